"""The black box: one memory-mapped file per rank that outlives its process.

`file_format` defines the bytes, `writer` writes a box, `reader` reads one at any time and without
torch, `run` reads the boxes of a folder, `live_box` polls a box that is being written.

A run is a `run.RunSummary`: boxes, or summaries of them, by rank. `run.BoxRun` adds their content;
`api.run.Run` and `flight_recorder.dumps.Dumps` are runs with more methods. Other classes hold a run
for one purpose: `HostView` over time, `RunNow` at one poll, `RunTimelines` on aligned clocks.

Entry points: `writer.BoxWriter` to record, `run.read_run` to read.
"""
