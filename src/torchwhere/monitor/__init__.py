"""Watches a run while it runs, with the monitors of other hosts."""
