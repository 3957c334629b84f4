"""Examines this machine before anything trains on it: ``nanotrain doctor``.

The plugin's entry module: every ``nanotrain`` command imports it, so it never imports torch.
"""

from nanotrain_core.api import Command, RegisterCommand, hookimpl

__version__ = "0.1.0"


@hookimpl
def nanotrain_register_command(register: RegisterCommand) -> None:
    """Register ``nanotrain doctor``."""
    register(
        Command(
            name="doctor",
            summary="check this machine: software, limits, devices, ranks, disk, clock and network",
            module="nanotrain_doctor.command",
        )
    )
