"""One watch: turns what the hooks notice into records, keeps the box, sends the heartbeat."""
