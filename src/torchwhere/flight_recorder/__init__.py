"""Reads PyTorch's flight recorder dumps as a run, and writes a run as dumps.

Entry points: `verdict.py` diagnoses dumps, `write.write_dumps` writes them.
"""
