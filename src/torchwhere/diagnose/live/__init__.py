"""Computes what each rank of a running job is doing now: moving, standing still, or waiting.

Entry point: `ranks.LiveRanks`.
"""
