"""What tensor cores torch's scaled GEMMs need. Without torch: recipes are checked before it is imported."""

from __future__ import annotations

import attrs


@attrs.define(frozen=True)
class Units:
    """The units that multiply one kind of operands."""

    what: str
    """The operands, with the verb: ``tiles of 128 need``."""
    capability: tuple[int, int]
    """The least compute capability."""
    devices: str = ""
    """Some that have it."""
    alone: bool = False
    """Later compute capabilities do not have them."""
    cuda: tuple[int, ...] = ()
    """The least version of CUDA that torch must have been built with; empty: any."""

    def lacks(self, capability: tuple[int, int]) -> str:
        """Return what GPUs of a compute capability lack; empty if nothing."""
        if capability == self.capability or (capability > self.capability and not self.alone):
            return ""
        needed = ".".join(map(str, self.capability)) + (f" ({self.devices})" if self.devices else "")
        return f"{self.what} compute capability {needed}, this is {capability[0]}.{capability[1]}"

    def lacks_cuda(self, built: str) -> str:
        """Return what a torch that was built with this version of CUDA lacks; empty if nothing."""
        if tuple(map(int, built.split("."))) >= self.cuda:
            return ""
        return f"{self.what} CUDA {'.'.join(map(str, self.cuda))}, this torch was built with {built}"


#: One scale for a whole tensor, tiles of 1 x 128 and 128 x 128, blocks of 32 of MX, and of 16 of NVFP4.
TENSORS = Units("FP8 needs", (8, 9))
TILES = Units("tiles of 128 need", (9, 0), "H100, H200", alone=True, cuda=(12, 9))
MX = Units("blocks of 32 need", (10, 0), "B200", cuda=(12, 8))
NVFP4 = Units("NVFP4 needs", (10, 0), "B200", cuda=(12, 8))
