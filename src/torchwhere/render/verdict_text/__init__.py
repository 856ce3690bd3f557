"""Makes verdicts from what the doctor found: all sentences of a verdict are written here.

Entry point: `assemble.verdict_of`. Its table has the text function of each cause.
"""
