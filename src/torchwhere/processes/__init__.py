"""Observes the processes of the ranks on this host from outside, through /proc.

Entry point: `look.look` returns a `ProcessStatus` for each rank.
"""
