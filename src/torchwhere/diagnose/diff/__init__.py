"""Finds where ranks that should do the same diverge, in their events and in their logs.

Entry points: `comparison.diff` compares ranks, `comparison.find_logs` lists their log files,
`logs.Log` and `logs.ranks_of` read them, `log_lines` strips from a line what may differ.
"""
