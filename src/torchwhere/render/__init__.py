"""Makes everything that a person reads: text, tables, HTML, and the sentences of verdicts.

Entry point: `reprs.py` knows the view of every result.
"""
