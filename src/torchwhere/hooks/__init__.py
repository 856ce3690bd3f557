"""Notices things inside a training process. A sense installs one thing, removes it, and lets no
error of its own out."""
