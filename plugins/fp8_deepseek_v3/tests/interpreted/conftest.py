"""Kernels in Triton's interpreter, on a CPU: ``TRITON_INTERPRET=1 pytest`` on this folder; nothing without.

The variable must be set before Triton is first imported, and would change every other test, so
``test_triton.py`` runs this folder in a process of its own.
"""

import os
import sys
from pathlib import Path

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["*"]
else:
    from nanotrain_core.testing.triton_interpreter import put_right

    sys.path.insert(0, str(Path(__file__).parents[1]))  # what other tests of this plugin compare with
    put_right()
