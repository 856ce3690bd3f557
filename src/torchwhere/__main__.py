"""`python -m torchwhere`: the same as the command."""

import sys

from torchwhere.cli import main

sys.exit(main())
