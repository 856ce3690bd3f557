"""Compares how the model is laid out on each rank.

Entry point: `layouts.layouts`.
"""
