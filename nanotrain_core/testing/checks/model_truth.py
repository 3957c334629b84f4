"""A model's logits and FLOPs agree with what it computes, and it keeps no state."""

from __future__ import annotations

import attrs
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from nanotrain_core.batch import IGNORE, Batch
from nanotrain_core.testing.case import Case
from nanotrain_core.testing.checks import check
from nanotrain_core.testing.checks.model import batch_of, model_of, parts_of, run_parts
from nanotrain_core.testing.compare import assert_same

#: How far from what is measured FLOPs may be: a norm, a rotation, a softmax are in no formula, or in some.
LOW, HIGH = 0.8, 1.25
#: The same of a head: torch counts no product that is added to a gradient in place, the third of its three.
HIGH_OF_HEAD = 1.6
#: How much of the measured growth with a sequence's length is said: half of it where attention is causal.
GROWTH = (0.4, 1.25)


def _logits(parts: list[nn.Module], batch: Batch) -> torch.Tensor:
    value = batch.tokens
    for part in parts:
        value = part(value, Batch(batch.tokens)).value
    return value


def predicts(case: Case) -> bool:
    """For checks of the next-token loss, which a reward model has not."""
    return "lm" in model_of(case).loss_weights


@check("model", since="0.2", variants=("training", "evaluation"), applies=predicts)
def logits_are_those_of_the_loss(case: Case, mode: str) -> None:
    """The next-token loss is the cross-entropy of the logits without targets, to 1e-9."""
    parts, batch = [part.train(mode == "training") for part in parts_of(case)], batch_of(case)
    assert batch.targets is not None
    with torch.no_grad():
        logits = _logits(parts, batch)
        wanted = F.cross_entropy(
            logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORE, reduction="sum"
        ).item()
        got = run_parts(parts, batch)["lm"].item()
    assert abs(got - wanted) < 1e-9 * max(1.0, abs(wanted)), (
        f"the loss is {got:.12g} with targets; the logits without them have {wanted:.12g}: does the "
        "pass with targets compute something else, or see them?"
    )


@check("model", since="0.2", applies=predicts)  # a reward is of all tokens of its sequence
def a_target_costs_only_itself(case: Case) -> None:
    """The loss of one target is the same whatever the targets and tokens after it are, in every term.

    Terms that targets have no part in, such as a router's balance loss, may depend on all tokens.
    """
    parts, batch = parts_of(case), batch_of(case, ignored=False)
    assert batch.targets is not None
    length, nothing = batch.tokens.shape[1], torch.full_like(batch.targets, IGNORE)
    without = _terms(parts, Batch(batch.tokens, nothing))
    predicting = [term for term, loss in without.items() if term == "lm" or loss == 0]
    for place in sorted({0, length // 2, length - 2}):
        only = nothing.clone()
        only[:, place] = batch.targets[:, place]
        tokens = batch.tokens.clone()
        tokens[:, place + 1 :] = (tokens[:, place + 1 :] + 1) % model_of(case).vocab_size
        ones, others = (_terms(parts, Batch(given, only)) for given in (batch.tokens, tokens))
        for term in predicting:
            one, other = ones[term], others[term]
            assert abs(one - other) < 1e-9, (
                f"{term}: the loss of the targets at position {place} is {one:.12g}, and {other:.12g} with "
                "other tokens behind it: the pass with targets sees the future"
            )


def _terms(parts: list[nn.Module], batch: Batch) -> dict[str, float]:
    with torch.no_grad():
        return {term: loss.item() for term, loss in run_parts(parts, batch).items()}


@check("model", since="0.2")
def forward_is_stateless(case: Case) -> None:
    """Results are a new model's whatever the lengths, numbers of sequences and documents of passes before."""
    batch, length = batch_of(case), case.recipe().batch.length
    lengths = [max(2, length // 2), length, max(1, length // 3), length]
    used = parts_of(case)
    for number, count in enumerate(lengths):
        tokens = batch.tokens[: 1 + number, :count].contiguous()
        with torch.no_grad():
            got, wanted = _logits(used, Batch(tokens)), _logits(parts_of(case), Batch(tokens))
        assert_same(
            {"logits": got},
            {"logits": wanted},
            f"pass {number + 1} of {count} tokens, after passes of {lengths[:number]}",
            atol=1e-12,
        )
    if "document_masks" in case.component().provides:
        _documents_are_those_of_the_batch(case, used, batch)


def _documents_are_those_of_the_batch(case: Case, used: list[nn.Module], batch: Batch) -> None:
    length = batch.tokens.shape[1]
    at_S = torch.arange(length)
    for cut in (length // 4, length // 2, length - 1):  # where a second document begins
        begins = torch.where(at_S < cut, 0, cut).expand_as(batch.tokens).contiguous()
        documents = attrs.evolve(batch, document_starts=begins)
        got, wanted = _terms(used, documents), _terms(parts_of(case), documents)
        for term, loss in wanted.items():
            assert abs(got[term] - loss) < 1e-9, (
                f"{term} of sequences whose second document begins at {cut} is {loss:.12g} in a new model, "
                f"and {got[term]:.12g} after passes with other documents"
            )


def _measured(part: nn.Module, value: torch.Tensor, batch: Batch) -> tuple[float, torch.Tensor | None]:
    """Return FLOPs per token of a part's forward and backward, and its output."""
    given = value.detach().requires_grad_(value.is_floating_point())
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:  # others count nothing
        output = part(given, batch)
        ends = [output.value] if output.value is not None else []
        torch.stack([each.sum() for each in (*ends, *output.losses.values())]).sum().backward()  # type: ignore[no-untyped-call]
    return counter.get_total_flops() / batch.tokens.numel(), output.value


@torch.no_grad()
def _sees_the_first(part: nn.Module, value: torch.Tensor, batch: Batch) -> bool:
    """Return whether the last token depends on the first; with sliding-window attention it does not."""
    other = value.clone()
    other[:, 0] = other[:, 1]
    ends = [part(each, batch).value for each in (value, other)]
    return ends[0] is None or not torch.equal(ends[0][:, -1], ends[1][:, -1])


@check("model", since="0.2")
def flops_are_those_of_a_pass(case: Case) -> None:
    """FLOPs of each layer and of the head are those of its matrix products, and grow as they do."""
    model, length = model_of(case), case.recipe().batch.length
    short, cuts = max(2, length // 2), range(1, model.layers + 1)
    by_length, whole_sequence = {}, [True] * (model.layers + 1)
    for count in (short, length):
        whole = batch_of(case, ignored=False)
        assert whole.targets is not None
        batch = attrs.evolve(whole, tokens=whole.tokens[:, :count], targets=whole.targets[:, :count])
        parts, value, found = parts_of(case, *cuts), batch.tokens, []
        for number, part in enumerate(parts):
            whole_sequence[number] = _sees_the_first(part, value, batch)
            flops, handed = _measured(part, value, batch)
            found.append(flops)
            value = handed if handed is not None else value
        by_length[count] = found
    low, high = model.flops(short), model.flops(length)
    for number in range(model.layers + 1):
        said = [[*c.layers, c.head][number] + c.embedding * (number == 0) for c in (low, high)]
        real = [by_length[short][number], by_length[length][number]]
        grown, growth = said[1] - said[0], real[1] - real[0]
        share = 0.5 if whole_sequence[number] else 1.0
        causal = growth * length / (length - short) * share  # what a causal formula leaves out
        head = number == model.layers
        what, most = ("the head", HIGH_OF_HEAD) if head else (f"layer {number}", HIGH)
        assert LOW * (real[1] - max(0.0, causal)) < said[1] < most * real[1], (
            f"{what}: flops({length}) says {said[1]:.6g} for each token, its matrix products are "
            f"{real[1]:.6g}"
        )
        if growth > 0.01 * real[1]:
            least = GROWTH[0] * whole_sequence[number]  # of a window's masked scores it counts none
            assert least * growth <= grown < GROWTH[1] * growth, (
                f"{what}: from {short} to {length} tokens FLOPs for each grow by {growth:.6g}, flops() says "
                f"{grown:.6g}"
            )
