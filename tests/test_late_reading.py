"""Where the host would wait for the device a step reads nothing from there, and is learnt of one late."""

import pytest
import torch
from nanotrain_deepseek.samples import V3
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from nanotrain_core.contracts import Monitor, StepStats
from nanotrain_core.engine import RuntimeEngine
from nanotrain_core.errors import Diverged
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.models import ops
from nanotrain_core.run.divergence import MOST_SKIPPED
from nanotrain_core.run.step_readback import AsyncReadback, StepFlags, StepReadback
from nanotrain_core.run.stop import Rollback
from nanotrain_core.testing import Case, run_ranks
from nanotrain_core.testing.probe import make_engine

DDP = Case("parallel", use="ddp", topology={"dp": 2})
ADAMW = {"use": "adamw", "lr": 0.01, "clip_norm": 1.0}


# --- what travels -----------------------------------------------------------------------------------


def stats(norm, *, skipped):
    return StepStats(torch.tensor(norm, dtype=torch.float64), torch.tensor(skipped))


def requests(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def test_late_numbers_are_those_of_the_step_before():
    reading = StepReadback(late=True)
    assert reading.after(1, requests(0.0, 2.0), stats(3.5, skipped=False)) is None
    assert reading.after(2, requests(1.0, 0.0), stats(4.5, skipped=True)) == StepFlags(
        1, [0.0, 2.0], False, 3.5
    )
    assert reading.rest() == StepFlags(2, [1.0, 0.0], True, 4.5)
    assert reading.rest() is None
    reading.after(3, requests(0.0, 0.0), stats(1.0, skipped=False))
    reading.forget()
    assert reading.after(4, requests(0.0, 0.0), stats(1.0, skipped=False)) is None


def test_on_a_cpu_they_are_the_steps_own():
    reading = StepReadback(late=False)
    told = reading.after(1, requests(0.0, 2.0), StepStats(torch.tensor(3.5).double(), True))
    assert told == StepFlags(1, [0.0, 2.0], True, 3.5)
    assert reading.rest() is None


def test_only_a_cpu_is_read_at_once():
    mesh = make_engine(DDP.alone(), {}).run.mesh
    assert not mesh.device_is_async
    mesh.device = torch.device("cuda")
    assert mesh.device_is_async


# --- a run ------------------------------------------------------------------------------------------


class Losses(Monitor):
    """Keeps losses and requests to stop, or to go back, after a step."""

    def __init__(self, after=0, request=None):
        self.after, self.request, self.losses, self.skipped = after, request, {}, []

    def on_step(self, report):
        self.losses[report.step] = report.loss
        self.skipped.append(report.skipped)
        return self.request if report.step == self.after else None


def trained(case, changes, late, after=0, request=None, folder=None):
    """Return losses, the reason to end, steps done and weights."""
    with pytest.MonkeyPatch.context() as patched:
        if late:
            patched.setattr(Mesh, "device_is_async", True)
        engine = make_engine(case, {"run": {"steps": 8}, **changes}, folder=folder)
        seen = Losses(after, request)
        # one rank alone asks
        engine.events.monitors = [seen if engine.run.mesh.rank == 0 else Losses()]
        end = engine.fit()
        weights = [placed.parameter.detach().clone() for placed in engine.run.placed]
        return seen.losses, end.reason, end.step, weights


@pytest.mark.full_cases("fp32", "bf16")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_late_run_trains_the_same_bits(precision):
    changes = {"optimizer": ADAMW, "precision": {"use": precision}}
    for late, now in zip(
        run_ranks(trained, 2, DDP, changes, True), run_ranks(trained, 2, DDP, changes, False), strict=True
    ):
        assert late[:3] == now[:3]
        assert all(map(torch.equal, late[3], now[3]))


def test_all_ranks_stop_after_the_same_step_one_later_than_on_a_cpu():
    ends = [run_ranks(trained, 2, DDP, {}, late, 3, "stop") for late in (False, True)]
    assert [[end[1:3] for end in ranks] for ranks in ends] == [[("stopped", 4)] * 2, [("stopped", 5)] * 2]


def test_a_request_before_a_save_counts_at_once(tmp_path):
    """Late numbers of the step are read before, and all ranks agree anew."""
    changes = {"checkpoint": {"use": "simple", "every": 3}}
    ends = run_ranks(trained, 2, DDP, changes, True, 3, "stop", tmp_path)
    assert [end[1:3] for end in ends] == [("stopped", 3)] * 2


def test_a_run_goes_back_once(tmp_path):
    """What the steps before told is forgotten with them."""
    changes = {"run": {"steps": 8}, "checkpoint": {"use": "simple", "every": 2}}
    changes["monitor"] = [{"use": "jsonl"}]
    reports = run_ranks(rolled_back, 2, DDP, changes, tmp_path)
    assert reports == [[(6, 5, 4)]] * 2


class GoesBack(Losses):
    """Asks to go back once, and keeps what it is told of that."""

    def __init__(self, at):
        super().__init__()
        self.at, self.told = at, []

    def on_step(self, report):
        if report.step == self.at and not self.told:
            return Rollback(5, "test")
        return None

    def on_rollback(self, report):
        self.told.append((report.step, report.onset, report.restored))


def rolled_back(case, changes, folder):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Mesh, "device_is_async", True)
        engine = make_engine(case, changes, folder=folder)
        watch = GoesBack(5)
        engine.events.monitors = [watch]
        assert engine.fit().step == 8
        return watch.told


class Poison(Monitor):
    """Makes the loss of some steps NaN."""

    def __init__(self, first, last):
        self.steps = range(first, last + 1)

    def on_before_update(self, update):
        if update.step in self.steps:
            for piece in update.gradients():
                piece.tensor.fill_(float("nan"))


def given_up(steps, first, last, late):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Mesh, "device_is_async", late)
        engine = make_engine(DDP.alone(), {"optimizer": ADAMW, "run": {"steps": steps, "log_every": 100}})
        engine.events.monitors = [Poison(first, last)]
        try:
            engine.fit()
        except Diverged as problem:
            return str(problem), engine.step
        return "", engine.step


@pytest.mark.full_cases("True", "False")
@pytest.mark.parametrize("late", [False, True])
def test_after_thirty_skipped_steps_in_a_row_a_run_is_given_up(late):
    text, step = given_up(50, 3, 50, late)
    assert text.startswith(f"step 32: the gradient norm was nan for {MOST_SKIPPED} steps in a row")
    assert step == (32 if late else 31)
    assert given_up(50, 3, 31, late) == ("", 50)


@pytest.mark.full_cases("False")
@pytest.mark.parametrize("late", [False, True])
def test_a_run_whose_last_steps_are_skipped_is_given_up_too(late):
    text, _ = given_up(32, 3, 32, late)
    assert text.startswith(f"step 32: the gradient norm was nan for {MOST_SKIPPED} steps in a row")


# --- no number is read ------------------------------------------------------------------------------

#: Operators that read a number of a device, or of which the size of the result has to be read from there.
READS = ("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "unique", "_unique2")


class Count(TorchDispatchMode):
    """Counts operators that wait for the device."""

    def __init__(self, found):
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name().removeprefix("aten::").partition(".")[0]
        if name in READS:
            self.found.append(name)
        return function(*args, **(kwargs or {}))


class CountCalls(TorchFunctionMode):
    """Counts calls that read a tensor: on a CPU ``tolist`` is no operator."""

    NAMES = ("tolist", "item", "numpy", "__bool__", "__int__", "__float__", "__index__")

    def __init__(self, found):
        super().__init__()
        self.found = found

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__name__", "") in self.NAMES:
            self.found.append(function.__name__)
        return function(*args, **(kwargs or {}))


def without_counts(rows_NK, weight_ENK, counts_E):
    """Multiply as a GPU's grouped kernel does: without asking how many rows an expert has."""
    experts = torch.arange(len(counts_E), device=counts_E.device).repeat_interleave(
        counts_E, output_size=len(rows_NK)
    )
    return torch.einsum("nk,nok->no", rows_NK, weight_ENK[experts])


def reads(case, changes):
    """Return what is read in the steps between two reports, in each, and the losses reported."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Mesh, "device_is_async", True)
        patched.setattr(ops, "grouped_linear", without_counts)
        changes = {**changes, "run": {"steps": 8, "log_every": 8}}
        engine = make_engine(case, changes)
        losses = Losses()
        engine.events.monitors = [losses]
        found, step, read = [], engine._train_step, AsyncReadback.read

        def arrived(sent):
            """What is on the host by then is no device's."""
            with torch._C.DisableTorchFunction(), torch.utils._python_dispatch._disable_current_modes():
                return read(sent)

        def watched():
            found.append([])
            with Count(found[-1]), CountCalls(found[-1]):
                return step()

        patched.setattr(AsyncReadback, "read", arrived)
        patched.setattr(engine, "_train_step", watched)
        engine.fit()
        assert len(found) == 8
        return found[2:], losses.losses


SGD = {"use": "sgd", "lr": 0.1, "momentum": 0.9, "clip_norm": 1.0}
MODELS = {
    "dense": {},
    "experts": {**V3, "use": "deepseek", "bias_update_rate": 0.01, "init_std": 0.3},
}


@pytest.mark.full_cases("dense-fp32-optimizer0")
@pytest.mark.parametrize("optimizer", [ADAMW, pytest.param(SGD, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("model", "precision"),
    [
        ("dense", "fp32"),
        ("dense", "bf16"),
        ("experts", "bf16"),
        pytest.param("experts", "fp32", marks=pytest.mark.full),
    ],
)
def test_a_step_reads_nothing(model, precision, optimizer):
    changes = {"precision": {"use": precision}, "optimizer": optimizer, "kernels": {"use": "torch"}}
    if MODELS[model]:
        changes["model"] = MODELS[model]
    found, _ = reads(DDP.alone(), changes)
    assert found == [[]] * 6


@pytest.mark.parametrize("use", ["adamw", "zero12"])
def test_a_step_of_several_ranks_reads_nothing(use):
    case = Case("optimizer", use="zero12", topology={"dp": 2}) if use == "zero12" else DDP
    changes = {"optimizer": {**ADAMW, "use": use}, "precision": {"use": "bf16"}, "kernels": {"use": "torch"}}
    for found, _ in run_ranks(reads, 2, case, changes, check_collectives=False):
        assert found == [[]] * 6


def test_what_is_counted_is_seen():
    """On a CPU a step reads the norm and the requests; a loss scale has the host read on a device too."""
    changes = {"optimizer": ADAMW, "precision": {"use": "fp16"}, "kernels": {"use": "torch"}}
    found, _ = reads(DDP.alone(), changes)
    assert all("_local_scalar_dense" in step or "__bool__" in step for step in found)


# --- on a GPU ---------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("optimizer", [ADAMW, {"use": "sgd", "lr": 0.1, "momentum": 0.9, "clip_norm": 1.0}])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("model", MODELS)
def test_no_step_on_a_gpu_waits_for_it(model, precision, optimizer, monkeypatch):
    """torch itself raises where a step waits. Experts in float32 ask for their counts."""
    if model == "experts" and precision == "fp32":
        monkeypatch.setattr(ops, "grouped_linear", without_counts)
    changes = {"precision": {"use": precision}, "optimizer": optimizer, "run": {"steps": 8, "log_every": 8}}
    case = Case("optimizer", use=optimizer["use"], overrides=changes)
    if MODELS[model]:
        changes["model"] = MODELS[model]
    recipe = case.recipe(**{**changes, "run": {**changes["run"], "device": "cuda"}})
    engine = RuntimeEngine.from_recipe(recipe, registry=case.registry(), device="cuda")
    step = engine._train_step

    def strict():
        if engine.step < 2:
            return step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            return step()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(engine, "_train_step", strict)
    assert engine.fit().step == 8
