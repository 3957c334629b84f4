"""How long a blend of 10 million documents takes to open, what memory it takes, and how fast it is read."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import attrs
import numpy as np
from nanotrain_data.manifest import Manifest, TokenizerInfo
from nanotrain_data.writer import seal_shard, shard_name

from benchmarks.report import spread, verdict

SOURCES, SHARDS, DOCUMENTS, MEAN = 5, 8, 10_000_000, 40
WEIGHTS = (0.4, 0.3, 0.15, 0.1, 0.05)
#: Processes that read on one host.
RANKS = 4
#: Tokens a second at which training is to wait for data less than 1% of a step: 20 times what the recipe
#: ``laptop`` trains on four cores.
RATE = 20 * 10_000


@attrs.define(frozen=True)
class Reading:
    """What one number of a reader is, and may be."""

    KIND = "data"
    TITLE = f"A blend of {SOURCES} sources, {DOCUMENTS:,} documents of {MEAN} tokens on average: medians."
    HEADER = ("what", "measured", "spread", "limit", "")

    what: str
    unit: str
    values: tuple[float, ...]
    limit: float | None = None
    """At most; None: no bar."""

    @property
    def passed(self) -> bool:
        return self.limit is None or median(self.values) < self.limit

    def row(self) -> list[str]:
        form = ",.0f" if median(self.values) >= 100 else ".3g"
        limit = "" if self.limit is None else f"{self.limit:g} {self.unit}"
        middle = f"{median(self.values):{form}} {self.unit}"
        return [self.what, middle, spread(self.values, form), limit, verdict(self.passed)]

    def data(self) -> dict[str, Any]:
        return {**attrs.asdict(self), "passed": self.passed}


def measure(*, rounds: int) -> list[Reading]:
    """Write the sources, and have processes read of them as the ranks of a host do."""
    with tempfile.TemporaryDirectory(prefix="nanotrain-data-") as folder:
        print(f"data: writing {DOCUMENTS:,} documents to {folder}", file=sys.stderr, flush=True)
        paths = [write_source(Path(folder) / f"source{n}", n) for n in range(SOURCES)]
        turns = [turn(paths) for _ in range(min(rounds, 5))]
    first = [ranks[0] for ranks in turns]
    return [
        Reading("until the first batch, from nothing open", "s", each(first, "seconds"), 2.0),
        Reading(
            f"memory of {RANKS} ranks beside mapped files, for opening and 200 batches",
            "MB",
            tuple(sum(rank["own_mb"] for rank in ranks) for ranks in turns),
            200.0,
        ),
        Reading("read, each piece compared with its hash", "tokens/s", each(first, "cold")),
        Reading("read again", "tokens/s", each(first, "warm")),
        Reading(f"share of a step that waits, at {RATE:,} tokens/s", "%", each(first, "waits"), 1.0),
    ]


def each(turns: Sequence[dict[str, float]], name: str) -> tuple[float, ...]:
    """Return one number of all turns."""
    return tuple(turn[name] for turn in turns)


def write_source(folder: Path, number: int) -> Path:
    """Write a prepared folder of random tokens, in documents of random lengths."""
    folder.mkdir()
    random = np.random.default_rng(number)
    shards = []
    for shard in range(SHARDS):
        lengths = random.geometric(1 / MEAN, DOCUMENTS // SOURCES // SHARDS)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        tokens = random.integers(0, 50257, int(offsets[-1]), np.uint16)
        (folder / f"{shard_name(shard)}.tokens").write_bytes(tokens.data)
        shards.append(seal_shard(folder, shard_name(shard), "uint16", offsets))
    Manifest(
        tokenizer=TokenizerInfo(kind="unknown", name="random", sha256="0" * 64),
        vocab_size=50257,
        dtype="uint16",
        end_of_document=None,
        made_of=str(number),
        shards=tuple(shards),
    ).write(folder)
    return folder


def turn(paths: Sequence[Path]) -> list[dict[str, float]]:
    """Have ranks of one host read at the same time, each in a new process, and return what each measured."""
    words = [sys.executable, "-m", "benchmarks.data", *map(str, paths)]
    root = Path(__file__).parents[1]
    ranks = [
        subprocess.Popen([*words, str(rank)], cwd=root, stdout=subprocess.PIPE, text=True)
        for rank in range(RANKS)
    ]
    told = [rank.communicate()[0] for rank in ranks]
    return [json.loads(text) for text in told]


def read(paths: Sequence[str], rank: int) -> dict[str, float]:
    """Open the blend and read of it: rank 0 alone tells times, the others are there to share memory."""
    import time

    from nanotrain_data.config import ShardsConfig
    from nanotrain_data.shards import Shards

    from nanotrain_core.api.torch import Shard

    shard = Shard(rank, RANKS)
    before = own_mb()
    began = time.perf_counter()
    data = Shards(ShardsConfig(paths=tuple(paths), weights=WEIGHTS, read_ahead=0))
    data.open(length=1024, seed=1)
    data.train_batch(32, shard)
    seconds = time.perf_counter() - began
    for _ in range(200):
        data.train_batch(32, shard)
    found = {"seconds": seconds, "own_mb": own_mb() - before}
    meta = data.meta()
    for name in ("cold", "warm"):  # the same batches again: their pieces are known
        data.load_meta(meta)
        began = time.perf_counter()
        for _ in range(50):
            data.train_batch(32, shard)
        found[name] = 50 * len(shard.rows(32)) * 1024 / (time.perf_counter() - began)
    ahead = Shards(ShardsConfig(paths=tuple(paths), weights=WEIGHTS))
    ahead.open(length=1024, seed=2)
    step, waited = 32 * 1024 / RATE, 0.0
    for number in range(20):
        began = time.perf_counter()
        ahead.train_batch(32, Shard())
        waited += (time.perf_counter() - began) * (number > 0)
        time.sleep(step)
    return {**found, "waits": 100 * waited / (19 * step)}


def own_mb() -> float:
    """Return the memory of this process beside mapped files, in 10^6 bytes.

    Pages of files that no other process has mapped at the moment count as private, too, but the kernel drops
    them when memory is short, and has them once however many ranks read them.
    """
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty")) * 1024 / 1e6


if __name__ == "__main__":
    print(json.dumps(read(sys.argv[1:-1], int(sys.argv[-1]))))
