"""Aligns the clocks of hosts by the collectives that their ranks took part in.

Entry point: `clocks.aligned`.
"""
