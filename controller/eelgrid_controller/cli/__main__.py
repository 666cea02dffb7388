"""The entry point of eelctl: global options, the list of commands, and the two that other programs carry out.

Names the commands with their one-line help and imports a command's module when it is run, so that help, the version and
a usage error import none of them. click writes the completion script; for the demo this process becomes
`python -m eelgrid_controller.demo`.
"""

import gc
import importlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from eelgrid_controller.cli.box_state import find_box_controller
from eelgrid_controller.cli.connection import (
    OUTPUTS,
    CliError,
    CliSettings,
    CommandInterrupted,
    FiniteRange,
    cli_error_for,
    describe_error,
    output_error,
    shorten_words,
)
from eelgrid_controller.cli.standard_streams import (
    BROKEN_PIPE_CODE,
    INTERRUPTED_CODE,
    discard_output,
    is_output_error,
    prepare_streams,
)
from eelgrid_protos import __version__
from eelgrid_protos.operator_calls import CONTROLLER_VARIABLE, DEFAULT_CONTROLLER, TLS_VARIABLES
from eelgrid_protos.safe_text import escape_json

# Command: (module, one-line help), in the order in which help lists them.
COMMANDS: Mapping[str, tuple[str, str]] = {
    "nodes": ("nodes", "List nodes with their allocations and power draw."),
    "node": ("nodes", "Remove a node that is gone for good."),
    "cordon": ("drain", "Close nodes or GPUs to new work."),
    "uncordon": ("drain", "Open nodes or GPUs to new work again."),
    "drain": ("drain", "Close nodes or GPUs to new work, and move what runs there."),
    "gpus": ("nodes", "List GPUs with their latest readings."),
    "reconcile": ("nodes", "Release work that nodes hold but the journal has lost."),
    "topology": ("nodes", "Show how the GPUs of a node are linked."),
    "workloads": ("workloads", "List workloads, or watch them change."),
    "queue": ("queue", "Show pending workloads and why they wait; declare queues."),
    "reservation": ("reservation", "Hold nodes for users, a queue or maintenance in a span of time."),
    "interference": (
        "interference",
        "Say by how much loads that share a GPU slow each other down, and how much work bears.",
    ),
    "run": ("jobs", "Run a command as a job, and print its output."),
    "jobs": ("jobs", "List jobs that wait or run."),
    "logs": ("jobs", "Print the output of a job."),
    "attach": ("jobs", "Attach to a job that runs: its output, and input to it."),
    "wait": ("jobs", "Wait until jobs have ended."),
    "hold": ("job_control", "Keep pending workloads from starting."),
    "release": ("job_control", "Let held workloads start."),
    "requeue": ("job_control", "Stop running jobs and let them wait again."),
    "rerun": ("job_control", "Run a job that has ended again."),
    "box": ("box", "Start, show or stop a controller and an agent on this machine."),
    "get": ("workloads", "Show one workload."),
    "submit": ("workloads", "Submit workloads, from flags or a YAML file."),
    "cancel": ("workloads", "Cancel workloads."),
    "scale": ("workloads", "Change the number of replicas of a workload."),
    "promises": ("promises", "Show whether services and jobs meet their objectives."),
    "progress": ("workloads", "Report the progress of a job."),
    "profile": ("profiles", "Import, list or predict measurements of workloads."),
    "explain": ("explain", "Explain why a workload was placed where it is, or why it waits."),
    "whatif": ("whatif", "Try changes on a copy: drain, add nodes, other weights, more work."),
    "capacity": ("whatif", "Compute how many more nodes are needed."),
    "shadow": ("whatif", "Run a second policy on a copy of the cluster, and compare."),
    "decision": ("explain", "Export a placement decision with all its inputs, or replay one."),
    "plan": ("nodes", "Show the plans that the controller sends to its nodes."),
    "policy": ("policy", "Show or change the policy."),
    "partition": ("partition", "Show, plan or change the MIG layouts of partitioned pools."),
    "moves": ("moves", "Recommend or execute moves of running workloads."),
    "energy": ("energy", "Show energy, cost and carbon by owner."),
    "clusters": ("clusters", "List the clusters behind a front, or where a workload is."),
    "spending": ("policy", "Show spending limits, what is spent, and what waits for them."),
    "flux": ("flux", "Show which jobs of a Flux instance held which GPUs, and their energy."),
    "exporters": ("energy_exports", "Show who exports energy rows, and up to when."),
    "report": ("report", "Write a monthly report of energy, cost and carbon as HTML or PDF."),
    "overview": ("overview", "Show what is going on and what needs attention."),
    "top": ("top", "Watch the cluster live."),
    "audit": ("access", "Show who requested which change, when, and with what result."),
    "whoami": ("access", "Show the identity, roles and rights of your certificate."),
    "admin": ("admin", "Move a controller's journal to another database."),
    "doctor": ("doctor", "Check this installation and say how to repair it."),
    "replay": ("replay", "Compare policies on a trace, or submit it to a controller."),
    "frontier": ("frontier", "Compute energy against latency and throughput of a fleet."),
    "demo": ("__main__", "Start a controller and a simulated fleet, and replay a trace."),
    "describe": ("describe", "Show everything that is known of one node, GPU or workload."),
    "version": ("access", "Show the versions of eelctl and of the controller."),
    "help": ("__main__", "Show the help of a command."),
    "completion": ("__main__", "Print the shell completion script."),
}
# Help lists commands in groups, by what somebody wants to do.
GROUPS: Mapping[str, tuple[str, ...]] = {
    "Jobs": ("run", "jobs", "logs", "attach", "wait", "hold", "release", "requeue", "rerun", "box"),
    "Look": (
        "overview",
        "clusters",
        "top",
        "workloads",
        "get",
        "describe",
        "explain",
        "queue",
        "reservation",
        "gpus",
        "nodes",
        "topology",
        "promises",
    ),
    "Work": ("submit", "cancel", "scale", "progress", "moves", "replay"),
    "Plan": ("whatif", "capacity", "shadow", "decision", "frontier", "profile", "interference", "policy"),
    "Money": ("energy", "spending", "report", "exporters", "flux"),
    "Nodes": ("cordon", "uncordon", "drain", "node", "plan", "partition", "reconcile"),
    "Set-up": ("doctor", "admin", "demo", "whoami", "audit", "version", "completion", "help"),
}


class _Commands(click.Group):
    """A group that imports a command when it is run."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"eelgrid_controller.cli.{COMMANDS[cmd_name][0]}")
        command: click.Command = getattr(module, f"{cmd_name}_" if cmd_name == "help" else cmd_name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Returns the command; for an unknown name, fails with the closest names."""
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            from difflib import get_close_matches

            near = get_close_matches(args[0], COMMANDS, n=2)
            if near:
                ctx.fail(f"No such command {args[0]!r}. Did you mean {' or '.join(near)}?")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        # One width for all groups, so that their texts are in one column.
        width = max(map(len, COMMANDS))
        for title, names in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), COMMANDS[name][1]) for name in names])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[Any]:
        from click.shell_completion import CompletionItem

        if incomplete[:1] in {"-", "/"}:
            return super().shell_complete(ctx, incomplete)
        return [CompletionItem(name, help=text) for name, (_, text) in COMMANDS.items() if name.startswith(incomplete)]

    def main(self, args: Sequence[str] | None = None, *rest: Any, **extra: Any) -> Any:
        """Runs a command and exits; under `-o json` an error is one JSON object on stderr, with the same exit code."""
        given = list(sys.argv[1:] if args is None else args)
        if not _is_json(given):
            return super().main(given, *rest, **extra)
        try:
            code = super().main(given, *rest, **{**extra, "standalone_mode": False})
        except click.ClickException as error:
            click.echo(escape_json(json.dumps(describe_error(error), ensure_ascii=False)), err=True)
            sys.exit(error.exit_code)
        except click.Abort:
            aborted = {"reason": "aborted", "message": "aborted", "remedy": "run the command again", "violations": []}
            click.echo(json.dumps(aborted), err=True)
            sys.exit(1)
        sys.exit(code if isinstance(code, int) else 0)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            text = error.format_message()
            short = shorten_words(text)
            if short == text:
                raise
            raise click.UsageError(short, ctx=error.ctx) from None
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except KeyboardInterrupt:
            raise CommandInterrupted(
                "interrupted", "what the controller has accepted stays; run the command again for the rest"
            ) from None
        except BrokenPipeError:
            discard_output()
            raise click.exceptions.Exit(BROKEN_PIPE_CODE) from None
        except Exception as error:
            stop = cli_error_for(error, ctx.obj or CliSettings())
            if isinstance(error, OSError) and is_output_error(error):
                discard_output()
                stop = output_error(error)
            if stop is None:
                raise
            raise stop from None


def _is_json(arguments: Sequence[str]) -> bool:
    """Whether the last output format among the arguments is JSON; known before they are parsed, as that may fail."""
    form = ""
    for index, argument in enumerate(arguments):
        if argument == "--":
            break
        if argument in {"-o", "--output"}:
            form = arguments[index + 1] if index + 1 < len(arguments) else ""
        elif argument.startswith("--output="):
            form = argument.partition("=")[2]
        elif argument.startswith("-o") and len(argument) > len("-o"):
            form = argument[2:]
    return form == "json"


# Objects made and not freed; what `eelctl top` makes is still collected.
_COLLECTED_AFTER = 50_000
_PEM = click.Path(path_type=Path, dir_okay=False)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="eelctl")
@click.option(
    "--controller",
    envvar=CONTROLLER_VARIABLE,
    default=DEFAULT_CONTROLLER,
    show_default=True,
    metavar="HOST:PORT[,HOST:PORT...]",
    help="Address of the controller, or of several of which one leads; without it that of `eelctl box`, if it runs. "
    "[env EELGRID_CONTROLLER]",
)
@click.option(
    "--cluster",
    envvar="EELGRID_CLUSTER",
    default="",
    metavar="NAME",
    help="Ask this cluster, if --controller is a front of several; with your own certificate. [env EELGRID_CLUSTER]",
)
@click.option("--tls-certificate", envvar=TLS_VARIABLES[0], type=_PEM, help="Client certificate chain, PEM.")
@click.option("--tls-key", envvar=TLS_VARIABLES[1], type=_PEM, help="Private key of the client certificate, PEM.")
@click.option(
    "--tls-authority",
    envvar=TLS_VARIABLES[2],
    type=_PEM,
    help="CA that signed the controller's certificate, PEM.",
)
@click.option("--insecure", is_flag=True, help="Connect to another machine without TLS.")
@click.option(
    "--stale",
    is_flag=True,
    help="Let any of the controllers answer what only reads, also one that follows the leader; standard error says how old "
    "such an answer is.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=FiniteRange(0.1, 3600.0),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="Time limit of one call.",
)
@click.option(
    "--page",
    envvar="EELGRID_PAGE",
    default="",
    metavar="URL",
    help="URL of the live page, for the link that `explain` prints. [env EELGRID_PAGE]",
)
@click.option("-o", "--output", type=click.Choice(OUTPUTS), default="table", show_default=True, help="Output format.")
@click.option("--no-headers", is_flag=True, help="Omit the header line.")
@click.pass_context
def cli(context: click.Context, /, no_headers: bool, **values: Any) -> None:
    """Query and control an Eelgrid controller, which places and powers GPU work."""
    if context.get_parameter_source("controller") is click.core.ParameterSource.DEFAULT:
        # Named by nobody: this user's box, if it runs.
        values["controller"] = find_box_controller() or values["controller"]
    context.obj = CliSettings(headers=not no_headers, **values)


@click.command(name="help")
@click.argument("command", nargs=-1)
@click.pass_context
def help_(context: click.Context, command: tuple[str, ...]) -> None:
    """Show the help of COMMAND, or the list of commands.

    \b
    eelctl help policy set
    """  # noqa: D301
    here = context.find_root()
    for name in command:
        group = here.command
        if not isinstance(group, click.Group):
            raise click.UsageError(f"{here.command_path} has no commands")
        _, found, _ = group.resolve_command(here, [name])
        if found is None:
            raise click.UsageError(f"No such command {name!r}.")
        here = click.Context(found, parent=here, info_name=name)
    click.echo(here.get_help())


_COMPLETION_LINES = {
    "bash": 'eval "$(eelctl completion bash)"     in ~/.bashrc',
    "zsh": 'eval "$(eelctl completion zsh)"      in ~/.zshrc',
    "fish": "eelctl completion fish | source       in ~/.config/fish/config.fish",
}


@click.command(epilog="\b\n" + "\n".join(_COMPLETION_LINES.values()))
@click.argument("shell", type=click.Choice(list(_COMPLETION_LINES)))
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


@contextmanager
def report_stream_errors() -> Iterator[None]:
    """Prepares the standard streams of a program; one that cannot be used ends it with a message."""
    # gRPC's own lines on stderr, such as each failed handshake, are no messages for people.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        prepare_streams()
    except OSError as error:
        output_error(error).show()
        sys.exit(CliError.exit_code)
    try:
        yield
    except OSError as error:
        # Of what click itself writes, such as help; `invoke` has those of commands.
        if not is_output_error(error):
            raise
        discard_output()
        output_error(error).show()
        sys.exit(CliError.exit_code)
    except KeyboardInterrupt:
        # Before or after the command itself, which has a message for it.
        sys.exit(INTERRUPTED_CODE)


def main() -> None:
    """Runs eelctl and exits."""
    # Modules are no garbage: looking for cycles among them as they load, and again when the interpreter takes them apart,
    # was a quarter of the processor time of a short command.
    gc.set_threshold(_COLLECTED_AFTER)
    try:
        with report_stream_errors():
            cli(prog_name="eelctl")
    finally:
        gc.freeze()


if __name__ == "__main__":
    main()
