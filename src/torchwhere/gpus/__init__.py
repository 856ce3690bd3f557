"""Reads the GPUs of a host from outside the job, through NVML, and stores samples of them.

Entry points: `nvml.open_nvml` samples the GPUs of this host, `samples.read_gpus` reads the files.
"""
