"""What a step does and holds in memory, from one point of it to the next: a phase."""

from __future__ import annotations

from collections import Counter

import attrs
import torch

from nanotrain_plan.dry.collectives import Collective
from nanotrain_plan.dry.cost import ATTENTION
from nanotrain_plan.dry.origin import Origin


@attrs.define(eq=False)
class Storage:
    """Memory of one tensor and its views."""

    bytes: int
    module: str
    """Qualified name of the module whose forward was running; empty outside of any."""
    op: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    source: Storage | None = None
    """What it is a pointwise function of."""
    recomputable: bool = False
    """Whether :attr:`source` was alive at the end of the phase."""
    freed_in: str = ""
    """Name of the phase in which it was freed; empty if it is alive."""


@attrs.define(eq=False)
class Level:
    """The memory that is alive from the allocation of a buffer up to that of the next one."""

    buffer: Storage | None
    """None: from the beginning of a phase."""
    most: int
    """Bytes."""


@attrs.define(eq=False)
class Phase:
    """What happened from one call of ``Recorder.enter`` to the next."""

    name: str
    before: int
    """Bytes alive at its beginning."""
    peak: int
    """Most bytes alive within; of a dry step, if what is :attr:`lasting` had been there all along."""
    after: int = 0
    kept: list[Storage] = attrs.field(factory=list)
    """Made here and alive at its end."""
    made: int = 0
    """Bytes of :attr:`kept`."""
    host: int = 0
    """Bytes of the host's memory that it takes, in a dry run, less those that it gives back."""
    lasting: int = 0
    """Of them, those that are alive after the step, as buffers that gradient sync uses again: a later step
    finds them there."""
    levels: list[Level] = attrs.field(factory=list)
    """From the beginning, and from the allocation of each buffer, up to that of the next."""
    collectives: list[Collective] = attrs.field(factory=list)
    origins: list[Origin | None] = attrs.field(factory=list)
    """Who asked for each of :attr:`collectives`, if the recorder looks."""
    callers: list[str] = attrs.field(factory=list)
    """Module whose forward was running, likewise."""
    gemm_flops: Counter[str] = attrs.field(factory=Counter)
    """FLOPs of matrix products by dtype, and of attention by :data:`ATTENTION` and dtype; half is masked."""
    flops_of: Counter[tuple[str, str]] = attrs.field(factory=Counter)
    """FLOPs by the module whose forward runs, and by ``gemm`` or ``attention`` (whole scores). In a backward
    pass these are FLOPs of recomputation."""
    bytes_of: Counter[tuple[str, str]] = attrs.field(factory=Counter)
    """Bytes read and written, likewise, and by ``other`` operators. Experts without rows do not count."""
    moved: int = 0
    """Bytes that operators other than matrix products read and wrote."""
    eager: int = 0
    """Of :attr:`moved`, those of autograd where it adds a gradient to earlier ones: no compiler fuses it."""
    kernels: int = 0

    @property
    def attention_flops(self) -> float:
        """FLOPs of attention over whole score matrices, of all dtypes."""
        return sum(flops for kind, flops in self.gemm_flops.items() if kind.startswith(ATTENTION))

    @property
    def transient(self) -> int:
        """Bytes needed within, on top of those at its beginning."""
        return self.peak - self.before

    def with_sync_of(self, last: Phase, usual: Phase | None) -> Phase:
        """Return it with what ``last`` does and ``usual``, of another microbatch, does not: gradient sync."""
        if usual is None:  # of W passes, which have no other collectives
            return attrs.evolve(self, collectives=[*self.collectives, *last.collectives])
        added = Counter(last.collectives) - Counter(usual.collectives)
        return attrs.evolve(
            self,
            collectives=[*self.collectives, *added.elements()],
            moved=self.moved + max(0, last.moved - usual.moved),
            kernels=self.kernels + max(0, last.kernels - usual.kernels),
        )
