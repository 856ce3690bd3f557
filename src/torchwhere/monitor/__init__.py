"""Watches a running job from outside, together with the monitors of other hosts.

Entry point: `monitor.Monitor`.
"""
