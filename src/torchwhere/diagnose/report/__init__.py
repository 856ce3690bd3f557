"""Computes everything that the report page shows, one file for each section.

Entry point: `report.report` puts the sections together.
"""
