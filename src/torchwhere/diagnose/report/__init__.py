"""All that the report page shows, computed: one file a part, `report.py` puts them together."""
