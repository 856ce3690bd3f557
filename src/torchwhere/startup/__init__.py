"""Watches a process that becomes a rank, without a change to its script or its launcher.

Entry point: `ranks.torch_is_loaded`, which `torchwhere_startup` calls in each process that has
imported torch, if `TORCHWHERE_OUT` is set.
"""
