"""A batch script for Slurm: ``sbatch FILE``.

One launcher per node, started by ``srun``: each starts and monitors its ranks, as on one machine. Before the
time limit Slurm signals the batch script (``--signal=B:TERM@SECONDS``), which makes Slurm signal the
launchers: ``srun`` itself would kill them on a SIGTERM. The job is then requeued, depending on the exit codes
of docs/reliability.md. A cancelled job is not requeued: it is no longer RUNNING.

Source: sbatch(1), srun(1), scancel(1) of Slurm 24.05.
"""

from __future__ import annotations

import re
import shlex

from nanotrain_core.api import Exit, NanotrainError
from nanotrain_launch.job import MARGIN, Job, command, exports, text
from nanotrain_launch.options import COUNT, Option, command_words

#: ``minutes``, ``minutes:seconds``, ``hours:minutes:seconds``, ``days-hours[:minutes[:seconds]]``.
TIME = r"\d+|\d+:\d+|\d+:\d+:\d+|\d+-\d+(:\d+(:\d+)?)?"
MEMORY = r"\d+[KMGT]?"

#: Those that are not in :data:`OWN` are passed unchanged to the options of sbatch with the same names.
OPTIONS = {
    "partition": Option("a partition", example="gpu"),
    "account": Option("an account"),
    "qos": Option("a quality of service"),
    "time": Option("a time limit as sbatch takes it", TIME, "1-12:00:00"),
    "constraint": Option("features of nodes", r"[\w.,:|&()\[\]*-]+", "h100"),
    "nodelist": Option("nodes", example="node[1-4]"),
    "exclude": Option("nodes that are left out", example="node7"),
    "reservation": Option("a reservation"),
    "gres": Option("generic resources of a node, in place of GPUs by number", example="gpu:h100:8"),
    "cpus-per-task": Option("cores of a node, where nodes are shared", COUNT, "64"),
    "mem": Option("memory of a node; 0 is all of it", MEMORY, "500G", default="0"),
    "exclusive": Option("yes or no: whether nodes are this job's alone", "yes|no", "no", default="yes"),
    "mail-user": Option("a mail address"),
    "mail-type": Option("events to be mailed", r"[A-Z_0-9,]+", "END,FAIL"),
    "comment": Option("a word for the accounts"),
    "output": Option("the log; %j is the job's number", default=None, example="logs/%x-%j.log"),
    "requeues": Option(
        "how often a crash or a hang sends the job back to the queue", r"\d+", "3", default="3"
    ),
    "command": Option("how nodes call nanotrain", r"[^\n]+", "/opt/venv/bin/nanotrain", default="nanotrain"),
}
#: Of those, what is no option of sbatch.
OWN = ("exclusive", "requeues", "command", "output")

STOP = """\
# Slurm warns this script alone. The launchers hear of it, save a checkpoint and end; those of a job that is
# being cancelled have heard of it already.
running() { scontrol show job "$SLURM_JOB_ID" | grep -q 'JobState=RUNNING'; }
trap 'told=1; running && scancel --signal=TERM "$SLURM_JOB_ID"' TERM
"""

WAIT = """\
told=1
while [ "$told" = 1 ]; do # a signal ends a wait early
    told=0
    wait "$step"
    code=$?
done
"""

REQUEUE = """\
# A line a crash: Slurm's own count of restarts has preemptions and time limits in it.
crashes={folder}/.crashes-"$SLURM_JOB_ID"
crashed() {{ mkdir -p -- {folder} && echo "$(date) code $code" >>"$crashes"; }}
again=no
case "$code" in
    # Ended by a signal: saved, or (143, 129) a node that had not begun, whose code is above the others'.
    {preempted} | 143 | 129) again=yes ;;
    # Crashed, hung, or killed as when memory runs out.
    {failed} | {hung} | 137) crashed && [ "$(wc -l <"$crashes")" -le {requeues} ] && again=yes ;;
esac
if [ "$again" = yes ] && running; then
    echo "nanotrain: code $code: back to the queue, to go on from the newest checkpoint"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def script(job: Job, options: dict[str, str]) -> str:
    """Return the batch script.

    Raises:
        NanotrainError: the time limit leaves no time before its warning.
    """
    seconds = job.grace_until_killed
    if "time" in options and _seconds(options["time"]) <= seconds:
        raise NanotrainError(
            f"--option time={options['time']}: the job would be told to end {seconds} s before that "
            f"(run.grace = {job.grace:g}, and {MARGIN} more), which leaves nothing: allow more time"
        )
    if seconds > 65535:
        raise NanotrainError(f"run.grace = {job.grace:g}: Slurm warns 65535 s ahead at most; lower it")
    lines = [
        "#!/usr/bin/env bash",
        *job.header(),
        *(f"#SBATCH --{line}" for line in _directives(job, options, seconds)),
        "",
        "set -u",
        *exports(job.environment),
        'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        'endpoint="$head:$((20000 + SLURM_JOB_ID % 20000))"',
        'attempt="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"',
        "",
        STOP,
        f"{_step(job, options)} &",
        "step=$!",
        "",
        WAIT,
        REQUEUE.format(
            preempted=Exit.PREEMPTED,
            failed=Exit.FAILED,
            hung=Exit.HUNG,
            requeues=options["requeues"],
            folder=shlex.quote(job.folder),
        ).rstrip(),
    ]
    return text(lines)


def _directives(job: Job, options: dict[str, str], seconds: int) -> list[str]:
    lines = [f"job-name={job.label()}", f"nodes={job.nodes}", "ntasks-per-node=1"]
    if job.gpus and "gres" not in options:
        lines.append(f"gpus-per-node={job.nproc}")
    if options["exclusive"] == "yes":
        lines.append("exclusive")
    lines += [f"{key}={value}" for key, value in options.items() if key not in OWN]
    lines += [f"output={options.get('output', f'{job.label()}-%j.log')}", "open-mode=append"]
    lines += ["no-kill"] if job.min_nodes is not None else []  # a node that fails ends no job
    return [*lines, f"signal=B:TERM@{seconds}", "requeue"]


def _step(job: Job, options: dict[str, str]) -> str:
    """Return the ``srun`` command: one task per node, with all its cores; no task is killed for another."""
    srun = ["srun", "--ntasks-per-node=1", "--cpu-bind=none", "--kill-on-bad-exit=0"]
    if job.min_nodes is None:
        srun += [f"--wait={int(job.patience) + MARGIN}", "--label"]
    else:  # the others go on for as long as they like, without a node that fails or leaves
        srun += ["--no-kill", "--wait=0", "--label"]
    words = job.on_each_node(command_words(options["command"]))
    launcher = command(words, '--rdzv-endpoint "$endpoint"', '--rdzv-id "$attempt"', indent=" " * 8)
    cores = '--cpus-per-task="$SLURM_CPUS_ON_NODE"'
    return f"{command(srun, cores)} \\\n    {launcher}"


def _seconds(time: str) -> int:
    """Return the seconds of a time limit.

    >>> [_seconds(time) for time in ("30", "30:15", "2:00:00", "1-12", "1-12:30", "1-12:30:05")]
    [1800, 1815, 7200, 129600, 131400, 131405]
    """
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in re.split(":", rest)]
    if dash:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
        return ((int(days) * 24 + hours) * 60 + minutes) * 60 + seconds
    if len(parts) == 3:
        return (parts[0] * 60 + parts[1]) * 60 + parts[2]
    return parts[0] * 60 + (parts[1] if len(parts) == 2 else 0)
