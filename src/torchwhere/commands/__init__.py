"""The subcommands of `torchwhere`, one file each.

Entry point: `add`, in each file, adds the subcommand to the parser that `cli.py` builds.
"""
