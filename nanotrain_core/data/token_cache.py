"""Tokens on the disk, under the hash of their bytes: what is damaged is not trained on but made anew."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import structlog

from nanotrain_core.run.files import write_atomically

Tokens = npt.NDArray[Any]


class TokenCache:
    """The tokens of one text by one tokenizer, in ``<key>-<SHA-256 of the tokens>.tokens``."""

    def __init__(self, key: str, dtype: np.dtype[Any]) -> None:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self.folder, self.dtype = base / "nanotrain" / "tokens", dtype
        self.key = hashlib.sha256(key.encode()).hexdigest()[:32]

    def read(self) -> Tokens | None:
        """Return what was written, mapped into memory; None if there is nothing, or nothing whole."""
        for path in sorted(self.folder.glob(f"{self.key}-*.tokens")):
            try:
                tokens = np.memmap(path, self.dtype, mode="r")
            except (OSError, ValueError):  # gone, empty, or cut within a token
                continue
            if path.name == self._name(tokens):
                return tokens
            log = structlog.get_logger("nanotrain.data")
            log.warning("cached tokens are damaged, and made anew", path=str(path))
        return None

    def write(self, tokens: Tokens) -> None:
        """Keep tokens for the next run, and nothing else under their key; without a place, do nothing."""
        path = self.folder / self._name(tokens)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(path, tokens.tofile)
            for other in self.folder.glob(f"{self.key}-*.tokens"):
                if other != path:
                    other.unlink(missing_ok=True)
        except OSError:
            pass  # the next run tokenises again

    def _name(self, tokens: Tokens) -> str:
        return f"{self.key}-{hashlib.sha256(tokens.data).hexdigest()}.tokens"
