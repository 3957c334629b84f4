"""Files of a run, and the resources of this machine."""

from nanotrain_core.run.files import (
    append_line,
    flush,
    obstacle_to_writing,
    remove_leftovers,
    write_atomically,
    write_text_atomically,
)
from nanotrain_core.run.folder_owner import running
from nanotrain_core.run.host_memory import HostMemory, host_memory
from nanotrain_core.run.host_processors import allowed_processors, cpu_quota, usable_processors
from nanotrain_core.run.plain_json import json_text
from nanotrain_core.run.suggest_run import RUN_FILES, is_run, nearby_run
from nanotrain_core.run.throughput import peak_flops

__all__ = [
    "RUN_FILES",
    "HostMemory",
    "allowed_processors",
    "append_line",
    "cpu_quota",
    "flush",
    "host_memory",
    "is_run",
    "json_text",
    "nearby_run",
    "obstacle_to_writing",
    "peak_flops",
    "remove_leftovers",
    "running",
    "usable_processors",
    "write_atomically",
    "write_text_atomically",
]
