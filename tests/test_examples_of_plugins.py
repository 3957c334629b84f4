"""The plugins of docs/examples/plugins pass every check, and do what they are there for."""

import http.server
import json
import math
import re
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import attrs
import numpy as np
import pytest
import torch
from as_one_process import assert_trains_as_one_process
from compositions import CONTEXT_PARALLEL, MODELS
from test_docs import failed

from nanotrain_core.api import Exit
from nanotrain_core.cli import main
from nanotrain_core.contracts import EndReport, MetricsReport
from nanotrain_core.errors import DataError, NanotrainError, PluginError, RecipeError
from nanotrain_core.pipeline.simulator import simulate
from nanotrain_core.testing import Case, RankFailure, run_ranks
from nanotrain_core.testing.checks.schedule import microbatch_counts
from nanotrain_core.testing.compare import assert_same, whole
from nanotrain_core.testing.probe import make_engine, train, weights

PLUGINS = Path(__file__).parents[1] / "docs/examples/plugins"
ALIBI = {"layers": 2, "heads": 4, "head_size": 8, "vocab": 64}
TP = {"parallel": [{"use": "tp"}, {"use": "summed"}]}


def example(kind, use, **options):
    return Case(kind, use=use, plugins=[PLUGINS / f"{use}.py"], **options)


@pytest.mark.parametrize("path", sorted(PLUGINS.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_short(path):
    assert len(path.read_text().splitlines()) <= 130


def slopes(case):
    engine = make_engine(case, {})
    parts = engine.run.stages.values()
    return [buffer.tolist() for part in parts for _, buffer in part.named_buffers()]


def test_each_rank_has_the_slopes_of_its_heads():
    case = example("model", "alibi", config=ALIBI, topology={"tp": 2}, overrides=TP)
    expected = [0.25, 0.0625, 0.015625, 0.00390625]
    assert run_ranks(slopes, 2, case) == [[expected[:2]] * 2, [expected[2:]] * 2]


def test_alibi_with_tensor_parallelism_trains_as_one_process_does():
    model = {"model": {"use": "alibi", **ALIBI}}
    case = example("model", "alibi", config=ALIBI)
    wrapped = attrs.evolve(case, kind="parallel", use="tp", config={}, topology={"tp": 2}, world_size=2)
    wrapped = attrs.evolve(wrapped, overrides={**model, "parallel": [{"use": "summed"}]})
    assert failed(wrapped, "gradients_equal[fp64]") == {}


@pytest.mark.full
def test_alibi_passes_every_check():
    assert failed(example("model", "alibi", config=ALIBI)) == {}


def whole_per_head(case):
    """Return what a wrapper is told that leaves what each head has an entry of as it is."""
    import nanotrain_core.testing.sliced_layers as sliced

    rows = sliced.slice_parameter
    sliced.slice_parameter = lambda module, key, *rest: rows(module, key, *rest) if key != "slopes" else None
    try:
        make_engine(case, {})
    except PluginError as error:
        return str(error)
    finally:
        sliced.slice_parameter = rows


def test_a_wrapper_that_leaves_an_entry_for_each_head_whole_is_refused():
    around = {"parallel": [{"use": "sliced"}, {"use": "summed"}]}
    case = example("model", "alibi", config=ALIBI, topology={"tp": 2}, overrides=around)
    for told in run_ranks(whole_per_head, 2, case):
        assert told.startswith("layers.0.alibi.slopes has an entry for each head, and is whole along tp")


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("def constant(self, name)", "def other(self, name)", "give the part a method constant(name)"),
        (
            "for head in range(config.heads)]",
            "for head in range(3)]",
            "returned shape (3,); expected a tensor (4,)",
        ),
        ("return torch.tensor([2", "return list([2", "returned list; expected a tensor (4,)"),
    ],
)
def test_a_buffer_of_which_the_part_has_no_numbers_is_refused(tmp_path, old, new, told):
    source = (PLUGINS / "alibi.py").read_text()
    assert old in source
    path = tmp_path / "without_numbers.py"  # its name is the module's: alibi.py is loaded already
    path.write_text(source.replace(old, new))
    case = Case("model", use="alibi", config=ALIBI, plugins=[path])
    with pytest.raises(PluginError) as caught:
        make_engine(case, {})
    assert "layers.0.alibi.slopes" in str(caught.value)
    assert told in str(caught.value)


def roles(case):
    run = make_engine(case, {}).run
    return {
        placed.placement.name: placed.placement.role and placed.placement.role.name for placed in run.placed
    }


def test_placements_say_the_roles_of_parameters_on_every_layout():
    alone = roles(example("model", "alibi", config=ALIBI))
    assert alone["embed.weight"] == "VOCAB"
    assert alone["head.weight"] == "HEAD"
    assert alone["layers.0.q.weight"] == "COLUMN"
    assert alone["layers.1.norm_1.weight"] == "NORM"
    case = example("model", "alibi", config=ALIBI, topology={"tp": 2}, overrides=TP)
    assert run_ranks(roles, 2, case) == [alone, alone]


# --- muon -------------------------------------------------------------------------------------------


def blocks_of_state(case):
    """Return (name, elements) of each tensor of the optimizer's state on this rank, after a step."""
    engine = make_engine(case, {"run": {"steps": 1}})
    engine.fit()
    return [(block.name, block.tensor.numel()) for block in engine.run.optimizer.blocks()]


def elements(found, slot):
    return sum(count for name, count in found if name.startswith(f"{slot}/"))


def test_embeddings_and_head_have_moments_and_matrices_a_momentum():
    (found,) = run_ranks(blocks_of_state, 1, example("optimizer", "muon"))
    slots = {name.partition("/")[2]: name.partition("/")[0] for name, _ in found}
    assert slots["embed.weight"] == slots["head.weight"] == slots["norm.weight"] == "exp_avg_sq"
    assert slots["layers.0.attn.q.weight"] == slots["layers.1.ffn.down.weight"] == "momentum"


def test_zero12_shards_the_state_of_an_optimizer_that_knows_nothing_of_it():
    sharded = example("optimizer", "muon", topology={"dp": 2}, overrides={"parallel": [{"use": "zero12"}]})
    (whole,) = run_ranks(blocks_of_state, 1, example("optimizer", "muon"))
    for slot in ("momentum", "exp_avg"):
        halves = [elements(found, slot) for found in run_ranks(blocks_of_state, 2, sharded)]
        assert sum(halves) == elements(whole, slot)
        assert max(halves) < 0.6 * sum(halves)


@pytest.mark.parametrize(
    ("topology", "wrappers"),
    [
        ({"dp": 2}, [{"use": "zero12"}]),
        pytest.param({"dp": 2}, [{"use": "zero12", "stage": 2, "bucket_mb": 0.01}], marks=pytest.mark.full),
        pytest.param({"tp": 2}, [{"use": "tp"}], marks=pytest.mark.full),
        pytest.param({"dp": 2, "tp": 2}, [{"use": "tp"}, {"use": "zero12"}], marks=pytest.mark.full),
        pytest.param({"dp": 2, "pp": 2}, [{"use": "zero12"}], marks=pytest.mark.full),
    ],
    ids=["zero1", "zero2", "tp", "tp x zero1", "pp x zero1"],
)
def test_muon_gives_every_layout_the_weights_of_one_process(topology, wrappers):
    around = {"parallel": wrappers, **({"schedule": {"use": "1f1b"}} if "pp" in topology else {})}
    case = example("optimizer", "muon", config={"lr": 0.02}, topology=topology, overrides=around)
    assert failed(case, "layout_changes_nothing") == {}


@pytest.mark.full
@pytest.mark.parametrize("topology", [{}, {"dp": 2}], ids=["alone", "zero1"])
def test_muon_passes_every_check(topology):
    around = {"parallel": [{"use": "zero12"}]} if topology else {}
    assert failed(example("optimizer", "muon", topology=topology, overrides=around)) == {}


# --- torch_ddp --------------------------------------------------------------------------------------

STAGED = {"schedule": {"use": "1f1b"}, "model": {"use": "transformer", "tied": True}}


def torch_ddp(topology, *beside, **around):
    """Return a case with several buckets on each rank."""
    overrides = {**around, "parallel": [*beside, {"use": "torch_ddp", "bucket_mb": 0.01}]}
    return example(
        "parallel", "torch_ddp", config={"bucket_mb": 0.01}, topology=topology, overrides=overrides
    )


def test_ddp_of_torch_sums_gradients_of_all_ranks_those_of_one_alone_included():
    labels = ("gradients_equal[fp64]", "weights_equal[adamw]", "unused_parameter_does_not_hang[on_one_rank]")
    assert failed(torch_ddp({"dp": 2}), *labels) == {}


@pytest.mark.full
@pytest.mark.parametrize(
    ("topology", "beside", "around"),
    [
        ({"dp": 2}, [], {}),
        ({"dp": 4}, [], {}),
        ({"dp": 2, "pp": 2}, [], STAGED),
        ({"dp": 2, "pp": 2}, [], {"schedule": {"use": "zb_h1"}}),
        ({"dp": 2, "tp": 2}, [{"use": "tp"}], {}),
    ],
    ids=["dp2", "dp4", "tied across stages", "W passes", "tp"],
)
def test_ddp_of_torch_passes_every_check(topology, beside, around):
    assert failed(torch_ddp(topology, *beside, **around)) == {}


def update(case, changes):
    engine = make_engine(case, changes)
    engine.fit()
    return torch.cat([block.tensor.flatten() for block in weights(engine.run)])


def test_compressed_gradients_are_near_and_not_the_same():
    changes = {"run": {"steps": 1}, "optimizer": {"use": "sgd", "lr": 0.1}}
    plain = torch_ddp({"dp": 2})
    narrow = {"use": "torch_ddp", "compress": "fp16"}
    (exact, _), (sent, _) = (
        run_ranks(update, 2, plain, {**changes, **more}) for more in ({}, {"parallel": [narrow]})
    )
    assert not torch.equal(sent, exact)
    torch.testing.assert_close(sent, exact, atol=1e-3, rtol=0)


def test_gradients_wider_than_their_parameters_are_refused_by_name():
    with pytest.raises(
        RankFailure, match=r"torch_ddp: .* is torch.bfloat16, and its gradient to be torch.float32"
    ):
        run_ranks(update, 2, torch_ddp({"dp": 2}), {"precision": {"use": "bf16"}})


@pytest.mark.parametrize(
    ("use", "instead"), [("torch_ddp", "plan with ddp"), ("fsdp2", "plan with zero12's stage 2")]
)
def test_a_plan_of_what_cannot_run_dry_is_refused_with_what_to_plan_in_its_place(capsys, use, instead):
    told = ["--set", f"parallel.0.use={use}", "--plugin", str(PLUGINS / f"{use}.py"), "--ranks", "2"]
    assert main(["plan", "laptop", *told]) == Exit.USER
    assert re.fullmatch(rf"nanotrain: {use}: .* on no meta device: {instead}\n", capsys.readouterr().err)


# --- fsdp2 ------------------------------------------------------------------------------------------

EXPERTS = {"model": {"use": "routed"}, "batch": {"sequences": 8}}


def fsdp2(topology, *beside, **around):
    around["parallel"] = [*beside, {"use": "fsdp2"}]
    return example("parallel", "fsdp2", topology=topology, overrides=around)


def held(case):
    """Return the elements of weights, and of each of AdamW's moments, that this rank has."""
    engine = make_engine(case, {"run": {"steps": 1}})
    engine.fit()
    moments = [block.tensor.numel() for block in engine.run.optimizer.blocks() if "exp_avg_sq" in block.name]
    return sum(placed.parameter.numel() for placed in engine.run.placed), sum(moments)


def test_each_rank_holds_its_share_of_weights_and_of_their_state():
    (whole_model,) = run_ranks(held, 1, fsdp2({}))
    shares = run_ranks(held, 4, fsdp2({"dp": 4}))
    assert tuple(map(sum, zip(*shares, strict=True))) == whole_model
    assert max(share for each in shares for share in each) < 0.3 * whole_model[0]


def test_fully_shard_of_torch_trains_as_one_process_does():
    labels = ("weights_equal[adamw]", "unused_parameter_does_not_hang[on_one_rank]")
    assert failed(fsdp2({"dp": 2}), *labels) == {}


def trained_on(ranks, folder, checkpoint="simple", **options):
    around = {"optimizer": {"use": "adamw", "lr": 0.01}, "checkpoint": {"use": checkpoint}}
    case = fsdp2({"dp": ranks}, **around)
    traces = run_ranks(train, ranks, case, {"run": {"steps": 4}}, folder=folder, save_at=2, **options)
    return whole([trace.weights for trace in traces]), whole([trace.state for trace in traces])


@pytest.mark.parametrize(
    ("saver", "loader", "checkpoint"),
    [
        (2, 1, "simple"),
        pytest.param(1, 2, "simple", marks=pytest.mark.full),
        pytest.param(4, 2, "sharded_v2", marks=pytest.mark.full),
        pytest.param(1, 4, "sharded_v2", marks=pytest.mark.full),
    ],
)
def test_a_checkpoint_of_shards_opens_on_any_number_of_ranks(tmp_path, saver, loader, checkpoint):
    saved = trained_on(saver, tmp_path, checkpoint)
    resumed = trained_on(loader, tmp_path, checkpoint, resume="2")
    for what, one, other in zip(("weights", "state"), saved, resumed, strict=True):
        assert_same(other, one, f"{what} after resuming", atol=1e-9)


@pytest.mark.full
@pytest.mark.parametrize(
    ("topology", "beside", "around"),
    [
        ({"dp": 2}, [], {}),
        ({"dp": 4}, [], {}),
        ({"dp": 2, "tp": 2}, [{"use": "tp"}], {}),
        ({"dp": 2, "pp": 2}, [], STAGED),
        ({"dp": 2, "ep": 2}, [{"use": "ep_deepseek"}], EXPERTS),
        ({"dp": 4, "ep": 2}, [{"use": "ep_deepseek"}], EXPERTS),
        ({"dp": 2}, [{"use": "recompute"}], {}),
    ],
    ids=["dp2", "dp4", "tp", "tied across stages", "experts", "experts in shards", "recompute"],
)
def test_fully_shard_of_torch_passes_every_check(topology, beside, around):
    assert failed(fsdp2(topology, *beside, **around)) == {}


@pytest.mark.full
def test_shards_beside_w_passes_are_refused_by_name():
    with pytest.raises(RankFailure, match=r"fsdp2: .* no W passes"):
        run_ranks(update, 4, fsdp2({"dp": 2, "pp": 2}, schedule={"use": "zb_h1"}), {})


# --- steps that are broken off ----------------------------------------------------------------------


def goes_on(case):
    """Return the weights of three steps, of which the second was broken off in its last backward pass."""
    engine, passes, backward = make_engine(case, {}), [], torch.autograd.backward

    def breaks_off(*args):
        passes.append(args)
        if len(passes) == 4:  # of two in each step
            raise RuntimeError("broken off")
        backward(*args)

    with mock.patch.object(torch.autograd, "backward", breaks_off):
        with pytest.raises(RuntimeError, match="broken off"):
            engine.fit()
        engine.fit()
    return torch.cat([block.tensor.flatten() for block in weights(engine.run)])


def test_ddp_of_torch_forgets_a_step_that_was_broken_off():
    """Its reducer summed the first microbatch of the next step, and that sum once more with the last."""
    summed = attrs.evolve(torch_ddp({"dp": 2}), use="summed", config={}, overrides={})
    (ours, _), (plain, _) = (run_ranks(goes_on, 2, case) for case in (torch_ddp({"dp": 2}), summed))
    torch.testing.assert_close(ours, plain, atol=1e-12, rtol=0)


def test_fully_shard_of_torch_refuses_to_go_on_after_a_step_that_was_broken_off():
    """It keeps gradients of layers, and those of embedding and head are never sent."""
    with pytest.raises(RankFailure, match="fsdp2: a step was broken off"):
        run_ranks(goes_on, 2, fsdp2({"dp": 2}))


# --- torch_pipelining -------------------------------------------------------------------------------


def pipelined(order, pp=2):
    model = {"layers": 4 * pp}
    around = {"model": model, "parallel": [{"use": "summed"}]}
    return example(
        "schedule", "torch_pipelining", config={"order": order}, topology={"pp": pp}, overrides=around
    )


@pytest.mark.parametrize(("order", "like"), [("GPipe", "gpipe"), ("Interleaved1F1B", "interleaved_1f1b")])
def test_an_order_of_torch_leaves_the_idle_time_of_ours(order, like):
    idle = []
    for case in (pipelined(order, 4), Case("schedule", use=like, topology={"pp": 4})):
        idle.append(simulate(case.build().actions(4, 8)).bubble())
    assert idle[0] == idle[1]


@pytest.mark.parametrize(
    "order",
    [
        "ZBVZeroBubble",
        *(
            pytest.param(order, marks=pytest.mark.full)
            for order in ("GPipe", "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "DualPipeV")
        ),
    ],
)
def test_an_order_of_torch_gives_the_gradients_of_one_process(order):
    assert failed(pipelined(order), "every_pass_happens_once", "uneven_stages_train_alike") == {}


@pytest.mark.full
@pytest.mark.parametrize("pp", [2, 4])
def test_orders_of_torch_pass_every_check(pp):
    assert failed(pipelined("ZBVZeroBubble", pp)) == {}


def test_the_harness_leaves_out_numbers_of_microbatches_without_a_schedule():
    case = pipelined("DualPipeV", 4)
    with pytest.raises(ValueError, match="at least as many microbatches as stages"):
        case.build().actions(4, 7)
    assert microbatch_counts(case) == [9, 18]


# --- npy --------------------------------------------------------------------------------------------


def tokens_in(path, tokens):
    np.save(path, tokens)
    around = {"batch": {"length": 16}}
    return example("data", "npy", config={"path": str(path), "vocab": 64}, overrides=around)


def test_tokens_of_a_file_pass_every_check(tmp_path):
    rng = np.random.default_rng(3)
    assert failed(tokens_in(tmp_path / "tokens.npy", rng.integers(0, 64, 3000, dtype=np.uint16))) == {}


@pytest.mark.parametrize(
    ("tokens", "told"),
    [
        (
            np.zeros((2, 3), dtype=np.int64),
            "expected whole numbers in one dimension, got int64 of shape (2, 3)",
        ),
        (np.zeros(300), "expected whole numbers in one dimension, got float64 of shape (300,)"),
        (np.full(3000, 64), "token 64; expected 0 to 63"),
        (None, "there is no file"),
    ],
)
def test_a_file_that_has_no_tokens_is_refused(tmp_path, tokens, told):
    case = tokens_in(tmp_path / "tokens.npy", np.zeros(3) if tokens is None else tokens)
    if tokens is None:
        (tmp_path / "tokens.npy").unlink()
    with pytest.raises(DataError) as caught:
        make_engine(case, {}).fit()
    assert told in str(caught.value)


# --- cp ---------------------------------------------------------------------------------------------
# That it trains as one process does, with everything else, is in the composition matrix.


def sharing(topology, **around):
    wrappers = {"parallel": [{"use": "cp"}, *around.pop("parallel", ())]}
    overrides = {**around, **wrappers}
    return Case("topology", use="grid", topology=topology, overrides=overrides, plugins=[CONTEXT_PARALLEL])


@pytest.mark.parametrize(
    ("topology", "around", "told"),
    [
        (
            {"cp": 2},
            {"model": {"heads": 6, "width": 48, "kv_heads": 3}},
            "model.kv_heads: 3 key and value heads do not divide by cp = 2; cp could be 1 or 3, "
            "their number 2 or 4",
        ),
        (
            {"cp": 4, "tp": 2},
            {"parallel": [{"use": "tp"}]},
            "model.heads: 4 heads do not divide by tp x cp = 8; tp x cp could be 4, their number 8",
        ),
        (
            {"cp": 4, "dp": 2},
            {"batch": {"length": 3}},
            "batch.length: 3 tokens are fewer than cp = 4 ranks, which share each sequence; nearest: 4",
        ),
    ],
    ids=["key and value heads", "heads of tp", "tokens"],
)
def test_what_cp_does_not_divide_is_refused_before_ranks_start(topology, around, told):
    with pytest.raises(RecipeError) as caught:
        sharing(topology, **around).recipe()
    assert told in caught.value.lines


def refused(case):
    with pytest.raises(NanotrainError) as caught:
        make_engine(case, {"run": {"steps": 1}}).fit()
    return str(caught.value)


def test_a_model_whose_attention_is_its_own_is_refused_in_the_first_step():
    """No token would see those of other ranks."""
    case = sharing({"cp": 2}, model={"use": "alibi", **ALIBI})
    case = attrs.evolve(case, plugins=[*case.plugins, PLUGINS / "alibi.py"])
    assert run_ranks(refused, 2, case) == ["cp: 2 layers called ops.attention 0 times"] * 2


@pytest.mark.full
@pytest.mark.parametrize(
    ("topology", "around"),
    [
        (
            {"cp": 2, "tp": 2},
            {"model": {**MODELS["transformer"], "kv_heads": 12}, "parallel": [{"use": "tp"}]},
        ),
        ({"cp": 4}, {"model": {"positions": "learned", "max_length": 16, "tied": True}}),
        (
            {"cp": 2, "dp": 2},
            {"model": {"rope_scaling": {"type": "dynamic", "factor": 2.0, "original_length": 8}}},
        ),
    ],
    ids=["grouped heads of tp", "learned positions", "angles of the whole length"],
)
def test_cp_with_more_models_trains_as_one_process(topology, around):
    model = {"data": {"vocab": 33}} if "parallel" in around else {}
    assert_trains_as_one_process(sharing(topology, **model, **around))


@pytest.mark.full
def test_cp_passes_every_check():
    assert failed(example("parallel", "cp", topology={"cp": 2})) == {}


# --- webhook ----------------------------------------------------------------------------------------


class Answers(http.server.BaseHTTPRequestHandler):
    """Keeps the bodies that it is sent; answers 503 as often as its server says."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.away -= 1
        if self.server.away < 0:
            self.server.bodies.append(body)
        self.send_response(200 if self.server.away < 0 else 503)
        self.end_headers()

    def log_message(self, *_):
        """Say nothing."""


@pytest.fixture
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        server.bodies, server.away = [], 0
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        server.url = f"http://127.0.0.1:{server.server_port}/hook"
        yield server
        server.shutdown()


def test_what_a_run_reports_is_posted_in_order(server):
    engine = make_engine(example("monitor", "webhook", config={"url": server.url}), {})
    engine.fit()
    rows = [row for body in server.bodies for row in body["rows"]]
    assert [(row["event"], row["step"]) for row in rows] == [
        ("start", 0),
        ("metrics", 1),
        ("metrics", 2),
        ("metrics", 3),
        ("end", 3),
    ]
    assert {body["run"] for body in server.bodies} == {"conformance"}
    assert all(math.isfinite(row["values"]["loss"]) for row in rows[1:4])
    assert rows[-1]["reason"] == "done"


def test_rows_wait_for_a_server_that_is_away_and_those_lost_are_counted(server):
    server.away = 2
    sink = example("monitor", "webhook", config={"url": server.url, "waiting": 2}).build()
    sink.open(SimpleNamespace(name="mine", first_step=0, steps=9, world_size=1))
    for step in (1, 2):
        with pytest.raises(OSError, match="503"):
            sink.write(MetricsReport(step, {"loss": math.nan}))
    sink.write(MetricsReport(3, {"loss": 2.0}))
    sink.finish(EndReport(3, "done", 99))
    first, last = server.bodies
    assert first["lost"] == 2
    assert [(row["step"], row["values"]["loss"]) for row in first["rows"]] == [(2, "NaN"), (3, 2.0)]
    assert (last["lost"], [row["event"] for row in last["rows"]]) == (0, ["end"])


def test_an_address_that_is_none_is_refused():
    with pytest.raises(
        RecipeError, match=r"monitor\.0\.url: 'somewhere' is no address; expected https://host/path"
    ):
        example("monitor", "webhook", config={"url": "somewhere"}).recipe()


@pytest.mark.full
def test_webhook_passes_every_check(server):
    assert failed(example("monitor", "webhook", config={"url": server.url}, topology={"dp": 2})) == {}
