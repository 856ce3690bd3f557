"""Finds which ranks hang, differ, exited or are late, and why.

Entry point: `rules.diagnose` runs the rules in order and returns a `Verdict`.
"""
