"""Who hangs, who differs, who died, and why."""
