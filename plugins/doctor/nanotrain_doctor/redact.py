"""Takes out of a report what nobody else should read: it is made to be pasted into an issue."""

from __future__ import annotations

import getpass
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanotrain_core.api import is_secret

HIDDEN = "(hidden)"
#: Variables that say how ranks start, find one another and compute; no others are printed.
TOLD = re.compile(
    r"(NCCL|GLOO|TORCH|PYTORCH|CUDA|OMP|MKL|KMP|GOMP|OPENBLAS|TRITON|NVIDIA|UCX|FI|NANOTRAIN|SLURM_(JOB_ID|JOB_NUM_NODES|NNODES|NTASKS|"
    r"PROCID|LOCALID|STEP_NUM_TASKS|STEP_TASKS_PER_NODE|JOB_NODELIST|STEP_NODELIST|RESTART_COUNT|CPUS_ON_NODE))(_|$)"
    r"|(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|LD_LIBRARY_PATH|LD_PRELOAD|PYTHONPATH|"
    r"VIRTUAL_ENV|NO_COLOR)$"
)
#: Text that is a key wherever it stands: of known services, or long and without words.
KEY = re.compile(
    r"\b(?:hf_|sk-|gh[pousr]_|github_pat_|glpat-|xox[a-z]-|AKIA|ASIA|eyJ)[A-Za-z0-9_\-.=]{8,}"
    r"|\b(?=[A-Za-z0-9_\-]*\d)(?=[A-Za-z0-9_\-]*[A-Za-z])[A-Za-z0-9]{32,}\b"
)
#: ``scheme://user:password@host``, ``?token=...`` and ``password=...``.
IN_URL = re.compile(r"(?<=://)[^/\s@]+(?=@)")
ASSIGNED = re.compile(
    r"""(?i)((?:token|key|secret|password|passwd|webhook|auth)\w*["']?\s*[=:]\s*)[^\s&,;"']+"""
)


def environment_to_tell(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that matter for a run, without secret values."""
    told = {name: value for name, value in environment.items() if TOLD.match(name)}
    return {name: HIDDEN if is_secret(name.lower()) else redacted(told[name]) for name in sorted(told)}


def redacted(value: Any, home: str | None = None, user: str | None = None) -> Any:
    """Return JSON in which keys, users in URLs, and the name of this user in paths are hidden."""
    home = str(Path.home()) if home is None else home
    user = _user() if user is None else user
    if isinstance(value, Mapping):
        return {
            key: HIDDEN if isinstance(each, str) and each and is_secret(str(key).lower()) else
            redacted(each, home, user)
            for key, each in value.items()
        }  # fmt: skip
    if isinstance(value, list | tuple):
        return [redacted(each, home, user) for each in value]
    if not isinstance(value, str):
        return value
    text = IN_URL.sub(HIDDEN, value)
    text = ASSIGNED.sub(rf"\1{HIDDEN}", text)
    text = KEY.sub(HIDDEN, text)
    if len(home) > 1:
        text = re.sub(rf"{re.escape(home)}(?=/|$|[\s:;,'\"])", "~", text)
    return re.sub(rf"(?<=/){re.escape(user)}(?=/|$)", "(user)", text) if len(user) > 2 else text


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return ""
