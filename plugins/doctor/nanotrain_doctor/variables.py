"""Environment variables that are known to slow runs down, or to make them fail."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import attrs

from nanotrain_doctor.findings import Finding, bad, good, warning
from nanotrain_doctor.network import interfaces, unknown_interfaces


@attrs.define(frozen=True)
class Rule:
    """One setting that hurts."""

    name: str
    hurts: Callable[[str], bool]
    why: str
    remedy: str


def _on(value: str) -> bool:
    return value.strip().lower() not in ("", "0", "false", "off", "no")


def _off(value: str) -> bool:
    return value.strip().lower() in ("0", "false", "off", "no")


def _unset(name: str) -> str:
    return f"unset {name}"


RULES = (
    Rule("CUDA_LAUNCH_BLOCKING", _on, "every kernel is waited for", "for debugging alone: unset it"),
    Rule(
        "PYTORCH_NO_CUDA_MEMORY_CACHING", _on, "every tensor is a cudaMalloc", "for debugging alone: unset it"
    ),
    Rule(
        "TORCH_DISTRIBUTED_DEBUG", lambda v: v == "DETAIL", "every collective is compared first", "unset it"
    ),
    Rule(
        "NCCL_DEBUG", lambda v: v in ("INFO", "TRACE"), "every rank writes what NCCL does", "set it to WARN"
    ),
    Rule("NCCL_P2P_DISABLE", _on, "GPUs of a host do not use NVLink", "unset it"),
    Rule("NCCL_SHM_DISABLE", _on, "ranks of a host exchange over the network", "unset it; see /dev/shm"),
    Rule("NCCL_IB_DISABLE", _on, "hosts do not use InfiniBand or RoCE", "unset it where there is any"),
    Rule("NCCL_NET_GDR_LEVEL", lambda v: v in ("0", "LOC"), "no GPU is read by the network card", "unset it"),
    Rule("NCCL_PROTO", _on, "forced: LL128 gives wrong sums where it is not supported", "unset it"),
    Rule("NCCL_ALGO", _on, "forced: NCCL's own choice is tuned for the machine", "unset it"),
    Rule("TORCH_NCCL_ASYNC_ERROR_HANDLING", _off, "a failed collective hangs for ever", "unset it"),
    Rule("NCCL_ASYNC_ERROR_HANDLING", _off, "a failed collective hangs for ever", "unset it"),
    Rule("TORCH_NCCL_BLOCKING_WAIT", _on, "the host waits for every collective", "unset it"),
    Rule("NVIDIA_TF32_OVERRIDE", _off, "no float32 product uses tensor cores", "unset it"),
    Rule("TORCH_COMPILE_DISABLE", _on, "no layer is compiled", "unset it, or set run.compile = false"),
    Rule("TORCHDYNAMO_DISABLE", _on, "no layer is compiled", "unset it, or set run.compile = false"),
    Rule("GOMP_CPU_AFFINITY", _on, "all ranks of a host are bound to the same cores", "unset it"),
)
#: Names of one setting of torch's allocator, the present one first.
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def examine_variables(
    environment: Mapping[str, str],
    *,
    cores: int,
    ranks: int = 1,
    hosts: int = 1,
    gpus: bool = False,
    known: Iterable[str] | None = None,
) -> list[Finding]:
    """Look at an environment.

    Args:
        environment: of this process, which ranks inherit.
        cores: of this host.
        ranks: on this host.
        hosts: of the run.
        gpus: whether this host has any.
        known: names of its interfaces; None asks it.
    """
    here = list(interfaces() if known is None else known)
    found = [
        warning(rule.name, f"is {environment[rule.name]}: {rule.why}", rule.remedy)
        for rule in RULES
        if rule.name in environment and rule.hurts(environment[rule.name])
    ]
    found += _threads(environment, cores, ranks)
    found += _allocator(environment)
    found += _interfaces(environment, here, hosts)
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if gpus and visible is not None and visible.strip() in ("", "-1"):
        text = f"is {visible!r}: no GPU of this host is used"
        found.append(warning("CUDA_VISIBLE_DEVICES", text, _unset("CUDA_VISIBLE_DEVICES")))
    return found or [good("environment", "no variable that is known to hurt")]


def _threads(environment: Mapping[str, str], cores: int, ranks: int) -> Iterator[Finding]:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        text = environment.get(name)
        if text is None:
            continue
        first = text.partition(",")[0]
        if not first.isdecimal() or int(first) < 1:
            yield bad(name, f"is {text!r}: expected a number above 0", _unset(name))
        elif int(first) * ranks > cores:
            why = f"is {text}: {ranks} ranks would have {int(first) * ranks} threads on {cores} cores"
            yield warning(name, why, f"{_unset(name)}: ranks divide the cores", cores=cores, ranks=ranks)


def _allocator(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Judge the allocator's settings: a run sets expandable segments only where there are none."""
    given = {name: environment[name] for name in ALLOCATOR if environment.get(name)}
    if len(set(given.values())) > 1:
        yield warning(ALLOCATOR[1], "differs from PYTORCH_ALLOC_CONF, which counts", _unset(ALLOCATOR[1]))
    for name, text in given.items():
        settings = {
            part.partition(":")[0].strip(): part.partition(":")[2].strip() for part in text.split(",")
        }
        own = settings.get("backend") == "cudaMallocAsync"
        if not own and settings.get("expandable_segments", "").lower() != "true":
            why = f"is {text}: without expandable_segments memory falls into holes"
            yield warning(name, why, f"add expandable_segments:True, or {_unset(name)}: a run sets it")


def _interfaces(environment: Mapping[str, str], known: list[str], hosts: int) -> Iterator[Finding]:
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        wanted = environment.get(name)
        if not wanted:
            continue
        if lacking := unknown_interfaces(wanted, known):
            text = f"is {wanted}, and there is no {', '.join(lacking)}; interfaces: {', '.join(known)}"
            yield bad(name, text, f"name one that is here, or {_unset(name)}")
        elif hosts > 1 and wanted.lstrip("=") in ("lo", "lo0"):
            yield bad(name, f"is {wanted}, over which no other host is reached", _unset(name))
