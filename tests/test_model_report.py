"""DeepSeek's models: what ``nanotrain inspect RECIPE`` says of them, against what is published."""

import contextlib
import io
import json

import pytest
import torch

from nanotrain_core.api import Part, cached_token_of
from nanotrain_core.batch import Batch
from nanotrain_core.cli import main
from nanotrain_core.models.cache import Cache
from nanotrain_core.recipe.load import resolve_recipe


@pytest.fixture(scope="module")
def v3():
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(["inspect", "deepseek_v3_671b", "--hardware", "h800", "--json"]) == 0
    return json.loads(out.getvalue())


@pytest.mark.full
def test_v3_has_its_published_size_and_cost(v3):
    parameters, flops = v3["parameters"], v3["flops_per_token"]
    assert parameters["total"] == pytest.approx(671.026e9, abs=0.5e6)
    assert parameters["active"] == pytest.approx(37.55e9, abs=5e6)
    assert flops["causal"] / 1e9 == pytest.approx(250.45, abs=0.005)
    assert flops["mtp"] / 1e9 == pytest.approx(10.19, abs=0.005)


def test_its_operators_add_up_to_its_flops(v3):
    """Those of a forward pass on meta, three times: the convention that backward is twice the forward."""
    told = v3["flops_per_token"]
    again = [each for each in v3["layers"] if "again for further tokens" in each["module"]]
    further = [*again, *(each for each in v3["layers"] if each["module"].startswith("mtp."))]
    forward = sum(each["number"] * each["flops"] for each in v3["layers"])
    assert 3 * forward == pytest.approx(told["model"], rel=1e-9)
    assert 3 * sum(each["flops"] for each in further) == pytest.approx(told["mtp"], rel=1e-9)
    work = v3["roofline"]["training"]["work"]
    assert sum(each["flops"] for each in work) == pytest.approx(told["model"] * 4096, rel=1e-9)
    counted = sum(each["number"] * each["parameters"] for each in v3["layers"])
    assert counted == v3["parameters"]["total"] + v3["parameters"]["mtp"]


def test_a_vocabulary_that_training_pads_calls_no_head_again(capsys):
    """GPT-2's 50,257 columns are padded to a multiple of 128."""
    assert main(["inspect", "gpt_125m", "--json"]) == 0
    assert not [each for each in json.loads(capsys.readouterr().out)["layers"] if "again" in each["module"]]


@pytest.mark.parametrize("name", ["laptop", "deepseek_4d"])
def test_a_config_says_what_the_layers_keep(name):
    """Against the cache that generation fills, in float32."""
    found = resolve_recipe(name)
    model = found.registry.build(found.recipe.model)
    part, cache = model.build(Part.whole(model.layers)).to_empty(device="cpu"), Cache(4)
    for parameter in part.parameters():
        parameter.data.zero_()
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    with torch.no_grad():
        part.eval()(tokens, Batch(tokens, cache=cache))
    assert 4 * cached_token_of(found.recipe.model.config).elements == cache.bytes_per_token


def test_it_caches_latents(v3):
    """arXiv 2505.09343, table 1."""
    assert v3["kv_cache"]["bytes_bfloat16"] == 70_272


def test_decode_reads_the_experts_that_a_batch_is_sent_to(v3):
    """One token: 8 of 256 experts, so decode reads little more than the weights that it computes with."""
    work = v3["roofline"]["decode"]["work"]
    (experts,) = [each for each in work if each["module"].endswith("moe.experts")]
    chosen = 58 * 8 * 3 * 7168 * 2048
    assert experts["bytes"] == pytest.approx(2 * chosen, rel=0.001)
    assert v3["roofline"]["decode"]["by_memory"] == pytest.approx(1.0)


def test_experts_make_the_parameters_and_not_the_flops(v3):
    moved = {each["key"]: each for each in v3["sensitivity"]}
    assert moved["model.experts"]["parameters"] > 0.1
    assert moved["model.experts"]["flops"] < 0.001
    assert moved["model.top_k"]["parameters"] == 0
    assert moved["model.top_k"]["flops"] > 0.05


@pytest.mark.full
def test_v2_lite(tmp_path, capsys):
    path = tmp_path / "lite.toml"
    path.write_text(
        'extends = "fragments/deepseek_v2_lite.toml"\n[run]\nname = "lite"\nsteps = 10\n'
        '[batch]\nsequences = 8\nmicrobatch = 1\nlength = 4096\n[data]\nuse = "synthetic"\nvocab = 128\n'
    )
    resolve_recipe(path)
    assert main(["inspect", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"]["total"] == pytest.approx(15.706e9, abs=0.5e6)
    assert found["flops_per_token"]["causal"] / 1e9 == pytest.approx(16.41, abs=0.005)
