"""Files of a run, progress on the terminal, and the resources of this machine."""

from nanotrain_core.run.files import (
    append_line,
    flush,
    remove_leftovers,
    write_atomically,
    write_problem,
    write_text_atomically,
)
from nanotrain_core.run.folder_owner import is_running
from nanotrain_core.run.host_memory import HostMemory, host_memory
from nanotrain_core.run.host_processors import allowed_processors, cpu_quota, usable_processors
from nanotrain_core.run.plain_json import json_text
from nanotrain_core.run.progress_bar import show_progress
from nanotrain_core.run.suggest_run import RUN_FILES, did_you_mean_run, is_run
from nanotrain_core.run.throughput import peak_flops

__all__ = [
    "RUN_FILES",
    "HostMemory",
    "allowed_processors",
    "append_line",
    "cpu_quota",
    "did_you_mean_run",
    "flush",
    "host_memory",
    "is_run",
    "is_running",
    "json_text",
    "peak_flops",
    "remove_leftovers",
    "show_progress",
    "usable_processors",
    "write_atomically",
    "write_problem",
    "write_text_atomically",
]
