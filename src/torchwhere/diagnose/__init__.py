"""Analyses recorded runs: takes boxes, returns facts. Imports no torch and prints nothing.

Entry point: `doctor.rules.diagnose` makes the verdict; each of the other packages answers one
question.
"""
