"""Counts the collectives that each module causes, and checks them against expectations.

Entry point: `tree.comms`.
"""
