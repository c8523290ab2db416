"""`python -m levit` is the command `levit`."""

import sys

from levit.cli import main

sys.exit(main())
