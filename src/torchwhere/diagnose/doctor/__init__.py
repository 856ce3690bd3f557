"""Finds which ranks hang, differ, exited or are late, and why.

Entry point: `examine.examine` applies the rules in order and returns a `Diagnosis`: facts, without
sentences.
"""
