"""PyTorch's flight recorder, both ways: the doctor reads its dumps; a run is written as dumps that
its own tool reads."""
