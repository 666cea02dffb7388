"""eelctl completion and demo: commands that another program carries out.

click writes the completion script; for the demo this process becomes `python -m eelgrid_controller.demo`.
"""

import os
import sys

import click

_HOW = {
    "bash": 'eval "$(eelctl completion bash)"     in ~/.bashrc',
    "zsh": 'eval "$(eelctl completion zsh)"      in ~/.zshrc',
    "fish": "eelctl completion fish | source       in ~/.config/fish/config.fish",
}


@click.command(epilog="\b\n" + "\n".join(_HOW.values()))
@click.argument("shell", type=click.Choice(list(_HOW)))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the shell completion script; the lines below load it."""
    from click.shell_completion import get_completion_class

    writer = get_completion_class(shell)
    if writer is None:
        raise click.UsageError(f"{shell} is not supported")
    # source() fills in a template; bash's version check, which runs a shell, is not in it.
    click.echo(writer(context.find_root().command, {}, "eelctl", "_EELCTL_COMPLETE").source())


@click.command(context_settings={"ignore_unknown_options": True, "help_option_names": []}, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def demo(arguments: tuple[str, ...]) -> None:
    """Start a controller and a simulated fleet on this machine, and replay a trace (--help lists the options)."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "eelgrid_controller.demo", *arguments])  # noqa: S606
