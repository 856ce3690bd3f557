"""`python -m torchwhere` does the same as the command `torchwhere`."""

import sys

from torchwhere.cli import main

sys.exit(main())
