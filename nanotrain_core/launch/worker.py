"""One attempt at a run on one rank: join the others, train, return how it ended."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import attrs

from nanotrain_core.launch import resume_point
from nanotrain_core.launch.agreement import OF_RECIPE, agree, broadcast_from_rank_0, expect_shared
from nanotrain_core.launch.attempts import LaunchHistory, exchange_histories, remember
from nanotrain_core.launch.cause import leave_failure
from nanotrain_core.launch.code_digests import environment_facts, expect_unchanged
from nanotrain_core.launch.cuda import record_collectives, set_allocator
from nanotrain_core.launch.device import choose_device
from nanotrain_core.launch.environment import Ranks, agent_serves_store
from nanotrain_core.launch.peers import watching_peers
from nanotrain_core.launch.process_groups import ending_process_groups
from nanotrain_core.launch.rendezvous import rendezvous_store
from nanotrain_core.launch.restart_info import restart_of
from nanotrain_core.recipe import Recipe, recipe_values, resolve_recipe, write_resolved
from nanotrain_core.recipe.load import Resolution
from nanotrain_core.recipe.write import explain
from nanotrain_core.registry.discovery import PluginArguments
from nanotrain_core.registry.registry import Registry, load_plugins
from nanotrain_core.run import log
from nanotrain_core.run.files import write_text_atomically
from nanotrain_core.run.folder import RunFolder, hold_as_rank, stop_without
from nanotrain_core.watch.progress import FAILED, Progress
from nanotrain_core.watch.scratch import FOLDER
from nanotrain_core.watch.watchdog import Watchdog

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

    from nanotrain_core.launch.rank_process import RankProcess

#: Seconds for which a shared file system may keep the lock of a host that is gone: NFS version 4 does so for
#: a lease, 90 seconds by default.
LEASE = 120.0
#: Seconds after which a host sees what another one has written to a shared file system: NFS may answer for 30
#: to 60 seconds from its cache that a folder does not exist.
CACHED = 60.0


@attrs.define(frozen=True, kw_only=True)
class Job:
    """What a rank is to run, as plain values that can be sent to another process."""

    recipe: str
    """Path or name of the recipe."""
    overrides: tuple[str, ...] = ()
    plugins: PluginArguments = attrs.field(factory=PluginArguments)
    folder: str | None = None
    """As specified by the user; None selects one by the run's name."""
    claimed: str | None = None
    """The run folder, when the launcher holds its lock."""
    resume: str | None = None
    scratch: str | None = None
    """The launcher's folder: pids and failures of its ranks. None when there is no launcher of ours."""
    one_host: bool = False
    """Whether all ranks share the scratch folder, and so can use a file store."""
    launcher_pid: int | None = None
    in_process_restart: bool = False
    """Whether a rank's process may be used again after another rank has failed."""
    code: Mapping[str, str] = attrs.field(factory=dict)
    """By distribution, digests of the code that the run uses, as the launcher has found it."""
    process: RankProcess | None = None
    """In a process of our launcher: what ends the attempt in its main thread."""
    show: tuple[str, ...] = ()
    """What to print before training: ``placements``."""
    saves: ClassVar[bool] = True
    """Whether ranks save when they are asked to stop, which is printed at Ctrl-C."""

    def run(self, ranks: Ranks) -> str:
        """Run the job as one rank, and return how it ended. Override it to make ranks do something else."""
        return train(self, ranks)


def train(job: Job, ranks: Ranks) -> str:
    """Load, agree with the other ranks, train; return how it ended.

    Process groups end before the rank's watchdog: their end may hang, too.
    """
    import torch.distributed  # noqa: F401 before the block, which ends process groups also if this fails

    with contextlib.ExitStack() as last, ending_process_groups(kept=job.in_process_restart):
        return _train(job, ranks, last)


def _train(job: Job, ranks: Ranks, last: contextlib.ExitStack) -> str:
    log.configure(ranks.rank)
    registry, resolved = _resolve(job, ranks)
    recipe = resolved.recipe

    import torch.distributed as dist

    from nanotrain_core.engine import RuntimeEngine
    from nanotrain_core.launch.launch_monitors import SaveMarker, add_launch_monitors, keep_recipe
    from nanotrain_core.run.show_placements import show_placements

    device = set_up_process(recipe, ranks)
    store, history = join_ranks(job, ranks, recipe, device, registry)
    if ranks.rank == 0:
        history = resume_point.with_claimed_folder(history, job, recipe)
    folder, lock = share_folder(job, ranks, recipe, store, history)
    held, marker, progress = hold_as_rank(folder), resume_point.saved_marker(job, folder), Progress()
    if job.process is not None:
        job.process.progress = progress
    if dist.is_initialized() and dist.get_backend() == "nccl":
        record_collectives(folder)
    scratch = Path(job.scratch) if job.scratch else None
    if timeout := recipe.run.hang_timeout:
        watchdog = Watchdog(progress, ranks.rank, timeout=timeout, folder=folder, scratch=scratch)
        last.callback(watchdog.stop)
    try:
        with _watched(job, ranks, recipe, store, progress):
            attempt = job, folder, marker, history, recipe.checkpoint.use, registry
            choose = partial(resume_point.start_from, *attempt)
            resume = broadcast_from_rank_0(choose, "resume", ranks, store)
            engine = RuntimeEngine.from_recipe(
                recipe,
                registry=registry,
                rank=ranks.rank,
                device=device,
                folder=folder,
                resume=resume,
            )
            failure = broadcast_from_rank_0(history.failure, "failure", ranks, store)
            engine.restart = restart_of(scratch, failure, recipe, ranks.world_size, registry)
            progress.waits = engine.run.mesh.waits
            engine.progress, engine.stop.grace = progress, recipe.run.grace
            stop_without(folder, held, engine.stop)
            texts = write_resolved(recipe), explain(recipe, resolved.merged)
            names = history.agents if ranks.rank == 0 else ()  # the others know their own alone
            at_save = SaveMarker(marker, "\n".join(names)) if marker is not None else None
            add_launch_monitors(engine, partial(keep_recipe, folder, *texts), at_save)
            if "placements" in job.show:
                show_placements(engine.run)
            return engine.fit().reason
    finally:
        if held is not None:
            held.close()
        if lock is not None:
            lock.release()


def _resolve(job: Job, ranks: Ranks) -> tuple[Registry, Resolution]:
    """Load the job's plugins and resolve its recipe, for as many ranks as there are.

    Raises:
        NanotrainError: code has changed since the launcher started, or the recipe is wrong for these ranks.
    """
    registry = load_plugins(block=job.plugins.blocked, local=job.plugins.local)
    if ranks.local_rank == 0:  # reading code takes many requests to a file server
        expect_unchanged(job.code, registry)
    resolved = resolve_recipe(
        job.recipe, overrides=job.overrides, plugins=job.plugins, ranks=ranks.world_size
    )
    # Our own launcher starts ranks as torchrun does, as many as it was told.
    note = ranks.compare(resolved.merged.own_ranks) if job.scratch is None else None
    if note and ranks.rank == 0:
        log.say(f"note: {note}", level="warning")
    return registry, resolved


def set_up_process(recipe: Recipe, ranks: Ranks) -> torch.device:
    """Set what holds for the process: allocator, threads, determinism, seeds; return its device."""
    import torch

    from nanotrain_core.run.random_state import seed_all

    set_allocator()
    gc.freeze()  # imported objects stay: exempt them from garbage collection, which all ranks wait for
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(ranks.threads())
    if recipe.run.deterministic:  # the setter imports torch's compiler, for over a second
        torch.use_deterministic_algorithms(True)
    device = choose_device(recipe.run.device, ranks, shared=recipe.run.share_device)
    seed_all(recipe.run.seed, ranks.rank)
    return device


@contextlib.contextmanager
def _watched(
    job: Job, ranks: Ranks, recipe: Recipe, store: Store | None, progress: Progress
) -> Iterator[None]:
    """Explain out-of-memory errors; watch the other ranks, unless one launcher does or it is disabled."""
    from nanotrain_core.run.memory import explain_out_of_memory

    with contextlib.ExitStack() as stack:
        if store is not None and not job.one_host and ranks.world_size > 1 and recipe.run.hang_timeout:
            interrupt = job.process.interrupt if job.process is not None else None
            at_end = partial(leave_failure, Path(job.scratch), ranks.rank) if job.scratch else None
            own, tells = (store, ranks.rank, ranks.world_size), partial(_tells, progress)
            stack.enter_context(watching_peers(*own, at_end, interrupt, tells))
        stack.enter_context(explain_out_of_memory(recipe, ranks.rank, progress))
        yield


def _tells(progress: Progress) -> bool:
    """Return whether a rank has failed and tells its monitors."""
    return progress.phase == FAILED


def join_ranks(
    job: Job, ranks: Ranks, recipe: Recipe, device: torch.device, registry: Registry
) -> tuple[Store | None, LaunchHistory]:
    """Connect to the other ranks, check that all run the same thing, create the world's process group.

    Returns:
        The store for communication between ranks, None for a single rank without an agent; and the
            history of this launch, on rank 0 as recorded by any host.
    """
    history = resume_point.local_history(job)
    if ranks.world_size == 1 and not agent_serves_store():
        return None, history
    import torch.distributed as dist

    from nanotrain_core.compile.options import group_timeout
    from nanotrain_core.layout import nccl

    timeout = group_timeout(recipe, device.type)
    store: Store
    if job.scratch is not None and job.one_host:
        store = dist.FileStore(
            str(Path(job.scratch, f"store-{resume_point.restart_count()}")), ranks.world_size
        )
    else:
        tcp = rendezvous_store(ranks, recipe.run.timeout, launched=job.scratch is not None)
        shared = dist.PrefixStore("nanotrain", tcp)
        store, history = exchange_histories(
            shared, ranks.rank, ranks.world_size, history, timeout=recipe.run.timeout
        )
    words = {"--folder": str(job.folder), "--show": " ".join(job.show) or "None"}
    # A host that joins a run may be told to resume it: what this launch has done counts there.
    resume = None if history.began else str(job.resume)
    own = environment_facts(registry, recipe.versions, with_code=ranks.local_rank == 0)
    values = {f"{OF_RECIPE}{key}": value for key, value in recipe_values(recipe).items()}
    facts = {**own, **values, "device": device.type, "--resume": resume, **words}
    agree(store, ranks.rank, ranks.world_size, facts)
    if ranks.world_size == 1:
        return store, history
    world: dict[str, Any] = {
        "store": store,
        "rank": ranks.rank,
        "world_size": ranks.world_size,
        "timeout": timeout,
    }
    if device.type == "cpu" or recipe.run.share_device:
        dist.init_process_group("gloo", **world)
        return store, history
    record_collectives(Path(job.claimed) if job.claimed else None)
    dist.init_process_group("nccl", **world, **nccl.options(timeout))
    dist.barrier(device_ids=[device.index])  # connects all ranks now: see nccl.of_subgroup
    return store, history


def share_folder(
    job: Job, ranks: Ranks, recipe: Recipe, store: Store | None, history: LaunchHistory
) -> tuple[Path, RunFolder | None]:
    """Return the run folder, and this process's claim on it if the launcher has none.

    Rank 0 claims it for all; the others receive the path, or the reason why there is none.

    Raises:
        FolderError: on every rank: it cannot be claimed, or a host does not see what rank 0 has claimed.
    """
    if job.claimed is not None:
        return Path(job.claimed), None
    locks: list[RunFolder] = []

    def choose() -> str:
        folder = history.folder or job.folder or recipe.run.folder
        # Ranks that died before they had a folder leave none to go on in: what is there is another run's.
        resume = job.resume is not None or history.folder is not None
        patience = min(LEASE, recipe.run.timeout / 2) if history.began else 0.0
        claim = partial(RunFolder.claim, recipe.run.name, resume=resume, patience=patience)
        locks.append(claim(folder=folder, agents=history.agents))
        return str(locks[0].path)

    def claimed() -> str:
        return locks[0].owner()

    path = str(broadcast_from_rank_0(choose, "folder", ranks, store))
    if store is not None:
        claim = broadcast_from_rank_0(claimed, "claim", ranks, store)
        expect_shared(Path(path), str(claim), ranks, store, min(CACHED, recipe.run.timeout / 2))
    if job.scratch is not None:
        write_text_atomically(Path(job.scratch, FOLDER), path)  # the launcher reads it at any time
    elif ranks.rank == 0 and store is not None:
        remember(store, path)
    return Path(path), locks[0] if locks else None
