"""Imports what plugins register and build, once in the server from which ranks and commands are forked.

Each still looks for plugins itself, and finds their modules imported: these define things only. One that is
broken is reported by whoever looks for it. The monitors of plugins are left to the runs that have them: some
bring a service's client, which takes half a second.
"""

import contextlib

from nanotrain_core.errors import NanotrainError
from nanotrain_core.registry.registry import load_plugins

for plugin in load_plugins().plugins:
    for kind, component in plugin.components:
        if kind != "monitor" or component.factory.startswith("nanotrain_core."):
            with contextlib.suppress(NanotrainError):
                component.load()
