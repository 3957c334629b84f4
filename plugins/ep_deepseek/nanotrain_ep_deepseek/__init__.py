"""Expert parallelism: each rank holds some experts, or slices of them, and tokens travel to them.

This is the plugin's face: every ``nanotrain`` command imports it, so it never imports torch.
"""

import attrs

from nanotrain_core import hookimpl
from nanotrain_core.component import Component
from nanotrain_core.hookspecs import Register

__version__ = "0.1.0"


@attrs.define(frozen=True, kw_only=True)
class ExpertParallelConfig:
    """``[[parallel]] use = "ep_deepseek"``: no keys. Degrees are the topology's ``ep`` and ``etp``."""


@hookimpl
def nanotrain_register_parallel(register: Register) -> None:
    """Announce ``ep_deepseek``."""
    register(
        Component(
            name="ep_deepseek",
            config=ExpertParallelConfig,
            factory="nanotrain_ep_deepseek.wrapper:ExpertParallel",
            summary="experts spread over ranks, tokens sent to them by all-to-all, none dropped",
            mesh_dims={"ep", "etp"},
        )
    )
