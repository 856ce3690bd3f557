"""The black box: one memory-mapped file per rank that outlives its writer.

`layout` is the format, `writer` makes a box, `reader` reads one (any time, from anywhere, without
torch), `run` reads a folder of them, `claim` takes a file name for a new box, `guard` keeps a
foreign truncation from killing the writer.
"""
