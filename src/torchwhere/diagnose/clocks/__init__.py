"""Aligns the clocks of hosts by the collectives that their ranks took part in.

Entry points: `clocks.aligned` for the arrivals of ranks, `host_clocks.align_hosts` for a run.
"""
