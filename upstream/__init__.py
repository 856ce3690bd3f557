"""Runs PyTorch's own tests three times: plain, watched and on the drop-ins, and lists the cases
that differ."""
