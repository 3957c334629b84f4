"""Waits for what other ranks write to the store, in which signals are handled.

Inside torch's own wait Python handles no signal: SIGTERM would be heeded after its timeout.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from nanotrain_core.errors import Exit
from nanotrain_core.launch.cause import PeerLostError

if TYPE_CHECKING:
    from torch.distributed import Store


def wait_for(store: Store, key: str, deadline: float, text: str) -> bytes:
    """Return what another rank stores under ``key``.

    Raises:
        PeerLostError: with this text: nothing was stored before the deadline.
    """
    for _ in tries(deadline, text):
        if store.check([key]):
            break
    return store.get(key)


def tries(deadline: float, text: str) -> Iterator[None]:
    """Yield until the deadline, after sleeps that become longer.

    Raises:
        PeerLostError: with this text: it has passed.
    """
    began = now = time.monotonic()
    while now <= deadline:
        yield
        time.sleep(min(0.001 + (now - began) / 10, 0.2))
        now = time.monotonic()
    raise PeerLostError(text).with_code(Exit.FAILED)
