"""A component: the description with which a plugin registers one thing a recipe can ``use``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

import attrs

from nanotrain_core.errors import NanotrainError, PluginError, describe, did_you_mean
from nanotrain_core.layout.roles import Role
from nanotrain_core.metrics.declared import Metric, check_distinct

if TYPE_CHECKING:
    from nanotrain_core.errors import Problem
    from nanotrain_core.layout.layout import Layout
    from nanotrain_core.recipe.tree import Recipe

#: The kinds of components, in the order in which commands list them.
KINDS = (
    "topology",
    "kernels",
    "model",
    "parallel",
    "precision",
    "optimizer",
    "schedule",
    "checkpoint",
    "data",
    "monitor",
)

#: Kinds of which a recipe lists any number; their order matters.
LISTED_KINDS = frozenset({"parallel", "monitor"})

#: Kinds that commands without torch build too: their factories do not import it.
TORCH_FREE_KINDS = frozenset({"topology", "schedule"})

#: Capabilities that at most one component of a run may provide: word -> what it means.
EXCLUSIVE_CAPABILITIES = {
    "gradient_sync": "sums each gradient over the ranks that hold a part of it",
}


class Support(Enum):
    """How a component relates to an optional ability."""

    FULL = "full"
    PARTIAL = "partial"
    UNSUPPORTED = "unsupported"
    NOT_IMPLEMENTED = "not implemented"


#: A component's check of the whole recipe: yields one Problem per thing that cannot work.
CrossCheck = Callable[["Recipe", Any, "Layout"], Iterable["Problem"]]


@attrs.define(frozen=True)
class StaysEager:
    """What ``torch.compile`` must not compile, because a component's code there cannot be traced."""

    role: Role = attrs.field(validator=attrs.validators.instance_of(Role))
    """Modules of this role. Of a BLOCK that contains some, the modules without any are compiled one by one;
    ``Role.BLOCK`` itself leaves no layer to compile. ``Role.HEAD``: the loss of a chunk of logits."""
    why: str
    """What cannot be in a graph, as a clause: ``the host must learn how many rows travel``."""


#: Returns what a component keeps eager in a run: none if it has no restriction.
EagerRule = Callable[["Recipe", Any, "Layout"], Iterable[StaysEager]]


@attrs.define(frozen=True)
class NotCaptured:
    """Why forward and backward passes with a component cannot be replayed from a CUDA graph."""

    why: str
    """As a clause: ``stage 2 sends the gradients of every microbatch``."""
    expected: str = "false"
    """What the recipe must have instead: ``stage 1``; or ``false``, which is no CUDA graph."""


#: Returns what prevents a CUDA graph with a component in a run: none if nothing does.
CaptureRule = Callable[["Recipe", Any, "Layout"], Iterable[NotCaptured]]


def always_captured(recipe: Recipe, config: Any, layout: Layout) -> Iterable[NotCaptured]:
    """A rule for :attr:`Component.cuda_graphs`: nothing prevents a CUDA graph in any run."""
    return ()


#: Yields why a component cannot run on GPUs of a compute capability, such as ``(9, 0)``: nothing if it can.
GPURule = Callable[["Recipe", Any, "Layout", tuple[int, int]], Iterable[str]]

#: Yields config keys, each with the metric that it names.
MetricPatterns = Callable[[Any], Iterable[tuple[str, str]]]
#: Yields config keys, each with the module that it names.
ModulePatterns = Callable[[Any], Iterable[tuple[str, str]]]

#: Fields of :class:`Component` that are None or name an object as ``"module:attribute"``.
Reference = Literal[
    "check_model", "hf", "weights", "listing", "added", "survey", "conversations", "example_of_text"
]


def _words(value: Iterable[str]) -> frozenset[str]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        text = f"the string {value!r}: write {{{value!r}}}" if isinstance(value, str) else repr(value)
        raise PluginError(f"provides, requires, conflicts and mesh_dims are sets of words, got {text}")
    return frozenset(value)


def _metrics(value: Iterable[Metric]) -> tuple[Metric, ...]:
    found = tuple(value)
    for each in found:
        if not isinstance(each, Metric):
            raise PluginError(f"metrics of a component are Metric objects, got {each!r}")
    check_distinct(found)
    return found


@attrs.define(frozen=True, kw_only=True, eq=False)
class Component:
    """A plugin's description of one component for the registry. Nothing here imports torch."""

    name: str
    """The word a recipe writes after ``use =``."""
    config: type
    """A frozen attrs class: the keys of this component's table in a recipe, typed, with defaults."""
    factory: str
    """``"module:attribute"`` of a callable that takes the config and returns the component's object."""
    summary: str = ""
    """One line for ``nanotrain plugins``."""
    provides: frozenset[str] = attrs.field(default=frozenset(), converter=_words)
    """Capabilities this component brings to a run, for example ``"gradient_sync"``."""
    requires: frozenset[str] = attrs.field(default=frozenset(), converter=_words)
    """Capabilities that some other component of the run must provide."""
    requires_for: Callable[[Any], Iterable[str]] | None = None
    """Returns further requirements for a given config: none if there are none. Must not import torch."""
    conflicts: frozenset[str] = attrs.field(default=frozenset(), converter=_words)
    """Capabilities or component names (``"kind:name"``) it cannot share a run with."""
    mesh_dims: frozenset[str] = attrs.field(default=frozenset(), converter=_words)
    """Mesh dimensions this component can use. A recipe whose topology gives a dimension
    a degree above 1 that no component of the run handles is rejected."""
    supports: dict[str, Support] = attrs.field(factory=dict)
    """Optional abilities by name, which ``nanotrain plugins --json`` reports."""
    supports_for: Callable[[Any], Mapping[str, Support]] | None = None
    """Returns further ones for a given config, which come before those. Must not import torch."""
    example: Mapping[str, Any] = attrs.field(factory=dict)
    """Keys of ``config`` with values for a small component that is built and run within a second:
    ``nanotrain conformance`` tests it when the user names none, or omits required keys."""
    example_of_text: str | None = None
    """``"module:attribute"`` of a callable for data that is prepared before a run: it takes a text file and
    an empty folder, writes there what a run reads of that text, with its bytes as tokens, and returns the
    keys of ``config`` that point to it. For the harness. Must not import torch."""
    check: CrossCheck | None = None
    """A cross-check of the whole recipe, run before any process starts. Must not import torch."""
    check_model: str | None = None
    """``"module:attribute"`` of a cross-check that reads the model's modules, before any process starts: it
    takes the arguments of ``check`` and a function that builds the whole model, without storage and with the
    parameters that wrappers add. Building imports torch: do so only for a config that needs it."""
    stays_eager: EagerRule | None = None
    """Returns what must not be compiled because of this component; takes the arguments of ``check``. Must
    not import torch: ``nanotrain check --explain`` shows it."""
    cuda_graphs: CaptureRule | None = None
    """Returns why forward and backward passes with this component cannot be replayed from a CUDA graph, in
    which no Python code runs and every tensor keeps its address; takes the arguments of ``check``, must not
    import torch. ``always_captured``: nothing prevents it. None, the default: unknown, ``run.cuda_graphs`` is
    refused. Only of kernels, models, parallel components, optimizers and precisions."""

    refuses_gpu: GPURule | None = None
    """Yields why this component cannot run on GPUs of a compute capability, such as ``(9, 0)``; takes the
    arguments of ``check`` and that capability, must not import torch. ``nanotrain plan`` says so of hardware
    on which the component would refuse to run."""

    metrics: tuple[Metric, ...] = attrs.field(default=(), converter=_metrics)
    """The metrics a monitor publishes: ``nanotrain metrics`` lists them; sinks get unit, group and rule."""

    reads_metrics: MetricPatterns | None = None
    """Yields the metrics that a monitor's config names, each as its key in the table, ``rules.0.metric``,
    and a name or a shell-style pattern. One that nothing in the recipe publishes is rejected, with the
    nearest name suggested."""

    reads_modules: ModulePatterns | None = None
    """Yields the modules or parameters that the config of a monitor, wrapper, precision or optimizer names,
    likewise: ``modules.0``, ``layers.*.attn``. One that matches none of the recipe's model is rejected before
    ranks start, likewise."""

    hf: str | None = None
    """``"module:attribute"`` of a model's :class:`~nanotrain_core.hf.mapping.HFMapping`: the names of its
    parameters in Hugging Face checkpoints. Must not import torch."""
    weights: str | None = None
    """``"module:attribute"`` of a callable that opens a checkpoint of this component to read only its
    weights: it takes a path and returns :class:`~nanotrain_core.contracts.SavedWeights`, or None if the path
    has another format; of a run folder, those of the newest checkpoint. For ``--weights`` and ``nanotrain
    convert``. In a folder with checkpoints of several components ``listing`` tells which is the newest."""
    listing: str | None = None
    """``"module:attribute"`` of a callable that lists the checkpoints of this component at a path (a run
    folder, the folder of its checkpoints, or one of them), oldest first, each as a
    :class:`~nanotrain_core.checkpoint.info.CheckpointInfo`; none if there are none of this format.
    For ``nanotrain ckpt``. Must not import torch."""

    added: str | None = None
    """``"module:attribute"`` of the :class:`~nanotrain_core.contracts.AddedWeights` of a wrapper that adds
    parameters to a model: how they are merged into the model's, for ``nanotrain convert`` and runs without
    the wrapper, and how they are written alone."""

    survey: str | None = None
    """``"module:attribute"`` of a callable that reports what data a run will find: it takes the component's
    config and the tokens of a sequence, and returns :class:`~nanotrain_core.data.survey.Survey`. If the
    component provides ``changes_length``, it also takes ``longest``, the tokens of the run's longest
    sequence. For ``nanotrain check`` and ``nanotrain run``, before ranks start. Must not import torch."""

    conversations: str | None = None
    """``"module:attribute"`` of a callable of data of conversations that opens the chat template next to a
    tokenizer: it takes the tokenizer's path and returns :class:`~nanotrain_core.data.codec.HasConversations`,
    or None if there is no template. For ``nanotrain sample --chat`` on weights that no run comes with."""

    def supported(self, word: str, config: Any) -> Support:
        """Return how the component, with this config, relates to an ability: FULL unless declared."""
        for_config = self.supports_for(config) if self.supports_for else {}
        return for_config.get(word, self.supports.get(word, Support.FULL))

    def unsupported(self, config: Any) -> frozenset[str]:
        """Return the abilities that it declares not to have with this config."""
        declared = {**self.supports, **(self.supports_for(config) if self.supports_for else {})}
        return frozenset(word for word, how in declared.items() if how not in (Support.FULL, Support.PARTIAL))

    def load(self) -> Callable[[Any], Any]:
        """Import the factory: the only place where a component's code is loaded.

        Raises:
            PluginError: its module cannot be imported or lacks the attribute; the nearest name is suggested.
        """
        found = _imported("factory", self.factory)
        if not callable(found):
            raise PluginError(f"factory '{self.factory}' cannot be called: it is a {type(found).__name__}")
        return found  # type: ignore[no-any-return]

    def load_optional(self, field: Reference) -> Any:
        """Import what that field names; None if the component has none.

        Raises:
            PluginError: as :meth:`load`.
        """
        reference = getattr(self, field)
        return None if reference is None else _imported(field, reference)

    def has_module(self) -> bool:
        """Return whether the factory's module exists, without importing it."""
        package, _, name = self.factory.partition(":")[0].rpartition(".")
        top = package.partition(".")[0] or name
        if package not in sys.modules:
            return find_spec(top) is not None  # a deeper search would import the package
        return find_spec(f"{package}.{name}") is not None

    def build(self, config: Any) -> Any:
        """Import the factory and call it with ``config``; :meth:`Registry.build` gives better errors."""
        return self.load()(config)


def _imported(field: str, reference: str) -> Any:
    """Return the object that ``"module:attribute"`` names."""
    name, _, attribute = reference.partition(":")
    try:
        found: Any = import_module(name)
    except NanotrainError:
        raise
    except Exception as error:
        raise PluginError(f"{field} '{reference}' cannot be imported: {describe(error)}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            near = did_you_mean(part, dir(found))
            raise PluginError(f"{field} '{reference}': {name} has no '{part}'{near}")
        found, name = getattr(found, part), f"{name}.{part}"
    return found
