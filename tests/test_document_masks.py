"""``mask_documents``: documents that share a sequence do not see one another, on any layout.

By definition a document alone in a sequence computes what it does among others: logits, losses, gradients.
"""

from itertools import pairwise

import numpy as np
import pytest
import torch
from as_one_process import assert_trains_as_one_process
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from nanotrain_core.batch import Batch, Shard
from nanotrain_core.builtin.configs import TextConfig
from nanotrain_core.contracts import Monitor
from nanotrain_core.data.order import document_starts
from nanotrain_core.data.text import Text
from nanotrain_core.data.text_survey import survey
from nanotrain_core.errors import DataError, RecipeError
from nanotrain_core.models import gpu_ops
from nanotrain_core.models.ops import attention
from nanotrain_core.testing import Case, run_ranks
from nanotrain_core.testing.probe import make_engine, make_run

END = 0
DEEPSEEK = {
    "use": "deepseek",
    "layers": 2,
    "width": 32,
    "heads": 4,
    "vocab": 256,
    "q_rank": 12,
    "kv_rank": 8,
    "nope_size": 6,
    "rope_size": 4,
    "value_size": 5,
    "ffn": 48,
    "experts": 4,
    "top_k": 2,
    "expert_ffn": 16,
    "dense_layers": 1,
}
LLAMA = {"use": "transformer", "layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "vocab": 256}
MOE = {**LLAMA, "use": "moe_transformer", "experts": 4, "top_k": 2, "expert_ffn": 16, "aux_loss_coeff": 0.0}
GPT = {**LLAMA, "kv_heads": 4, "positions": "learned", "max_length": 64, "norm": "layernorm", "bias": True}


def test_documents_begin_behind_the_token_that_ends_one():
    sequences = np.array([[5, 0, 6, 7, 0, 0, 8, 9], [0, 1, 2, 3, 4, 5, 6, 0]])
    assert document_starts(sequences, 0).tolist() == [[0, 0, 2, 2, 2, 5, 6], [0, 1, 1, 1, 1, 1, 1]]


def test_a_part_of_a_sequence_knows_where_its_documents_begin():
    tokens = torch.tensor([[5, 0, 6, 7, 0, 8, 9]])
    begins = torch.from_numpy(document_starts(tokens.numpy(), END))
    whole = Batch(tokens[:, :-1], tokens[:, 1:], document_starts=begins)
    assert whole.document_positions.tolist() == [[0, 1, 0, 1, 2, 0]]
    parts = [whole.part(index, 4) for index in range(4)]
    assert (
        torch.cat([part.document_positions for part in parts], 1).tolist()
        == whole.document_positions.tolist()
    )
    assert all(part.document_starts.tolist() == begins.tolist() for part in parts)
    (rows,) = whole.split(1)
    assert rows.document_starts.tolist() == begins.tolist()


def test_attention_of_documents_is_that_of_each_alone():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 9, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    begins = torch.tensor([[0, 0, 0, 3, 4, 4, 4, 4, 4]])
    each = [
        attention(q[:, part], k[:, part], v[:, part], 0.3) for part in (slice(3), slice(3, 4), slice(4, 9))
    ]
    torch.testing.assert_close(attention(q, k, v, 0.3, begins), torch.cat(each, 1), atol=1e-12, rtol=0)


def packed_and_alone(model):
    """Return the gradients of a packed sequence, and the sum of those of its documents, each by itself."""
    config = {key: value for key, value in model.items() if key != "use"}
    run = make_run(Case("model", use=model["use"], config=config).alone(), {})
    part = run.stages[0]
    random = np.random.default_rng(0)
    lengths = [7, 1, 12, 4]
    tokens = random.integers(1, 256, 25)
    for end in np.cumsum(lengths) - 1:
        tokens[end] = END
    whole = torch.from_numpy(tokens)[None]
    begins = torch.from_numpy(document_starts(whole.numpy(), END))
    edges = [0, *np.cumsum(lengths)]
    each = [Batch(whole[:, a:b], whole[:, a + 1 : b + 1]) for a, b in pairwise(edges)]
    found = []
    for batches in ([Batch(whole[:, :-1], whole[:, 1:], document_starts=begins)], each):
        part.zero_grad()
        losses = [part(batch.tokens, batch).losses for batch in batches]
        loss = sum(each[name] for each in losses for name in ("lm", "mtp") if name in each)
        loss.backward()
        grads = {name: p.grad.clone() for name, p in part.named_parameters() if p.grad is not None}
        found.append((loss.item(), grads))
    return found


@pytest.mark.parametrize(
    "model",
    [GPT, LLAMA, MOE, DEEPSEEK, DEEPSEEK | {"mtp": 2}],
    ids=["gpt", "llama", "moe", "deepseek", "mtp"],
)
def test_documents_in_one_sequence_train_as_each_by_itself(model):
    (loss, packed), (expected, alone) = packed_and_alone(model)
    assert loss == pytest.approx(expected, abs=1e-9)
    assert packed.keys() == alone.keys()
    for name, gradient in packed.items():
        torch.testing.assert_close(gradient, alone[name], atol=1e-9, rtol=0, msg=name)


@pytest.mark.parametrize("masked", [False, True])
def test_the_last_queries_get_what_they_get_in_the_whole_sequence(masked):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 9, *size, dtype=torch.float64) for size in ((4, 8), (2, 8), (2, 5)))
    begins = torch.tensor([[0, 0, 2, 3, 3, 3, 3, 7, 7], [0, 0, 0, 0, 0, 0, 6, 6, 6]]) if masked else None
    whole = attention(q, k, v, 0.3, begins)
    for begin, end in ((0, 1), (3, 4), (5, 9), (2, 7)):
        until = None if begins is None else begins[:, :end]
        found = attention(q[:, begin:end], k[:, :end], v[:, :end], 0.3, until)
        torch.testing.assert_close(found, whole[:, begin:end])


@pytest.mark.full
def test_what_a_gpu_computes_for_the_last_queries_is_the_same():
    """torch materializes its mask on a CPU; importing it takes seconds."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 9, *size, dtype=torch.float64) for size in ((4, 8), (2, 8), (2, 5)))
    for begin, end in ((0, 2), (5, 9), (2, 7)):
        leaves = [x.clone().requires_grad_() for x in (q[:, begin:end], k[:, :end], v[:, :end])]
        want = attention(*leaves, 0.3)
        found = gpu_ops.attention(*leaves, 0.3)
        torch.testing.assert_close(found, want)
        gradients = (torch.autograd.grad(y.square().sum(), leaves) for y in (want, found))
        torch.testing.assert_close(*gradients)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Documents of 1 to 40 bytes: most sequences of a batch have several, and some none that ends."""
    folder, random = tmp_path_factory.mktemp("files"), np.random.default_rng(1)
    for number, length in enumerate(random.integers(1, 41, 300)):
        text = "".join(map(chr, random.integers(97, 123, length)))
        (folder / f"{number:03d}.txt").write_text(text)
    return folder


TP, EP = {"use": "tp", "sequence_parallel": True}, {"use": "ep_deepseek"}
GATHER = {"use": "cp", "communication": "all_gather"}
RING = {"use": "cp", "communication": "ring"}
LAYOUTS = {
    "llama-tp2-pp2": (LLAMA, {"tp": 2, "pp": 2}, [TP]),
    "gpt-gather-cp2": (GPT, {"cp": 2}, [GATHER]),
    "llama-gather-cp4": ({**LLAMA, "kv_heads": 1}, {"cp": 4}, [GATHER]),
    "deepseek-gather-cp2": (DEEPSEEK, {"cp": 2}, [GATHER]),
    "llama-ring-cp3": ({**LLAMA, "kv_heads": 1}, {"cp": 3}, [RING]),
    "deepseek-ring-cp2-pp2": ({**DEEPSEEK, "mtp": 1}, {"cp": 2, "pp": 2}, [RING]),
    "deepseek-cp2": (DEEPSEEK, {"cp": 2}, [{"use": "cp"}]),
    "gpt-tp2": (GPT, {"tp": 2}, [TP]),
    "gpt-cp2": (GPT, {"cp": 2}, [{"use": "cp"}]),
    "gpt-dp2-pp2": (GPT, {"dp": 2, "pp": 2}, []),
    "llama-cp2-tp2": ({**LLAMA, "kv_heads": 4}, {"cp": 2, "tp": 2}, [TP, {"use": "cp"}]),
    "deepseek-pp2-tp2": (DEEPSEEK, {"pp": 2, "tp": 2}, [TP]),
    "deepseek-dp2-ep2": (DEEPSEEK, {"dp": 2, "ep": 2}, [EP]),
    "moe-cp2-ep2": (MOE | {"aux_loss_coeff": 0.1}, {"cp": 2, "ep": 2}, [{"use": "cp"}, EP]),
    "gpt-pp2": (GPT, {"pp": 2}, []),
    "deepseek-cp2-pp2": ({**DEEPSEEK, "mtp": 1}, {"cp": 2, "pp": 2}, [{"use": "cp"}]),
}
FIRST = ("llama-tp2-pp2", "deepseek-gather-cp2", "gpt-tp2")


@pytest.mark.full_cases("deepseek-gather-cp2")
@pytest.mark.parametrize(
    "name", [name if name in FIRST else pytest.param(name, marks=pytest.mark.full) for name in LAYOUTS]
)
def test_every_layout_trains_as_one_process(name, files):
    assert_trains_as_one_process(case_of(name, files))


def case_of(name, files):
    model, topology, wrappers = LAYOUTS[name]
    recompute = [{"use": "recompute"}] if name in ("gpt-cp2", "deepseek-pp2-tp2") else []
    return Case(
        "model",
        use=model["use"],
        config={key: value for key, value in model.items() if key != "use"},
        topology=topology,
        overrides={
            "parallel": [*wrappers, *recompute, {"use": "ddp"}],
            "data": masked(files),
            **({"schedule": {"use": "1f1b"}} if "pp" in topology else {}),
        },
        name=name,
    )


class Logits(Monitor):
    """Asks for logits of the new model, with and without documents."""

    def __init__(self, tokens, begins):
        self.tokens, self.document_starts = tokens, begins

    def on_start(self, run):
        self.found = run.logits(self.tokens, self.document_starts), run.logits(self.tokens)


def logits_of(case, tokens, begins):
    monitor = Logits(tokens, begins)
    make_engine(case, {"run": {"steps": 1}}, callbacks=[monitor]).fit()
    return monitor.found


@pytest.mark.parametrize(
    "name", ["gpt-pp2", "gpt-cp2", pytest.param("deepseek-cp2-pp2", marks=pytest.mark.full)]
)
def test_monitors_get_the_logits_of_documents_on_every_rank(name, files):
    case = case_of(name, files)
    tokens = torch.from_numpy(np.random.default_rng(0).integers(1, 256, (2, 12)))
    tokens[0, [4, 5]] = tokens[1, 9] = END
    begins = torch.from_numpy(document_starts(np.pad(tokens, ((0, 0), (0, 1))), END))
    (part,) = make_run(case.alone(), {}).stages.values()
    masked, plain = (part(tokens, Batch(tokens, document_starts=each)).value for each in (begins, None))
    for found in run_ranks(logits_of, case.world_size, case, tokens, begins):
        torch.testing.assert_close(found, (masked, plain), atol=1e-9, rtol=0)
    torch.testing.assert_close(masked[:, :5], plain[:, :5], atol=1e-9, rtol=0)
    assert (masked - plain)[0, 6:].abs().max() > 1e-3


def masked(files):
    return {"use": "text", "paths": [str(files)], "mask_documents": True}


def test_masks_change_what_is_trained(files):
    """Else the comparisons of this file would say nothing."""
    losses = []
    for mask in (False, True):
        data = Text(TextConfig(paths=(str(files),), mask_documents=mask))
        data.open(length=16, seed=0)
        batch = data.train_batch(8, Shard())
        run = make_run(Case("model", use="transformer", config={"vocab": 256}).alone(), {})
        losses.append(run.stages[0](batch.tokens, batch).losses["lm"].item())
        held = data.validation_batch(0, data.validation + 3, Shard())
        assert (held.document_starts is not None) == mask
        if mask:
            assert (batch.document_positions == 0).sum() > 8
            assert held.document_starts.shape == held.tokens.shape
    assert abs(losses[0] - losses[1]) > 1e-3


def test_a_model_that_knows_no_documents_is_refused_before_ranks_start(files):
    case = Case("model", use="routed", overrides={"data": masked(files)}, config={"vocab": 256})
    with pytest.raises(RecipeError, match=r"data 'text' needs document_masks; .*transformer"):
        case.recipe()


def test_a_tokenizer_that_ends_no_documents_is_refused_before_ranks_start(files, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(tmp_path / "words.json"))
    config = TextConfig(paths=(str(files),), mask_documents=True, tokenizer=str(tmp_path / "words.json"))
    (problem,) = survey(config, 4).problems
    assert problem.key == "data.mask_documents"
    assert "words.json has no token that ends documents" in problem.message
    with pytest.raises(DataError, match=r"words.json .* has no token that ends documents"):
        Text(config).open(length=4, seed=0)


class Calls(Monitor):
    """Keeps what attention of the first layer is called with."""

    def __init__(self):
        self.seen = []

    def on_start(self, run):
        run.observe_calls("attention", self.look, ["layers.0"])

    def look(self, name, q, k, v, scale=None, begins=None):
        self.seen.append((q.clone(), scale, begins.clone()))


@pytest.mark.full
@pytest.mark.parametrize(
    "model", [LLAMA, pytest.param(DEEPSEEK, marks=pytest.mark.full)], ids=["llama", "deepseek"]
)
def test_monitors_see_the_same_calls_of_attention_inside_of_a_graph(model, files):
    """Where documents begin is the last argument, after a scale that may be None: tracing it failed."""
    config = {key: value for key, value in model.items() if key != "use"}
    case = Case("model", use=model["use"], config=config).alone()
    found = []
    for compiled in (False, True):
        calls, run = Calls(), {"steps": 1, "compile": compiled, "compile_backend": "aot_eager"}
        changes = {"data": masked(files), "kernels": {"use": "torch"}, "run": run}
        make_engine(case, changes, callbacks=[calls]).fit()
        found.append(calls.seen)
    for (q, scale, begins), (same_q, same_scale, same_begins) in zip(*found, strict=True):
        assert begins.any()
        assert scale == same_scale
        assert torch.equal(begins, same_begins)
        torch.testing.assert_close(q, same_q)
