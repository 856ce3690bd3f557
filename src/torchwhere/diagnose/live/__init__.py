"""What each rank of a running job is doing now: who moves, who stands still, who waits for whom."""
