"""eelctl top: a live screen of the cluster.

Owns when the screen is drawn and what is asked for it; terminal_rendering draws it.
A terminal gets a screen that follows the controller's watch and survives a restart
of the controller; anything else gets one plain snapshot.
"""

import sys
import time
from collections.abc import Callable
from typing import Any

import click

from eelgrid_controller.cli.connection import CliSettings, connect_operators, fetch_whole, iterate_pages, output_option
from eelgrid_controller.cli.output import print_document, use_colour
from eelgrid_protos.messages import (
    GetSummaryRequest,
    ListNodesRequest,
    ListPromisesRequest,
    QueryEnergyRequest,
    Summary,
    WatchSummaryRequest,
)

# A listing of a thousand nodes costs the controller some 100 ms, a summary under 1 ms.
_REST_EVERY_S = 10.0
_RECONNECT_S = 1.0
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


def _live(client: Any, settings: CliSettings, shown: int, interval_s: float) -> None:
    from rich.console import Console
    from rich.live import Live

    from eelgrid_protos.faults import Unavailable

    rest, listed_s = _rest(client, settings), time.monotonic()
    summary = client.get_summary(GetSummaryRequest(), timeout=settings.timeout_s).summary
    console = Console(no_color=not use_colour())
    first = _picture(summary, rest, shown, settings.controller, console)
    with Live(first, console=console, auto_refresh=False, screen=True) as live:
        while True:
            try:
                for answer in client.watch_summary(WatchSummaryRequest(interval_s=interval_s)):
                    summary = answer.summary
                    if time.monotonic() - listed_s > _REST_EVERY_S:
                        rest, listed_s = _rest(client, settings), time.monotonic()
                    live.update(_picture(summary, rest, shown, settings.controller, console), refresh=True)
                note = f"{settings.controller} closed the watch; reconnecting (Ctrl-C quits)"
            except Unavailable:
                note = f"{settings.controller} does not answer; retrying (Ctrl-C quits)"
            live.update(_picture(summary, rest, shown, note, console), refresh=True)
            time.sleep(_RECONNECT_S)


@click.command()
@click.option("--once", is_flag=True, help="Print one snapshot and exit.")
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(0.2, 60.0),
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
    help="Number of nodes to show, the busiest first.",
)
@output_option
@click.pass_obj
def top(settings: CliSettings, once: bool, interval_s: float, shown: int) -> None:
    """Watch the cluster live: power, energy today, objectives, pending work and its reasons. Ctrl-C quits."""
    with connect_operators(settings) as client:
        if once or not sys.stdout.isatty() or settings.output in {"json", "yaml"}:
            _once(client, settings, shown)
            return
        try:
            _live(client, settings, shown, interval_s)
        except KeyboardInterrupt:
            return
