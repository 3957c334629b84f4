"""The numbers of docs/guides/zero_in_bytes.md.

python docs/guides/zero_in_bytes.py
"""

import contextlib
import io
import json

from drawing import guide, rect, svg, text

from nanotrain_core.cli import main as nanotrain

#: ``laptop`` on 4 ranks, with a model of 49 million parameters and four microbatches on each rank.
WIDER = ["model.layers=8", "model.width=768", "model.heads=12", "model.ffn=2048", "batch.microbatch=1"]
RUNS = {
    "adamw with ddp": ['parallel=[{use="ddp"}]'],
    "ZeRO-1": ["parallel=[]", 'optimizer={use="zero12", stage=1}'],
    "ZeRO-2": ["parallel=[]", 'optimizer={use="zero12", stage=2}'],
}
HELD = ("weights", "masters", "optimizer", "gradients")


def per_parameter(stage, ranks):
    """Return bytes a parameter of bfloat16 weights, gradients, and float32 state: masters and both moments.

    Source: ZeRO, arXiv 1910.02054, figure 1, whose gradients are of two bytes.
    """
    return {
        "weights": 2 / (ranks if stage >= 3 else 1),
        "gradients": 2 / (ranks if stage >= 2 else 1),
        "state": 12 / (ranks if stage >= 1 else 1),
    }


def planned(precision, overrides):
    """Return bytes a parameter that a rank holds at the peak of a plan, and how many parameters there are."""
    chosen = [*WIDER, f'precision={{use="{precision}"}}', *overrides]
    words = [word for each in chosen for word in ("--set", each)]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        nanotrain(["plan", "laptop", *words, "--json"])
    told = json.loads(out.getvalue())
    parameters, held = told["parameters"]["total"], told["memory"]["ranks"][0]["at_peak"]
    return {name: held[name] / parameters for name in HELD}, parameters


def main():
    print("7.5 billion parameters, 64 ranks")
    for stage in range(4):
        parts = per_parameter(stage, 64)
        each = ", ".join(f"{name} {size:.2f}" for name, size in parts.items())
        print(f"  ZeRO-{stage}: {each}: {7.5 * sum(parts.values()):.1f} GB")
    for precision in ("fp32", "bf16"):
        print(f"\nplanned in {precision}, 4 ranks: bytes a parameter at the peak")
        print(f"{'':16}" + "".join(f"{name:>11}" for name in HELD))
        for name, overrides in RUNS.items():
            found, parameters = planned(precision, overrides)
            print(f"{name:16}" + "".join(f"{found[each]:>11.2f}" for each in HELD))
    print(f"of {parameters:,} parameters")


def pictures():
    parts, top = [], 26
    colors = {"weights": "c0", "gradients": "c1", "state": "c2"}
    parts.append(
        text(
            90, 14, "bytes a parameter on each of 8 ranks: weights (blue), gradients (orange), state (green)"
        )
    )
    for stage in range(4):
        left = 90.0
        parts.append(text(0, top + 17, f"ZeRO-{stage}"))
        for name, size in per_parameter(stage, 8).items():
            parts.append(rect(left, top, size * 36 - 1, 24, colors[name]))
            left += size * 36
        parts.append(text(left + 6, top + 17, f"{sum(per_parameter(stage, 8).values()):.2f}"))
        top += 32
    return {"zero_in_bytes": svg(720, top, parts, "What each stage of ZeRO leaves on a rank")}


if __name__ == "__main__":
    guide(main, pictures)
