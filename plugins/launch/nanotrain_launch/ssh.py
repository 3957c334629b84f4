"""A script that starts the launchers of all hosts over ssh, waits for them, and stops them with it.

Hosts need a shell, a key that asks for no password, and the same folder: a shared file system.
"""

from __future__ import annotations

import shlex
import sys

from nanotrain_launch.job import PORT, Job, command, exports, text
from nanotrain_launch.options import COMMAND, PATH, PORT_NUMBER, Option, command_words, read_hosts
from nanotrain_launch.torchrun import HOSTS

OPTIONS = {
    "hosts": HOSTS,
    "port": Option("the port where they meet, from 1 to 65535", PORT_NUMBER, default=str(PORT)),
    "workdir": Option(
        "the folder to run in, on every host; where this command is called", PATH, "/shared/work"
    ),
    "command": Option(
        "how hosts call nanotrain",
        COMMAND,
        "/opt/venv/bin/nanotrain",
        default=shlex.join([sys.executable, "-m", "nanotrain_core.cli"]),
    ),
}

USAGE = "Starts all hosts and waits. Ctrl-C, SIGTERM, or this file with the word stop: all save and end."

START = """\
start() {{ # HOST
    ssh -o BatchMode=yes -o ServerAliveInterval=30 "$1" sh -s -- "$1" <<'END'
cd {workdir} || exit 255
mkdir -p {notes} || exit 255
echo $$ > {notes}/"$1".pid
{exports}exec {launcher} </dev/null
END
}}
"""

REST = """\
tell_all() { # to save and end
    for host in "${hosts[@]}"; do
        ssh -o BatchMode=yes "$host" sh -s -- "$host" <<'END' &
for _ in 1 2 3 4 5 6 7 8 9 10; do # it may be starting still, and the number be of an earlier run's
    pid=$(cat {pids}/"$1".pid 2>/dev/null)
    if tr '\\0' ' ' 2>/dev/null < "/proc/$pid/cmdline" | grep -qF -- '--rdzv-id {name} '; then
        kill -s TERM "$pid"
        break
    fi
    sleep 1
done
END
    done
}

if [ "${1:-start}" = stop ]; then
    tell_all
    wait
    exit
fi

# 255 is ssh's own failure: the other hosts would wait for this one.
launch() { # HOST
    start "$1"
    local code=$?
    echo "$code" > "$logs/$1.code"
    [ "$code" = 255 ] && echo "nanotrain: $1 could not be reached, or has no such folder" >&2 && kill -TERM $$
}

trap tell_all TERM INT HUP
for host in "${hosts[@]}"; do
    rm -f "$logs/$host.code"
    launch "$host" > >(tee "$logs/$host.log") 2>&1 & # rank 0, which tells of the run, may be on any
done

worst=0
for host in "${hosts[@]}"; do # no `wait`: where signals come, it may forget how a process ended
    until [ -s "$logs/$host.code" ]; do sleep 1; done
    code=$(cat "$logs/$host.code")
    [ "$code" -gt "$worst" ] && worst=$code
done
[ "$worst" = 0 ] || echo "nanotrain: ended with code $worst; logs are in $logs" >&2
exit "$worst"
"""


def script(job: Job, options: dict[str, str]) -> str:
    """Return the script."""
    hosts = read_hosts(options["hosts"], job.nodes)
    notes, workdir = f"launch-{job.label()}", options["workdir"]
    endpoint = f"{hosts[0].rpartition('@')[2]}:{options['port']}"
    meet = ("--rdzv-endpoint", endpoint, "--rdzv-id", job.label())
    words = job.on_each_node(command_words(options["command"]), *meet)
    start = START.format(
        workdir=shlex.quote(workdir),
        notes=notes,
        exports="".join(f"{line}\n" for line in exports(job.environment)),
        launcher=command(words),
    )
    lines = [
        "#!/usr/bin/env bash",
        *job.header(USAGE),
        "set -u",
        f"hosts=({' '.join(map(shlex.quote, hosts))})",
        f"logs={notes}",
        'mkdir -p "$logs"',
        "",
        start,
        REST.replace("{pids}", shlex.quote(f"{workdir}/{notes}")).replace("{name}", job.label()).rstrip(),
    ]
    return text(lines)
