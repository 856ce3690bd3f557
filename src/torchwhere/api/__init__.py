"""The functions that users call, one file for each question.

Entry point: `torchwhere/__init__.py` imports each function when a program first uses it.
"""
