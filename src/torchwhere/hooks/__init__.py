"""Hooks and patches in the training process.

Each hook installs one thing, removes it again, and lets none of its own errors reach the job.

Entry point: `recorder.session.Session` installs and removes all of them.
"""
