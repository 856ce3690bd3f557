"""Which collectives each part of a model causes, and whether they are as a test says."""
