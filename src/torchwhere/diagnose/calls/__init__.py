"""Loads the collectives of all ranks into arrays, with ids that all ranks share.

Entry point: `job_calls.load_calls` reads a folder and returns a `RunSummary` and a `JobCalls`.

    rank0.box  rank1.box  ...          worker process 0          worker process 1
        |          |                   rank0.box ... 63          rank64.box ... 127
        v          v                          |                         |
    records with ids of the box        Encoder, LocalIds         Encoder, LocalIds
    (each rank has its own table)             |                         |
                                       CallBatch (pickled)       CallBatch (pickled)
                                              |  local ids              |  local ids
                                              +-----------+-------------+
                                                          v
                                       JobCalls: IdMap per encoder -> SharedIds
                                              |
                                       RankCalls by rank: StreamCalls by stream

A record names its signature (op, dtype, shapes, group ...) and its call site (module, pass, line
...) by ids of its own box. An `Encoder` replaces them by its local ids (`keys.LocalIds`): equal
things have equal ids in all boxes that one encoder reads. It sorts the calls of a rank by stream
(`order.py`) and stores them in a `CallBatch`: arrays of all ranks, plus the meaning of each local
id that is new. `JobCalls` translates the local ids of every encoder to `SharedIds`. From then on
two ranks issued the same call exactly if two integers are equal (`StreamCalls.packed_ids`), and
windows of calls (`stream_calls.py`) compare thousands of ranks as matrices. `doctor/examine.py`
repairs the numbers of calls if some ranks began to count late.
"""
