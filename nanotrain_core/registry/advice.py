"""Advice for a name that no plugin registered: what to install, or which command was meant."""

from __future__ import annotations

from collections.abc import Sequence

from nanotrain_core.errors import did_you_mean

#: The distribution of each component and command of this project outside the core, by (kind, name); the kind
#: of a command is ``command``. In the table a plugin is left out where it has its component's name.
FIRST_PARTY = {
    (kind, name): f"nanotrain-{plugin or name}".replace("_", "-")
    for kind, plugin, names in (
        ("checkpoint", "sharded_ckpt_v2", "sharded_v2"),
        ("command", "", "data doctor inspect launch plan report sample"),
        ("command", "object_store", "store"),
        ("command", "plan", "explain"),
        ("command", "report", "top"),
        ("command", "sample", "eval"),
        ("data", "data", "shards streaming chat"),
        ("kernels", "", "cpu cuda"),
        ("kernels", "plan", "dry"),
        ("model", "", "deepseek moe_transformer"),
        ("monitor", "", "alerts health memory_snapshots object_store replay tensorboard wandb"),
        ("monitor", "fp8_deepseek_v3", "fp8"),
        ("monitor", "health", "moe probes"),
        ("monitor", "inspect", "profiler dump"),
        ("monitor", "performance", "throughput memory pipeline device goodput"),
        ("optimizer", "", "muon zero12"),
        ("parallel", "", "activation_offload cp ddp ep_deepseek lora tp zero12"),
        ("parallel", "fsdp", "fsdp2"),
        ("precision", "", "fp4_master fp8_deepseek_v3"),
        ("precision", "fp4_master", "qlora"),
        ("precision", "fp8_deepseek_v3", "fp8_hybrid mxfp8 nvfp4"),
        ("schedule", "pp_1f1b", "1f1b gpipe interleaved_1f1b zb_h1 dualpipe_v"),
    )
    for name in names.split()
}

#: A command of other programs -> the words after ``nanotrain`` that correspond to it.
ALIASES = {
    "generate": "sample",
    "help": "--help",
    "resume": "run RECIPE --resume",
    "test": "conformance",
    "train": "run",
    "validate": "check",
    "version": "--version",
}


def how_to_install(package: str) -> str:
    """Return the command that installs a distribution of this project, and the one to use in a checkout.

    >>> how_to_install("nanotrain-pp-1f1b")
    'pip install nanotrain-pp-1f1b (in a checkout: pip install -e plugins/pp_1f1b)'
    """
    folder = package.removeprefix("nanotrain-").replace("-", "_")
    return f"pip install {package} (in a checkout: pip install -e plugins/{folder})"


def nearest_command(word: str, known: Sequence[str]) -> str:
    """Return `` (did you mean 'x'?)`` for the command that a word stands for, or an empty string.

    :data:`ALIASES` are looked up first. Else it is the most similar of ``known``, more similar than other
    names need to be: ``serve`` is not ``store``, but ``rnu`` is ``run``.
    """
    if word in ALIASES:
        return f" (did you mean 'nanotrain {ALIASES[word]}'?)"
    return did_you_mean(word, known, cutoff=0.65)
