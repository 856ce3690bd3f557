"""What watching costs: `make bench`, or `python -m bench`. How to read it: docs/overhead.md."""

import os

# else the profiler announces its every start and stop
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
