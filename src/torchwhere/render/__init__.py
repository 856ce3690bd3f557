"""Formats what others computed. No torch."""
