"""`python -m stepfx` is the `stepfx` command."""

import sys

from stepfx.cli.main import main

sys.exit(main())
