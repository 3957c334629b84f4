"""`nanotrain plan`: memory, communication and time of a recipe at any scale, before a GPU is touched.

`nanotrain explain` tells the same dry run to a learner, `nanotrain inspect` what the model of a recipe is.

The plugin's entry module: every ``nanotrain`` command imports it, so it never imports torch.
"""

from __future__ import annotations

import attrs

from nanotrain_core.api import Command, Component, Register, RegisterCommand, hookimpl

__version__ = "0.1.0"


@attrs.define(frozen=True, kw_only=True)
class DryKernelsConfig:
    """``[kernels] use = "dry"``: a plan takes them by itself."""

    host: bool = False
    """Plan for a CPU."""


@hookimpl
def nanotrain_register_command(register: RegisterCommand) -> None:
    """Register ``plan`` and ``explain``, and what ``inspect`` does with recipes."""
    register(
        Command(
            name="plan",
            summary="show memory, communication and time of a recipe at any scale, without a GPU",
            module="nanotrain_plan.command",
            tells_memory=True,
        )
    )
    register(
        Command(
            name="explain",
            summary="explain one step of a recipe in text, diagrams and numbers",
            module="nanotrain_plan.explain.command",
        )
    )
    register(
        Command(
            name="inspect",
            summary="report on the model of a recipe, without a run",
            module="nanotrain_plan.model_report.command",
            extends=True,
        )
    )


@hookimpl
def nanotrain_register_kernels(register: Register) -> None:
    """Register ``dry``, which a plan computes with on ``meta``."""
    register(
        Component(
            name="dry",
            config=DryKernelsConfig,
            factory="nanotrain_plan.dry.kernels:DryKernels",
            summary="shapes without data, for nanotrain plan",
            provides={"kernels:meta"},
        )
    )
