"""The hot paths again in C++: built on the user's machine, optional, tested before use.

Entry point: `load.py` finds the built library.
"""
