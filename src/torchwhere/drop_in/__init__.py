"""Replacements for five debugging modules: change one import line, keep the program.

Entry points: `comm_mode`, `mod_tracker`, `deepspeed_debug`, `fsdp_debug` and `aot_logging`.
"""
