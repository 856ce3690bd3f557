"""The functions that users call, one file for each question.

Entry point: `torchwhere/__init__.py` imports each of them when it is first used.
"""
