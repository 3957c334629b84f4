"""The contract between nanotrain and a plugin: one hook for each kind of component, and one for commands.

A plugin implements the hooks of the kinds it offers and calls ``register`` once per component,
with a :class:`~nanotrain_core.component.Component`. A hook only describes components; it neither builds
them nor imports torch. The built-in components are registered through these same hooks.
"""

from collections.abc import Callable

import pluggy

from nanotrain_core.command import Command
from nanotrain_core.component import Component

#: The minor number grows when a hook is new or gains an argument, the major one when a meaning changes.
HOOKSPEC_VERSION = "1.2"

hookspec = pluggy.HookspecMarker("nanotrain")

#: The type of ``register`` in the hook of a component kind.
Register = Callable[[Component], None]
#: The type of ``register`` in the hook for commands.
RegisterCommand = Callable[[Command], None]


@hookspec
def nanotrain_register_topology(register: Register) -> None:
    """Register topologies: how the ranks of a run are arranged along named mesh dimensions."""


@hookspec
def nanotrain_register_kernels(register: Register) -> None:
    """Register kernels: attention, norms, linear layers, experts and the loss for a type of device."""


@hookspec
def nanotrain_register_model(register: Register) -> None:
    """Register models: plain single-device modules that declare the role of each of their layers."""


@hookspec
def nanotrain_register_parallel(register: Register) -> None:
    """Register parallel wrappers: they transform a model by its roles and update its placements."""


@hookspec
def nanotrain_register_optimizer(register: Register) -> None:
    """Register optimizers: they turn summed gradients into new weights."""


@hookspec
def nanotrain_register_precision(register: Register) -> None:
    """Register precisions: dtypes of compute, of gradients and of the weights the optimizer owns."""


@hookspec
def nanotrain_register_schedule(register: Register) -> None:
    """Register schedules: the order of forward and backward passes over stages and microbatches."""


@hookspec
def nanotrain_register_checkpoint(register: Register) -> None:
    """Register checkpoint formats: they save placed blocks and read them back on any layout."""


@hookspec
def nanotrain_register_monitor(register: Register) -> None:
    """Register monitors: they react to the events of a run and never change its results."""


@hookspec
def nanotrain_register_data(register: Register) -> None:
    """Register data sources: batches with a position that can be saved and restored."""


@hookspec
def nanotrain_register_command(register: RegisterCommand) -> None:
    """Register commands: subcommands of ``nanotrain`` that work with recipes, runs or checkpoints."""
