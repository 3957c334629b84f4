"""Phases that change the length of sequences: the same training wherever it is resumed, on every layout."""

import shutil
from itertools import pairwise

import numpy as np
import pytest
import torch
from recipe_files import SMALL, write
from test_phase_runs import CHANGES, assert_equal, layout

from nanotrain_core.errors import CheckpointError, RecipeError
from nanotrain_core.phases.timeline import PhaseTimeline
from nanotrain_core.recipe import load_recipe, write_resolved
from nanotrain_core.recipe.tree import BatchConfig
from nanotrain_core.registry.discovery import PluginArguments
from nanotrain_core.run.train_state import capture_state
from nanotrain_core.testing import run_ranks
from nanotrain_core.testing.probe import make_engine, train

YARN = {"factor": 4.0, "original_length": 8}
#: Steps of 6 sequences of 8 tokens, then of 4 of 16 with YaRN, then of 2 of 24.
PHASES = [
    {"until_tokens": 140, "batch": {"sequences": 6, "length": 8}},
    {
        "name": "longer",
        "until_tokens": 250,
        "batch": {"sequences": 4, "length": 16, "microbatch": 1},
        "model": {"yarn": YARN, "rope_theta": 20000.0},
        "optimizer": {"lr": 0.005},
    },
    {"batch": {"sequences": 2, "length": 24}},
]
SHAPES = [(6, 8)] * 3 + [(4, 16)] * 2 + [(2, 24)] * 2
ALONE = layout()
WIDE = layout(pp=2, dp=2, ep=2, schedule="1f1b")
FIRST, *MORE = LAYOUTS = {
    "tp2-pp2": layout(tp=2, pp=2, schedule="1f1b", sp=True),
    "pp2-dp2-ep2": WIDE,
    "zb_h1-pp2": layout(pp=2, schedule="zb_h1"),
    "zero2-dp2-ep2": layout(dp=2, ep=2, zero=2),
}
BASE = {
    **CHANGES,
    "run": {"steps": len(SHAPES), "deterministic": True},
    "batch": {"sequences": 6, "microbatch": 2, "length": 8},
    "evaluation": {"every": 2, "sequences": 4},
    "data": {"use": "synthetic", "sequences": 64, "validation_sequences": 8},
}


def run(composition, changes=None, **options):
    changes = {**BASE, "phase": PHASES, **(changes or {})}
    if composition.zero:
        changes["optimizer"] = changes["optimizer"] | {"use": "zero12", "stage": composition.zero}
    return run_ranks(train, composition.ranks, composition.case(), changes, **options)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Return the folder and traces of a run in one process, saved where the first phase ends."""
    folder = tmp_path_factory.mktemp("straight")
    return folder, run(ALONE, folder=folder, save_at=3)


def test_each_step_has_the_sequences_of_its_phase(straight):
    _, (trace,) = straight
    tokens = [0, *(report.tokens for report in trace.reports)]
    assert [after - before for before, after in pairwise(tokens)] == [n * size for n, size in SHAPES]
    assert [report.length for report in trace.reports] == [size for _, size in SHAPES]
    flops = [report.flops_per_token for report in trace.reports]
    assert flops[0] == flops[2] < flops[3] == flops[4] < flops[5]
    assert trace.meta["data"]["position"] == trace.meta["data"]["taken"] == sum(n for n, _ in SHAPES)


def test_it_equals_runs_of_each_phases_own_recipe_resumed(tmp_path, straight):
    """Lengths in ``[batch]``. That others come later, or came before, is part of what the data are."""
    later, resume, done = [{"until_tokens": 10**9}, {"batch": {"length": 24}}], None, 0
    scaled = {"yarn": YARN, "rope_theta": 20000.0}
    before = {**later[0], "model": scaled}
    recipes = [
        (3, {"sequences": 6, "length": 8, "microbatch": 2}, 0.01, later),
        (
            2,
            {"sequences": 4, "length": 16, "microbatch": 1},
            0.005,
            [before, later[1]],
        ),
        (2, {"sequences": 2, "length": 24, "microbatch": 1}, 0.005, [{"model": scaled}]),
    ]
    for steps, batch, lr, phases in recipes:
        done += steps
        changes = {
            "run": {"steps": done, "deterministic": True},
            "batch": batch,
            "phase": phases,
            "optimizer": CHANGES["optimizer"] | {"lr": lr},
        }
        found, resume = run(ALONE, changes, folder=tmp_path, resume=resume), "latest"
    assert_equal(found, straight[1], atol=0.0)


@pytest.mark.full_cases("tp2-pp2")
@pytest.mark.parametrize("name", [FIRST, *(pytest.param(n, marks=pytest.mark.full) for n in MORE)])
def test_every_layout_trains_as_one_process(straight, name):
    found = run(LAYOUTS[name])
    assert_equal(found, straight[1], atol=1e-9)
    wanted = straight[1][0].evaluations
    assert found[0].evaluations == pytest.approx(wanted, abs=1e-9)


@pytest.mark.parametrize(
    ("step", "target", "atol"),
    [
        (3, ALONE, 0.0),
        pytest.param(2, ALONE, 0.0, marks=pytest.mark.full),
        pytest.param(4, ALONE, 0.0, marks=pytest.mark.full),
        pytest.param(5, ALONE, 0.0, marks=pytest.mark.full),
        pytest.param(3, WIDE, 1e-9, marks=pytest.mark.full),
    ],
)
def test_it_goes_on_before_at_and_after_a_border(tmp_path, straight, step, target, atol):
    saved, wanted = straight
    if step == 3:
        shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    else:
        run(ALONE, folder=tmp_path, save_at=step)
    found = run(target, folder=tmp_path, resume=str(step))
    assert_equal(found, wanted, atol=atol)
    later = wanted[0].evaluations[-len(found[0].evaluations) :]
    assert found[0].evaluations == pytest.approx(later, abs=atol)


def test_a_checkpoint_has_the_model_of_its_phase(tmp_path, straight):
    """So what reads its weights computes what was trained."""
    folder = shutil.copytree(straight[0], tmp_path / "run")
    alone = {**BASE, "batch": BASE["batch"] | {"length": 24}}
    other = make_engine(ALONE.case(), alone, folder=folder)  # without YaRN
    other.run.checkpoint.open(folder / "checkpoints", other.run.mesh)
    with pytest.raises(CheckpointError, match="another model: model"):
        other.load(str(len(SHAPES)))
    engine = make_engine(ALONE.case(), {**BASE, "phase": PHASES}, folder=folder)
    engine.run.checkpoint.open(folder / "checkpoints", engine.run.mesh)
    (part,) = engine.run.stages.values()
    for step, yarn in ((len(SHAPES), YARN), (3, None)):
        assert engine.load(str(step))
        engine.run = engine.run.phases.advance(engine.run, again=True)
        assert engine.run.feed.length == (24 if yarn else 8)  # of the last step: an evaluation may be owed
        saved = capture_state(engine).meta["model"]
        assert (saved["yarn"] or {}).items() >= (yarn or {}).items()
        assert (saved["yarn"] is None) == (yarn is None)
        scales = {m.scale for m in part.modules() if hasattr(m, "kv_a")}
        assert len(scales) == 1
        assert (scales.pop() > part.config.qk_size**-0.5 * 1.01) == (yarn is not None)


@pytest.mark.full
def test_compiled_layers_take_the_new_length():
    plain = {
        "run": {"steps": 4, "deterministic": True},
        "batch": {"sequences": 4, "microbatch": 2, "length": 8},
        "evaluation": {"sequences": 0},
        "phase": [
            {"until_tokens": 64},
            {"batch": {"length": 16}, "model": {"rope_scaling": {"type": "yarn", "original_length": 8}}},
        ],
    }
    changes = {
        "run": plain["run"] | {"compile": True, "compile_backend": "aot_eager"},
        "kernels": {"use": "torch"},
    }
    model = layout(model="transformer")
    assert_equal(run(model, plain | changes), run(model, plain), atol=1e-9)


LONGER = """
[[phase]]
until_tokens = 256

[[phase]]
batch.length = 32
model.rope_scaling = { type = "yarn", factor = 2.0, original_length = 16 }
"""


COUNTING = """
import attrs
from nanotrain_core.api import Component, hookimpl


@attrs.define(frozen=True, kw_only=True)
class Config:
    pass


@hookimpl
def nanotrain_register_data(register):
    register(Component(name="counting", config=Config, factory="json:Counting"))
"""


def test_data_of_one_length_are_refused_by_name_before_ranks_start(tmp_path):
    (tmp_path / "counting.py").write_text(COUNTING)
    recipe = SMALL + '[data]\nuse = "counting"\n' + LONGER
    message = (
        r"phase\.1\.batch\.length: data 'counting' of .*counting.* cannot change the length of its "
        r"sequences in a run; expected 16, or data 'chat' or 'shards' or 'streaming' or 'synthetic' or 'text'"
    )
    with pytest.raises(RecipeError, match=message):
        load_recipe(write(tmp_path, recipe), plugins=PluginArguments(local=[str(tmp_path / "counting.py")]))


def test_validation_keeps_its_batch_until_the_length_changes():
    timeline = PhaseTimeline(ALONE.case().recipe(**BASE, phase=PHASES))
    shapes = [timeline.validated_at(number) for number in range(3)]
    assert shapes == [
        BatchConfig(sequences=6, microbatch=2, length=8),
        BatchConfig(sequences=4, microbatch=1, length=16),
        BatchConfig(sequences=2, microbatch=1, length=24),
    ]
    grown = [{"until_tokens": 96, "batch": {"sequences": 12}}, {"batch": {"microbatch": 1}}]
    timeline = PhaseTimeline(ALONE.case().recipe(**BASE, phase=grown))
    assert timeline.validated_at(0) == BatchConfig(sequences=6, microbatch=2, length=8)
    assert timeline.validated_at(1) == BatchConfig(sequences=6, microbatch=1, length=8)


def test_the_largest_phase_has_most_tokens_in_a_microbatch_of_those_that_are_reached():
    recipe = ALONE.case().recipe(**BASE, phase=PHASES)
    assert PhaseTimeline(recipe).largest().batch == BatchConfig(sequences=2, microbatch=1, length=24)
    short = ALONE.case().recipe(**{**BASE, "run": {"steps": 3}}, phase=PHASES)
    assert PhaseTimeline(short).largest().batch == BatchConfig(sequences=6, microbatch=2, length=8)
    assert [(s.sequences, s.length, s.steps) for s in PhaseTimeline(recipe).stretches(7)] == [
        (6, 8, 3),
        (4, 16, 2),
        (2, 24, 2),
    ]


def test_the_resolved_recipe_loads_back(tmp_path):
    found = load_recipe(write(tmp_path, SMALL + LONGER), overrides=["phase.1.model.rope_scaling.factor=4.0"])
    assert found.phase[1].changes["model.rope_scaling"].factor == 4.0
    assert load_recipe(write(tmp_path, write_resolved(found), "again.toml")) == found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "batch.length = { end = 64 }",
            "phase.0.batch.length: expected an integer: it does not move",
        ),
        ("model.rope_scaling = { end = 2.0 }", r"phase.0.model.rope_scaling.end: unknown key 'end'"),
        ("model.rope_scaling = 2.0", "phase.0.model.rope_scaling: expected a table, got the float 2.0"),
        ("model.rope_scaling = { factor = 0.5 }", "phase.0.model.rope_scaling.factor: expected a number"),
        ("batch.length = 65\n[model]\nmax_length = 64", "phase.0.batch.length: 65 exceeds model.max_length"),
    ],
)
def test_what_cannot_be_is_refused_by_its_key(tmp_path, change, message):
    change, _, model = change.partition("\n[model]\n")
    with pytest.raises(RecipeError, match=message):
        load_recipe(write(tmp_path, SMALL + f"{model}\n[[phase]]\n{change}\n"))


def test_text_is_held_out_in_pieces_of_the_longest_sequence(tmp_path):
    """Each number of the text stands in it once: what is held out at one length is trained on at none."""
    from nanotrain_core.batch import Shard
    from nanotrain_core.builtin.configs import TextConfig
    from nanotrain_core.data.text import Text
    from nanotrain_core.data.text_survey import survey

    (tmp_path / "a.txt").write_bytes(bytes(range(1, 251)))
    config = TextConfig(paths=(str(tmp_path),), suffixes=(".txt",), validation_fraction=0.25)

    def opened():
        data = Text(config)
        data.expect_lengths((5, 10, 20))
        data.open(length=5, seed=3)
        return data

    data, trained, held = opened(), {}, {}
    for length in (10, 20, 5):
        data.set_length(length)
        known = survey(config, length, 20)
        assert (known.train, known.validation) == (data.train, data.validation)
        batch = data.train_batch(data.train, Shard())
        trained[length] = {*batch.tokens.flatten().tolist()}
        held[length] = {*data.validation_batch(0, data.validation, Shard()).tokens.flatten().tolist()}
    assert len(trained[20]) == 20 * 9
    assert len(held[20]) == 20 * 3
    for length in (5, 10):
        assert (trained[length], held[length]) == (trained[20], held[20])
    assert not trained[20] & held[20]


def test_a_position_in_text_is_one_of_tokens_and_holds_at_any_length(tmp_path):
    from nanotrain_core.batch import Shard
    from nanotrain_core.builtin.configs import TextConfig
    from nanotrain_core.data.text import Text

    (tmp_path / "a.txt").write_bytes(bytes(range(1, 251)))

    def opened():
        data = Text(TextConfig(paths=(str(tmp_path),), suffixes=(".txt",), validation_fraction=0.25))
        data.expect_lengths((5, 20))
        data.open(length=5, seed=3)
        return data

    data = opened()
    data.train_batch(6, Shard())  # 30 tokens
    meta = data.meta()
    data.set_length(20)
    data.set_length(5)
    data.set_length(20)
    assert (data.meta(), meta["position"], meta["length"]) == (meta, 6, 5)
    first = data.train_batch(2, Shard())
    assert (data.meta()["position"], data.meta()["length"]) == (4, 20)  # the second of 20 tokens, and two
    for length in (5, 20):
        other = opened()
        other.set_length(length)
        other.load_meta(meta)
        other.set_length(20)
        assert torch.equal(other.train_batch(2, Shard()).tokens, first.tokens)


def text_of(folder, *lengths, length=16, piece_length=0):
    from nanotrain_core.builtin.configs import TextConfig
    from nanotrain_core.data.text import Text

    options = {"validation_fraction": 0.2, "piece_length": piece_length}
    data = Text(TextConfig(paths=(str(folder),), suffixes=(".txt",), **options))
    if lengths:
        data.expect_lengths(lengths)
    data.open(length=length, seed=3)
    return data


@pytest.mark.parametrize("piece", [24, 64])
def test_pieces_of_text_are_as_long_as_their_key_says(tmp_path, piece):
    """As if a phase had that length; so a run is resumed by a recipe that has such a phase."""
    from nanotrain_core.batch import Shard

    tokens = bytes(number % 251 for number in range(20 * piece))
    (tmp_path / "a.txt").write_bytes(tokens)  # 20 pieces: its end is a token too
    data, wanted = text_of(tmp_path, piece_length=piece), text_of(tmp_path, 16, piece)
    assert (data.fingerprint, data.train, data.validation) == (
        wanted.fingerprint,
        wanted.train,
        wanted.validation,
    )
    assert (data.train, data.validation) == (16 * (piece // 16), 4 * (piece // 16))
    begins = [each * piece + cut * 16 for each in range(20) if each % 5 != 2 for cut in range(piece // 16)]
    expected = sorted(tokens[begin : begin + 16] for begin in begins)
    batches = data.train_batch(data.train, Shard()), wanted.train_batch(wanted.train, Shard())
    assert torch.equal(*(batch.tokens for batch in batches))
    assert sorted(bytes(row) for row in batches[0].tokens.tolist()) == expected
    last = data.read_sequences(np.array([data.train - 1]), validation=False)[0]
    assert bytes(last.tolist()) == (tokens + b"\0")[begins[-1] :][:17]
    resumed = text_of(tmp_path, 16, piece)
    resumed.load_meta(data.meta())
    for one in (data, resumed):
        one.set_length(piece)
    assert torch.equal(data.train_batch(3, Shard()).tokens, resumed.train_batch(3, Shard()).tokens)
    assert (data.position, resumed.position) == (16 + 3, 16 + 3)  # one epoch of 16 pieces, and three


def test_after_whole_epochs_another_length_begins_an_epoch(tmp_path):
    """Also a length that does not divide the longest, and so leaves out the rest of each piece."""
    from nanotrain_core.batch import Shard

    (tmp_path / "a.txt").write_bytes(bytes(20 * 20))
    data = text_of(tmp_path, 5, 8, 20, length=5)
    assert data.train == 16 * 4
    data.train_batch(64, Shard())
    old = {name: value for name, value in data.meta().items() if name != "train"}
    data.set_length(8)
    data.train_batch(1, Shard())
    assert (data.train, data.position) == (32, 32 + 1)
    data.skip(8)  # 9 of 32
    data.set_length(5)
    data.skip(0)
    assert data.position == 64 + 18
    before = text_of(tmp_path, 5, 8, 20, length=20)
    before.load_meta(old)  # a checkpoint from before positions were shares of an epoch: by its tokens
    before.skip(0)
    assert before.position == 16


def test_a_rollback_warns_if_what_it_skips_is_of_several_lengths():
    from structlog.testing import capture_logs

    from nanotrain_core.run.rollback import warn_of_lengths

    # Steps 1 to 3 of 8 tokens, then 16, 24.
    timeline = PhaseTimeline(ALONE.case().recipe(**BASE, phase=PHASES))
    with capture_logs() as logs:
        warn_of_lengths(timeline, 48, first=1, last=2)  # a checkpoint of step 1, steps 2 and 3
        warn_of_lengths(timeline, 48, first=3, last=4)  # steps 4 and 5
    assert logs == []
    with capture_logs() as logs:
        warn_of_lengths(timeline, 48, first=2, last=5)  # steps 3 to 6
    assert [(entry["log_level"], entry["lengths"]) for entry in logs] == [("warning", [8, 16, 24])]
