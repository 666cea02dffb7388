"""eelctl top: a live screen of the cluster.

A terminal gets the interactive screen of top_app; anything else gets one plain snapshot, which terminal_rendering draws.
Textual is imported for the screen alone.
"""

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import click

from eelgrid_controller.cli.connection import (
    CliSettings,
    FiniteRange,
    connect_operators,
    fetch_whole,
    iterate_pages,
    output_option,
)
from eelgrid_controller.cli.output import print_document, use_colour
from eelgrid_protos.messages import (
    GetSummaryRequest,
    ListNodesRequest,
    ListPromisesRequest,
    QueryEnergyRequest,
    Summary,
)

_WIDTH_IN_A_PIPE = 130
_CONSUMERS_MOST = 100
_DAY_S = 86_400


def _picture(summary: Summary, rest: dict[str, Any], shown: int, note: str, console: Any) -> Any:
    from eelgrid_controller.cli import terminal_rendering

    size = console.size if console.is_terminal else None
    return terminal_rendering.render_top(
        terminal_rendering.TopSnapshot(summary=summary, **rest),
        f"Eelgrid {note}",
        nodes_most=shown,
        width=console.width,
        height=size.height if size else 0,
    )


def _rest(client: Any, settings: CliSettings) -> dict[str, Any]:
    """Fetches what is expensive to ask for; leaves out promises and energy if the calls fail."""
    from eelgrid_protos import faults

    timeout_s = settings.timeout_s
    nodes = tuple(iterate_pages(client.list_nodes, ListNodesRequest(), "nodes", timeout_s=timeout_s))
    found: dict[str, Any] = {"nodes": nodes, "missing": ""}
    now_ns = time.time_ns()
    today = QueryEnergyRequest(
        begin_ns=now_ns // 10**9 // _DAY_S * _DAY_S * 10**9,
        end_ns=now_ns,
        group_by=("namespace", "title"),
        rows_most=_CONSUMERS_MOST,
    )
    asked: tuple[tuple[str, Callable[[], Any]], ...] = (
        ("promises", lambda: fetch_whole(client.list_promises, ListPromisesRequest(), timeout_s=timeout_s)),
        ("energy", lambda: client.query_energy(today, timeout=timeout_s)),
    )
    for name, ask in asked:
        try:
            found[name] = ask()
        except faults.Fault as fault:
            found["missing"] = fault.message
    return found


def _once(client: Any, settings: CliSettings, shown: int) -> None:
    from rich.console import Console

    summary = client.get_summary(GetSummaryRequest(), timeout=settings.timeout_s).summary
    if settings.output in {"json", "yaml"}:
        print_document(settings, summary, ())
        return
    width = None if sys.stdout.isatty() else _WIDTH_IN_A_PIPE
    console = Console(file=sys.stdout, width=width, no_color=not use_colour())
    console.print(_picture(summary, _rest(client, settings), shown, settings.controller, console))


def _is_interactive() -> bool:
    """Returns whether keys can be read and a screen be drawn."""
    is_terminal = all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))
    return is_terminal and os.environ.get("TERM", "dumb") != "dumb"


def _live(settings: CliSettings, interval_s: float) -> None:
    """Shows the screen until its user quits; an error in it that is a bug is raised."""
    # gRPC's own messages would be written into the screen.
    os.environ["GRPC_VERBOSITY"] = "NONE"
    from eelgrid_controller.cli.top_app import TopApp
    from eelgrid_controller.cli.top_feed import TopFeed

    with connect_operators(settings) as client:
        app = TopApp(settings.controller, lambda report: TopFeed(client, settings, interval_s, report))
        app.run()
    # The channel is closed: calls under way have ended.
    app.feed.join()
    if app.return_code:
        sys.exit(app.return_code)


@click.command()
@click.option("--once", is_flag=True, help="Print one snapshot and exit.")
@click.option(
    "--interval",
    "interval_s",
    type=FiniteRange(0.2, 60.0),
    default=1.0,
    show_default=True,
    help="Seconds between updates.",
)
@click.option(
    "--nodes",
    "shown",
    type=click.IntRange(1, 100),
    default=10,
    show_default=True,
    help="Number of nodes in a snapshot, the busiest first.",
)
@output_option
@click.pass_obj
def top(settings: CliSettings, once: bool, interval_s: float, shown: int) -> None:
    """Watch the cluster live: power against the budget, what needs attention, nodes, GPUs, work and its promises.

    On a terminal the screen is interactive: 1 to 7 show a tab, / filters, s sorts, Enter describes a row, ? lists all
    keys, q quits. It changes nothing. In a pipe, and with --once, it prints one snapshot.
    """
    if once or not _is_interactive() or settings.output in {"json", "yaml"}:
        with connect_operators(settings) as client:
            _once(client, settings, shown)
        return
    _live(settings, interval_s)
