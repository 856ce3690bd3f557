"""Finds where ranks that should do the same diverge, in their events and in their logs.

Entry point: `comparison.diff`.
"""
