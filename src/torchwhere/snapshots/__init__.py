"""Saves snapshots of a running job, so that `doctor` still works after it ended or lost a box.

Entry points: `write.SnapshotWriter` and `read.fill_from_snapshots`.
"""
