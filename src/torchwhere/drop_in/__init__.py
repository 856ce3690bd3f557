"""The names people already use, on top of torchwhere: change one import line, the rest of the
program stays."""
