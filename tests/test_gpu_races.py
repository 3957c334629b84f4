"""The races of the benchmark of a GPU: their contenders, rounds, ratios and bars, where there is none."""

from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest
import torch

from benchmarks.gpu import bars, command, races
from benchmarks.gpu.plain import Loop, model_of
from benchmarks.gpu.race import Measured, Runner
from benchmarks.gpu.records import read
from benchmarks.gpu.settings import Settings
from benchmarks.gpu.side import Ready, SideFailed, Turn
from nanotrain_core.engine import RuntimeEngine


def test_gpt2_in_plain_pytorch_follows_the_losses_of_ours_from_the_same_weights():
    settings = Settings(smoke=True, records=Path("unused"))
    mine = races.gpt2(settings).ours
    recipe = attrs.evolve(
        mine, overrides=(*mine.overrides, 'precision.use="fp32"', "run.compile=false")
    ).load()
    engine = RuntimeEngine.from_recipe(recipe)
    peer = model_of(recipe)
    peer.model.load_state_dict(as_plain(engine.run.stages[0].state_dict()))
    loop = Loop(peer, recipe, "cpu")
    engine.fit(steps=3)
    with torch.autocast("cpu", enabled=False):
        loop.loss = without_autocast(loop.loss)
        loop.advance(3)
    expected = as_plain(engine.run.stages[0].state_dict())
    for name, weight in peer.model.state_dict().items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=3e-5)


def without_autocast(loss):
    def call(*batch):
        with torch.autocast("cpu", enabled=False):
            return loss(*batch)

    return call


def as_plain(state):
    """Return our GPT-2's weights under the peer's names: q, k and v in one, the embedding twice."""
    found = {"head.weight": state["embed.weight"]}
    for name, weight in state.items():
        if ".attn." not in name:
            found[name.replace(".ffn.", ".")] = weight
        elif ".attn.o." in name:
            found[name.replace(".attn.o.", ".out.")] = weight
        elif ".attn.q." in name:
            three = [state[name.replace(".q.", f".{each}.")] for each in "qkv"]
            found[name.replace(".attn.q.", ".qkv.")] = torch.cat(three)
    return {name: weight.clone() for name, weight in found.items()}


def test_every_contender_of_every_race_has_a_recipe_of_one_rank():
    for smoke in (True, False):
        settings = Settings(smoke=smoke, records=Path("unused"))
        for make in (races.llama, races.wide, races.gpt2, races.deepseek, races.host):
            race = make(settings)
            for each in (race.ours, *race.others):
                if not (smoke and each.on_gpu_only):
                    assert each.load().run.ranks == 1
                assert {*each.bars} <= {*bars.BARS}


def test_every_bar_is_measured_by_a_part_before_any_side_without_one(monkeypatch):
    raced = {}
    settings = Settings(records=Path("unused"), nanogpt=Path("clone"))
    for part in command.PARTS:
        if part.function.startswith("benchmarks.gpu.races:"):
            monkeypatch.setattr(
                races, "run", lambda race, settings, name=part.name: raced.update({name: race})
            )
            part.call(settings)
    names = [part.name for part in command.PARTS]
    for key, bar in bars.BARS.items():
        race = raced.get(bar.part)
        assert race is None or key in {each for side in (race.ours, *race.others) for each in side.bars}
        assert names.index(bar.part) < names.index("llama-others")
    for name in ("llama", "gpt2", "wide", "deepseek"):
        whole, first, rest = getattr(races, name)(settings), raced[name], raced[f"{name}-others"]
        assert {*whole.others} == {*first.others, *rest.others}
        assert all(side.bars for side in first.others)
        assert not any(side.bars for side in (rest.ours, *rest.others))


def test_as_many_sides_live_at_once_as_the_device_holds():
    settings = Settings(records=Path("unused"))
    found = {
        race.model: (race.together(80), race.together(141), race.at_once(80, 0), race.at_once(141, 1))
        for race in (races.llama(settings), races.wide(settings), races.deepseek(settings))
    }
    assert found == {
        "Llama 0.96B": (2, 6, 1, 2),
        "Llama 1.5B wide": (2, 4, 1, 2),
        "DeepSeek 2.3B slice": (1, 2, 1, 1),
    }


def test_ratios_are_of_each_round_and_bars_of_what_they_are_named(tmp_path):
    """Ours 100 tokens/s and 90; FP8 twice as fast, a peer of twice the memory half as fast."""
    settings = Settings(records=tmp_path / "records", device_name="NVIDIA H100 80GB HBM3")
    runner = Runner(races.wide(settings), settings)
    peer, narrow = runner.race.others[:2]
    seconds = {runner.race.ours.name: [1.0, 1.1], peer.name: [2.0, 2.2], narrow.name: [0.5, 0.55]}

    def side(contender):
        left, memory = iter(seconds[contender.name]), 20 if contender is peer else 10
        turn = lambda steps, limit: Turn(next(left), memory, memory)  # noqa: E731
        alive = SimpleNamespace(is_alive=lambda: True)
        ready = Ready(100, 1000, 989e12 / 200, 1.0, 1.0)
        measured = Measured(attrs.evolve(contender, memory_bar="memory" if contender is peer else ""), ready)
        return SimpleNamespace(turn=turn, process=alive, close=lambda: None), measured

    runner.rounds = 2
    ours, mine = side(runner.race.ours)
    runner._group(ours, mine, [side(peer), side(narrow)], first=True)
    records = read(settings.records)
    assert {each["bar"]: each["value"] for each in records if each["kind"] == "bar"} == pytest.approx(
        {"wide": 2.0, "memory": 0.5, "fp8-wide": 2.0}
    )
    rows = [each["cells"] for each in records if each["kind"] == "row"]
    assert [row["ours / it"] for row in rows] == ["", "2.00", "0.50"]
    assert rows[0]["MFU"] == "47.6%"  # of the median of 1.05 s


def test_a_side_that_compiles_for_too_long_does_not_cost_the_others_their_round(tmp_path, monkeypatch):
    now, names = [100.0], []
    monkeypatch.setattr("benchmarks.gpu.settings.time.monotonic", lambda: now[0])

    class Side:
        def __init__(self, contender, device, start):
            self.contender = contender
            self.process = SimpleNamespace(is_alive=lambda: True)

        def ready(self, seconds):
            now[0] += min(seconds, 1e6 if self.contender.compiled == "whole" else 20.0)
            if self.contender.compiled == "whole":
                raise SideFailed("its first steps took too long")
            return Ready(100, 1000, 0.0, 1.0, 1.0)

        def turn(self, steps, seconds):
            if seconds < 2.0:
                raise SideFailed("no time")
            now[0] += 2.0
            return Turn(1.0, 1, 1)

        def close(self):
            names.append(self.contender.name)

    monkeypatch.setattr("benchmarks.gpu.race.Side", Side)
    settings = Settings(records=tmp_path / "records", memory=150.0, deadline=300.0)
    Runner(races.llama(settings), settings).run()
    records = read(settings.records)
    (problem,) = (each for each in records if each["kind"] == "problem")
    assert problem["name"] == "Llama 0.96B: PyTorch, compiled whole"
    assert problem["bars"] == ["llama", "memory"]
    sides = [each["cells"]["side"] for each in records if each["kind"] == "row"]
    assert sides[0] == "ours, bf16"
    assert all(each["cells"]["tokens/s"] == "100" for each in records if each["kind"] == "row")
    assert now[0] <= settings.deadline


def test_ours_is_profiled_after_it_has_raced_all_others(tmp_path, monkeypatch):
    done = []

    class Side:
        def __init__(self, contender, device, start):
            self.contender, self.process = contender, SimpleNamespace(is_alive=lambda: True)

        def ready(self, seconds):
            return Ready(100, 1000, 0.0, 1.0, 1.0)

        def turn(self, steps, seconds):
            done.append(f"turn of {self.contender.name}")
            return Turn(1.0, 1, 1)

        def profile(self, name, folder, seconds):
            done.append(f"profile of {self.contender.name}")

        def close(self):
            pass

    monkeypatch.setattr("benchmarks.gpu.race.Side", Side)
    settings = Settings(records=tmp_path / "records", memory=80.0, profile=tmp_path)
    Runner(races.llama(settings), settings).run()  # in groups of two
    assert done[-1] == "profile of ours, bf16"
    assert done.count("profile of ours, bf16") == 1
    assert done.count("turn of PyTorch, eager") == 5
