"""Analyses a folder from start to end: reads the boxes, looks at the processes, diagnoses.

Entry points: `verdict.diagnose_folder` and `report.report_on`.
"""
