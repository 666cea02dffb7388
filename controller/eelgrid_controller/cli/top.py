"""eelctl top: the cluster, live.

Owns when the picture is drawn again; how it looks is picture.py's. A terminal
gets a screen that follows the controller's watch and survives its restart;
anything else gets one plain snapshot, because a pipe is no screen.
"""

import sys
import time
from typing import Any

import click

from eelgrid_controller.cli.connection import operators, pages
from eelgrid_controller.cli.settings import Settings, printing
from eelgrid_controller.cli.tables import coloured, document
from eelgrid_protos.messages import GetSummaryRequest, ListNodesRequest, Node, Summary, WatchSummaryRequest

__all__ = ["top"]

# A listing of a thousand nodes costs the controller some 100 ms, a summary under 1 ms.
_NODES_EVERY_S = 10.0
_RECONNECT_S = 1.0
_WIDTH_IN_A_PIPE = 110


def _picture(summary: Summary, nodes: tuple[Node, ...], shown: int, note: str) -> Any:
    from rich.text import Text

    from eelgrid_controller import picture

    return picture.summary_picture(
        summary,
        f"Eelgrid {note}",
        Text("\nwaiting for", style="grey62"),
        picture.reasons(summary),
        Text("\nbusiest nodes", style="grey62"),
        picture.busiest(nodes, shown),
    )


def _nodes(client: Any, settings: Settings) -> tuple[Node, ...]:
    return tuple(pages(client.list_nodes, ListNodesRequest(), "nodes", timeout_s=settings.timeout_s))


def _once(client: Any, settings: Settings, shown: int) -> None:
    from rich.console import Console

    summary = client.get_summary(GetSummaryRequest(), timeout=settings.timeout_s).summary
    if settings.output in {"json", "yaml"}:
        document(settings, summary, ())
        return
    width = None if sys.stdout.isatty() else _WIDTH_IN_A_PIPE
    console = Console(file=sys.stdout, width=width, no_color=not coloured())
    console.print(_picture(summary, _nodes(client, settings), shown, settings.controller))


def _live(client: Any, settings: Settings, shown: int, interval_s: float) -> None:
    from rich.console import Console
    from rich.live import Live

    from eelgrid_protos.faults import Unavailable

    nodes, listed_s = _nodes(client, settings), time.monotonic()
    summary = client.get_summary(GetSummaryRequest(), timeout=settings.timeout_s).summary
    first = _picture(summary, nodes, shown, settings.controller)
    with Live(first, console=Console(no_color=not coloured()), auto_refresh=False, screen=True) as live:
        while True:
            try:
                for answer in client.watch_summary(WatchSummaryRequest(interval_s=interval_s)):
                    summary = answer.summary
                    if time.monotonic() - listed_s > _NODES_EVERY_S:
                        nodes, listed_s = _nodes(client, settings), time.monotonic()
                    live.update(_picture(summary, nodes, shown, settings.controller), refresh=True)
                note = f"{settings.controller} closed the watch; reconnecting (Ctrl-C ends)"
            except Unavailable:
                note = f"{settings.controller} does not answer; trying again (Ctrl-C ends)"
            live.update(_picture(summary, nodes, shown, note), refresh=True)
            time.sleep(_RECONNECT_S)


@click.command()
@click.option("--once", is_flag=True, help="Print one snapshot and end.")
@click.option(
    "--interval", "interval_s", type=click.FloatRange(0.2, 60.0), default=1.0, show_default=True, help="Seconds."
)
@click.option(
    "--nodes", "shown", type=click.IntRange(1, 100), default=10, show_default=True, help="Busiest nodes to show."
)
@printing
@click.pass_obj
def top(settings: Settings, once: bool, interval_s: float, shown: int) -> None:
    """Watch the cluster live: power, allocation, what waits and why. Ctrl-C ends it."""
    with operators(settings) as client:
        if once or not sys.stdout.isatty() or settings.output in {"json", "yaml"}:
            _once(client, settings, shown)
            return
        try:
            _live(client, settings, shown, interval_s)
        except KeyboardInterrupt:
            return
