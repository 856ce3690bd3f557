"""Turns the events of ranks into slices, instants and arrows on one clock.

Entry point: `load.survey`.
"""
