"""Adapters against plain PyTorch, in one process: what they compute, how they train, and what is refused."""

from functools import partial

import pytest
import torch
from nanotrain_lora import LoRAConfig
from nanotrain_lora.checks import check_model
from structlog.testing import capture_logs

from nanotrain_core.batch import Batch
from nanotrain_core.cli import main
from nanotrain_core.compose import compose
from nanotrain_core.engine import RuntimeEngine
from nanotrain_core.errors import Exit, NanotrainError, RecipeError
from nanotrain_core.hf.open_weights import open_weights
from nanotrain_core.pipeline.actions import Part
from nanotrain_core.recipe import write_resolved
from nanotrain_core.recipe.validate import find_problems
from nanotrain_core.run.added_parameters import model_with
from nanotrain_core.testing import Case, RankFailure, run_ranks
from nanotrain_core.testing.probe import train

MODEL = {"use": "transformer", "layers": 2, "width": 24, "heads": 4, "kv_heads": 2, "ffn": 40, "vocab": 33}
CONFIG = {"rank": 3, "alpha": 24.0}


def case(config=None, *before, **overrides):
    wrappers = [*before, {"use": "lora", **(config or CONFIG)}]
    tables = {"parallel": wrappers, "model": {**MODEL, "init_std": 0.3}, "data": {"vocab": 33}, **overrides}
    return Case("checkpoint", use="simple", overrides=tables)


def engine(config=None, *before, folder=None, **overrides):
    made = case(config, *before, **overrides)
    return RuntimeEngine.from_recipe(made.recipe(), registry=made.registry(), folder=folder)


def weights(run):
    return {each.placement.name: each.parameter.detach().clone() for each in run.placed}


def plain_model(run):
    """Return the model's one part without wrappers, in float64."""
    made = case()
    part = made.registry().build(run.model).build(Part.whole(2))
    part.to_empty(device="cpu")
    return part.double()


def merged(values, scale):
    """Return W + scale B A in place of the three, differentiable."""
    found = {name: each for name, each in values.items() if ".lora_" not in name}
    layers = [name.removesuffix(".lora_a") for name in values if name.endswith(".lora_a")]
    deltas = {f"{n}.weight": scale * values[f"{n}.lora_b"] @ values[f"{n}.lora_a"] for n in layers}
    return {name: value + deltas[name] if name in deltas else value for name, value in found.items()}


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({"rank": 3, "alpha": 24.0}, 8.0),
        ({"rank": 4, "alpha": 24.0, "rslora": True, "targets": ["q", "ffn"]}, 12.0),
    ],
    ids=["all", "some"],
)
def test_it_trains_as_plain_pytorch_does(config, scale):
    """The model is called with merged weights, and autograd finds the gradients of A and B."""
    made, steps = engine(config), 4
    values, batches = weights(made.run), []
    (part,) = made.run.stages.values()
    part.register_forward_pre_hook(lambda part, args: batches.append(args))
    made.fit()
    plain, each = plain_model(made.run), len(batches) // 3
    trained = [name for name in values if ".lora_" in name]
    assert len(trained) == 2 * 2 * (7 if "targets" not in config else 4)
    for step in range(steps - 1):
        for name in trained:
            values[name] = values[name].detach().requires_grad_()
        passes = batches[each * step : each * (step + 1)]
        losses = [torch.func.functional_call(plain, merged(values, scale), args) for args in passes]
        tokens = sum(args[1].target_tokens() for args in passes)
        sum(found.losses["lm"] for found in losses).div(tokens).backward()
        for name in trained:
            values[name] = values[name].detach() - 0.1 * values[name].grad
    found = weights(made.run)
    for name, value in values.items():
        torch.testing.assert_close(found[name], value.detach(), atol=1e-11, rtol=0, msg=name)
    moved = max(found[name].abs().max().item() for name in trained if name.endswith("b"))
    assert moved > 1e-3, "B begins with zeros"


def test_a_is_uniform_as_in_peft_and_b_zero():
    values = weights(engine({"rank": 16}).run)
    for name, value in values.items():
        if name.endswith(".lora_a"):
            bound = value.shape[1] ** -0.5  # kaiming_uniform_ with a = sqrt(5)
            assert 0.9 * bound < value.abs().max() <= bound
            assert value.std().item() == pytest.approx(bound / 3**0.5, rel=0.15)
        elif name.endswith(".lora_b"):
            assert not value.any()


def test_the_base_has_no_gradients_no_state_and_no_masters():
    made = engine(precision={"use": "bf16"}, optimizer={"use": "adamw", "lr": 0.01})
    before = weights(made.run)
    made.fit()
    kept = {block.name.partition("/")[2] for block in made.run.optimizer.blocks()}
    trained = {name for name in before if ".lora_" in name}
    assert {name for name in kept if name} == trained
    assert {piece.name for piece in made.run.gradients.pieces()} == trained
    for placed in made.run.placed:
        name = placed.placement.name
        assert (placed.parameter.grad is None) or name in trained
        assert torch.equal(placed.parameter, before[name]) == (name not in trained)


def test_the_console_tells_how_many_parameters_are_trained(capsys):
    made = engine(monitor=[{"use": "console"}])
    made.fit()
    trained = sum(value.numel() for name, value in weights(made.run).items() if ".lora_" in name)
    total = sum(value.numel() for value in weights(made.run).values())
    out = capsys.readouterr().out
    assert f"{total:,} parameters" in out
    assert f"{trained:,} of the parameters are trained ({trained / total:.2%})" in out


@pytest.mark.parametrize("changes", [{}, {"alpha": 12.0}, {"rslora": True}, {"rank": 2}, {"targets": ["q"]}])
def test_a_run_goes_on_with_adapters_of_the_same_config_and_merges_others(tmp_path, changes):
    """They would act otherwise there, or not all of them, though each has a tensor of its name."""
    around = {"precision": {"use": "fp64"}, "optimizer": {"use": "adamw", "lr": 0.05}}
    trained = engine(folder=tmp_path, **around)
    trained.fit()
    other = case({**CONFIG, **changes}, **around)
    with capture_logs() as logs:
        started = weights(compose(other.recipe(), other.registry(), weights=str(tmp_path)))
    told = [log["merged"] for log in logs if "is merged into the model's weights" in log["event"]]
    assert told == ([["lora"]] if changes else [])
    saved = {name: value.double() for name, value in weights(trained.run).items()}
    if not changes:
        assert all(torch.equal(started[name], value) for name, value in saved.items())
        return
    for name, value in merged(saved, LoRAConfig(**CONFIG).scale).items():
        torch.testing.assert_close(started[name], value, atol=1e-12, rtol=0, msg=name)
    assert not any(started[name].any() for name in started if name.endswith(".lora_b"))


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        (
            CONFIG,
            {**CONFIG, "alpha": 12.0},
            "alpha is 24.0 there and 12.0 in this recipe. `--weights",
        ),
        (
            CONFIG,
            {**CONFIG, "rslora": True},
            "else: parallel.lora.rslora is False there and True",
        ),
        (
            CONFIG,
            {**CONFIG, "rank": 4},
            "another recipe: parallel.lora.rank is 3 there and 4 in this recipe",
        ),
        (CONFIG, None, "place for .* another recipe: parallel.lora is only there"),
        (
            None,
            CONFIG,
            "no tensor layers.0.attn.q.lora_a .* another recipe: parallel.lora is only in this recipe",
        ),
    ],
    ids=["alpha", "rslora", "rank", "without", "with"],
)
def test_a_resume_with_other_adapters_names_the_key_that_changed(tmp_path, before, after, text):
    """Another alpha or rslora went on with another model, as each tensor has the same name and shape."""
    run = {} if before else {"parallel": []}
    engine(before, folder=tmp_path, run={"steps": 2}, **run).fit()
    made = case(after, run={"steps": 3}, **({} if after else {"parallel": []}))
    resumed = RuntimeEngine.from_recipe(
        made.recipe(), registry=made.registry(), folder=tmp_path, resume="latest"
    )
    with pytest.raises(NanotrainError, match=text):
        resumed.fit()


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_merged_weights_compute_the_same_without_the_wrapper(tmp_path, precision):
    around = {"precision": {"use": precision}, "optimizer": {"use": "adamw", "lr": 0.05}}
    made = engine(folder=tmp_path, **around)
    made.fit()
    read = open_weights(tmp_path, case().registry()).reader
    assert not any(".lora_" in name for name in read.shapes)
    whole = {name: read.read(name, tuple(slice(0, n) for n in shape)) for name, shape in read.shapes.items()}
    scale = LoRAConfig(**CONFIG).scale
    values = {name: value.double() for name, value in weights(made.run).items()}
    for name, value in merged(values, scale).items():
        exact = {"atol": 1e-12, "rtol": 0} if precision == "fp64" else {"atol": 1e-6, "rtol": 2**-8}
        torch.testing.assert_close(whole[name].double(), value, **exact, msg=name)
        half = tuple(slice(n // 3, n) for n in value.shape)
        assert torch.equal(read.read(name, half), whole[name][half])
    alone = Case("checkpoint", use="simple", overrides={**case().overrides, "parallel": [], **around})
    started = compose(alone.recipe(), alone.registry(), weights=str(tmp_path))
    tokens = torch.arange(22).view(2, 11)
    with torch.no_grad():
        ours, theirs = (run.stages[0](tokens, Batch(tokens)).value for run in (made.run, started))
    allowed = 1e-11 if precision == "fp64" else 2**-5 * ours.abs().max().item()
    torch.testing.assert_close(theirs, ours, atol=allowed, rtol=0)


@pytest.mark.parametrize(
    ("targets", "text"),
    [
        (
            ["q", "attn_norm"],
            r"targets.1: 'attn_norm' names no linear layer \(did you mean 'attn'\?\); there are q, k, v, o",
        ),
        (
            ["layers.7.attn.q"],
            r"targets.0: 'layers.7.attn.q' names no linear layer \(did you mean 'layers.\d.attn.q'\?\)",
        ),
        (["head"], "targets.0: 'head' names no linear layer"),
    ],
)
def test_a_target_without_a_linear_layer_is_refused(targets, text):
    with pytest.raises(NanotrainError, match=text):
        engine({"targets": targets})


def checked(recipe, tmp_path, capsys):
    """Return the exit code of ``nanotrain check`` and its errors."""
    (tmp_path / "recipe.toml").write_text(write_resolved(recipe))
    return main(["check", str(tmp_path / "recipe.toml")]), capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("ffn_norm", "'ffn_norm' names no linear layer (did you mean 'ffn'?)"),
        ("norm", "the model has no module or parameter '*.norm' (did"),
        ("*norm", "'*norm' names no linear layer"),
        (
            "layers.0.attn_norm",
            "'layers.0.attn_norm' names no linear layer (did you mean 'layers.0.attn.o'?)",
        ),
    ],
)
def test_a_target_without_a_linear_layer_is_refused_before_ranks_start(target, text, tmp_path, capsys):
    code, errors = checked(case({"targets": ["v", target]}).recipe(), tmp_path, capsys)
    assert code == Exit.USER
    assert f"parallel.0.targets.1: {text}" in errors


@pytest.mark.parametrize(
    ("targets", "tp", "before", "refused"),
    [
        ([], 2, False, True),
        (["v"], 2, False, True),
        (["v"], 2, True, False),
        (["v"], 1, False, False),
    ],
)
def test_its_place_before_what_splits_its_layers_is_refused_before_ranks_start(targets, tp, before, refused):
    config = {"targets": targets}
    lora, sliced = {"use": "lora", **config}, {"use": "sliced"}
    wrappers = [sliced, lora] if before else [lora, sliced]
    made = Case("parallel", use="lora", config=config, topology={"tp": tp}, overrides={"parallel": wrappers})
    recipe, registry = made.recipe(), made.registry()
    layout, _ = find_problems(recipe, registry)
    settings = next(each.config for each in recipe.parallel if each.use == "lora")
    adding = [each for each in recipe.parallel if each.use == "lora"]
    model = partial(model_with, recipe.model, adding, registry)
    problems = [*check_model(recipe, settings, layout, model)]
    first = "layers.0.attn.v" if targets else "layers.0.attn.q"
    wanted = f"'lora' is listed before 'sliced', which splits {first} over tp = 2 and would leave its adapter"
    assert [each.key for each in problems] == ["parallel.0"] * refused
    assert all(wanted in each.message for each in problems)


def test_it_is_listed_after_wrappers_that_split_layers():
    """B would have had the rows of all ranks."""
    config = {"targets": ["q", "v"]}
    wrappers = [{"use": "lora", **config}, {"use": "sliced"}]
    made = Case("parallel", use="lora", config=config, topology={"tp": 2}, overrides={"parallel": wrappers})
    with pytest.raises(RankFailure, match=r"List .lora. after"):
        run_ranks(train, 2, made, {})


@pytest.mark.parametrize(
    ("key", "text"),
    [("dropout", "adapters have none"), ("target_modules", "it is targets"), ("lora_alpha", "it is alpha")],
)
def test_keys_of_other_libraries_are_explained(key, text):
    with pytest.raises(RecipeError, match=text):
        case({key: 1}).recipe()


@pytest.mark.parametrize(
    ("target", "text"),
    [
        (
            "q_proj",
            "no module or parameter '*.q_proj': what transformers calls q_proj is q here",
        ),
        ("layers.*.o_proj", "calls o_proj is o here"),
        (
            "query",
            "parallel.0.targets.1: the model has no module or parameter '*.query'; modules have the names",
        ),
        (
            "dwn",
            "parallel.0.targets.1: the model has no module or parameter '*.dwn' (did you mean '*.down'?)",
        ),
        (
            "layers.0.atn",
            "the model has no module or parameter 'layers.0.atn' (did you mean 'layers.0.attn'?)",
        ),
    ],
)
def test_a_target_that_names_no_module_is_refused_before_ranks_start(target, text, tmp_path, capsys):
    code, errors = checked(case({"targets": ["v", target]}).recipe(), tmp_path, capsys)
    assert code == Exit.USER
    assert text in errors
