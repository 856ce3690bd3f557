"""Answers questions about live objects. Records nothing, installs nothing."""
