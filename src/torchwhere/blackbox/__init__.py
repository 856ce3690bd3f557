"""The black box: one memory-mapped file per rank that outlives its process.

`file_format` defines the bytes, `writer` writes a box, `reader` reads one at any time and without
torch, `run` reads the boxes of a folder, `live_box` polls a box that is being written.

Entry points: `writer.BoxWriter` to record, `run.read_run` to read.
"""
