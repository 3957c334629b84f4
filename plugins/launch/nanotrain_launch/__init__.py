"""Writes the script that runs a recipe on a cluster: ``nanotrain launch``.

The plugin's entry module: every ``nanotrain`` command imports it, so it never imports torch.
"""

from nanotrain_core.api import Command, RegisterCommand, hookimpl

__version__ = "0.1.0"


@hookimpl
def nanotrain_register_command(register: RegisterCommand) -> None:
    """Register ``nanotrain launch``."""
    register(
        Command(
            name="launch",
            summary="write the script that runs a recipe on several machines: slurm, k8s, torchrun or ssh",
            module="nanotrain_launch.command",
        )
    )
