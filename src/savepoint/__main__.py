"""`python -m savepoint`."""

import sys

from savepoint.cli import main

sys.exit(main())
