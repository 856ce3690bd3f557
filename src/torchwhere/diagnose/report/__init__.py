"""Computes everything that the report page shows, one file for each section.

Entry points: `report.make_report` puts the sections together, `digest.Digest` collects their data
while the boxes are read.
"""
