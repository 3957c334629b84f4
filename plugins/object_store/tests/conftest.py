"""Lets test files import small_runs from beside them, whichever way pytest imports them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from s3_server import server  # noqa: F401 a fixture, once its folder is on the path
