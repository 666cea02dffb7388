"""eelctl demo: the same as `python -m eelgrid_controller.demo`.

Owns the hand-over alone: the demo is a program of its own beside eelctl, so
this process becomes it.
"""

import os
import sys

import click

__all__ = ["demo"]


@click.command(context_settings={"ignore_unknown_options": True, "help_option_names": []}, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def demo(arguments: tuple[str, ...]) -> None:
    """Start a controller and a simulated fleet, and replay a trace (--help lists its options)."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "eelgrid_controller.demo", *arguments])  # noqa: S606
