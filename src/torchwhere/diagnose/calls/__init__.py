"""Loads the collectives of all ranks into arrays, with ids that all ranks share.

Entry point: `load.load_calls` reads a folder in worker processes and returns `JobCalls`.
"""
