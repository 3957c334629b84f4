"""The numbers of docs/guides/reading_plan_explain_report.md.

python docs/guides/reading_plan_explain_report.py
"""

import contextlib
import io
import json
import sys
import tempfile
from math import log
from pathlib import Path

from drawing import guide, rect, svg, text

from nanotrain_core.api import read_metrics
from nanotrain_core.cli import main as nanotrain

sys.path.insert(0, str(Path(__file__).parents[1] / "examples/learn"))

from common import engine_of

LAYERS, MICROBATCHES = 4, 2  # laptop: 16 sequences, microbatches of 4, two data ranks
TOKENS, WIDTH, FLOAT32 = 4 * 128, 192, 4
TP_DP = ["--set", "topology.tp=2", "--set", 'parallel=[{use="tp", sequence_parallel=false}, {use="ddp"}]']


def predicted():
    """Return (when, collective, axis) -> (times, bytes) of a step of tp 2 x dp 2, by the page's rules."""
    one = TOKENS * WIDTH * FLOAT32
    behind = MICROBATCHES * (2 * LAYERS + 1)  # each attention, each feed-forward, and the embedding
    before = MICROBATCHES * (2 * LAYERS + 1)  # their mirror images, and the head's
    return {
        ("in forward", "all-reduce", "tp"): (behind, behind * one),
        # of each token the maximum, the sum of exponentials and the target's logit, from both ranks
        ("in forward", "all-gather", "tp"): (MICROBATCHES, MICROBATCHES * 2 * 3 * TOKENS * FLOAT32),
        ("in backward", "all-reduce", "tp"): (before, before * one),
        ("in backward", "all-reduce", "dp"): (1, weights_on_a_rank() * FLOAT32),
    }


def weights_on_a_rank():
    """Return how many weights a rank of tp 2 has: half of each matrix, and all of each norm."""
    matrices = 2 * 256 * WIDTH + LAYERS * (2 * WIDTH * WIDTH + 2 * 64 * WIDTH + 3 * 512 * WIDTH)
    return matrices // 2 + (2 * LAYERS + 1) * WIDTH


def asked(words):
    """Return what a command prints as JSON."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        nanotrain([*words, "--json"])
    return json.loads(out.getvalue())


def explained():
    """Return the same of `nanotrain explain`: (when, collective, axis) -> [times, bytes]."""
    told = asked(["explain", "laptop", *TP_DP])
    (section,) = (each for each in told["sections"] if each["title"] == "Communication")
    found = {}
    for when, what, axis, _, times, size, _ in section["tables"][0]["rows"]:
        sums = found.setdefault((when, what, axis), [0, 0])
        sums[0] += times
        sums[1] += size
    return found


def planned():
    """Return a plan's bytes of a rank at the peak, and its answer."""
    told = asked(["plan", "laptop", *TP_DP])
    return told["memory"]["ranks"][0]["at_peak"], told["parameters"]


def watched(folder):
    """Train 40 steps of ``lesson.toml``, write its report, and return the losses and the corpus's entropy."""
    lines = ["run.steps=40", 'monitor=[{use="jsonl"}]']
    engine, _ = engine_of(lines, Path(folder))
    engine.fit()
    with contextlib.redirect_stdout(io.StringIO()):
        nanotrain(["report", str(folder)])
    return dict(read_metrics(Path(folder), ["loss"]).curves["loss"]), engine.run.feed.data.entropy


def main():
    wanted, found = predicted(), explained()
    print(f"an activation: {TOKENS} tokens of {WIDTH} numbers, {TOKENS * WIDTH * FLOAT32:,} B")
    for (when, what, axis), (times, size) in wanted.items():
        there = found.pop((when, what, axis))
        same = "as explain" if there == [times, size] else f"explain: {there[0]}, {there[1]:,} B"
        print(f"{when}, {what} along {axis}: {times}, {size:,} B; {same}")
    for (when, what, axis), (times, size) in found.items():
        print(f"and {when}, {what} along {axis}: {times}, {size:,} B")
    held, parameters = planned()
    print(f"\na rank of {parameters['per_rank']['max']:,} of {parameters['total']:,} parameters")
    for name in ("weights", "optimizer", "gradients", "activations"):
        print(f"{name:13}{held[name]:>11,} B")
    with tempfile.TemporaryDirectory() as folder:
        losses, entropy = watched(folder)
        written = (Path(folder) / "report.html").is_file()
    print(f"\nlosses at steps 1, 10 and 40: {losses[1]:.1f} {losses[10]:.1f} {losses[40]:.1f}")
    print(f"knowing nothing: ln 64 = {log(64):.2f}; all there is to know: {entropy:.2f}")
    print("a report was written:", written)


def pictures():
    parts = []
    for rank in range(4):
        dp, tp = divmod(rank, 2)
        x, y = 160 + tp * 200, 20 + dp * 90
        parts.append(rect(x, y, 120, 56, f"c{tp}"))
        parts.append(text(x + 60, y + 24, f"rank {rank}", "middle", "on"))
        parts.append(text(x + 60, y + 42, f"half {tp}, batch {dp}", "middle", "on"))
    parts += [
        text(282, 50, "tp: activations"),
        text(282, 140, "tp: activations"),
        text(20, 104, "dp: gradients"),
    ]
    return {"reading_plan_explain_report": svg(520, 180, parts, "Four ranks: tp 2 x dp 2")}


if __name__ == "__main__":
    guide(main, pictures)
