"""Determines, before anything runs, what is compiled, what stays eager, and why. Torch-free.

A component declares with :attr:`Component.stays_eager` which modules cannot be traced because of it. The core
adds a rule for W passes, which compute weight gradients later: a graph contains a whole backward pass, which
computes them immediately.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import attrs

from nanotrain_core.component import StaysEager
from nanotrain_core.errors import Problem
from nanotrain_core.layout.layout import Layout
from nanotrain_core.layout.roles import Role
from nanotrain_core.pipeline.actions import Action
from nanotrain_core.recipe.component_functions import call_declared
from nanotrain_core.recipe.tree import Recipe, Selection
from nanotrain_core.registry.registry import Registry


@attrs.define(frozen=True)
class KeptEager:
    """What a component of this recipe keeps eager."""

    kind: str
    use: str
    role: Role
    why: str

    @property
    def who(self) -> str:
        """``parallel 'ep_deepseek'``."""
        return f"{self.kind} '{self.use}'"

    def __str__(self) -> str:
        return f"{self.who}: {self.why}"


def on_device(selection: Selection, registry: Registry, device: str | None) -> Selection:
    """Return what a selection stands for on a device of type ``device``: itself, except for kernels ``auto``.

    Those stand for the only installed component that provides ``kernels:<device>``, with its default config;
    for ``torch`` if there is none, or several. Without a device they stay ``auto``, which declares nothing.
    """
    if (selection.kind, selection.use) != ("kernels", "auto") or device is None:
        return selection
    word = f"kernels:{device}"
    found = [name for name in registry.names("kernels") if word in registry.get("kernels", name).provides]
    use = found[0] if len(found) == 1 else "torch"
    return Selection("kernels", use, registry.get("kernels", use).config())


def actions_of(recipe: Recipe, registry: Registry, layout: Layout) -> Sequence[Sequence[Action]]:
    """Return the actions of every pipeline rank in a step."""
    microbatches = recipe.batch.microbatches(layout.size(*layout.row_dims))
    lists: Sequence[Sequence[Action]] = registry.build(recipe.schedule).actions(
        layout.degree("pp"), microbatches
    )
    return lists


def kept_eager(
    recipe: Recipe, registry: Registry, layout: Layout, device: str | None = None
) -> list[KeptEager]:
    """Return what stays eager in a compiled run.

    Args:
        recipe: the checked recipe.
        registry: the plugins.
        layout: the layout of its ranks.
        device: type of the run's device; None: unknown, so that the kernels of ``auto`` are not considered.

    Raises:
        PluginError: a component's rule is wrong.
    """
    kept = list(_of_w_passes(recipe, registry, layout))
    for selection in recipe.selections():
        kept += _of_component(on_device(selection, registry, device), recipe, registry, layout)
    return kept


def _of_component(
    selection: Selection, recipe: Recipe, registry: Registry, layout: Layout
) -> Iterator[KeptEager]:
    for each in call_declared("stays_eager", selection, recipe, layout, registry, StaysEager):
        yield KeptEager(selection.kind, selection.use, each.role, each.why)


def _of_w_passes(recipe: Recipe, registry: Registry, layout: Layout) -> Iterator[KeptEager]:
    lists = actions_of(recipe, registry, layout)
    if any(action.kind == "W" for actions in lists for action in actions):
        why = "its W passes make weight gradients later, and a compiled backward pass makes them at once"
        yield KeptEager("schedule", recipe.schedule.use, Role.BLOCK, why)


def refused(recipe: Recipe, kept: Iterable[KeptEager]) -> Iterator[Problem]:
    """Reject ``compile = true`` where nothing is left to compile."""
    against = [each for each in kept if each.role is Role.BLOCK]
    if recipe.run.compile is True and against:
        remedy = 'expected "auto" or false'
        if any(each.kind == "kernels" for each in against):
            remedy += ', or [kernels] use = "torch"'
        text = f"every layer would stay eager ({'; '.join(map(str, against))}); {remedy}"
        yield Problem("run.compile", text)


def describe_compiled(backend: str, kept: Iterable[KeptEager]) -> list[str]:
    """Return lines that list what is compiled, and what stays eager because of which component."""
    kept = list(kept)
    against = [each for each in kept if each.role is Role.BLOCK]
    roles = {each.role for each in kept}
    inside = ", ".join(sorted(role.name for role in roles - {Role.BLOCK, Role.HEAD}))
    what = [] if against else ["each layer" + (f", in pieces around {inside}" if inside else "")]
    what += [] if Role.HEAD in roles else ["the loss of a chunk of logits with its gradient"]
    lines = ["torch.compile: no layer"] if against else []
    if what:
        lines.append(f"torch.compile: {', and '.join(what)}, with {backend}")
    lines.append("torch.compile: embedding, final norm and the head's products stay eager")
    shown = against + [each for each in kept if each.role is Role.HEAD] if against else kept
    return lines + [f"torch.compile: {each.role.name} eager because of {each}" for each in shown]


def explain_compiled(recipe: Recipe, registry: Registry, layout: Layout) -> list[str]:
    """Return :func:`describe_compiled` for ``nanotrain check --explain``; the device may be unknown."""
    wanted, device = recipe.run.compile, recipe.run.device
    if wanted is False:
        return ["torch.compile: off"]
    if wanted == "auto" and device == "cpu":
        return ["torch.compile: off on a CPU"]
    known = "cuda" if wanted == "auto" else None if device == "auto" else device
    lines = describe_compiled(recipe.run.compile_backend, kept_eager(recipe, registry, layout, known))
    either = wanted == "auto" and device == "auto"
    return ["torch.compile: off on a CPU; on a GPU:", *lines] if either else lines
