"""How ranks exchange tensors: the seam behind which kernels may put something faster than process groups."""

from __future__ import annotations


class Transport:
    """Exchanges through torch's process groups. A component of kind ``kernels`` may offer another."""
