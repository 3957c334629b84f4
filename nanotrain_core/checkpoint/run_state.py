"""Validates the JSON state in a run's checkpoint as untrusted input. Torch-free.

A hash only proves that the bytes are those that were written. A negative position or an unbounded range of
skipped data would silently train on other data, or on none.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

#: The error of a resume from anything else.
NO_RUN_STATE = "the checkpoint does not contain a valid run state"
#: Keys that the engine always saves.
OF_A_RUN = ("recipe", "model", "optimizer", "loss_scale", "data")
#: Keys of the data that it always saves, in addition to those of the component's ``meta``.
COUNTED = ("taken", "tokens", "skipped")
#: Keys of ``SequenceData.meta``. State with most of them is taken to be of that class, and must have all.
OF_SEQUENCES = ("position", "length", "train", "fingerprint")
#: Largest accepted step or position: 2^53 sequences are more than all existing text.
LARGEST = 2**53
#: Maximum sequences, or batches of a script, that a run may have skipped: each costs the time to read it.
MOST_SKIPPED = 2**31
#: Maximum size in bytes of a JSON file: the index of a model of a million tensors takes a tenth of it.
LARGEST_JSON = 2**28


def load_json(text: str | bytes) -> Any:
    """Parse a JSON text strictly, and return its value.

    Raises:
        ValueError: it is invalid, a table has a duplicate key, which readers interpret differently, or it is
            nested too deeply.
    """
    try:
        return json.loads(text, object_pairs_hook=_each_once)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: Path) -> bytes:
    """Return the bytes of a JSON file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is missing, not a regular file, or larger than :data:`LARGEST_JSON` bytes.
    """
    if not path.is_file():
        raise ValueError("it is missing, or is no plain file")
    if (size := path.stat().st_size) > LARGEST_JSON:
        raise ValueError(f"it has {size} bytes; at most {LARGEST_JSON} are read")
    return path.read_bytes()


def _each_once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice!r} is duplicated")
    return table


def state_problems(meta: Any, step: int | None = None) -> list[str]:
    """Return what in ``TrainState.meta`` cannot be a run's state: empty if it is valid.

    Args:
        meta: the parsed state.
        step: the checkpoint's step in its name or manifest, if it has one.
    """
    if not isinstance(meta, Mapping):
        return [f"its state is {_short(meta)}, expected a table"]
    problems = [*_step(meta, step), *_ranks(meta)]
    if is_run_state(meta):
        problems += [f"its state lacks '{key}'" for key in ("step", *OF_A_RUN) if key not in meta]
        problems += _kinds(meta)
        problems += _rollback(meta.get("rollback"), meta.get("step"))
        problems += _scale(meta.get("loss_scale"))
        problems += _data(meta.get("data"))
        problems = problems or list(_taken(meta["data"], meta["step"], meta["recipe"]))
    return problems


def is_run_state(meta: Mapping[str, Any]) -> bool:
    """Return whether the engine wrote ``meta``: whether it has most of :data:`OF_A_RUN`; some may be missing.

    State of other writers, such as in files with weights alone, is not checked.
    """
    return sum(key in meta for key in OF_A_RUN) > len(OF_A_RUN) / 2


def _step(meta: Mapping[str, Any], step: int | None) -> Iterator[str]:
    found, evaluated = meta.get("step", step), meta.get("evaluated")
    if found is not None and not _is_count(found):
        yield f"step of its state is {_short(found)}, expected a number of 0 or more"
    elif step is not None and found != step:
        yield f"its state is that of step {found}, not {step}"
    elif not _is_count(skipped := meta.get("skipped_in_a_row", 0)) or skipped > (found or 0):
        yield f"skipped_in_a_row of its state is {_short(skipped)}, expected a number up to its step, {found}"
    elif evaluated is not None and (not _is_count(evaluated) or evaluated > (found or 0)):
        yield f"evaluated of its state is {_short(evaluated)}, expected a step up to {found}"


def newest_evaluated(steps: Sequence[int], meta: Mapping[str, Any]) -> list[int]:
    """Return the newest of ``steps`` up to the last evaluation with a finite loss, and up to the last step
    that no monitor may still roll back, if there are any.

    Retention keeps these checkpoints, since later weights may be finite and still useless.
    """
    limits = (meta.get("evaluated"), meta.get("trusted"))
    newest = (
        max((step for step in steps if step <= last), default=None) for last in limits if last is not None
    )
    return sorted({step for step in newest if step is not None})


def _ranks(meta: Mapping[str, Any]) -> Iterator[str]:
    """Yield problems with the world size and the layout, which some formats store with the state."""
    if "world_size" in meta and not (_is_count(meta["world_size"]) and meta["world_size"]):
        yield f"world_size is {_short(meta['world_size'])}, expected a number of 1 or more"
    views = meta.get("degrees", {})
    if not isinstance(views, Mapping) or not all(map(_is_view, views.values())):
        yield f"degrees is {_short(views)}, expected a table of tables of numbers"


def _is_view(view: Any) -> bool:
    return isinstance(view, Mapping) and all(map(_is_count, view.values()))


def _kinds(meta: Mapping[str, Any]) -> Iterator[str]:
    kinds = {"evaluation_pending": bool, "save_pending": bool, "recipe": str}
    kinds |= dict.fromkeys(("model", "optimizer", "loss_scale", "data", "monitors"), Mapping)
    for key, kind in kinds.items():
        if key in meta and not isinstance(meta[key], kind):
            wanted = {bool: "true or false", str: "a text"}.get(kind, "a table")
            yield f"{key} of its state is {_short(meta[key])}, expected {wanted}"


def _rollback(found: Any, step: Any) -> Iterator[str]:
    """Yield why ``found`` cannot be :meth:`StopRequest.meta` of a run at ``step``."""
    if found is None:
        return
    known = found if isinstance(found, Mapping) else {}
    onset, latest = known.get("onset", 0), step if _is_count(step) else LARGEST
    if not _is_count(onset) or not 0 < onset <= latest:
        yield f"rollback of its state is {_short(found)}, expected an onset from 1 to its step, {step}"
    elif not isinstance(known.get("reason"), str) or not isinstance(known.get("agreed"), bool):
        yield f"rollback of its state is {_short(found)}, expected a reason and whether it is agreed"


def _scale(found: Any) -> Iterator[str]:
    if not isinstance(found, Mapping):
        return
    value, steps = found.get("value", 1.0), found.get("good_steps", 0)
    if type(value) not in (int, float) or not 0 < value < float("inf"):
        yield f"loss_scale.value is {_short(value)}, expected a finite number above 0"
    if not _is_count(steps):
        yield f"loss_scale.good_steps is {_short(steps)}, expected a number of 0 or more"


def _data(found: Any) -> Iterator[str]:
    if not isinstance(found, Mapping):
        return
    known = _is_of_sequences(found)
    wanted = (*COUNTED, *OF_SEQUENCES) if known else COUNTED
    yield from (f"data of its state lacks '{key}'" for key in wanted if key not in found)
    # Others are the component's own: a position may be a table of several sources' positions.
    own = ("position", "into", "length", "train")
    numbers = [key for key in own if known or not isinstance(found.get(key, 0), Mapping | list | str)]
    for key in ("taken", "tokens", "tokens_before", *numbers):
        if key in found and not _is_count(found[key]):
            yield f"data.{key} is {_short(found[key])}, expected a number from 0 to 2^53"
    if "fingerprint" in found and not isinstance(found["fingerprint"], str if known else str | int):
        yield f"data.fingerprint is {_short(found['fingerprint'])}, expected a text"
    for key in ("skipped", "batch_sizes"):
        pairs = found.get(key, [])
        if not isinstance(pairs, list) or not all(map(_is_pair, pairs)):
            yield f"data.{key} is {_short(pairs)}, expected a list of pairs of numbers of 0 or more"
        elif key == "skipped":
            yield from _ranges(pairs)
        elif key in found and (not pairs or any(size < 1 for _, size in pairs)):
            yield f"data.batch_sizes is {_short(pairs)}, expected sizes of 1 or more"


def _is_of_sequences(data: Mapping[str, Any]) -> bool:
    return sum(key in data for key in OF_SEQUENCES) > len(OF_SEQUENCES) / 2


def _ranges(pairs: Sequence[Sequence[int]]) -> Iterator[str]:
    for first, end in pairs:
        if end < first:
            yield f"data.skipped has the range {first} to {end}, which ends before it begins"
    total = sum(end - first for first, end in pairs)
    if total > MOST_SKIPPED:
        yield f"data.skipped leaves out {total} sequences; expected at most 2^31"


def _taken(data: Mapping[str, Any], step: int, recipe: str) -> Iterator[str]:
    """Check the number of consumed sequences against the number of steps: each step consumed one batch.

    Also check it against the position of :class:`~nanotrain_core.data.order.SequenceData`. The two are equal
    if all sequences had the same length; after a change of length, the converted position differs.
    A script's loader is not checked: its batches may have any size, and their sizes are not saved.
    """
    if "batch_sizes" not in data:
        return
    begins = [begin for begin, _ in data["batch_sizes"]]
    batches = trained = 0
    for (begin, size), end in zip(data["batch_sizes"], [*begins[1:], data["taken"]], strict=True):
        there, rest = divmod(end - begin, size)
        if there < 0 or rest:
            yield f"data.batch_sizes has {size} sequences a batch from {begin} to {end}"
            return
        there -= _left_out(data["skipped"], begin, size, there)
        batches, trained = batches + there, trained + there * size
    if batches != step:
        yield f"data.taken is {data['taken']}, which is {batches} steps, but {step} were made"
    one_length = "[[phase]]" not in recipe and data["tokens"] == trained * data.get("length", 0)
    if one_length and _is_of_sequences(data) and data["position"] != data["taken"]:
        yield f"data.position is {data['position']}, but data.taken is {data['taken']}; expected them equal"


def _left_out(skipped: Sequence[Sequence[int]], begin: int, size: int, batches: int) -> int:
    """Return how many of the given batches from ``begin`` on overlap a skipped range."""
    spans = (
        (max(0, (first - begin) // size), min(batches, -(-(end - begin) // size))) for first, end in skipped
    )
    count = after = 0
    for first, end in sorted(spans):
        count += max(0, end - max(first, after))
        after = max(after, end)
    return count


def streams_problem(streams: Mapping[str, Any]) -> str:
    """Return why random-number streams cannot be restored: empty if they can.

    Args:
        streams: NumPy arrays, named as in ``random_state.capture``. Streams of devices are not checked.
    """
    for name, count in (("python", 625), ("numpy", 625), ("halves", 4)):
        if name in streams and streams[name].shape != (count,):
            return f"the random-number stream '{name}' has shape {streams[name].shape}, expected {(count,)}"
    for name in ("python", "numpy"):
        if name in streams and (streams[name].dtype != "int64" or (streams[name] >> 32).any()):
            return f"the random-number stream '{name}' is not int64, or has values that do not fit 32 bits"
    return _torch_problem(streams["torch"]) if "torch" in streams else ""


def _torch_problem(state: Any) -> str:
    """Check what torch accepts for a CPU generator: seeded, and at one of 624 words.

    Source: https://github.com/pytorch/pytorch, ``aten/src/ATen/CPUGeneratorImpl.cpp``, ``set_state``.
    """
    if state.shape != (5056,) or state.dtype != "uint8":
        return f"the random-number stream 'torch' is {state.dtype} {state.shape}, expected uint8 (5056,)"
    left, seeded = state[8:16].view("<i4").tolist()
    at = int(state[16:24].view("<u8")[0])
    fine = seeded == 1 and 0 < left <= 624 and at <= 624
    return "" if fine else "the random-number stream 'torch' is unseeded, or at no valid one of its 624 words"


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= LARGEST


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_count, value))


def _short(value: Any) -> str:
    """Return a value in human-readable form, only the beginning of a long one."""
    text = repr(value) if not isinstance(value, list | Mapping) else json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}... ({len(text):,} characters)"
