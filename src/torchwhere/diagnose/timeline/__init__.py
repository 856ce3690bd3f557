"""What ranks did, over time: slices, instants, counters and the arrows between them."""
