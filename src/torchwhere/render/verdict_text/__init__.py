"""Makes verdicts from what the doctor found: all sentences of a verdict are written here.

Entry point: `verdict_of` in `assemble.py`. `explanation.py` lists the text function of each cause.
"""
