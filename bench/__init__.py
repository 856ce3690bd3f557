"""What watching costs: `make bench`, or `python -m bench`. How to read it: docs/overhead.md."""

import os

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler announces its every start and stop
