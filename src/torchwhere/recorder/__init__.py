"""One watch of one process: the hooks, the recorder, the box and the heartbeat.

Entry point: `session.Session`.
"""
