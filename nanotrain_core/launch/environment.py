"""The rank of this process when another launcher started it: torchrun or Slurm's srun. Torch-free."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

from nanotrain_core.errors import LaunchError
from nanotrain_core.run.host_processors import usable_processors

#: What a launcher sets: rank, world size, local rank, local world size, and what else tells of it.
VARIABLES: Mapping[str, Sequence[str]] = {
    "torchrun": (
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        *("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"),
    ),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
}
#: Where an MPI launcher tells how many processes it has started: Open MPI; MPICH and Intel MPI, two of them.
MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS")

#: What to do where RANK and WORLD_SIZE may be those of hosts.
REMEDY = (
    "; in one process per host, as a pod of a PyTorchJob, give --nnodes and --rdzv-endpoint to start the "
    "ranks; otherwise set LOCAL_RANK and LOCAL_WORLD_SIZE, or unset RANK WORLD_SIZE"
)


@attrs.define(frozen=True)
class Ranks:
    """Rank, world size and local rank of one process."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    launcher: str = "nanotrain"

    @classmethod
    def detect(cls, environment: Mapping[str, str] = os.environ) -> Ranks | None:
        """Return what torchrun or srun set for this process, None if neither started it.

        Raises:
            LaunchError: the environment is incomplete or not numeric.
        """
        if "TORCHELASTIC_RUN_ID" in environment or {"RANK", "WORLD_SIZE"} <= set(environment):
            return _ranks(environment, "torchrun")
        if "SLURM_STEP_NUM_TASKS" in environment and "SLURM_PROCID" in environment:
            return _ranks(environment, "srun")
        return None

    @classmethod
    def joined(cls, endpoint: str = "", environment: Mapping[str, str] = os.environ) -> Ranks | None:
        """Return the rank that this process is to be, None if it is to start the ranks.

        A single Slurm task, as in `srun --pty bash`, is not a rank. Neither is one task per host if the
        command line gives the hosts' rendezvous, ``endpoint``, or one pod per host of a PyTorchJob, which
        has ``RANK`` and ``WORLD_SIZE`` of the pods.

        Raises:
            LaunchError: the environment is incomplete or not numeric, or the process is one of several that
                mpirun has started, which cannot find each other.
        """
        if endpoint and not {"LOCAL_RANK", "TORCHELASTIC_RUN_ID"} & environment.keys():
            return None
        found = cls.detect(environment)
        if found is not None and found.launcher == "torchrun" and "TORCHELASTIC_RUN_ID" not in environment:
            found._warn_of_srun(environment)
        if not endpoint and (found is None or found.launcher == "srun"):
            _expect_no_mpi(environment, srun=found is not None)
        if found is not None and found.launcher == "srun" and (found.world_size == 1 or endpoint):
            return None
        return found

    def check_sizes(
        self, nproc: int | None, nnodes: int | None, environment: Mapping[str, str] = os.environ
    ) -> None:
        """Compare ``--nproc`` and ``--nnodes``, which start nothing here, with what the launcher has started.

        The variables may be left in this shell by an earlier launcher, and the run would have other ranks
        than asked for. ``--nproc`` may be the ranks of all hosts if ``--nnodes`` is not given.

        Raises:
            LaunchError: they differ; the text names the variables.
        """
        if nproc is None and nnodes is None:
            return
        hosts = -(-self.world_size // self.local_world_size)
        of_all_hosts = nproc if nnodes is None else None
        if self.world_size in ((nproc or self.local_world_size) * (nnodes or hosts), of_all_hosts):
            return
        given = {"--nproc": nproc, "--nnodes": nnodes}
        options = " ".join(f"{name} {value}" for name, value in given.items() if value is not None)
        raise LaunchError(
            f"{options}: {self._said()}; leave the option out, or start the ranks here after: "
            f"unset {self._names(environment)}"
        )

    def compare(
        self, stated: tuple[object, str] | None, environment: Mapping[str, str] = os.environ
    ) -> str | None:
        """Compare ``run.ranks`` of a recipe, and where it says so, with what the launcher has started.

        A recipe may be trained by any number of ranks: the text that is returned is a note. An elastic
        torchrun changes the number, and a shell that its variables were left in cannot be told from it.

        Raises:
            LaunchError: they differ, and an option of this command has said it, or the process is one of
                several tasks of srun, each of which would be the only rank.
        """
        if self.launcher not in VARIABLES or stated is None or stated[0] == self.world_size:
            return None
        if "TORCHELASTIC_RUN_ID" in environment:
            return None
        text = f"{stated[1]}: run.ranks is {stated[0]}, and {self._said()}"
        names = self._names(environment)
        if stated[1].startswith("--"):
            raise LaunchError(f"{text}; leave it out, or start the ranks here after: unset {names}")
        tasks = self._tasks(environment)
        if tasks > 1 == self.world_size:
            raise LaunchError(
                f"{text}, and one of {tasks} tasks of srun; start the ranks with srun after: unset {names}; "
                "for one run in each task give --set run.ranks=1"
            )
        return f"{text}: the run has {self.world_size}. If an earlier launcher left this here: unset {names}"

    def _tasks(self, environment: Mapping[str, str]) -> int:
        """Return of how many tasks of srun this process is one, though torchrun's variables say its rank."""
        tasks = environment.get("SLURM_STEP_NUM_TASKS", "")
        beside = self.launcher == "torchrun" and "SLURM_PROCID" in environment and tasks.isdecimal()
        return int(tasks) if beside else 0

    def _warn_of_srun(self, environment: Mapping[str, str]) -> None:
        """Warn where torchrun's variables, if left in the shell, make several tasks of srun the same rank.

        A sweep may give each task a run of its own, and a job step may have more tasks than ranks.
        """
        tasks = self._tasks(environment)
        if self.world_size < tasks and environment["SLURM_PROCID"] == "0":
            text = f"{self._said()}, and one of {tasks} tasks of srun. If an earlier launcher left this here"
            print(f"nanotrain: warning: {text}: unset {self._names(environment)}", file=sys.stderr)

    def _said(self) -> str:
        who = f"rank {self.rank} of {self.world_size} that {self.launcher} has started"
        return f"by its environment this process is {who}"

    def _names(self, environment: Mapping[str, str]) -> str:
        return " ".join(name for name in VARIABLES[self.launcher] if name in environment)

    def threads(self) -> int:
        """Return how many threads this rank may use so that the ranks of a host share its processors."""
        return max(1, usable_processors() // self.local_world_size)


def _expect_no_mpi(environment: Mapping[str, str], *, srun: bool) -> None:
    """Reject processes of mpirun that nothing else tells their rank: each would run alone.

    ``srun``: its variables are there. In a Slurm job mpirun starts its daemons by srun, and processes inherit
    them. ``PMI_SIZE`` is then srun's own (``--mpi=pmi2``), of all components of a heterogeneous job.
    """
    sizes = [name for name in MPI_SIZES if not (srun and name == "PMI_SIZE")]
    told = [name for name in sizes if environment.get(name, "").isdecimal()]
    name = next((name for name in told if int(environment[name]) > 1), None)
    if name is not None and "WORLD_SIZE" not in environment:
        raise LaunchError(
            f"{name} is {environment[name]}: mpirun does not start ranks of nanotrain, and each process runs "
            "alone; use srun or torchrun, or on each host one `nanotrain run` with --nnodes and "
            "--rdzv-endpoint; for independent runs, or if this was only left in the shell: "
            f"unset {' '.join(told)}"
        )


def _ranks(environment: Mapping[str, str], launcher: str) -> Ranks:
    values, names = [], VARIABLES[launcher][:4]
    for name in names:
        text = environment.get(name, "")
        digits = text.partition("(")[0].partition(",")[0]  # Slurm writes "4(x2)" for 4 tasks on 2 nodes
        if not digits.isdecimal():
            known = name in environment or launcher != "torchrun"
            raise LaunchError(
                f"started by {launcher}, but {name} is {text!r} where a number was expected"
                f"{'' if known else REMEDY}"
            )
        values.append(int(digits))
    rank, world_size, local_rank, local_world_size = values
    # Slurm lists the tasks of each node; only the first is read.
    for place, size in ((0, 1), (2, 3)) if launcher == "torchrun" else ((0, 1),):
        if values[place] >= values[size]:
            text = f"{names[place]} is {values[place]} and {names[size]} {values[size]}"
            raise LaunchError(f"started by {launcher}, but {text}: ranks are numbered from 0")
    return Ranks(rank, world_size, local_rank, local_world_size, launcher)


def rendezvous_address(ranks: Ranks, environment: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Return the host and port where rank 0 of a run without our launcher listens.

    Raises:
        LaunchError: neither is set.
    """
    if "MASTER_ADDR" in environment and "MASTER_PORT" in environment:
        if not is_port(environment["MASTER_PORT"]):
            raise LaunchError(f"MASTER_PORT is {environment['MASTER_PORT']!r}: expected 1 to 65535")
        return environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    if ranks.launcher == "srun":
        port = 20_000 + int(environment.get("SLURM_JOB_ID", "0")) % 20_000
        return environment.get("MASTER_ADDR") or _first_slurm_host(environment), port
    raise LaunchError(f"started by {ranks.launcher}, but MASTER_ADDR and MASTER_PORT are not set")


def run_name(ranks: Ranks, environment: Mapping[str, str] = os.environ) -> str:
    """Return what distinguishes a run from all others whose ranks may try the same port.

    A job that Slurm has requeued keeps its number, and its old rank 0 may still be ending.
    """
    slurm = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    keys = slurm if ranks.launcher == "srun" else ("TORCHELASTIC_RUN_ID",)
    return "/".join([ranks.launcher, str(ranks.world_size), *(environment.get(key, "") for key in keys)])


def agent_serves_store(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether torchrun's agent serves the rendezvous store, so that no rank does."""
    return environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def agent_name(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return what tells this host's torchrun from any other launch, the same in all its attempts.

    Every attempt has a folder in the one that torchrun creates for its logs. Told to write none, it is
    known by its process and when that began. None if torchrun did not start this process.
    """
    if "TORCHELASTIC_RUN_ID" not in environment:
        return None
    logs = Path(environment.get("TORCHELASTIC_ERROR_FILE", "")).parents
    own = str(logs[2]) if len(logs) > 3 else _parent()
    return f"{socket.gethostname()} {environment['TORCHELASTIC_RUN_ID']} {own}"


def is_port(text: str) -> bool:
    """Return whether ``text`` is a port number."""
    return text.isdecimal() and 0 < int(text) < 65536


def _parent() -> str:
    pid, began = os.getppid(), ""
    with contextlib.suppress(OSError):
        began = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    return f"process {pid} {began}"


def _first_slurm_host(environment: Mapping[str, str]) -> str:
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    if not set("[,") & set(nodes):
        return nodes or socket.gethostname()
    try:
        command = ["scontrol", "show", "hostnames", nodes]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError) as problem:
        raise LaunchError(
            f"cannot tell the first host of {nodes!r} ({problem}): set MASTER_ADDR"
        ) from problem


def loopback() -> str | None:
    """Return the name of the loopback interface, to keep a single host's traffic off the network."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), None)
