"""Phases of a recipe: what is in force after how many tokens, and what is refused."""

import math

import attrs
import pytest
import torch
from recipe_files import SMALL, write

from nanotrain_core.cli.check import phase_lines
from nanotrain_core.errors import RecipeError
from nanotrain_core.optim.lr_schedule import lr_scheduler
from nanotrain_core.phases.tables import PhaseTables
from nanotrain_core.phases.timeline import PhaseTimeline
from nanotrain_core.recipe import load_recipe, resolve_recipe, write_resolved
from nanotrain_core.recipe.model_table import model_table, refuse_other_model
from nanotrain_core.recipe.phase import CHANGEABLE, Ramp
from nanotrain_core.recipe.tree import LRScheduleConfig, OptimizerConfig

#: Of 16 tokens each: SMALL takes 8 in a step.
PHASES = """
[[phase]]
name = "grow"
until_tokens = 1000
batch.sequences = { start = 2, end = 8, by = 2 }

[[phase]]
until_tokens = 2000
optimizer.lr = { end = 1e-4, shape = "cosine" }

[[phase]]
until_tokens = 3000
batch.sequences = 4
"""


def recipe(folder, phases=PHASES, small=SMALL, **options):
    return load_recipe(write(folder, small + phases), **options)


def test_values_stay_until_a_later_phase_changes_them(tmp_path):
    timeline = PhaseTimeline(recipe(tmp_path))
    found = {tokens: timeline.at(tokens) for tokens in (0, 999, 1000, 1999, 2000, 2999, 3000, 9000)}
    assert {tokens: now.number for tokens, now in found.items()} == {
        **{0: 0, 999: 0, 1000: 1, 1999: 1, 2000: 2, 2999: 2},
        **{3000: 2, 9000: 2},  # after the last phase its end stays
    }
    assert [now.values["batch.sequences"] for now in found.values()] == [2, 6, 8, 8, 4, 4, 4, 4]
    rates = [now.values["optimizer.lr"] for now in found.values()]
    assert rates[:3] == [1e-3, 1e-3, 1e-3]
    assert rates[4:] == [1e-4] * 4


def test_a_ramp_is_the_line_or_half_cosine_between_its_ends():
    line, cosine = Ramp(end=1.0), Ramp(end=2.2e-5, shape="cosine")
    assert [line.at(p, 3.0) for p in (0.0, 0.25, 1.0)] == [3.0, 2.5, 1.0]
    for p in (0.0, 0.3, 0.5, 1.0):
        by_hand = 2.2e-5 + (2.2e-4 - 2.2e-5) * (1 + math.cos(math.pi * p)) / 2
        assert cosine.at(p, 2.2e-4) == pytest.approx(by_hand, rel=1e-12)
    steps = Ramp(end=10, by=4)
    assert [steps.at(p, 1) for p in (0.0, 0.44, 0.45, 0.89, 1.0)] == [1, 1, 5, 9, 10]


def test_run_steps_are_those_that_the_phases_take(tmp_path):
    without = SMALL.replace("steps = 3\n", "")
    found = recipe(tmp_path, small=without)
    timeline, tokens, steps, taken = PhaseTimeline(found), 0, 0, []
    while tokens < 3000:
        sequences = timeline.at(tokens).values["batch.sequences"]
        taken.append((timeline.at(tokens).number, sequences))
        tokens, steps = tokens + 16 * sequences, steps + 1
    assert found.run.steps == steps
    stretches = list(timeline.stretches())
    assert [(s.phase, s.sequences) for s in stretches for _ in range(s.steps)] == taken
    assert sum(s.steps for s in timeline.stretches(steps + 7)) == steps + 7
    assert [s.steps for s in timeline.stretches(5)] == [5]
    assert load_recipe(write(tmp_path, SMALL + PHASES)).run.steps == 3  # what is written counts


@pytest.mark.parametrize(
    ("steps", "note"),
    [
        (4, "run.steps = 4 ends the run before phase.1 begins"),
        # 20 steps of 2, 4 and 6 sequences, 8 of 8, 15 of 4
        (50, "phases end at step 43; steps 44 to 50 keep the last phase's values"),
        (43, ""),
    ],
)
def test_a_run_shorter_or_longer_than_its_phases_is_noted(tmp_path, steps, note):
    found = resolve_recipe(str(write(tmp_path, SMALL + PHASES)), overrides=[f"run.steps={steps}"])
    assert [line for line in found.notes if "phase" in line] == ([note] if note else [])


def test_check_tells_a_line_for_each_phase(tmp_path):
    assert list(phase_lines(recipe(tmp_path))) == [
        "phase 0 grow: to 1,000 tokens, batch.sequences 2 -> 8 (linear)",
        "phase 1: to 2,000 tokens, optimizer.lr 0.001 -> 0.0001 (cosine)",
        "phase 2: to 3,000 tokens, batch.sequences 4",
    ]


@pytest.mark.parametrize("before", ["", "[[phase]]\nuntil_tokens = 96\nbatch.sequences = 4\n"])
def test_a_last_phase_without_name_and_end_stays_apart_in_the_resolved_recipe(tmp_path, before):
    """TOML had read its tables as those of the phase before it."""
    found = recipe(tmp_path, before + "[[phase]]\noptimizer.lr = 1e-4\nbatch.sequences = 8\n")
    assert load_recipe(write(tmp_path, write_resolved(found))) == found


def test_of_an_optimizer_the_rate_alone_can_change(tmp_path):
    """The core applies no other, though a component's config marks it."""

    @attrs.define(frozen=True, kw_only=True)
    class Marked(OptimizerConfig):
        decay: float = attrs.field(default=0.0, metadata={CHANGEABLE: True})

    found = recipe(tmp_path, "")
    sections = {"batch": found.batch, "model": found.model}
    tables = PhaseTables({**sections, "optimizer": attrs.evolve(found.optimizer, config=Marked())})
    assert tables.phases([{"optimizer": {"decay": 0.1}}]) == ()
    assert "'optimizer.decay' cannot change in a run" in tables.problems[0].message


def test_groups_of_parameters_keep_the_ratio_of_their_rates():
    fast, slow = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    groups = [{"params": [fast], "lr": 1e-3}, {"params": [slow], "lr": 5e-4}]
    optimizer = torch.optim.SGD(groups, lr=1e-3)
    scheduler = lr_scheduler(optimizer, LRScheduleConfig(use="constant", warmup_steps=0), 10)
    for rate in (2e-3, 4e-4, 1e-3):
        scheduler.set_peak(rate, of=1e-3)
        assert [group["lr"] for group in optimizer.param_groups] == [rate, pytest.approx(rate / 2)]


def test_the_resolved_recipe_loads_back_and_a_phase_can_be_overridden(tmp_path):
    first = recipe(tmp_path, overrides=["phase.2.batch.sequences=6", "phase.0.until_tokens=900"])
    assert (first.phase[2].changes["batch.sequences"], first.phase[0].until_tokens) == (6, 900)
    again = load_recipe(write(tmp_path, write_resolved(first), "again.toml"))
    assert again == first
    assert PhaseTimeline(again).at(950) == PhaseTimeline(first).at(950)


WRONG = {
    "model.width": (
        "model.width = 64",
        "phase.0.model.width: 'model.width' cannot change in a run; what can",
    ),
    "schedule": (
        "optimizer.lr_schedule = 'cosine'",
        "phase.0.optimizer.lr_schedule: .* cannot change in a run: it counts steps of the whole run",
    ),
    "near": ("optimizer.lrr = 1.0", r"\(did you mean 'optimizer.lr'\?\)"),
    "section": ("lr = 1.0", r"phase.0.lr: no table of what changes \(did you mean 'optimizer.lr'\?\)"),
    "type": ("batch.sequences = 2.5", "phase.0.batch.sequences: expected an integer, got the float 2.5"),
    "range": ("optimizer.lr = -1.0", "phase.0.optimizer.lr: expected a number above 0"),
    "ramp": ("optimizer.lr = { start = 1.0 }", "phase.0.optimizer.lr.end: missing"),
    "ramp's end": ("batch.sequences = { end = 0 }", "phase.0.batch.sequences.end: expected an integer"),
    "too few": ("batch.sequences = 2", "phase.0.batch.sequences: 2 would leave some of dp = 4 ranks without"),
    "on the way": (
        "batch.sequences = { start = 4, end = 8 }",
        "phase.0.batch.sequences: 5 would leave some of dp = 4 ranks without a sequence in the last",
    ),
    "decay": (
        "optimizer.lr = 1e-4",
        "phase.0.optimizer.lr: a phase and lr_schedule 'cosine' both change the rate",
        '[optimizer]\nlr_schedule = { use = "cosine" }\n',
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_is_refused_by_its_key(tmp_path, case):
    text, message, *more = WRONG[case]
    small = SMALL.replace("steps = 3\n", "steps = 3\nranks = 4\n").replace("microbatch = 2", "microbatch = 1")
    with pytest.raises(RecipeError, match=f"recipe.toml:[0-9]+: .*{message}"):
        recipe(tmp_path, f"[[phase]]\nuntil_tokens = 500\n{text}\n" + "".join(more), small)


@pytest.mark.parametrize(
    ("phases", "message"),
    [
        ("[[phase]]\n[[phase]]\n", "phase.0.until_tokens: missing; only the last phase may have no end"),
        ("[[phase]]\nuntil_tokens = 9\n[[phase]]\nuntil_tokens = 9\n", "phase.1.until_tokens: expected more"),
        ("[[phase]]\noptimizer.lr = { end = 1.0 }\n", "phase.0.until_tokens: missing; optimizer.lr moves"),
        ("[[phase]]\nuntil_tokens = 0\n", "phase.0.until_tokens: expected an integer from 1 to"),
        ("[phase]\nuntil_tokens = 9\n", r"phase: expected an array of tables: write \[\[phase\]\]"),
    ],
)
def test_phases_follow_one_another(tmp_path, phases, message):
    with pytest.raises(RecipeError, match=message):
        recipe(tmp_path, phases)


def test_a_mistake_in_a_section_is_told_once_not_of_phases_too(tmp_path):
    wrong = SMALL + '[optimizer]\nuse = "adamw"\nlr = 1e-3\nclip_norm = -1.0\n'
    with pytest.raises(RecipeError) as told:
        recipe(tmp_path, "[[phase]]\nuntil_tokens = 9\noptimizer.lr = 1e-3\n", wrong)
    assert str(told.value).count("expected") == 1
    assert " optimizer.clip_norm: " in str(told.value)


def test_without_steps_the_last_phase_needs_an_end(tmp_path):
    with pytest.raises(RecipeError, match=r"run\.steps: missing, and the last phase has no until_tokens"):
        recipe(tmp_path, "[[phase]]\nbatch.sequences = 4\n", SMALL.replace("steps = 3\n", ""))


def test_deepseek_v3_is_extended_as_the_paper_says():
    """arXiv 2412.19437, section 4.3: two phases of 1000 steps, at the last rate of pre-training."""
    found = load_recipe("deepseek_v3_128k")
    stretches = [*PhaseTimeline(found).stretches()]
    shapes = [(each.steps, each.sequences, each.length) for each in stretches]
    assert shapes == [(1000, 1920, 32768), (1000, 480, 131072)]
    assert found.run.steps == 2000
    for _, now in PhaseTimeline(found).corners():
        yarn, config = now.model.config.yarn, now.model.config
        assert (yarn.factor, yarn.beta_slow, yarn.beta_fast, yarn.original_length) == (40.0, 1.0, 32.0, 4096)
        assert (config.mtp_weight, config.bias_update_rate, now.optimizer.config.lr) == (0.1, 0.0, 7.3e-6)
    assert yarn.magnitude == 1.0
    trained = load_recipe("deepseek_v3_671b").model
    refuse_other_model(model_table(trained), found.model)  # its weights can be started from


def test_deepseek_v3_changes_as_the_paper_says():
    """arXiv 2412.19437, section 4.2: 2048 GPUs took 14.8T tokens."""
    found = load_recipe("deepseek_v3_671b")
    timeline, T = PhaseTimeline(found), 10**12
    keys = ("batch.sequences", "optimizer.lr", "model.mtp_weight", "model.bias_update_rate")
    paper = {
        0: (3072, 2.2e-4, 0.3, 0.001),
        469 * 10**9: (15360, 2.2e-4, 0.3, 0.001),
        10 * T - 1: (15360, 2.2e-4, 0.3, 0.001),
        12_150_000_000_000: (15360, (2.2e-4 + 2.2e-5) / 2, 0.1, 0.001),  # half of the cosine
        14_300_000_000_000: (15360, 2.2e-5, 0.1, 0.0),
        14_633_000_000_000: (15360, 7.3e-6, 0.1, 0.0),
    }
    for tokens, wanted in paper.items():
        values = timeline.at(tokens).values
        assert [values[key] for key in keys] == pytest.approx(wanted, rel=1e-9), tokens
    tokens = sum(each.steps * each.sequences for each in timeline.stretches()) * found.batch.length
    assert 0 <= tokens - 14.8 * T < 15360 * 4096
    assert found.run.steps == sum(each.steps for each in timeline.stretches())
    assert found.optimizer.config.lr_schedule.warmup_steps == 2000


@pytest.mark.parametrize(("steps", "sequences"), [(3, 8), (10, 16)])
def test_a_ramp_that_the_run_does_not_finish_ends_with_its_last_step(tmp_path, steps, sequences):
    ramp = "[[phase]]\nuntil_tokens = 8000\nbatch.sequences = { start = 8, end = 64, by = 8 }\n[[phase]]\n"
    found = recipe(tmp_path, ramp, SMALL.replace("steps = 3", f"steps = {steps}"))
    timeline = PhaseTimeline(found)
    reached = [(number, now.batch.sequences) for number, now in timeline.reached_corners(steps)]
    assert reached == [(0, 8), (0, sequences)]
    assert timeline.largest().batch.sequences == sequences
