"""Analyses recorded runs: takes boxes, returns facts. Imports no torch and prints nothing.

Entry point: `doctor.examine.examine` finds the fault; each of the other packages answers one
question.
"""
