"""The report page: one HTML file that opens from disk.

Entry point: `page.page_html`.
"""
