"""Snapshots of a running job: `doctor` still works after the job ended or lost a box."""
