"""How often a run that goes on is read again: next to training, that must take a small part of the time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Rest:
    """A pause after each reading, the longer the longer that took: a long run takes a while."""

    #: Seconds of the pause for each second of reading.
    times = 10.0

    def __init__(self) -> None:
        self._until = 0.0

    @property
    def over(self) -> bool:
        """Whether the run may be read again."""
        return time.monotonic() >= self._until

    @contextmanager
    def after(self) -> Iterator[None]:
        """Begin a pause after the body, which reads the run."""
        began = time.monotonic()
        yield
        ended = time.monotonic()
        self._until = ended + self.times * (ended - began)
