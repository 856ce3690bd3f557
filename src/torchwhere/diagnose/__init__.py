"""Pure: boxes in, answers out. No torch, no printing."""
