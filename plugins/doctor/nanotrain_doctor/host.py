"""All checks of one host that need no other host. Each is a function of its own, too."""

from __future__ import annotations

import os
from pathlib import Path

from nanotrain_core.api import Registry, allowed_processors
from nanotrain_doctor.clock import clock_source
from nanotrain_doctor.container import examine_container
from nanotrain_doctor.findings import Finding
from nanotrain_doctor.limits import examine_limits, examine_load
from nanotrain_doctor.network import examine_network
from nanotrain_doctor.shared_memory import examine_shared_memory
from nanotrain_doctor.software import examine_plugins, examine_torch, python, torch_version
from nanotrain_doctor.storage import examine_disk
from nanotrain_doctor.variables import examine_variables


def examine_host(
    folder: Path, registry: Registry, *, ranks: int = 1, hosts: int = 1, quick: bool = False
) -> list[Finding]:
    """Run every check of this host.

    Args:
        folder: of runs; it may not exist yet.
        registry: the plugins.
        ranks: on this host, that will share it.
        hosts: of the run.
        quick: write less to the disk.
    """
    cores = len(allowed_processors())
    found = [python(), torch_version(), *examine_plugins(registry)]
    found += examine_torch()
    found += [examine_load(os.getloadavg()[0], cores), *examine_container(cores=cores), *examine_limits()]
    found += [*examine_shared_memory(), *examine_disk(folder, megabytes=4 if quick else 64)]
    found += [*examine_network(hosts=hosts), clock_source()]
    gpus = any(each.check == "GPUs" and each.status != "note" for each in found)
    found += examine_variables(os.environ, cores=cores, ranks=ranks, hosts=hosts, gpus=gpus)
    return found
