"""Finds where ranks that should do the same diverge, in their events and in their logs.

Entry points: `comparison.diff` compares ranks, `comparison.find_logs` lists their log files, and
`log_lines` removes from a line what may differ between ranks.
"""
