"""The entry point of eelctl: global options and the list of commands.

Owns the composition: commands are named here with their one-line help and are
imported when they are run, so that help, the version and a usage error cost no
import of theirs. Must not know any command's options.
"""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from eelgrid_controller.cli.connection import DEFAULT_CONTROLLER, OUTPUTS, CliSettings
from eelgrid_controller.cli.errors import cli_error_for
from eelgrid_protos import __version__

# Command: (module, one-line help), in the order in which help lists them.
COMMANDS: Mapping[str, tuple[str, str]] = {
    "nodes": ("nodes", "List nodes, what is allocated on them and what they draw."),
    "node": ("nodes", "Remove a node that is gone for good."),
    "gpus": ("nodes", "List GPUs with their newest readings."),
    "reconcile": ("nodes", "Give up what nodes hold beyond the journal, after it lost entries."),
    "topology": ("nodes", "Show how the GPUs of a node are linked."),
    "workloads": ("workloads", "List workloads, or watch them change."),
    "queue": ("queue", "Show what waits, in which order, since when and for what."),
    "get": ("workloads", "Show one workload."),
    "submit": ("workloads", "Submit a workload, from flags or YAML."),
    "cancel": ("workloads", "End workloads."),
    "scale": ("promises", "Give a workload another number of replicas."),
    "promises": ("promises", "Show how services and jobs keep what they were promised."),
    "progress": ("promises", "Tell how far a job is."),
    "profile": ("profiles", "Tell or list what was measured of workloads."),
    "explain": ("explain", "Say where a workload went and why, or what it waits for."),
    "whatif": ("whatif", "Try changes on a copy: drain, add nodes, other weights, more work."),
    "capacity": ("whatif", "Say how many more nodes are needed."),
    "shadow": ("whatif", "Let a second policy follow the cluster on a copy, and compare."),
    "decision": ("explain", "Export a decision with all that it depended on, or replay one."),
    "plan": ("nodes", "Show what the controller wants of its nodes."),
    "policy": ("policy", "Show or change what to aim for."),
    "partition": ("partition", "Show, plan or change the MIG layouts of partitioned pools."),
    "moves": ("moves", "Recommend moves of running work, or execute them."),
    "energy": ("energy", "Say who spent how many joules, and what they cost."),
    "spending": ("policy", "Show what is spent of spending limits, and what waits for them."),
    "exporters": ("energy", "Show who takes energy's rows elsewhere, and until when they have them."),
    "report": ("report", "Write a month of energy, cost and carbon as a page of HTML or PDF."),
    "top": ("top", "Watch the cluster live."),
    "audit": ("access", "Show who asked to change what, when, and what came of it."),
    "whoami": ("access", "Say whose our certificate is and what it may."),
    "doctor": ("doctor", "Say what is wrong with this installation and what to do."),
    "replay": ("replay", "Compare policies on a trace, or submit it to a controller."),
    "frontier": ("frontier", "Energy against latency and throughput, of a described fleet or the running one."),
    "demo": ("shell", "Start a controller and a simulated fleet, and replay a trace."),
    "completion": ("shell", "Print the shell completion script."),
}


class _Commands(click.Group):
    """A group whose commands are imported when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"eelgrid_controller.cli.{COMMANDS[cmd_name][0]}")
        command: click.Command = getattr(module, cmd_name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command; of one that is not there the names that are nearest."""
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            from difflib import get_close_matches

            near = get_close_matches(args[0], COMMANDS, n=2)
            if near:
                ctx.fail(f"No such command {args[0]!r}. Did you mean {' or '.join(near)}?")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[Any]:
        from click.shell_completion import CompletionItem

        if incomplete[:1] in {"-", "/"}:
            return super().shell_complete(ctx, incomplete)
        return [CompletionItem(name, help=text) for name, (_, text) in COMMANDS.items() if name.startswith(incomplete)]

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            stop = cli_error_for(error, ctx.obj or CliSettings())
            if stop is None:
                raise
            raise stop from None


_PEM = click.Path(path_type=Path, dir_okay=False)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="eelctl")
@click.option(
    "--controller",
    envvar="EELGRID_CONTROLLER",
    default=DEFAULT_CONTROLLER,
    show_default=True,
    metavar="HOST:PORT",
    help="The controller's address. [env EELGRID_CONTROLLER]",
)
@click.option("--tls-certificate", envvar="EELGRID_TLS_CERTIFICATE", type=_PEM, help="Our certificate chain, PEM.")
@click.option("--tls-key", envvar="EELGRID_TLS_KEY", type=_PEM, help="The certificate's key, PEM.")
@click.option(
    "--tls-authority", envvar="EELGRID_TLS_AUTHORITY", type=_PEM, help="Who the controller must be from, PEM."
)
@click.option("--insecure", is_flag=True, help="Talk to another machine without TLS.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(0.1, 3600.0),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="How long one call may take.",
)
@click.option(
    "--page",
    envvar="EELGRID_PAGE",
    default="",
    metavar="URL",
    help="Where you see the live page; `explain` then prints a link. [env EELGRID_PAGE]",
)
@click.option("-o", "--output", type=click.Choice(OUTPUTS), default="table", show_default=True, help="How to print.")
@click.option("--no-headers", is_flag=True, help="Leave out the line of titles.")
@click.pass_context
def cli(context: click.Context, /, no_headers: bool, **values: Any) -> None:
    """Place and power GPU work: ask and command an Eelgrid controller."""
    context.obj = CliSettings(headers=not no_headers, **values)


def main() -> None:
    """Runs eelctl and exits."""
    cli(prog_name="eelctl")


if __name__ == "__main__":
    main()
