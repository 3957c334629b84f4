"""The modules of the core that plugins may import."""

import runpy
from pathlib import Path

#: Their names, which the pages of the documentation are made of.
API_MODULES = runpy.run_path(str(Path(__file__).parents[1] / "docs/site/public_names.py"))["API_MODULES"]
