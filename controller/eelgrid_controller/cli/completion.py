"""eelctl completion: the script that a shell loads to complete commands and options.

Owns nothing but the choice of shell; click writes the script.
"""

import click

__all__ = ["completion"]

_HOW = {
    "bash": 'eval "$(eelctl completion bash)"     in ~/.bashrc',
    "zsh": 'eval "$(eelctl completion zsh)"      in ~/.zshrc',
    "fish": "eelctl completion fish | source       in ~/.config/fish/config.fish",
}


@click.command(epilog="\b\n" + "\n".join(_HOW.values()))
@click.argument("shell", type=click.Choice(list(_HOW)))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the shell completion script."""
    from click.shell_completion import get_completion_class

    writer = get_completion_class(shell)
    if writer is None:
        raise click.UsageError(f"{shell} is not supported")
    # source() fills in a template; bash's version check, which runs a shell, is not in it.
    click.echo(writer(context.find_root().command, {}, "eelctl", "_EELCTL_COMPLETE").source())
