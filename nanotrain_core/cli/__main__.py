"""``python -m nanotrain_core.cli`` is the command ``nanotrain``."""

import sys

from nanotrain_core.cli import main

sys.exit(main())
