"""One attempt at a run on one rank: join the others, train, return how it ended."""

from __future__ import annotations

import contextlib
import gc
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import attrs

from nanotrain_core.checkpoint.listing import expect_own_kind
from nanotrain_core.errors import FolderError
from nanotrain_core.launch.agreement import agree, broadcast_from_rank_0, expect_shared
from nanotrain_core.launch.attempts import Past, meet, remember
from nanotrain_core.launch.cause import leave_failure
from nanotrain_core.launch.code import environment_facts, expect_unchanged
from nanotrain_core.launch.cuda import record_collectives, set_allocator
from nanotrain_core.launch.device import choose_device
from nanotrain_core.launch.environment import Ranks, agent_name, agent_serves_store
from nanotrain_core.launch.peers import watching_peers
from nanotrain_core.launch.process_groups import ending_process_groups
from nanotrain_core.launch.rendezvous import meet_ranks
from nanotrain_core.launch.restart_info import restart_of
from nanotrain_core.recipe import Recipe, recipe_hash, resolve_recipe, write_resolved
from nanotrain_core.recipe.secrets import without_secrets
from nanotrain_core.recipe.write import explain
from nanotrain_core.registry.discovery import PluginArguments
from nanotrain_core.registry.registry import Registry, load_plugins
from nanotrain_core.run import log
from nanotrain_core.run.files import write_text_atomically
from nanotrain_core.run.folder import RunFolder, claimed_by, hold_as_rank, stop_without
from nanotrain_core.watch.progress import FAILED, Progress
from nanotrain_core.watch.scratch import FAILED_AT, FOLDER, HAS_SAVED
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
    registry = load_plugins(block=job.plugins.blocked, local=job.plugins.local)
    if ranks.local_rank == 0:  # reading code takes many requests to a file server
        expect_unchanged(job.code, registry)
    found = resolve_recipe(job.recipe, overrides=job.overrides, plugins=job.plugins, ranks=ranks.world_size)
    recipe = found.recipe
    # Our own launcher starts ranks as torchrun does, as many as it was told.
    note = ranks.compare(found.merged.own_ranks) if job.scratch is None else None
    if note and ranks.rank == 0:
        log.say(f"note: {note}", level="warning")

    import torch.distributed as dist

    from nanotrain_core.engine import RuntimeEngine
    from nanotrain_core.launch.watchers import Mark, add_watchers
    from nanotrain_core.run.show_placements import show_placements

    device = prepare(recipe, ranks)
    store, past = join(job, ranks, recipe, device, registry)
    if ranks.rank == 0:
        past = recalled(past, job, recipe)
    folder, lock = share_folder(job, ranks, recipe, store, past)
    held, mark, progress = hold_as_rank(folder), mark_of(job, folder), Progress()
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
            begin = partial(start_from, job, folder, mark, past, recipe.checkpoint.use, registry)
            resume = broadcast_from_rank_0(begin, "resume", ranks, store)
            engine = RuntimeEngine.from_recipe(
                recipe,
                registry=registry,
                rank=ranks.rank,
                device=device,
                folder=folder,
                resume=resume,
            )
            failure = broadcast_from_rank_0(past.failure, "failure", ranks, store)
            engine.restart = restart_of(scratch, failure, recipe, ranks.world_size, registry)
            progress.waits = engine.run.mesh.waits
            engine.progress, engine.stop.grace = progress, recipe.run.grace
            stop_without(folder, held, engine.stop)
            texts = write_resolved(recipe), explain(recipe, found.merged)
            names = past.agents if ranks.rank == 0 else ()  # the others know their own alone
            at_save = Mark(mark, "\n".join(names)) if mark is not None else None
            add_watchers(engine, partial(keep_recipe, folder, *texts), at_save)
            if "placements" in job.show:
                show_placements(engine.run)
            return engine.fit().reason
    finally:
        if held is not None:
            held.close()
        if lock is not None:
            lock.release()


def prepare(recipe: Recipe, ranks: Ranks) -> torch.device:
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


def attempt() -> int:
    """Return how often this host's launcher has restarted ranks after one of its own failed."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def recorded_folder(scratch: Path) -> str | None:
    """Return the run folder that ranks of this host have recorded: with several hosts rank 0 selects it."""
    path = scratch / FOLDER
    return path.read_text(encoding="utf-8") if path.exists() else None


def known_past(job: Job) -> Past:
    """Return the :class:`Past` of this launch, as far as this host's launcher has recorded it."""
    scratch = Path(job.scratch) if job.scratch else None
    folder = recorded_folder(scratch) if scratch else None
    saved = scratch is not None and (scratch / HAS_SAVED).exists()
    seen = scratch / FAILED_AT if scratch else None
    failed_at = float(seen.read_text()) if seen is not None and seen.exists() else None
    began, agent = attempt() > 0 or folder is not None, None if scratch else agent_name()
    past = Past(began=began, saved=saved, folder=folder, failed_at=failed_at)
    return past if agent is None else attrs.evolve(past, agents=(agent,))


def mark_of(job: Job, folder: Path) -> Path | None:
    """Return the file that records that this launch has saved, None if its ranks would not be restarted.

    An earlier launch of torchrun may have left one in the run folder: it contains the names of agents.
    """
    if job.scratch is not None:
        return Path(job.scratch, HAS_SAVED)
    return folder / f".{HAS_SAVED}" if "TORCHELASTIC_RESTART_COUNT" in os.environ else None


def start_from(
    job: Job, folder: Path, mark: Path | None, past: Past, use: str, registry: Registry
) -> str | None:
    """Return the checkpoint to start from: after a restart the run's own newest. On rank 0 only.

    A run that was started from a given checkpoint restarts from it until it has saved one, as recorded in
    ``past`` or ``mark``; a new one begins anew, also for monitors that know of other runs' checkpoints. From
    then on there must be one: if rank 0 is on a host that sees none, the run fails.

    Raises:
        CheckpointError: see :func:`~nanotrain_core.checkpoint.listing.expect_own_kind`.
    """
    saved = past.saved or (mark is not None and mark.exists() and _names(mark, past.agents))
    if mark is not None and not saved:
        mark.unlink(missing_ok=True)  # of an earlier launch
    resume = "latest" if past.began and saved else job.resume
    if past.began and resume is None and _has_checkpoints(folder):
        resume = "auto"
    expect_own_kind(folder, resume, use, registry)
    return resume


def _has_checkpoints(folder: Path) -> bool:
    """Return whether the run has any: it may have died after a save, before that was recorded."""
    saved = folder / "checkpoints"
    return saved.is_dir() and any(entry.name[0] != "." for entry in saved.iterdir())


def _names(mark: Path, agents: Sequence[str]) -> bool:
    """Return whether a file was written by a launch with one of these agents."""
    return not {*agents}.isdisjoint(mark.read_text(encoding="utf-8").splitlines())


def keep_recipe(folder: Path, text: str, explained: str) -> None:
    """Write the resolved recipe as ``recipe.toml``, or ``recipe-2.toml`` if a resumed run changed it.

    The newest file is what the run goes by: one that goes back to an earlier recipe writes that once more.
    The origin of each of its values is in ``recipe.explained`` next to it. Who repeats the run needs all
    values: with a secret among them, only the owner may read the files.

    Raises:
        FolderError: it cannot be written.
    """
    names = (re.fullmatch(r"recipe(?:-(\d+))?\.toml", path.name) for path in folder.glob("recipe*.toml"))
    kept = {int(name[1] or 1): folder / name[0] for name in names if name}
    newest = max(kept, default=0)
    if newest and kept[newest].read_text(encoding="utf-8") == text:
        return
    path = folder / (f"recipe-{newest + 1}.toml" if newest else "recipe.toml")
    try:
        secret = without_secrets(text) != text
        write_text_atomically(path.with_suffix(".explained"), explained, private=secret)
        write_text_atomically(path, text, private=secret)
    except OSError as problem:
        raise FolderError(f"{path} cannot be written: {problem.strerror}") from problem


def join(
    job: Job, ranks: Ranks, recipe: Recipe, device: torch.device, registry: Registry
) -> tuple[Store | None, Past]:
    """Connect to the other ranks, check that all run the same thing, create the world's process group.

    Returns:
        The store for communication between ranks, None for a single rank without an agent; and the
            :class:`Past` of this launch, on rank 0 as recorded by any host.
    """
    past = known_past(job)
    if ranks.world_size == 1 and not agent_serves_store():
        return None, past
    import torch.distributed as dist

    from nanotrain_core.compile.options import group_timeout
    from nanotrain_core.layout import nccl

    timeout = group_timeout(recipe, device.type)
    store: Store
    if job.scratch is not None and job.one_host:
        store = dist.FileStore(str(Path(job.scratch, f"store-{attempt()}")), ranks.world_size)
    else:
        tcp = meet_ranks(ranks, recipe.run.timeout, launched=job.scratch is not None)
        shared = dist.PrefixStore("nanotrain", tcp)
        store, past = meet(shared, ranks.rank, ranks.world_size, past, timeout=recipe.run.timeout)
    words = {"--folder": str(job.folder), "--show": " ".join(job.show) or "None"}
    # A host that joins a run may be told to resume it: what this launch has done counts there.
    resume = None if past.began else str(job.resume)
    own = environment_facts(registry, recipe.versions, with_code=ranks.local_rank == 0)
    facts = {**own, "recipe hash": recipe_hash(recipe), "device": device.type, "--resume": resume, **words}
    agree(store, ranks.rank, ranks.world_size, facts)
    if ranks.world_size == 1:
        return store, past
    world: dict[str, Any] = {
        "store": store,
        "rank": ranks.rank,
        "world_size": ranks.world_size,
        "timeout": timeout,
    }
    if device.type == "cpu" or recipe.run.share_device:
        dist.init_process_group("gloo", **world)
        return store, past
    record_collectives(Path(job.claimed) if job.claimed else None)
    dist.init_process_group("nccl", **world, **nccl.options(timeout))
    dist.barrier(device_ids=[device.index])  # connects all ranks now: see nccl.of_subgroup
    return store, past


def share_folder(
    job: Job, ranks: Ranks, recipe: Recipe, store: Store | None, past: Past
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
        folder = past.folder or job.folder or recipe.run.folder
        # Ranks that died before they had a folder leave none to go on in: what is there is another run's.
        resume = job.resume is not None or past.folder is not None
        patience = min(LEASE, recipe.run.timeout / 2) if past.began else 0.0
        claim = partial(RunFolder.claim, recipe.run.name, resume=resume, patience=patience)
        locks.append(claim(folder=folder, agents=past.agents))
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


def recalled(past: Past, job: Job, recipe: Recipe) -> Past:
    """Add the run folder that this launch has claimed before, for rank 0, which reads the disk.

    The ranks' store ends with an attempt if torchrun does not serve it, as gloo needs it: only the folder
    then tells of earlier ones.
    """
    if past.folder is not None or not past.agents:
        return past
    folder = claimed_by(past.agents, recipe.run.name, job.folder or recipe.run.folder)
    return attrs.evolve(past, began=True, folder=str(folder)) if folder is not None else past
