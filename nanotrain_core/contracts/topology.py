"""The interface of a topology."""

from __future__ import annotations

from typing import Protocol

from nanotrain_core.layout.layout import Layout


class Topology(Protocol):
    """Lays out the ranks. The factory's module must not import torch: every command uses it."""

    def layout(self, world_size: int) -> Layout:
        """Return the layout of ``world_size`` ranks.

        Raises:
            ValueError: the degrees do not fit; the text says which and what would.
        """
        ...
