"""What can be seen of the ranks' processes on this host, from outside. Reads /proc; no torch."""
