"""``nanotrain run RECIPE``: train."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path

from nanotrain_core.checkpoint.info import strip_ema
from nanotrain_core.checkpoint.listing import resume_path
from nanotrain_core.cli.argument_types import positive_int, unsigned_int
from nanotrain_core.cli.common import add_recipe_options, plugin_arguments, resolve
from nanotrain_core.cli.gpus import fit_to_gpus
from nanotrain_core.cli.machines import fewest_machines
from nanotrain_core.cli.replay import replay
from nanotrain_core.errors import CheckpointError, Exit, NanotrainError, Preempted
from nanotrain_core.launch import temporary
from nanotrain_core.launch.check_inputs import check_inputs
from nanotrain_core.launch.check_modules import check_modules
from nanotrain_core.launch.check_weights import check_weights
from nanotrain_core.launch.environment import Ranks
from nanotrain_core.run.folder import newest
from nanotrain_core.run.progress_bar import is_live
from nanotrain_core.run.stop import EXIT_OF, end_on_sigterm, keep_exit_code
from nanotrain_core.run.suggest_run import did_you_mean_weights


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    add_recipe_options(parser)
    parser.add_argument(
        "--min-nnodes",
        type=positive_int,
        metavar="N",
        help="smallest number of machines to start with, or continue with after a loss; default: --nnodes",
    )
    parser.add_argument(
        "--rdzv-endpoint",
        default="",
        metavar="HOST:PORT",
        help="rendezvous of several machines; then this launches one machine's ranks, also under srun",
    )
    parser.add_argument(
        "--rdzv-id",
        metavar="ID",
        help="name of the run at the rendezvous; default: run.name",
    )
    parser.add_argument(
        "--max-restarts",
        type=unsigned_int,
        metavar="N",
        help="restart all ranks after a failure, at most N times; default: run.max_restarts",
    )
    parser.add_argument(
        "--folder", metavar="PATH", help="run folder; default: runs/<name>, numbered if taken"
    )
    parser.add_argument(
        "--resume",
        nargs="?",
        const="latest",
        metavar="WHICH",
        help="resume from a checkpoint: the latest (default), a step or a path; 'auto' is the latest, or the "
        "beginning if there is none yet; write it after RECIPE, which would otherwise be read as WHICH",
    )
    parser.add_argument(
        "--weights",
        metavar="PATH",
        help="weights to start from: a Hugging Face folder, one written by `nanotrain convert`, a checkpoint",
    )
    parser.add_argument(
        "--show",
        action="append",
        default=[],
        choices=["placements"],
        help="print the placement of every parameter before training",
    )
    told = "then train again from the oldest checkpoint, and compare bytes, as `nanotrain ckpt replay`"
    parser.add_argument("--verify-resume", action="store_true", help=told)


def run(args: argparse.Namespace) -> int:
    """Start the ranks, or be one of them under torchrun or srun."""
    end_on_sigterm(_ended, interrupts=True)  # until there are ranks to end, or training
    from nanotrain_core.launch.hosts import Nodes
    from nanotrain_core.launch.launcher import launch, start_forkserver
    from nanotrain_core.launch.worker import Job, train

    use_weights(args)
    plugins = plugin_arguments(args)
    job = Job(
        recipe=args.recipe,
        overrides=tuple(args.set),
        plugins=plugins,
        folder=args.folder,
        resume=args.resume,
        show=tuple(args.show),
    )
    joined = Ranks.joined(args.rdzv_endpoint)
    if args.verify_resume and (joined is not None or (args.nnodes or 1) > 1):
        raise NanotrainError("--verify-resume: one machine must start the run; use `nanotrain ckpt replay`")
    if joined is not None:
        joined.check_sizes(args.nproc, args.nnodes)
        return keep_exit_code(EXIT_OF[train(job, joined)])
    found = resolve(args)
    recipe = found.recipe
    nnodes = args.nnodes or 1
    least = fewest_machines(args, recipe)
    if recipe.run.ranks > 1:
        start_forkserver(max(1, recipe.run.ranks // nnodes))
    check_inputs(found, weights=args.resume is None)
    check_resume(args)
    check_modules(found)
    if args.resume is None:
        check_weights(found)
    if args.nproc is None and nnodes == 1:
        recipe = fit_to_gpus(args, found)
    nodes = Nodes(
        count=nnodes,
        least=least,
        nproc=recipe.run.ranks // nnodes,
        endpoint=args.rdzv_endpoint,
        run_id=args.rdzv_id or recipe.run.name,
        max_restarts=recipe.run.max_restarts if args.max_restarts is None else args.max_restarts,
    )
    code = keep_exit_code(launch(job, recipe, nodes))
    if args.verify_resume and code == Exit.DONE:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a replay has files to delete
        args.path, args.step = Path(args.folder or recipe.run.folder or newest(recipe.run.name)), None
        return replay(args, found.registry)
    return code


def _ended(problem: Preempted) -> None:
    """Say why this process ends, show the cursor that a progress bar may hide, delete temporary files."""
    os.write(2, f"nanotrain: {problem}\n".encode())  # print may be what the signal has interrupted
    if is_live(sys.stdout):
        os.write(1, b"\x1b[?25h")
    temporary.delete()


def check_resume(args: argparse.Namespace) -> None:
    """Reject a path to resume from that does not exist, before ranks start and a run folder is made.

    With several hosts, which may see different disks, the ranks check it instead.

    Raises:
        CheckpointError: it does not exist; the text suggests a similar path.
    """
    path = resume_path(args.resume)
    if path is not None and (args.nnodes or 1) == 1 and not path.exists():
        raise CheckpointError(f"no checkpoint at {path}{did_you_mean_weights(path)}: it does not exist")


def use_weights(args: argparse.Namespace) -> None:
    """Apply ``--weights`` to the recipe, so that the resolved recipe names them.

    Raises:
        NanotrainError: the run is to be resumed, with its checkpoint's weights, or there is no such path.
    """
    if args.weights is None:
        return
    if args.resume:
        raise NanotrainError("--weights starts a new run, --resume goes on with one: give one of them")
    if not strip_ema(Path(args.weights))[0].exists():
        near = did_you_mean_weights(Path(args.weights))
        raise NanotrainError(f"--weights {args.weights}: there is no such file or folder{near}")
    args.set = [*args.set, f"run.weights={json.dumps(args.weights)}"]
