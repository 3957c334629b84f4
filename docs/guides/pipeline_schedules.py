"""The numbers of docs/guides/pipeline_schedules.md.

python docs/guides/pipeline_schedules.py
"""

from drawing import guide, rect, svg, text

from nanotrain_core.api import load_plugins, simulate

RANKS, MICROBATCHES = 4, 8
NAMES = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1")
KINDS = {"F": "c0", "B": "c1", "W": "c2"}


def schedule(name):
    component = load_plugins().get("schedule", name)
    return component.build(component.config())


def timeline(name, microbatches=MICROBATCHES):
    """Return when each action of each rank begins and ends: a forward takes 1, a whole backward 2."""
    return simulate(schedule(name).actions(RANKS, microbatches))


def held(name, rank, microbatches):
    """Return how many microbatches' worth of a rank's layers it holds activations of at its peak.

    The stages of a rank are of equal size here, so a microbatch in one of its two stages counts as a half.
    """
    found = timeline(name, microbatches)
    return found.peak(rank) / len(found.stages(rank))


def main():
    first = [str(action) for action in schedule("1f1b").actions(RANKS, MICROBATCHES)[0]]
    last = [str(action) for action in schedule("1f1b").actions(RANKS, MICROBATCHES)[-1]]
    print("1f1b, rank 0:", " ".join(first[:10]))
    print("1f1b, rank 3:", " ".join(last[:10]))
    print(
        f"\nidle share, {RANKS} ranks   "
        + "".join(f"m = {m:<7}" for m in (4, 8, 32))
        + f"held, m = 32: rank 0   rank {RANKS - 1}"
    )
    for name in NAMES:
        idle = "".join(f"{timeline(name, m).bubble():<11.1%}" for m in (4, 8, 32))
        print(f"{name:23}{idle}{held(name, 0, 32):<22g}{held(name, RANKS - 1, 32):g}")
    print(f"{'(p - 1) / (m + p - 1)':23}" + "".join(f"{3 / (m + 3):<11.1%}" for m in (4, 8, 32)).rstrip())


def pictures():
    parts, y = [], 0
    scale = 740 / max(timeline(name).makespan for name in NAMES)
    for name in NAMES:
        found = timeline(name)
        parts.append(text(0, y + 14, f"{name}: idle {found.bubble():.1%}"))
        for rank, row in enumerate(found.rows):
            top = y + 22 + rank * 20
            parts.append(text(0, top + 13, f"rank {rank}"))
            for slot in row:
                wide = (slot.end - slot.start) * scale
                left = 50 + slot.start * scale
                parts.append(rect(left, top, wide - 1, 18, KINDS[slot.action.kind]))
                if wide > 12:
                    parts.append(text(left + wide / 2, top + 13, str(slot.action.microbatch), "middle", "on"))
        y += 22 + RANKS * 20 + 14
    parts.append(
        text(
            50,
            y + 6,
            "blue: forward; orange: backward; green: weight gradients; the number is the microbatch",
        )
    )
    return {
        "pipeline_schedules": svg(800, y + 16, parts, "Four schedules of eight microbatches on four ranks")
    }


if __name__ == "__main__":
    guide(main, pictures)
