"""Runs the analysis of a folder end to end: read the boxes, look at the processes, diagnose.

Entry points: `verdict.diagnose_folder` and `report.py`.
"""
