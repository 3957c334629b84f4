"""The roofline of a model on a device: what bounds training, prefill and decode, and tokens/s at most.

A kind of work (the matrix products of a module, its attention, its other operators) takes as long as the
longer of its FLOPs at the device's peak and its bytes at the memory's bandwidth. Nothing else overlaps, and
nothing waits.

Source: Williams, Waterman and Patterson, "Roofline", CACM 52 (2009), 4.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import attrs

from nanotrain_core.api import CachedToken
from nanotrain_plan.hardware import Hardware
from nanotrain_plan.model_report.components import Pieces
from nanotrain_plan.number_format import starred


@attrs.define(frozen=True, kw_only=True)
class Work:
    """Of one module in one pass, all layers of its kind together."""

    piece: str
    module: str
    kind: str
    """``gemm``, ``attention``, ``cache`` or ``other``."""
    flops: float
    bytes: float
    seconds: float
    bound: str
    """``compute`` or ``memory``."""

    @property
    def intensity(self) -> float:
        """FLOPs for each byte."""
        return self.flops / self.bytes if self.bytes else 0.0


@attrs.define(frozen=True, kw_only=True)
class Regime:
    """Training, prefill or decode."""

    name: str
    assumes: str
    tokens: int
    """That the pass trains on, reads or makes."""
    work: Sequence[Work]

    @property
    def seconds(self) -> float:
        """Of the pass, at the least."""
        return sum(each.seconds for each in self.work)

    @property
    def tokens_per_second(self) -> float:
        """At most."""
        return self.tokens / self.seconds

    @property
    def intensity(self) -> float:
        """FLOPs for each byte, of everything."""
        return sum(each.flops for each in self.work) / sum(each.bytes for each in self.work)

    @property
    def by_memory(self) -> float:
        """Share of the time that is bound by memory."""
        return sum(each.seconds for each in self.work if each.bound == "memory") / self.seconds

    def as_json(self) -> dict[str, Any]:
        """Return what ``--json`` has of it."""
        names = ("tokens", "seconds", "tokens_per_second", "intensity", "by_memory")
        return {
            "assumes": self.assumes,
            **{name: getattr(self, name) for name in names},
            "work": [{**attrs.asdict(each), "intensity": each.intensity} for each in self.work],
        }


def roofline(
    pieces: Pieces,
    hardware: Hardware,
    cached: CachedToken | None,
    *,
    microbatch: int,
    length: int,
    batch: int,
) -> list[Regime]:
    """Return the three regimes.

    Args:
        pieces: of the model.
        hardware: the device.
        cached: what the model says of its cache; without it decode's attention is left out.
        microbatch: sequences that are trained on at once.
        length: of a sequence, of a prompt, and of the context of a decoded token.
        batch: sequences that are decoded at once.
    """
    roof = _Roof(pieces, hardware)
    told = f"{microbatch} x {length:,} tokens at once; backward counts as two forward passes"
    training = Regime(
        name="training",
        assumes=told,
        tokens=microbatch * length,
        work=roof.work(microbatch, length, passes=3, training=True),
    )
    prefill = Regime(
        name="prefill",
        assumes=f"a prompt of {length:,} tokens; logits of the last one",
        tokens=length,
        work=roof.work(1, length, last=True),
    )
    decode = [each for each in roof.work(batch, 1) if each.kind != "attention"]
    context = "without its context: the model does not say what it caches"
    if cached is not None:
        size, attended = pieces.dtype.itemsize, cached.attended(length)
        read = batch * attended * cached.elements * size
        decode.append(roof.made("all layers", "attention", "cache", batch * attended * cached.flops, read))
        context = f"each after {length:,} tokens, which are read from the cache"
        if attended < length:
            context += f": with windows {attended:,.0f} of them, on average over layers"
    told = f"{batch} sequence{'s' if batch > 1 else ''} at once, {context}"
    return [training, prefill, Regime(name="decode", assumes=told, tokens=batch, work=decode)]


class _Roof:
    """Runs the model, and times what it does."""

    def __init__(self, pieces: Pieces, hardware: Hardware) -> None:
        self.pieces, self.hardware = pieces, hardware
        self.peak = hardware.peak(str(pieces.dtype)[6:])
        self.bandwidth = hardware.memory.bandwidth_gb_s * 1e9

    def made(self, piece: str, module: str, kind: str, flops: float, moved: float) -> Work:
        """Return work with its time."""
        compute, memory = flops / self.peak, moved / self.bandwidth
        return Work(
            piece=piece,
            module=module,
            kind=kind,
            flops=flops,
            bytes=moved,
            seconds=max(compute, memory),
            bound="compute" if compute > memory else "memory",
        )

    def work(
        self, sequences: int, length: int, *, passes: int = 1, training: bool = False, last: bool = False
    ) -> list[Work]:
        """Return what forward passes take; attention's masked half is left out."""
        found = []
        for piece, phase in self.pieces.run(sequences, length, training=training, keeps=False, last=last):
            flops: Counter[tuple[str, str]] = Counter()
            moved: Counter[tuple[str, str]] = Counter()
            for (name, kind), size in phase.bytes_of.items():
                key = (starred(name) or piece.name, kind) if kind != "other" else ("other operators", kind)
                masked = 0.5 if kind == "attention" and length > 1 else 1.0
                fused = self.hardware.memory.fusion if kind == "other" else 1.0
                flops[key] += phase.flops_of[name, kind] * masked  # type: ignore[assignment]
                moved[key] += size / fused  # type: ignore[assignment]
            times = piece.number * passes
            found += [self.made(piece.name, *key, flops[key] * times, moved[key] * times) for key in moved]
        return found
