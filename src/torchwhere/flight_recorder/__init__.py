"""Reads PyTorch's flight recorder dumps as a run, and writes a run as dumps.

Entry points: `verdict.consult_dumps` diagnoses dumps, `evidence.with_evidence` adds them to a
verdict, `write.write_dumps` writes them.
"""
