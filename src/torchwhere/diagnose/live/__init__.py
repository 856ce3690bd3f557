"""Computes the current state of each rank of a running job: progressing, stalled or waiting.

Entry points: `ranks.LiveRanks` for the ranks, `run.RunNow` for the run, and `run.cohorts` for ranks
that do the same.
"""
