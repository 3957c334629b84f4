"""A model is the same whole or in parts, declares the roles of its layers, and its loss is a sum."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import attrs
import torch
from torch import nn

from nanotrain_core.batch import IGNORE, Batch
from nanotrain_core.contracts import ChangesInRun, Initializer, Model, PartOutput
from nanotrain_core.errors import RecipeError
from nanotrain_core.layout.initialization import materialize
from nanotrain_core.layout.layout import Layout, View
from nanotrain_core.layout.parameters_in_flight import install_ready_hooks
from nanotrain_core.layout.placement import place
from nanotrain_core.layout.roles import Role, Tag, tag_of, tagged
from nanotrain_core.models.activation_checkpointing import recompute_blocks
from nanotrain_core.models.ops import TORCH_OPS
from nanotrain_core.moe.routing import counting_routers
from nanotrain_core.pipeline.actions import parts_between
from nanotrain_core.recipe.divisibility import divisibility_of
from nanotrain_core.recipe.phase import changeable
from nanotrain_core.recipe.types import field_types, members
from nanotrain_core.recipe.write import plain
from nanotrain_core.testing.case import Case
from nanotrain_core.testing.checks import check
from nanotrain_core.testing.compare import assert_bitwise, assert_numbers, assert_same
from nanotrain_core.testing.components.late_weights import LateWeights

ONE_RANK = Layout({"dense": View(("dp",), (1,))})
Losses = dict[str, float]


def model_of(case: Case) -> Model:
    """Build the model's description."""
    model: Model = case.build()
    return model


def on_meta(case: Case, *bounds: int) -> list[nn.Module]:
    """Build the model split at ``bounds``."""
    model = model_of(case)
    edges = [0, *bounds, model.layers]
    parts = parts_between(edges, [0] * (len(edges) - 1))
    with torch.device("meta"):
        return [model.build(part, TORCH_OPS) for part in parts]


def parts_of(case: Case, *bounds: int, seed: int = 7) -> list[nn.Module]:
    """Build the model split at ``bounds``, in float64 with its initial weights."""
    parts = [part.to(torch.float64) for part in on_meta(case, *bounds)]
    materialize(parts, place(parts, ONE_RANK), seed, torch.device("cpu"))
    return parts


def named(parts: list[nn.Module]) -> dict[str, torch.Tensor]:
    """Return parameters by global name, a repeated one once."""
    return {name: p.detach() for part in parts for name, p in part.named_parameters()}


def batch_of(case: Case, *, ignored: bool = True) -> Batch:
    """Draw 4 random sequences; a third of the targets, unevenly distributed, are ignored."""
    vocab, length = model_of(case).vocab_size, case.recipe().batch.length
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocab, (4, length + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    if ignored:
        targets[0, length // 4 :] = IGNORE
        targets[1, : length // 2] = IGNORE
    return Batch(tokens[:, :-1].clone(), targets)


def run_parts(parts: list[nn.Module], batch: Batch) -> dict[str, torch.Tensor]:
    """Pass a batch through all parts and return the loss sums."""
    value: torch.Tensor | None = batch.tokens
    losses: dict[str, torch.Tensor] = {}
    for part in parts:
        output = part(value, batch)
        assert isinstance(output, PartOutput), f"a part returned a {type(output).__name__}, not a PartOutput"
        value = output.value
        for name, loss in output.losses.items():
            losses[name] = losses[name] + loss if name in losses else loss
    return losses


def losses_and_gradients(parts: list[nn.Module], batch: Batch) -> tuple[Losses, dict[str, torch.Tensor]]:
    """Run forward and backward; a parameter that two parts share is one, and gets both gradients."""
    losses = run_parts(parts, batch)
    torch.stack(list(losses.values())).sum().backward()  # type: ignore[no-untyped-call]
    gradients = {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for part in parts
        for name, p in part.named_parameters()
        if p.requires_grad
    }
    return {name: loss.item() for name, loss in losses.items()}, gradients


@check("model", since="0.1")
def weights_do_not_depend_on_the_cut(case: Case) -> None:
    """Split anywhere, the parts have the whole model's parameters: same names, bitwise the same values."""
    expected = named(parts_of(case))
    for cut in range(1, model_of(case).layers):
        assert_bitwise(named(parts_of(case, cut)), expected, f"parts cut before layer {cut}")


@check("model", since="0.1")
def weights_depend_on_the_seed(case: Case) -> None:
    """Another seed draws other weights."""
    one, other = named(parts_of(case, seed=1)), named(parts_of(case, seed=2))
    assert any(not torch.equal(one[name], other[name]) for name in one), "seeds 1 and 2 draw equal weights"


@check("model", since="0.1")
def parts_compose_to_the_whole(case: Case) -> None:
    """Chained, the parts give the whole model's losses and gradients, to 1e-10 in float64."""
    losses, gradients = losses_and_gradients(parts_of(case), batch_of(case))
    for cut in range(1, model_of(case).layers):
        got_losses, got = losses_and_gradients(parts_of(case, cut), batch_of(case))
        assert_same(got, gradients, f"gradients of parts cut before layer {cut}")
        assert got_losses.keys() == losses.keys(), f"loss terms {set(got_losses)}, whole: {set(losses)}"
        assert_numbers([got_losses[name] for name in losses], list(losses.values()), "losses", atol=1e-9)


@check("model", since="0.1")
def activation_checkpointing_is_exact(case: Case) -> None:
    """With activation checkpointing of every BLOCK, losses, gradients and routers' counts are the same."""
    once, twice = parts_of(case), parts_of(case)
    for part in twice:
        recompute_blocks(part)
    losses, gradients = losses_and_gradients(once, batch_of(case))
    again, found = losses_and_gradients(twice, batch_of(case))
    assert_same(found, gradients, "gradients")
    assert_numbers([again[name] for name in losses], list(losses.values()), "losses", atol=1e-9)
    loads, counted = (
        {name: router.take_load().double() for name, router in counting_routers(parts).items()}
        for parts in (once, twice)
    )
    try:
        assert_same(counted, loads, "tokens counted")
    except AssertionError as error:
        remedy = "return the load in Routing and add it in the part, which runs once: a BLOCK may run twice"
        raise AssertionError(f"{error}; {remedy}") from None


@check("model", since="0.1")
def every_layer_has_a_role(case: Case) -> None:
    """Every matrix is in a module with a role, and linear layers have their own, or no wrapper sees it."""
    (part,) = on_meta(case)
    layers = [(name, m) for name, m in part.named_modules() if isinstance(m, nn.Linear | nn.Embedding)]
    untagged = [name for name, module in layers if tag_of(module) is None]
    known = [f"{name}." for name, _, found in tagged(part) if found.role is not Role.BLOCK]
    matrices = [name for name, parameter in part.named_parameters() if parameter.dim() > 1]
    untagged += [name for name in matrices if not name.startswith((*known, *(f"{one}." for one in untagged)))]
    assert not untagged, f"without a role: {untagged}"


@check("model", since="0.1")
def divisibility_is_true(case: Case) -> None:
    """The divisibility that the config declares is correct and complete for the built model."""
    said = divisibility_of(case.recipe().model.config)
    if said is None:
        return
    (part,) = on_meta(case)
    built = {found for _, module, tag in tagged(part) for found in _units(module, tag)}
    told = {(role, extent.width, extent.units) for extent in said for role in extent.roles}
    assert built <= told, f"not said by divisibility(): {built - told}"
    false = [extent for extent in said if not built & {(r, extent.width, extent.units) for r in extent.roles}]
    assert not false, f"said by divisibility(), but nothing that is built has it: {false}"
    rows = {found for _, module, tag in tagged(part) for found in _rows(module, tag)}
    false = [extent for extent in said if extent.row and not rows & {(r, extent.row) for r in extent.roles}]
    assert not false, f"rows said by divisibility(), but nothing that is built has them: {false}"


def _rows(module: nn.Module, tag: Tag) -> Iterator[tuple[Role, int]]:
    """Yield (role, length) of the rows that ranks split when they shard a module."""
    for name, parameter in module.named_parameters():
        last = tag.role is Role.ROW or tag.split.get(name) == parameter.dim() - 1
        if last and parameter.dim() > 1:
            yield tag.role, parameter.shape[-1]


def _units(module: nn.Module, tag: Tag) -> Iterator[tuple[Role, bool, int]]:
    """Yield (role, width, units) of what may be sharded in a module."""
    if tag.role in (Role.VOCAB, Role.COLUMN, Role.ROW, Role.HEAD):
        weight = getattr(module, "weight", None)
        if weight is not None:  # a head may be lent the embedding's
            yield tag.role, False, weight.shape[tag.role is Role.ROW] // tag.unit
    elif tag.role is Role.EXPERTS:
        for name, parameter in module.named_parameters():
            yield tag.role, False, len(parameter)
            if name in tag.split:
                yield tag.role, True, parameter.shape[tag.split[name]]


@check("model", since="0.1")
def every_parameter_has_an_initializer(case: Case) -> None:
    """``initializer`` answers for every parameter, in every part that has it, identically."""
    (part,) = on_meta(case)
    answers = {name: part.initializer(name) for name, _ in part.named_parameters()}  # type: ignore[operator]
    wrong = {name: found for name, found in answers.items() if not isinstance(found, Initializer)}
    assert not wrong, f"not an Initializer: {wrong}"


@check("model", since="0.1")
def nothing_but_parameters(case: Case) -> None:
    """Built on ``meta``, the model has only buffers whose values ``constant`` provides."""
    (part,) = on_meta(case)
    buffers = {name: buffer.shape for name, buffer in part.named_buffers()}
    given = {name: part.constant(name).shape for name in buffers}  # type: ignore[operator]
    assert given == buffers, f"constant(name) gives shapes {given}, expected {buffers}"
    real = [name for name, p in part.named_parameters() if p.device.type != "meta"]
    assert not real, f"not on meta, so the plan of a large model would not fit: {real}"


@check("model", since="0.1")
def loss_is_a_sum(case: Case) -> None:
    """The losses and counts of two microbatches sum to those of the batch, ignored targets or not."""
    parts, model, batch = parts_of(case), model_of(case), batch_of(case)
    whole = {name: loss.item() for name, loss in run_parts(parts, batch).items()}
    halves = [run_parts(parts, half) for half in batch.split(1)]
    for name, loss in whole.items():
        added = sum(half[name].item() for half in halves)
        assert abs(added - loss) < 1e-9, f"{name}: microbatches add to {added}, the batch gives {loss}"
    counts = model.loss_counts(batch)
    for name in model.loss_weights:
        added = sum(model.loss_counts(half)[name].item() for half in batch.split(1))
        assert added == counts[name] > 0, f"{name}: microbatches count {added}, the batch {counts[name]}"


@check("model", since="0.1")
def terms_are_weighed_and_counted(case: Case) -> None:
    """Each loss term has a weight and a count, a next-token loss that of the targets it predicts."""
    model, batch = model_of(case), batch_of(case)
    found, counts = run_parts(parts_of(case), batch), model.loss_counts(batch)
    assert {*found} == {*model.loss_weights} == {*counts}, (
        f"losses {sorted(found)}, loss_weights {sorted(model.loss_weights)}, loss_counts {sorted(counts)}; "
        "expected the same terms in all three"
    )
    told, wanted = int(counts.get("lm", batch.target_tokens())), int(batch.target_tokens())
    assert told == wanted, f"lm is counted {told} times; expected {wanted}, the targets that are not ignored"


@check("model", since="0.1")
def weights_may_arrive_at_the_last_moment(case: Case) -> None:
    """Parameters of a tagged module are not read before it is called: an optimizer may deliver them late.

    Those of an embedding, and of what has no tag, may be read from the beginning of the part on.
    """
    batch = batch_of(case)
    for cuts in ((), *((cut,) for cut in range(1, model_of(case).layers))):
        parts = parts_of(case, *cuts)
        expected = {name: loss.item() for name, loss in run_parts(parts, batch).items()}
        late = LateWeights(parts)
        install_ready_hooks(parts, late)
        for _ in range(2):
            late.send()
            got = {name: loss.item() for name, loss in run_parts(parts, batch).items()}
            assert got == expected, f"losses {got} with late weights, {expected} otherwise; cut at {cuts}"


@check("model", since="0.1")
def ignored_targets_cost_nothing(case: Case) -> None:
    """A microbatch with no target has a gradient of zero, not nan, and no next-token loss but 0."""
    batch = batch_of(case)
    assert batch.targets is not None
    nothing = attrs.evolve(batch, targets=torch.full_like(batch.targets, IGNORE))
    losses, gradients = losses_and_gradients(parts_of(case), nothing)
    assert losses.get("lm", 0.0) == 0.0, f"loss {losses['lm']} with no target"
    broken = [name for name, g in gradients.items() if not torch.isfinite(g).all()]
    assert not broken, f"gradients not finite with no target: {broken}"


@check("model", since="0.1")
def tokens_do_not_see_the_future(case: Case) -> None:
    """Changing the last token changes no logits before it."""
    parts, batch = parts_of(case), batch_of(case)
    tokens = batch.tokens.clone()
    tokens[:, -1] = (tokens[:, -1] + 1) % model_of(case).vocab_size
    (logits, changed) = (_logits(parts, Batch(t)) for t in (batch.tokens, tokens))
    error = (logits - changed)[:, :-1].abs().max().item()
    assert error < 1e-12, f"logits before the last token moved by {error:.3g} when it changed"
    assert not torch.equal(logits[:, -1], changed[:, -1]), "the last token has no effect on its logits"


@torch.no_grad()
def _logits(parts: list[nn.Module], batch: Batch) -> torch.Tensor:
    value = batch.tokens
    for part in parts:
        value = part(value, batch).value
    return value


@check("model", since="0.1")
def flops_are_counted(case: Case) -> None:
    """FLOPs per token are positive, do not fall as sequences grow, and name every layer."""
    model, length = model_of(case), case.recipe().batch.length
    short, long = model.flops(length // 2), model.flops(length)
    assert 0 < short.total <= long.total, f"{short} FLOPs per token at half the length, {long} at full"
    assert len(long.layers) == model.layers, f"FLOPs of {len(long.layers)} layers; expected {model.layers}"
    costs = [long.embedding, *long.layers, long.head]
    assert min(costs) >= 0, f"FLOPs of embedding, layers and head are below 0: {costs}"


def _changed(case: Case) -> Iterator[tuple[str, Any]]:
    """Yield other values of fields that a phase may change, where the recipe allows them.

    That is half of a number, and a table with its defaults.
    """
    config = case.settings()
    types = field_types(type(config))
    for name in changeable(type(config)):
        old = getattr(config, name)
        new = type(old)(old / 2) if isinstance(old, int | float) else members(types[name])[0]()
        with contextlib.suppress(RecipeError):
            attrs.evolve(case, config={**case.config, name: plain(new)}).recipe()
            yield name, new


@check("model", since="0.2", applies=lambda case: bool(changeable(type(case.settings()))))
def changes_in_a_run_are_those_of_a_model_built_so(case: Case) -> None:
    """After ``change``, loss weights, losses and routers' decisions are those of a model of that config."""
    config = case.settings()
    now = dict(_changed(case))
    config = attrs.evolve(config, **now)
    changed, parts = model_of(case), parts_of(case)
    assert isinstance(changed, ChangesInRun), "fields are marked with CHANGEABLE, but it has no change()"
    changed.change(config, parts)
    case = attrs.evolve(case, config={**case.config, **{name: plain(value) for name, value in now.items()}})
    fresh, others = model_of(case), parts_of(case)
    weights, wanted = dict(changed.loss_weights), dict(fresh.loss_weights)
    assert weights == wanted, f"loss_weights {weights} after {now}; expected {wanted}"
    found, expected = (
        {name: loss.item() for name, loss in run_parts(each, batch_of(case)).items()}
        for each in (parts, others)
    )
    assert found == expected, f"losses {found} after {now}; expected {expected}"
    for each in (parts, others):
        for router in counting_routers(each).values():
            router.balance(router.take_load())
    assert_bitwise(named(parts), named(others), f"weights and biases of routers after {now}")
