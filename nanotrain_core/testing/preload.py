"""Imports what installed plugins register, once in the server from which ranks and commands are forked.

Each still looks for plugins itself, and finds their modules imported: these are torch-free, and define things
only. One that is broken is reported by whoever looks for it.
"""

from nanotrain_core.registry.registry import load_plugins

load_plugins()
