"""Lets test files import fp8_operands from beside them, whichever way pytest imports them."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
