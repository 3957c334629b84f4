"""Replays the forward and backward pass of a microbatch from a CUDA graph, captured once for one shape.

The host may need longer to launch the kernels of a small model one by one than the GPU to run them; a graph
launches all of them at once. It repeats the same kernels on the same addresses. Each microbatch is therefore
copied into the memory of the captured one, and gradients are accumulated in persistent tensors. What Python
code does in a pass is done before or after a replay: waiting for weights in flight, adding up losses, and
passing routers their loads.

A microbatch is not replayed if its shape is not that of the step's first one, if monitors observe the step,
or if it is the last one and gradients are reduced during its backward pass.

Source: torch's notes on CUDA graphs, "whole network capture"; Megatron-LM captures iterations likewise.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import attrs
import structlog
import torch
from torch import nn

from nanotrain_core.batch import Batch
from nanotrain_core.errors import NanotrainError, in_one_line
from nanotrain_core.moe.routing import counting_routers
from nanotrain_core.pipeline.actions import Action
from nanotrain_core.pipeline.executor import Executor, Losses, add_losses

T = TypeVar("T")

#: Microbatches that run eagerly before one is captured: layers are compiled, libraries choose kernels.
WARM_UP = 2
#: Steps without a replay after which a warning is logged.
PATIENCE = 30

_log = structlog.get_logger()


class CUDAGraph:
    """A sequence of kernels of a GPU that can be run again."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._graph = device, torch.cuda.CUDAGraph()

    def capture(self, work: Callable[[], T]) -> T:
        """Record the kernels of ``work`` without running them; return its result, computed by each replay.

        Other threads, which copy batches to the GPU, continue meanwhile.

        Raises:
            RuntimeError: raised by ``work`` if it cannot be captured; or it launched no kernels.
        """
        raised: list[Exception] = []

        def noted() -> T:
            try:
                return work()
            except Exception as problem:  # ending the capture raises another error, without the cause
                raised.append(problem)
                raise

        gc.collect()  # an autograd graph that is still alive would involve another stream
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        try:
            with (
                torch.cuda.device(self.device),
                torch.cuda.stream(torch.cuda.current_stream(self.device)),  # restored if a capture fails
                warnings.catch_warnings(),
                torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"),
            ):
                warnings.filterwarnings("error", message=".*CUDA Graph is empty")
                return noted()
        except UserWarning as problem:
            raise RuntimeError(f"{problem}") from problem
        except Exception:
            if raised:
                raise raised[0] from None
            raise

    def replay(self) -> None:
        """Run the captured kernels on the current stream."""
        self._graph.replay()


@attrs.define(frozen=True, eq=False)
class Captured:
    """A captured microbatch."""

    graph: CUDAGraph
    batch: Batch
    """The tensors that the graph reads."""
    losses: Losses
    """What the last replay computed."""
    loads: Mapping[str, torch.Tensor]
    """Tokens of each expert [E] in the last replay, by router."""
    addresses: Sequence[int]
    """Addresses of weights, buffers and gradients, which the graph reads and writes."""


class CapturingExecutor(Executor):
    """An executor for one stage, whose microbatches go forward and then backward in turn."""

    def __init__(
        self,
        *args: Any,
        weights_ready: Callable[[], None] = lambda: None,
        **kwargs: Any,
    ) -> None:
        """Capture nothing yet.

        Args:
            args: as for :class:`Executor`.
            weights_ready: waits for weights that the optimizer's last step left in flight.
            kwargs: as for :class:`Executor`.
        """
        super().__init__(*args, **kwargs)
        self.weights_ready = weights_ready
        self._own_gradients: dict[nn.Parameter, torch.Tensor] = {}
        self._routers = counting_routers(self.stages.values())
        self._last_is_eager = self.gradients.needs_gradient_hooks
        """Whether gradients are reduced while the last microbatch's backward pass runs."""
        self._captured: Captured | None = None
        self._factors = torch.empty(0)
        self._key: Any = None
        """The properties that captured passes depend on, besides tensor values and addresses."""
        self.steps = self.replays = 0
        """Number of steps, and number of replayed microbatches."""
        self._eager: Counter[str] = Counter()
        """The number of microbatches that ran eagerly, by the reason why they were not replayed."""
        self._model: Any = None
        """The model's trained parameters and hooks, which a script or a monitor's ``on_start`` may change."""
        self.check_model()

    def check_model(self) -> None:
        """Check the model at the next step, after monitors have installed their hooks."""
        self._unchecked = True

    def _check_model(self) -> None:
        """Discard the captured graph if the trained parameters, or the hooks of modules, have changed."""
        self._unchecked = False
        parts = [*self.stages.values()]
        modules = [module for part in parts for module in part.modules()]
        parameters = [each for part in parts for each in part.parameters()]
        hooks = [(*m._forward_pre_hooks, *m._forward_hooks, *m._backward_hooks) for m in modules]
        model = [each.requires_grad for each in parameters], hooks
        if model != self._model:
            self._model = model
            self._trained = [each for each in dict.fromkeys(parameters) if each.requires_grad]
            self._held = [*parameters, *(each for part in parts for each in part.buffers())]
            self._forget()

    def _forget(self) -> None:
        """Discard the captured graph; capture again after :data:`WARM_UP` eager microbatches."""
        if self._captured is not None and self.mesh.device_is_async:
            # The last replay may still be running, and the allocator, which waits only for the stream of the
            # capture, may unmap the released pool immediately.
            torch.accelerator.synchronize(self.mesh.device)
        self._captured = None
        self._ran = 0

    def _begin(
        self,
        actions: Sequence[Action],
        loss_factors: Mapping[str, torch.Tensor],
        microbatches: Sequence[Batch],
    ) -> None:
        super()._begin(actions, loss_factors, microbatches)
        self._replayed: set[int] = set()
        self._warn_once()
        if self._unchecked:
            self._check_model()
        self._put_gradients()
        self._shapes = _shapes(microbatches[0])
        key = self._shapes, self.passes.model_changes, [*loss_factors]
        if key != self._key or (self._captured and self._captured.addresses != self._addresses()):
            self._forget()
            self._factors = torch.zeros(len(loss_factors), dtype=torch.float64, device=self.mesh.device)
        self._key = key
        self._factors.copy_(torch.stack([*loss_factors.values()]), non_blocking=True)
        self._loss_factors = dict(zip(loss_factors, self._factors, strict=True))

    def _warn_once(self) -> None:
        """Warn if after some steps nothing was replayed."""
        self.steps += 1
        if self.steps == PATIENCE + 1 and not self.replays and self.mesh.rank == 0:
            (reason, _), *_ = self._eager.most_common(1)
            why = f"no microbatch was replayed in {PATIENCE} steps: {reason}"
            _log.warning("run.cuda_graphs has no effect", why=why)

    def _put_gradients(self) -> None:
        """Give each parameter without a gradient a zero gradient, in the same memory in every step."""
        cleared = []
        for each in self._trained:
            if each.grad is None:
                if each not in self._own_gradients:
                    dtype = each.grad_dtype or each.dtype
                    self._own_gradients[each] = torch.zeros(each.shape, dtype=dtype, device=each.device)
                cleared.append(self._own_gradients[each])
                each.grad = self._own_gradients[each]
        if cleared:
            torch._foreach_zero_(cleared)

    def _addresses(self) -> Sequence[int]:
        gradients = (each.grad for each in self._trained)
        return [each.data_ptr() for each in (*self._held, *gradients) if each is not None]

    def _execute(self, action: Action) -> None:
        number = action.microbatch
        if number in self._replayed:
            return  # its backward pass followed at once
        if action.kind == "F" and self._can_replay(number):
            if not self._replayed:  # Python code that waits for weights is not replayed
                self.weights_ready()
            self._replay(self._microbatches[number])
            self._replayed.add(number)
            return
        super()._execute(action)

    def _can_replay(self, number: int) -> bool:
        if self.passes.observed or self.passes.eager:
            reason = "a monitor reads modules in every step: raise run.log_every"
        elif number == len(self._microbatches) - 1 and self._last_is_eager:
            reason = "a step's last microbatch, during which gradients are reduced, is its only one"
        elif _shapes(self._microbatches[number]) != self._shapes:
            reason = "microbatches have different shapes"
        else:
            reason = "what the passes depend on, such as a key of the model, changes in every step"
            self._ran += 1
            if self._ran > WARM_UP:
                return True
        self._eager[reason] += 1
        return False

    def _replay(self, batch: Batch) -> None:
        captured = self._captured = self._captured or self._capture(batch)
        for own, given in zip(captured.batch.tensors(), batch.tensors(), strict=True):
            own.copy_(given, non_blocking=True)
        captured.graph.replay()
        # The next replay overwrites them.
        add_losses({name: loss.clone() for name, loss in captured.losses.items()}, self._sums)
        for name, load in captured.loads.items():
            self._routers[name].add_load(load.clone())
        self.replays += 1

    def _capture(self, like: Batch) -> Captured:
        """Capture the passes of a microbatch of this shape.

        Raises:
            NanotrainError: something in them cannot be captured, such as the host reading a value.
        """
        began, graph, batch = time.perf_counter(), CUDAGraph(self.mesh.device), like.clone()
        counted = {name: router.take_load() for name, router in self._routers.items()}
        try:
            losses, loads = graph.capture(lambda: self._passes_of(batch))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as problem:
            raise NanotrainError(
                f"run.cuda_graphs: the passes of a microbatch cannot be captured: {in_one_line(problem)}; "
                "set run.cuda_graphs = false"
            ) from problem
        for name, load in counted.items():
            self._routers[name].add_load(load)
        if self.mesh.rank == 0:
            seconds = round(time.perf_counter() - began, 1)
            _log.info("captured a CUDA graph", shape=tuple(batch.tokens.shape), seconds=seconds)
        return Captured(graph, batch, losses, loads, self._addresses())

    def _passes_of(self, batch: Batch) -> tuple[Losses, Mapping[str, torch.Tensor]]:
        """Run a microbatch forward and backward; return its losses, and its load of each router."""
        output = self._run_stage(0, batch.tokens, batch)
        losses = {name: loss.detach() for name, loss in output.losses.items()}
        with self.passes.backward():
            torch.autograd.backward(self._training_loss(output.losses))
        return losses, {name: router.take_load() for name, router in self._routers.items()}


def _shapes(batch: Batch) -> list[torch.Size]:
    return [tensor.shape for tensor in batch.tensors()]
