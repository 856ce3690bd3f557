"""The subcommands of `torchwhere`: one file for each, and `tables.py` for four that are alike.

Entry point: `add`, in each file, adds the subcommand to the parser that `cli.py` builds.
"""
