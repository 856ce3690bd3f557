"""How the layouts of many ranks compare."""
