"""Turns the events of ranks into slices and instants on one clock.

Entry point: `load.load_timelines`.
"""
