"""Measures what watching costs: `make bench`, or `python -m bench`. docs/overhead.md explains
it."""

import os

# otherwise the profiler prints a line for every start and stop
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
