"""What the demo shows while it runs: a live picture on a terminal, lines in a pipe.

Owns the state of the picture: how far the trace has come, the newest summary,
and the allocation of each node. Must not know calls or processes. The map is
kept from the answers to the submissions, which name node and share: the
controller is not asked for a thousand nodes again and again while it is timed.
"""

import os
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.rule import Rule
from rich.text import Text

from eelgrid_controller import picture
from eelgrid_controller.replay.openb import NodeRow
from eelgrid_controller.replay.submit import Report
from eelgrid_controller.spelling import watts_text
from eelgrid_protos.messages import Summary, Workload

__all__ = ["NodeMap", "Scene", "make_console"]

_LINE_EVERY_S = 2.0
_FRAMES_HZ = 4.0
_WIDTH_IN_A_PIPE = 110
# Rows of the screen that are not the map: frame, figures, progress, reasons, key.
_ROWS_ELSEWHERE = 20


def make_console(*, live: bool) -> Console:
    """The console of the demo; a pipe gets plain text of a fixed width."""
    colourless = bool(os.environ.get("NO_COLOR"))
    if live:
        return Console(no_color=colourless)
    return Console(file=sys.stdout, width=_WIDTH_IN_A_PIPE, no_color=True, force_terminal=False)


@dataclass(slots=True)
class NodeMap:
    """The allocated share of each node's GPUs, by model."""

    capacity_milli: Mapping[str, int]
    by_model: Mapping[str, tuple[str, ...]]
    allocated_milli: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, nodes: Iterable[NodeRow]) -> "NodeMap":
        """An empty map of the nodes that have GPUs, the largest fleet first."""
        groups: dict[str, list[NodeRow]] = {}
        for row in nodes:
            if row.gpu_count:
                groups.setdefault(row.gpu_model, []).append(row)
        ordered = sorted(groups.items(), key=lambda item: (-sum(row.gpu_count for row in item[1]), item[0]))
        return cls(
            {row.name: row.gpu_count * 1000 for _, rows in ordered for row in rows},
            {model: tuple(row.name for row in rows) for model, rows in ordered},
        )

    def place(self, workload: Workload) -> None:
        """Adds what a workload holds."""
        for placement in workload.placements:
            held = workload.spec.request.gpu_milli * len(placement.gpu_indexes)
            if held and placement.node_name in self.capacity_milli:
                self.allocated_milli[placement.node_name] = self.allocated_milli.get(placement.node_name, 0) + held

    def shares(self) -> Mapping[str, list[float]]:
        """Allocated shares in the order of the trace."""
        return {
            model: [self.allocated_milli.get(name, 0) / self.capacity_milli[name] for name in names]
            for model, names in self.by_model.items()
        }


class Scene:
    """Draws what is known by now, a few times a second, or prints a line every two seconds."""

    def __init__(self, console: Console, nodes: NodeMap, source: str, *, live: bool) -> None:
        self.console = console
        self.nodes = nodes
        self.source = source
        self.summary: Summary | None = None
        self.report: Report | None = None
        self.act = "starting"
        self._live = Live(console=console, get_renderable=self.draw, refresh_per_second=_FRAMES_HZ) if live else None
        self._printed_s = 0.0
        self._printed_act = ""
        self._is_over = False

    def start(self) -> None:
        """Begins to draw."""
        if self._live:
            self._live.start()

    def stop(self) -> None:
        """Leaves the last picture on the screen, or the last line; harmless when said twice."""
        self._is_over = True
        if self._live:
            self._live.stop()

    def answered(self, report: Report, workload: Workload | None) -> None:
        """Takes the answer to one submission."""
        self.report = report
        if workload is not None:
            self.nodes.place(workload)

    def tell(self, act: str) -> None:
        """Says what is being done now."""
        self.act = act
        self.tick()

    def tick(self) -> None:
        """Prints a line where there is no screen and the last one is old."""
        if self._live is not None or self._is_over:
            return
        now_s = time.monotonic()
        if self.act == self._printed_act and now_s - self._printed_s < _LINE_EVERY_S:
            return
        self._printed_s, self._printed_act = now_s, self.act
        self.console.print(self._line(), soft_wrap=True)

    def _line(self) -> str:
        parts = [self.act]
        if self.report and self.report.done:
            parts.append(f"{self.report.done}/{self.report.total} tasks, {self.report.rate_hz:,.0f}/s")
        summary = self.summary
        if summary and summary.gpus:
            parts.append(f"{summary.nodes_ready} nodes")
            parts.append(f"{summary.allocated_gpu_milli / summary.gpus / 10:.1f} % of GPUs allocated")
            modelled, measured = watts_text(summary.modelled_power_w), watts_text(summary.measured_power_w)
            parts.append(f"{modelled} modelled, {measured} measured")
        return "; ".join(parts)

    def _progress(self, width: int) -> Text:
        report = self.report
        if report is None or not report.total:
            return Text(f"{self.act} ...", style="bold")
        text = Text.assemble((f"{self.act}  ", "bold"))
        text.append_text(picture.bar(report.done / report.total, max(10, width - 60)))
        text.append(f"  {report.done:,}/{report.total:,} tasks  {report.rate_hz:,.0f}/s  {report.elapsed_s:.1f} s")
        return text

    def draw(self) -> RenderableType:
        """The whole picture."""
        width, height = self.console.size.width - 4, self.console.size.height
        parts: list[Any] = [Text(), self._progress(width)]
        rows_most = max(8, height - _ROWS_ELSEWHERE)
        parts += [Text(), picture.fleet_map(self.nodes.shares(), width=width, rows_most=rows_most)]
        title = f"Eelgrid demo, openb trace {self.source}"
        if self.summary is None:
            return Group(Rule(title, align="left", style="grey37"), *parts)
        if self.summary.pending_reasons:
            parts += [Text("waiting for", style="grey62"), picture.reasons(self.summary)]
        return picture.summary_picture(self.summary, title, *parts)
