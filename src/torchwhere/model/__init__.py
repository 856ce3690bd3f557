"""Reads live models and autograd graphs. Records nothing and installs nothing.

Entry points: `module_names` for names, `read_layout` for layouts, `backward_graph` for graphs.
"""
