"""Compares how the model is laid out on each rank.

Entry points: `layouts.layouts` for a run, `layouts.compare` for layouts in memory.
"""
