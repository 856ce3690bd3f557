"""Counts the collectives that each module causes and checks them against expectations.

Entry points: `tree.comms`; `outline.outline` folds the tree; `expect.check` and `snapshot`
compare it.
"""
