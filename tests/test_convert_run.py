"""A run that starts from weights: which ones, on which layout, and what comes out of it again."""

import json

import pytest
import torch
from command import nanotrain
from hf_models import VOCAB, llama, logits
from safetensors.torch import load_file

from nanotrain_core.cli import main
from nanotrain_core.errors import CheckpointError, Exit
from nanotrain_core.testing import run_ranks
from nanotrain_core.testing.converted import tensors_at

RECIPE = """
extends = "ours/model.toml"

[run]
name = "tuned"
steps = 2
device = "cpu"

[batch]
sequences = 4
microbatch = 2
length = 16

[evaluation]
sequences = 0

[[parallel]]
use = "ddp"

[optimizer]
use = "sgd"
lr = 0.01

[data]
use = "synthetic"
vocab = 64
"""

OWN = """[model]
use = "transformer"
layers = 2
width = 32
heads = 4
vocab = 64
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with a Llama in ``theirs`` and ``ours``, and a recipe for it."""
    monkeypatch.chdir(tmp_path)
    llama(num_key_value_heads=2).save_pretrained("theirs")
    assert main(["convert", "theirs", "ours"]) == 0
    (tmp_path / "recipe.toml").write_text(RECIPE)
    return tmp_path


def steps(path):
    rows = map(json.loads, (path / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if row["event"] == "step"]


def test_the_first_loss_is_that_of_the_weights_on_any_number_of_ranks(folder):
    """The reference is transformers' own loss on the same tokens."""
    for ranks, weights in (("1", "theirs"), ("2", "ours")):
        words = ("run", "recipe.toml", "--nproc", ranks, "--weights", weights, "--folder", ranks)
        words += ("--set", "run.ranks=3")  # which --nproc replaces, without a word
        done = nanotrain(*words, cwd=folder)
        assert (done.code, done.err) == (Exit.DONE, "")
        assert f'/{weights}"' in (folder / ranks / "recipe.toml").read_text()
    one, two = steps(folder / "1"), steps(folder / "2")
    assert one[0]["loss"] == pytest.approx(first_loss(folder), abs=1e-5)
    for ours, theirs in zip(two, one, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)


def first_loss(folder):
    from transformers import AutoModelForCausalLM

    from nanotrain_core.batch import Shard
    from nanotrain_core.recipe import load_recipe
    from nanotrain_core.registry.registry import load_plugins

    recipe = load_recipe(folder / "recipe.toml")
    data = load_plugins().build(recipe.data)
    data.open(length=16, seed=recipe.run.seed)
    batch = data.train_batch(4, Shard())
    with torch.no_grad():
        found = AutoModelForCausalLM.from_pretrained(folder / "theirs")(batch.tokens).logits
    return torch.nn.functional.cross_entropy(found.flatten(0, 1), batch.targets.flatten()).item()


def test_what_a_run_trained_can_be_exported_and_started_from(folder):
    words = ("run", "recipe.toml", "--weights", "theirs")
    assert nanotrain(*words, "--folder", "first", cwd=folder).code == Exit.DONE
    checkpoint = folder / "first/checkpoints/step-00000002.safetensors"
    saved = {name: tensor for name, tensor in load_file(checkpoint).items() if "/" not in name}
    for source, target in (("first", "a"), (str(checkpoint), "b")):
        assert main(["convert", source, target]) == 0
        assert tensors_at(folder / target).keys() == saved.keys()
        assert all(torch.equal(t, saved[name]) for name, t in tensors_at(folder / target).items())
    assert not torch.equal(saved["norm.weight"], tensors_at(folder / "ours")["norm.weight"])
    from transformers import AutoModelForCausalLM

    assert torch.isfinite(logits(AutoModelForCausalLM.from_pretrained(folder / "a"))).all()
    words = ("run", "recipe.toml", "--weights", "first", "--folder", "second")
    assert nanotrain(*words, cwd=folder).code == Exit.DONE
    assert steps(folder / "second")[0]["loss"] < steps(folder / "first")[0]["loss"]


def test_a_resumed_run_has_the_weights_of_its_checkpoint(folder):
    words = ("run", "recipe.toml", "--folder", "run")
    assert nanotrain(*words, "--weights", "theirs", cwd=folder).code == Exit.DONE
    (folder / "theirs").rename(folder / "elsewhere")
    again = nanotrain(
        "run", "run/recipe.toml", "--folder", "run", "--resume", "--set", "run.steps=3", cwd=folder
    )
    assert (again.code, again.err) == (Exit.DONE, "")
    losses = [row["loss"] for row in steps(folder / "run")]
    assert len(losses) == 3


def split_blocks(path, rank_count):
    """Read each rank's blocks of a tensor split both ways, as a wrapper would place them."""
    from pathlib import Path

    import torch.distributed as dist
    from torch import nn

    from nanotrain_core.hf.load_weights import saved_weights
    from nanotrain_core.hf.open_weights import open_weights
    from nanotrain_core.layout.layout import Layout, View
    from nanotrain_core.layout.mesh import Mesh
    from nanotrain_core.layout.placement import PlacedParameter, Placement
    from nanotrain_core.registry.registry import load_plugins

    rank = dist.get_rank()
    layout = Layout({"dense": View(("dp", "tp"), (1, rank_count))})
    selection = open_weights(Path(path), load_plugins()).selection
    placed = []
    for name, shape, axis in (
        ("layers.1.attn.k.weight", (32, 32), 0),
        ("layers.1.ffn.down.weight", (32, 128), 1),
        ("layers.0.attn.v.bias", (32,), 0),
    ):
        placement = Placement.whole(name, shape, layout).split(axis, "tp", rank, rank_count)
        placed.append(PlacedParameter(nn.Parameter(torch.empty(placement.shape)), placement))
    mesh = Mesh(layout, rank=rank)
    with saved_weights(Path(path), load_plugins(), selection, (), placed, mesh) as saved:
        found = [(p.placement, saved(p.placement.name, p.parameter)) for p in placed]
    return {placement.name: (placement.slices, block) for placement, block in found}


@pytest.mark.full
def test_each_rank_reads_its_own_block_of_a_fused_and_transposed_matrix(tmp_path):
    from hf_models import gpt2

    model = gpt2()
    model.save_pretrained(tmp_path)
    theirs = model.state_dict()
    expected = {
        "layers.1.attn.k.weight": theirs["transformer.h.1.attn.c_attn.weight"][:, 32:64].T,
        "layers.1.ffn.down.weight": theirs["transformer.h.1.mlp.c_proj.weight"].T,
        "layers.0.attn.v.bias": theirs["transformer.h.0.attn.c_attn.bias"][64:],
    }
    for blocks in run_ranks(split_blocks, 2, str(tmp_path), 2):
        for name, (slices, block) in blocks.items():
            assert torch.equal(block, expected[name][slices]), name


def load_from_own_disk(path):
    """Load the weights of this rank's own folder, and return the error."""
    import torch.distributed as dist

    from nanotrain_core.hf.load_weights import saved_weights
    from nanotrain_core.hf.open_weights import open_weights
    from nanotrain_core.layout.layout import Layout, View
    from nanotrain_core.layout.mesh import Mesh
    from nanotrain_core.registry.registry import load_plugins

    rank = dist.get_rank()
    path, registry = path / str(rank), load_plugins()
    selection = open_weights(path, registry).selection
    mesh = Mesh(Layout({"dense": View(("dp",), (2,))}), rank=rank)
    try:
        with saved_weights(path, registry, selection, (), [], mesh):
            pass
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("apart", [True, False])
def test_weights_that_are_not_the_same_on_all_ranks_are_refused(tmp_path, apart):
    """Each host has a folder of its own, of one model: layers of both would be mixed."""
    for rank in range(2):
        model = llama(num_key_value_heads=2)
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight.mul_(1 + rank * apart)
        model.save_pretrained(tmp_path / str(rank))
    for said in run_ranks(load_from_own_disk, 2, tmp_path):
        assert said.startswith("rank 1 finds other weights in ") == apart
        assert bool(said) == apart


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--weights", "nowhere"), "--weights nowhere: there is no such file or folder"),
        (("--weights", "our"), "--weights our: there is no such file or folder (did you mean 'ours'?)"),
        (("--set", "run.weights=our"), "our: there is no such file or folder (did you mean 'ours'?)"),
        (("--weights", "ours", "--resume"), "--weights starts a new run, --resume goes on with one"),
        (("--set", "run.weights=nowhere"), "nowhere: there is no such file or folder"),
        (
            ("--weights", "recipe.toml"),
            "holds no weights that can be read: expected a folder with config.json",
        ),
        (
            ("--weights", "ours", "--set", "model.rope_theta=500.0"),
            "has weights of another model: model.rope_theta is 10000.0 there and 500.0 in this recipe",
        ),
        (
            ("--weights", "theirs", "--set", "model.vocab=128"),
            f"has weights of another model: model.vocab is {VOCAB} there and 128 in this recipe",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused_in_plain_words(folder, words, text):
    ended = nanotrain("run", "recipe.toml", *words, cwd=folder)
    assert ended.code == Exit.USER
    assert text in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            ["run.weights=recipe.toml"],
            "--set #1: run.weights: {}/recipe.toml holds no weights that can be read",
        ),
        (
            ["run.weights=ours", "model.rope_theta=500.0"],
            "--set #1: run.weights: {}/ours has weights of another model: model.rope_theta is 10000.0 there",
        ),
        (["run.weights=broken"], "--set #1: run.weights: {}/broken/config.json: model_type is 'bert'"),
        (["run.weights=ours"], ""),
        (["run.weights=ours", 'parallel=[{use="lora"}]'], ""),
    ],
)
def test_check_opens_the_weights_before_any_rank_does(folder, changes, text, capsys):
    (folder / "broken").mkdir()
    (folder / "broken" / "config.json").write_text('{"model_type": "bert"}')
    code = main(["check", "recipe.toml", *(word for change in changes for word in ("--set", change))])
    assert code == (Exit.USER if text else Exit.DONE)
    assert text.format(folder) in capsys.readouterr().err


def test_a_recipe_s_own_export_starts_it_where_it_leaves_values_unset(folder):
    """A folder that was exported spells out what the recipe left unset; resumed, both are one model, too."""
    (folder / "recipe.toml").write_text(RECIPE.replace('extends = "ours/model.toml"', OWN))
    words = ("run", "recipe.toml", "--set", "run.steps=1")
    assert nanotrain(*words, "--folder", "first", cwd=folder).code == Exit.DONE
    assert main(["convert", "first", "exported"]) == 0
    done = nanotrain(*words, "--weights", "exported", "--folder", "second", cwd=folder)
    assert (done.code, done.err) == (Exit.DONE, "")
    spelled = ("--set", "model.ffn=128", "--set", "model.kv_heads=4", "--set", "model.head_size=8")
    again = ("run", "second/recipe.toml", "--folder", "second", "--resume", "--set", "run.steps=2", *spelled)
    done = nanotrain(*again, cwd=folder)
    assert (done.code, done.err) == (Exit.DONE, "")
    assert [row["step"] for row in steps(folder / "second")] == [1, 2]


def test_what_only_shapes_training_may_differ(folder):
    words = ("--weights", "ours", "--set", "model.init_std=0.5", "--set", "model.max_length=16")
    done = nanotrain("run", "recipe.toml", "--set", "run.steps=1", *words, "--folder", "run", cwd=folder)
    assert (done.code, done.err) == (Exit.DONE, "")
    assert steps(folder / "run")[0]["loss"] == pytest.approx(first_loss(folder), abs=1e-5)
