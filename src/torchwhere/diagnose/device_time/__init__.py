"""Computes the time of devices: how long a step takes, and how long its collectives wait.

Entry points: `job.device_times_of` for a run, `calls.device_calls` for the collectives of one rank.
"""
