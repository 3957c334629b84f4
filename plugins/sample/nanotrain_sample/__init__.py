"""Writes text with the weights of a run, and scores text: validation loss, perplexity, tasks.

The plugin's entry module: every ``nanotrain`` command imports it, so it never imports torch.
"""

from nanotrain_core.api import Command, RegisterCommand, hookimpl

__version__ = "0.1.0"


@hookimpl
def nanotrain_register_command(register: RegisterCommand) -> None:
    """Register ``nanotrain sample`` and ``nanotrain eval``."""
    register(
        Command(
            name="sample",
            summary="continue prompts with the weights of a run or a checkpoint",
            module="nanotrain_sample.command",
        )
    )
    register(
        Command(
            name="eval",
            summary="measure a checkpoint: validation loss, perplexity of files, multiple-choice tasks",
            module="nanotrain_sample.evaluate.command",
        )
    )
