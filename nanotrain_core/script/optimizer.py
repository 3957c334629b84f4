"""A script's own torch optimizer: stepped on the engine's gradients, its state saved and restored."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from nanotrain_core.contracts import Block, GradientSync, Optimizer, Precision, StepStats
from nanotrain_core.errors import CheckpointError, NanotrainError
from nanotrain_core.layout.mesh import Mesh
from nanotrain_core.layout.placement import PlacedParameter
from nanotrain_core.optim.grad_norm import clip_factor, global_norm
from nanotrain_core.optim.master_shards import step_unless

#: Options that affect how a step is computed, not its result: a resumed run may change them.
FREE = {"foreach", "fused", "capturable", "differentiable"}
#: Entries of a parameter group that are not the optimizer's own: the script or a schedule sets them.
SET = {"params", "lr", "initial_lr", "scheduled_lr"}
#: Key of the weights that are trained, in the state in a checkpoint that has other weights, for evaluation.
TRAINED = "trained_weight"
#: Types of values that JSON keeps unchanged.
PLAIN = bool | int | float | str | None
#: What to do about a model that was changed too late.
REMEDY = "make the engine after changing the model, around an optimizer of its parameters"


def has_momentum(inner: torch.optim.Optimizer) -> bool:
    """Return whether every weight with a gradient has its momentum, if its group has any.

    torch's fused SGD allocates the momentum of a first step in memory that a step skipped on the device never
    writes to.
    """
    return all(
        inner.state.get(weight, {}).get("momentum_buffer") is not None
        for group in inner.param_groups
        if group.get("momentum")
        for weight in group["params"]
        if weight.grad is not None
    )


class Reached:
    """Records which parameters the backward passes of a step have reached, on any rank.

    torch's optimizers skip a parameter without a gradient: they neither decay it nor update its moments.
    """

    def __init__(self, placed: Sequence[PlacedParameter], mesh: Mesh) -> None:
        self.mesh = mesh
        self.flags = [False] * len(placed)
        self.frozen = [each for each in placed if not each.parameter.requires_grad]
        """Parameters whose gradients no one completes or records."""
        for index, each in enumerate(placed):
            if each.parameter.requires_grad:
                each.parameter.register_post_accumulate_grad_hook(self._setter(index))  # type: ignore[no-untyped-call]

    def _setter(self, index: int) -> Callable[[torch.Tensor], None]:
        flags = self.flags  # not the run: the garbage collector cannot see a tensor's hooks

        def reached(_: torch.Tensor) -> None:
            flags[index] = True

        return reached

    def take(self) -> list[bool]:
        """All-reduce: return a flag for each parameter, and reset them for the next step."""
        found = list(self.flags)
        self.flags[:] = [False] * len(found)
        if self.mesh.world_size == 1:
            return found
        numbers = torch.tensor(found, dtype=torch.int32, device=self.mesh.device)
        self.mesh.all_reduce(numbers)
        return [bool(number) for number in numbers.tolist()]


class ScriptOptimizer(Optimizer):
    """A torch optimizer that steps on the engine's gradients.

    Its state is saved unchanged, tensors of any shape and plain numbers, for any optimizer. What it changes
    in its parameter groups when it steps, as Prodigy does its ``d``, is state. Its options, such as betas and
    weight decay, are those that the script sets, even after a resume.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        placed: Sequence[PlacedParameter],
        gradients: GradientSync,
        mesh: Mesh,
        clip_norm: float,
    ) -> None:
        self.inner, self.placed, self.gradients, self.mesh = inner, placed, gradients, mesh
        self.clip_norm = clip_norm
        self.reached = Reached(placed, mesh)
        self.names = {each.parameter: each.placement.name for each in placed}
        self.own: dict[int, dict[str, Any]] = defaultdict(dict)
        """For each parameter group the entries that are state, with their values before they changed."""
        self._incoming: dict[str, dict[str, Any]] | None = None
        self._trained: dict[nn.Parameter, torch.Tensor] = {}
        """While the model has weights for evaluation, those that are trained."""

    def setup(
        self,
        parameters: Sequence[PlacedParameter],
        precision: Precision,
        gradients: GradientSync,
        mesh: Mesh,
    ) -> None:
        """Do nothing: the script has created its optimizer."""

    def begin(self, model: nn.Module) -> None:
        """Begin a call of ``fit``: refuse changes, and train at the weights to train, as after ``eval()``."""
        self.refuse_changes(model)
        self.train()

    def refuse_changes(self, model: nn.Module) -> None:
        """Refuse a model or an optimizer that has other parameters than when the engine was made.

        Gradients of new ones would not be zeroed, reduced or clipped, and no checkpoint would contain them.

        Raises:
            NanotrainError: with the names of some.
        """
        now = {parameter: name for name, parameter in model.named_parameters()}
        new = [f"new: {name}" for parameter, name in now.items() if parameter not in self.names]
        gone = [f"gone: {name}" for parameter, name in self.names.items() if parameter not in now]
        if new or gone:
            raise NanotrainError(
                f"the model has other parameters than when the engine was made "
                f"({', '.join(new[:2] + gone[:2])}; {len(new)} new, {len(gone)} gone in all): {REMEDY}"
            )
        self._refuse_new_in_groups()

    def _refuse_new_in_groups(self) -> None:
        for group in self.inner.param_groups:
            for parameter in group["params"]:
                if parameter not in self.names:
                    raise NanotrainError(
                        f"the optimizer has a parameter of shape {tuple(parameter.shape)} that the model did "
                        f"not have when the engine was made: {REMEDY}"
                    )

    @torch.no_grad()
    def step(self, *, loss_scale: float = 1.0) -> StepStats:
        """Unscale, clip and update. A frozen parameter, or one that no backward reached, has no gradient.

        Raises:
            NanotrainError: a parameter is trained that was frozen when the engine was made, or that the
                optimizer was given since.
        """
        self._refuse_new_in_groups()
        for each in self.reached.frozen:
            if each.parameter.requires_grad:
                raise NanotrainError(
                    f"parameter {each.placement.name} was frozen when the engine was made, and is not now: "
                    "make a new RuntimeEngine, around the same optimizer, after unfreezing it"
                )
        for placed, reached in zip(self.placed, self.reached.take(), strict=True):
            placed.parameter.grad = self.gradients.gradient(placed.parameter) if reached else None
        pairs = [(p.parameter.grad, p.placement) for p in self.placed if p.parameter.grad is not None]
        gradients = [gradient for gradient, _ in pairs]
        norm = global_norm(pairs, self.mesh) / loss_scale
        skipped = ~torch.isfinite(norm)
        can_skip = getattr(self.inner, "_step_supports_amp_scaling", False) and has_momentum(self.inner)
        on_device = self.mesh.device_is_async and can_skip
        if not on_device and skipped:
            return StepStats(norm, skipped=True)
        if pairs and (self.clip_norm or loss_scale != 1.0):
            torch._foreach_mul_(gradients, clip_factor(norm, self.clip_norm, gradients) / loss_scale)
        with self._noting_changes():
            step_unless(skipped.float() if on_device else None, self.inner)
        return StepStats(norm, skipped if on_device else False)

    @contextmanager
    def _noting_changes(self) -> Iterator[None]:
        """Treat the entries of parameter groups that the optimizer changes within the block as state."""
        before = [dict(group) for group in self.inner.param_groups]
        yield
        for old, (group, own) in zip(before, self._groups_and_own(), strict=False):
            changed = {key for key in group if not same(old.get(key), group[key])} - SET
            own.update({key: old.get(key) for key in changed - own.keys()})

    # --- two sets of weights --------------------------------------------------------------------

    @property
    def has_modes(self) -> bool:
        """Whether the optimizer trains at other weights than those to evaluate, as schedule-free ones do."""
        return all(callable(getattr(self.inner, name, None)) for name in ("train", "eval"))

    @contextmanager
    def for_evaluation(self) -> Iterator[None]:
        """Have the weights to evaluate in the model within the block, if the optimizer trains at others.

        Those that it trains at are kept: computed back by ``train()``, they would differ by rounding errors,
        so that training would depend on how often one evaluates and saves.
        """
        if not self.has_modes:
            yield
            return
        own = {p for group in self.inner.param_groups for p in group["params"]}
        self._trained = {p: p.detach().clone() for p in own}
        with self._noting_changes():
            self.inner.eval()  # type: ignore[attr-defined]
        try:
            yield
        finally:
            trained, self._trained = self._trained, {}
            self.train(trained)

    @torch.no_grad()
    def train(self, trained: Mapping[nn.Parameter, torch.Tensor] | None = None) -> None:
        """Have the weights to train in the model, exactly those of ``trained``."""
        if self.has_modes:
            with self._noting_changes():
                self.inner.train()  # type: ignore[attr-defined]
        for parameter, weight in (trained or {}).items():
            parameter.copy_(weight)

    # --- state --------------------------------------------------------------------------------

    def blocks(self) -> Iterator[Block]:
        """Yield every tensor of the optimizer's state, named after its parameter, group or key."""
        for name, state in self._state():
            yield from (block(key, name, t) for key, t in state.items() if isinstance(t, torch.Tensor))

    def _state(self) -> Iterator[tuple[str, dict[str, Any]]]:
        kept = self.inner.state
        for parameter, name in self.names.items():
            trained = {TRAINED: self._trained[parameter]} if parameter in self._trained else {}
            if parameter in kept or trained:
                yield name, {**kept.get(parameter, {}), **trained}
        for number, (group, own) in enumerate(self._groups_and_own()):
            yield f"param_groups[{number}]", {key: group[key] for key in own if key in group}
        others: dict[Any, Any] = {key: value for key, value in kept.items() if key not in self.names}
        yield from ((f"state[{key}]", value) for key, value in others.items() if isinstance(value, dict))
        yield "state", {key: value for key, value in others.items() if not isinstance(value, dict)}

    def _groups_and_own(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        return ((group, self.own[number]) for number, group in enumerate(self.inner.param_groups))

    def meta(self) -> dict[str, Any]:
        """Return the class of the optimizer and its state: plain values, and the form of each tensor.

        Raises:
            CheckpointError: its state has something that cannot be saved.
            NanotrainError: it was given a parameter after the engine was made.
        """
        self._refuse_new_in_groups()
        for key in self.inner.state.keys() - self.names.keys():
            if not isinstance(key, str):
                raise CheckpointError(
                    f"the optimizer keeps state under a {type(key).__name__}; only that of the model's "
                    "parameters, and under names, can be saved"
                )
        state = {
            name: {key: described(f"{key} of {name}", value) for key, value in found.items()}
            for name, found in self._state()
        }
        return {"class": type(self.inner).__name__, "groups": self._groups(), "state": state}

    def _groups(self) -> list[dict[str, Any]]:
        """Return the parameters of each group, and its switches, which determine whether state fits."""
        return [
            {
                "parameters": [self.names[p] for p in group["params"]],
                "switches": {
                    k: v for k, v in group.items() if isinstance(v, bool) and k not in FREE | {*own}
                },
            }
            for group, own in self._groups_and_own()
        ]

    def expect(self, meta: Mapping[str, Any]) -> list[Block]:
        """Allocate the state that a checkpoint's ``meta`` describes, and return it to be filled.

        The optimizer gets it with :meth:`load_meta`: until then it is unchanged.

        Raises:
            CheckpointError: it belongs to another optimizer.
        """
        self._refuse_other(meta)
        devices = {name: parameter.device for parameter, name in self.names.items()}
        self._incoming = {
            name: {key: allocated(devices.get(name, self.mesh.device), form) for key, form in state.items()}
            for name, state in meta["state"].items()
        }
        return [
            block(key, name, value)
            for name, state in self._incoming.items()
            for key, value in state.items()
            if isinstance(value, torch.Tensor)
        ]

    def _refuse_other(self, meta: Mapping[str, Any]) -> None:
        if "class" not in meta:
            raise CheckpointError(
                "the checkpoint is of a recipe's run, which nanotrain run resumes, not of a script"
            )
        own = type(self.inner).__name__
        if meta["class"] != own:
            raise CheckpointError(
                f"the checkpoint has the state of {meta['class']} and the script's optimizer is {own}: "
                f"expected {meta['class']}, or another folder to begin anew"
            )
        there, here = meta["groups"], self._groups()
        if len(there) != len(here):
            raise CheckpointError(
                f"the checkpoint's {own} has {len(there)} parameter groups and the script's has {len(here)}"
            )
        for number, (saved, ours) in enumerate(zip(there, here, strict=True)):
            for name in sorted({*saved["parameters"]} ^ {*ours["parameters"]}):
                where = "the checkpoint" if name in saved["parameters"] else "this script"
                raise CheckpointError(f"parameter group {number} of {own} has {name} only in {where}")
            for key, value in saved["switches"].items():
                if ours["switches"].get(key, value) != value:
                    raise CheckpointError(
                        f"parameter group {number} of {own}: {key} is {value} in the checkpoint and "
                        f"{ours['switches'][key]} in this script"
                    )

    def load_meta(self, meta: Mapping[str, Any]) -> None:
        """Set the optimizer's state to what was read, replacing all it had."""
        if self._incoming is None:
            return
        incoming, self._incoming = self._incoming, None
        trained = {
            parameter: incoming[name].pop(TRAINED)
            for parameter, name in self.names.items()
            if TRAINED in incoming.get(name, {})
        }
        for parameter, name in self.names.items():
            self.inner.state.pop(parameter, None)
            if incoming.get(name):
                self.inner.state[parameter] = incoming[name]
        for number, (group, own) in enumerate(self._groups_and_own()):
            saved = incoming.get(f"param_groups[{number}]", {})
            own.update({key: group.get(key) for key in saved.keys() - own.keys()})
            group.update({**own, **saved})
        others: dict[Any, Any] = self.inner.state
        others.update(incoming.get("state", {}))
        others.update({name[6:-1]: kept for name, kept in incoming.items() if name.startswith("state[")})
        self.train(trained)


def block(key: str, name: str, tensor: torch.Tensor) -> Block:
    """Return a whole state tensor of parameter ``name``."""
    return Block(f"{key}/{name}", tuple(tensor.shape), (0,) * tensor.dim(), tensor)


def same(old: Any, new: Any) -> bool:
    """Return whether an entry of a parameter group is unchanged.

    A tensor is not read, and always counts as changed: a script sets none but a learning rate.
    """
    if isinstance(new, torch.Tensor):
        return False
    return old is new or (isinstance(new, PLAIN) and type(old) is type(new) and bool(old == new))


def described(what: str, value: Any) -> Any:
    """Return the form of a tensor, or a plain value unchanged, as JSON."""
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return {"dtype": dtype, "shape": list(value.shape), "host": value.device.type == "cpu"}
    if isinstance(value, PLAIN):
        return {"value": value}
    raise CheckpointError(
        f"the optimizer keeps a {type(value).__name__} as {what}; only tensors and plain numbers can be saved"
    )


def allocated(device: torch.device, form: Mapping[str, Any]) -> Any:
    """Return an empty tensor of the recorded shape, there or on the host, or the plain value."""
    if "value" in form:
        return form["value"]
    where = torch.device("cpu") if form["host"] else device
    return torch.empty(form["shape"], dtype=getattr(torch, form["dtype"]), device=where)
