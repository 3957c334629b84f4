"""A torchrun command for each node, for clusters where another tool starts the processes on nodes.

torchrun exits with 1 for every failure of its ranks: their exit code is in the last line of the log.
"""

from __future__ import annotations

import shlex

from nanotrain_core.api import NanotrainError
from nanotrain_launch.job import PORT, Job, text
from nanotrain_launch.options import COMMAND, PATH, PORT_NUMBER, Option, command_words, read_hosts

HOSTS = Option(
    "the hosts, one for each node; they meet at the first", r"[\w.@,-]+", "node1,node2", required=True
)
OPTIONS = {
    "hosts": HOSTS,
    "port": Option("the port where they meet, from 1 to 65535", PORT_NUMBER, default=str(PORT)),
    "workdir": Option("the folder to run in; as it is", PATH, "/shared/work"),
    "command": Option("how nodes call torchrun", COMMAND, "/opt/venv/bin/torchrun", default="torchrun"),
}


def script(job: Job, options: dict[str, str]) -> str:
    """Return the lines.

    Raises:
        NanotrainError: torchrun does not support ``--min-nnodes`` and ``--check-hosts``.
    """
    if job.checks_hosts:
        raise NanotrainError(
            "--check-hosts: torchrun starts ranks, and no command before them: run `nanotrain doctor "
            "--quick` on each node, or use ssh, slurm or k8s"
        )
    if job.min_nodes is not None:
        raise NanotrainError(
            "--min-nnodes: launchers of nanotrain go on with fewer hosts, torchrun's ranks do not: "
            "use ssh, slurm or k8s"
        )
    hosts = read_hosts(options["hosts"], job.nodes)
    environment = {
        # Without it a second rendezvous of gloo, after a failure, does not work.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        # From SIGTERM until torchrun kills remaining ranks: the default of 30 s is less than run.grace.
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(job.grace_until_killed),
        **job.environment,
    }
    variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in environment.items())
    lines = job.header("Each line on its node.")
    for host in hosts:
        words = [
            *command_words(options["command"]),
            *(f"--nnodes={job.nodes}", f"--nproc-per-node={job.nproc}", f"--max-restarts={job.max_restarts}"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint={_bare(hosts[0])}:{options['port']}"),
            *(f"--rdzv-id={job.label()}", f"--local-addr={_bare(host)}"),
            *("-m", "nanotrain_core.cli", *job.words()),
        ]
        folder = f"cd {shlex.quote(options['workdir'])} && " if "workdir" in options else ""
        lines += ["", f"# {host}", f"{folder}{variables} {' '.join(map(shlex.quote, words))}"]
    return text(lines)


def _bare(host: str) -> str:
    """Return a host without its user."""
    return host.rpartition("@")[2]
