"""The native extension: the hot paths in C++, optional and built on the user's machine.

Entry point: `load.native` returns the built extension, or None.
"""
