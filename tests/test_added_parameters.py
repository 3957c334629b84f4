"""Parameters that a wrapper adds: weights without them, one of several stages, split layers, commands."""

import json
from pathlib import Path

import pytest
import torch
from as_one_process import assert_trains_as_one_process
from compositions import BATCH, VOCAB
from safetensors.torch import save_file
from structlog.testing import capture_logs
from torch import nn

from nanotrain_core.builtin.transformer_config import TransformerConfig
from nanotrain_core.cli import main
from nanotrain_core.compose import compose
from nanotrain_core.engine import RuntimeEngine
from nanotrain_core.errors import CheckpointError, PluginError
from nanotrain_core.layout.layout import Layout, View
from nanotrain_core.layout.placement import Placement, place
from nanotrain_core.layout.roles import Role, override_forward, tagged
from nanotrain_core.models.transformer import Transformer
from nanotrain_core.pipeline.actions import Part
from nanotrain_core.recipe import write_resolved
from nanotrain_core.registry.contract_checks import check_part
from nanotrain_core.run.split_conflicts import Splits
from nanotrain_core.testing import Case, RankFailure, run_ranks
from nanotrain_core.testing.probe import make_engine, rank, train

PLUGINS = [str(Path(__file__).with_name("added_parameters.py"))]


def composed(wrapper, **options):
    """Return the parameters of a run on one rank by name."""
    parallel = [{"use": wrapper}] if wrapper else []
    case = Case("parallel", use=wrapper or "ddp", overrides={"parallel": parallel}, plugins=PLUGINS)
    run = compose(case.recipe(), case.registry(), **options)
    return {each.placement.name: each.parameter for each in run.placed}, run.recipe


@pytest.fixture
def weights(tmp_path):
    """A folder with the model's weights, each one above what it is initially."""
    parameters, recipe = composed("")
    save_file({n: p.detach() + 1 for n, p in parameters.items()}, tmp_path / "model.safetensors")
    (tmp_path / "model.toml").write_text(write_resolved(recipe))
    return tmp_path


@pytest.mark.parametrize("wrapper", ["gradienthook", "accumulatedhook"])
def test_a_hook_on_a_parameter_is_refused(wrapper):
    """It was never called, without a word: the parameter that is trained is another object."""
    with pytest.raises(PluginError, match=rf"'{wrapper}': parameter layers.0.attn.q.weight has a hook"):
        composed(wrapper)


def test_a_models_own_hook_on_a_parameter_is_refused():
    part = Transformer(TransformerConfig(layers=1, width=8, heads=2, vocab=8)).build(Part.whole(1))
    check_part("model 'mine'", part)
    part.embed.weight.register_hook(lambda gradient: gradient)
    with pytest.raises(PluginError, match=r"model 'mine': parameter embed\.weight has a hook"):
        check_part("model 'mine'", part)


def test_one_parameter_in_two_modules_is_refused_before_it_is_allocated():
    """It was a KeyError. A module in two places is fine, since it is allocated once."""
    part = Transformer(TransformerConfig(layers=2, width=8, heads=2, vocab=8)).build(Part.whole(2))
    up = [layer.ffn.up for layer in part.layers.values()]
    part.again = up[0]
    check_part("model 'mine'", part)
    up[1].weight = up[0].weight
    same = r"layers\.1\.ffn\.up\.weight is the same parameter as layers\.0\.ffn\.up\.weight"
    with pytest.raises(PluginError, match=f"model 'mine': {same}"):
        check_part("model 'mine'", part)


def test_added_parameters_keep_their_initial_values_and_a_warning_counts_them(weights):
    """The reader's own exception had ended the run with a traceback."""
    initial, _ = composed("adapters")
    with capture_logs() as logs:
        found, _ = composed("adapters", weights=str(weights))
    added = {name for name in found if name.endswith(".scale")}
    assert len(added) == 2
    for name, parameter in found.items():
        assert torch.equal(parameter, initial[name] + (name not in added))
    (warning,) = [log for log in logs if log["event"].startswith("parameters that a wrapper added")]
    assert (warning["parameters"], warning["such_as"]) == (2, min(added))


def test_a_parameter_that_a_wrapper_has_renamed_is_refused(weights):
    with pytest.raises(CheckpointError, match=r"has norm\.weight, and the run has norm\.gain instead"):
        composed("renames", weights=str(weights))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run whose adapters have been trained: its loss is not that of its model alone."""
    folder = tmp_path_factory.mktemp("adapted")
    around = {"parallel": [{"use": "adapters"}], "evaluation": {"sequences": 3}}
    case = Case("checkpoint", use="simple", overrides=around, plugins=PLUGINS)
    make_engine(case, {"run": {"steps": 3}, "monitor": [{"use": "jsonl"}]}, folder=folder).fit()
    return folder


def test_a_checkpoint_with_added_parameters_is_whole_where_its_wrapper_is_installed(trained, capsys):
    """Each was reported as a tensor for which the model has no place."""
    assert main(["ckpt", "verify", str(trained), "--plugin", *PLUGINS]) == 0
    assert "step 3: whole" in capsys.readouterr().out
    assert main(["ckpt", "verify", str(trained)]) == 2
    assert "no parallel named 'adapters'" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["ckpt", "verify"], ["eval"]])
def test_a_wrapper_that_only_a_run_can_apply_is_told(trained, capsys, monkeypatch, command):
    """It had ended with a traceback."""

    def fail(*args):
        raise ValueError("Default process group has not been initialized")

    monkeypatch.setattr("nanotrain_core.run.wrapping.wrap", fail)
    assert main([*command, str(trained), "--plugin", *PLUGINS]) == 2
    said = "".join(capsys.readouterr())
    assert (
        "parallel 'adapters' cannot be applied on one rank, to find what it adds: its apply raised " in said
    )
    assert "Default process group" in said


def test_eval_computes_with_added_parameters(trained, capsys):
    rows = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if row["event"] == "evaluation"]
    assert main(["eval", str(trained), "--json", "--plugin", *PLUGINS]) == 0
    (text,) = json.loads(capsys.readouterr().out)["texts"]
    assert text["loss"] == pytest.approx(losses[-1], abs=1e-9)


def test_weights_with_added_parameters_start_a_run_with_the_same_wrapper(trained):
    found, _ = composed("adapters", weights=str(trained))
    assert any(not torch.equal(p, torch.ones_like(p)) for name, p in found.items() if name.endswith(".scale"))


def test_convert_says_what_added_parameters_are_for(trained, tmp_path, capsys):
    assert main(["convert", str(trained), str(tmp_path / "out"), "--plugin", *PLUGINS]) == 2
    assert "one that a wrapper of its run added is read by `nanotrain eval`" in capsys.readouterr().err


def staged(wrapper, schedule="1f1b", *more, dp=1, pp=2):
    """Return a case with pipeline ranks, whose parts all hold the parameter that ``wrapper`` adds."""
    overrides = {
        "batch": {**BATCH, "sequences": 8, "microbatch": 1},
        "model": {"use": "transformer", "layers": 4, "width": 24, "heads": 4, "ffn": 32, "vocab": VOCAB},
        "data": {"vocab": VOCAB},
        "schedule": {"use": schedule},
        "parallel": [{"use": wrapper}, *more],
    }
    return Case("topology", use="grid", topology={"pp": pp, "dp": dp}, overrides=overrides, plugins=PLUGINS)


@pytest.mark.full_cases("1f1b", "interleaved-dp2", "zero12")
@pytest.mark.parametrize(
    ("schedule", "dp", "sync"),
    [
        ("1f1b", 1, {}),
        ("interleaved_1f1b", 1, {"use": "ddp"}),
        ("interleaved_1f1b", 2, {"use": "ddp", "bucket_mb": 1e-6}),
        ("1f1b", 2, {"use": "zero12", "stage": 2, "bucket_mb": 1e-6}),
    ],
    ids=["1f1b", "interleaved", "interleaved-dp2", "zero12"],
)
def test_a_parameter_that_several_stages_are_given_is_one(schedule, dp, sync):
    """Each stage had trained its own, and a checkpoint had that of one."""
    alone = staged("temperature", "accumulate", pp=1)
    assert_trains_as_one_process(staged("temperature", schedule, *([sync] if sync else []), dp=dp), alone)


@pytest.mark.parametrize(
    ("wrapper", "forms"),
    [
        ("temperatureoflayers", r"\(3,\), trained on one pipeline rank, and \(4,\), trained on another"),
        ("temperatureofonepart", r"\(1,\), frozen on one pipeline rank, and \(1,\), trained on another"),
    ],
    ids=["shapes", "frozen"],
)
def test_different_parameters_under_one_name_are_refused(wrapper, forms):
    with pytest.raises(RankFailure, match=f"temperature is {forms}: under one name they hold copies of one"):
        run_ranks(train, 2, staged(wrapper), {})


DP2_TP2 = Layout({"dense": View(("dp", "tp"), (2, 2))})


class Layers:
    """A part that wrappers change one after another."""

    def __init__(self):
        config = TransformerConfig(layers=1, width=24, heads=4, ffn=32, vocab=VOCAB)
        self.part = Transformer(config).build(Part.whole(1))
        self.placements = place([self.part], DP2_TP2)
        self.splits = Splits([self.part], self.placements)

    def add(self, name, hook="register_forward_hook", *, summed=False, trained=True, prepend=False):
        """Add a number to a layer, placed as whole, and a hook that would read it."""
        layer, full = self.part.get_submodule(name), f"{name}.scale"
        layer.scale = nn.Parameter(torch.empty(1, device="meta"), requires_grad=trained)
        if hook:
            getattr(layer, hook)(lambda *_: None, prepend=prepend)
        placed = Placement.whole(full, (1,), DP2_TP2)
        self.placements[full] = placed.sum_over("tp") if summed else placed
        self.check("adds")

    def split(self, *, tokens=False):
        """Split layers over two ranks; with ``tokens`` all other gradients are partial."""
        axes = {Role.VOCAB: 0, Role.COLUMN: 0, Role.ROW: 1}
        for name, module, tag in tagged(self.part):
            if tag.role is Role.COLUMN:
                module.register_forward_pre_hook(lambda *_: None)
            elif tag.role is Role.ROW:
                module.register_forward_hook(lambda *_: None)
            if (axis := axes.get(tag.role)) is not None:
                placed = self.placements[f"{name}.weight"]
                self.placements[placed.name] = placed.split(axis, "tp", 0, 2, uneven=True)
        for name, placed in self.placements.items():
            if tokens and "tp" in placed.same:
                self.placements[name] = placed.sum_over("tp")
        self.check("splits")

    def check(self, use):
        self.splits.check(use, [self.part], self.placements)


QUERY, OUT, EMBED, NORM = "layers.0.attn.q", "layers.0.attn.o", "embed", "norm"
BEFORE = "register_forward_pre_hook"


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize(("name", "role"), [(OUT, "ROW"), (EMBED, "VOCAB"), (QUERY, "COLUMN")])
def test_what_a_wrapper_added_to_a_layer_is_not_split_around_unawares(name, role, tokens):
    """Its gradient is taken for complete on every rank, and replicas of it had drifted apart."""
    layers = Layers()
    layers.add(name)
    if tokens and role == "COLUMN":  # each rank's outputs are right, and what is partial is summed
        layers.split(tokens=True)
        return
    text = rf"compute a part of a {role}, to which 'adds' has added {name}.scale, .* gradient .* partial"
    with pytest.raises(PluginError, match=text):
        layers.split(tokens=tokens)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        (NORM, {}),
        (OUT, {"summed": True}),
        (QUERY, {"summed": True}),
        (QUERY, {"hook": BEFORE}),
        *((name, {"hook": None, "trained": trained}) for name in (OUT, EMBED) for trained in (True, False)),
        (OUT, {"hook": BEFORE, "trained": False}),
        (QUERY, {"trained": False}),
    ],
)
def test_what_is_right_beside_blocks_or_says_that_it_is_partial_is_not_refused(name, options):
    layers = Layers()
    layers.add(name, **options)
    layers.split()


def test_a_hook_that_would_see_partial_outputs_is_refused_beside_a_frozen_parameter_too():
    layers = Layers()
    layers.add(OUT, trained=False)
    with pytest.raises(
        PluginError, match=r"as whole: its hook would see partial outputs\. List 'adds' after"
    ):
        layers.split()


def test_what_a_hook_of_a_split_layers_input_reads_is_summed_with_shares_of_tokens():
    layers = Layers()
    layers.add(OUT, BEFORE)
    layers.split(tokens=True)
    layers = Layers()
    layers.add(OUT, BEFORE)
    with pytest.raises(PluginError, match="gradient on each rank would be partial"):
        layers.split()


@pytest.mark.parametrize("name", [QUERY, OUT, EMBED])
def test_a_layer_is_not_split_whose_forward_another_wrapper_took_over(name):
    """Weight standardization of a ROW took norms of a block."""
    layers = Layers()
    override_forward(layers.part.get_submodule(name), lambda module, x: x)
    layers.check("standardizes")
    text = f"splits {name} over tp, and 'standardizes' has taken over its .* it splits it in `shard`"
    with pytest.raises(PluginError, match=text):
        layers.split()


def test_gradients_that_are_summed_are_no_blocks_of_a_layer_whose_forward_was_taken_over():
    """Context parallelism was refused after a wrapper that computes a COLUMN in another way."""
    layers = Layers()
    override_forward(layers.part.get_submodule(QUERY), lambda module, x: x)
    layers.check("computes")
    placed = layers.placements[f"{QUERY}.weight"]
    layers.placements[placed.name] = placed.sum_over("tp")
    layers.check("sums")


def test_what_a_wrapper_adds_to_a_split_layer_says_how_its_gradient_is_summed():
    layers = Layers()
    layers.split()
    layers.add(OUT)
    layers.add(QUERY, summed=True)
    with pytest.raises(PluginError, match=r"'adds' adds .*k.scale, .* a COLUMN .* \.sum_over\('tp'\)"):
        layers.add("layers.0.attn.k")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        (QUERY, {"hook": BEFORE, "prepend": True}),
        (QUERY, {"trained": False}),
        (QUERY, {"hook": None}),
        (OUT, {"hook": BEFORE, "trained": False}),
        (OUT, {"hook": BEFORE, "summed": True}),
        (OUT, {"hook": None}),
    ],
)
def test_what_may_be_right_is_added_to_a_split_layer(name, options):
    """A hook that comes first sees a COLUMN's whole input; what no hook reads has no gradient there."""
    layers = Layers()
    layers.split()
    layers.add(name, **options)


@pytest.mark.parametrize(("name", "role"), [(QUERY, "COLUMN"), (OUT, "ROW")])
def test_what_is_added_inside_a_split_layer_says_how_its_gradient_is_summed(name, role):
    """A hook of a ROW's input sees this rank's features only: replicas drifted apart."""
    layers = Layers()
    layers.split()
    with pytest.raises(PluginError, match=rf"scale, placed as whole, to a {role} .* \.sum_over\('tp'\)"):
        layers.add(name, BEFORE)
    layers = Layers()
    layers.split()
    override_forward(layers.part.get_submodule(name), lambda module, x: x)
    with pytest.raises(PluginError, match="its gradient on each rank is partial"):
        layers.add(name, None)


def warned(folder, wrapper):
    """Train on two ranks that have the same tokens; return what a warning says at the save after step 2."""
    overrides = {
        "checkpoint": {"use": "simple", "every": 2},
        "run": {"steps": 2},
        "optimizer": {"use": "sgd", "lr": 0.1},
        "parallel": [{"use": wrapper}],
    }
    case = Case("topology", use="grid", topology={"tp": 2}, overrides=overrides, plugins=PLUGINS)
    made = RuntimeEngine.from_recipe(case.recipe(), registry=case.registry(), rank=rank(), folder=folder)
    with capture_logs() as logs:
        made.fit()
    return [log["event"].partition(",")[0] for log in logs if "drifted apart" in log["event"]]


def test_replicas_that_have_drifted_apart_are_reported_at_the_first_save(tmp_path):
    """A checkpoint has the value of one rank, and the run on it was another."""
    told = run_ranks(warned, 2, tmp_path / "apart", "parts")
    assert told == [["norm.scale has drifted apart on ranks along tp"], []]
    assert run_ranks(warned, 2, tmp_path / "summed", "summedparts") == [[], []]
