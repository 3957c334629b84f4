"""Look at a run from its folder: ``nanotrain report`` writes HTML, ``nanotrain top`` shows it in a terminal.

The plugin's entry module: every ``nanotrain`` command imports it, so it imports neither torch nor bokeh.
"""

from nanotrain_core.api import Command, RegisterCommand, hookimpl

__version__ = "0.1.0"


@hookimpl
def nanotrain_register_command(register: RegisterCommand) -> None:
    """Register ``report`` and ``top``."""
    register(
        Command(
            name="report",
            summary="write one HTML file that shows a run, or several side by side",
            module="nanotrain_report.report",
        )
    )
    register(
        Command(
            name="top",
            summary="show the progress of a run in the terminal",
            module="nanotrain_report.top",
        )
    )
