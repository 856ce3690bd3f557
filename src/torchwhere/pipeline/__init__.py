"""Analyses a folder from start to end: reads the boxes, looks at the processes, diagnoses.

Entry points: `verdict.diagnose_folder`, `report.report_on`, and `attach.diagnose_attached` for a
job without a folder.
"""
