"""Display of the demo: a live view or plain lines, then a table and an SVG picture.

The map of nodes is kept from the answers to the submissions, so that the controller is not queried for a thousand
nodes while it is timed. A figure that could not be taken is null with a reason in `notes`, never a number.
"""

import io
import os
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from eelgrid_controller.cli import terminal_rendering
from eelgrid_controller.formatting import format_memory, format_milliseconds, format_percent, format_power
from eelgrid_controller.replay.openb import TraceNode
from eelgrid_controller.replay.submitter import SubmitReport
from eelgrid_protos.messages import GpuStatus, Summary, Workload

_LINE_EVERY_S = 2.0
_FRAMES_HZ = 4.0
_WIDTH_IN_A_PIPE = 110
# Rows of the screen that are not the map: frame, figures, progress, reasons, key.
_ROWS_ELSEWHERE = 20


def make_console(*, live: bool) -> Console:
    """Creates the console of the demo; a pipe gets plain text of a fixed width."""
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
    def of(cls, nodes: Iterable[TraceNode]) -> "NodeMap":
        """An empty map of the nodes that have GPUs, the largest fleet first."""
        groups: dict[str, list[TraceNode]] = {}
        for row in nodes:
            if row.gpu_count:
                groups.setdefault(row.gpu_model, []).append(row)
        ordered = sorted(groups.items(), key=lambda item: (-sum(row.gpu_count for row in item[1]), item[0]))
        return cls(
            {row.name: row.gpu_count * 1000 for _, rows in ordered for row in rows},
            {model: tuple(row.name for row in rows) for model, rows in ordered},
        )

    def add_workload(self, workload: Workload) -> None:
        """Adds the GPUs that a workload holds."""
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


class DemoView:
    """Draws the progress a few times a second on a terminal, or prints a line every two seconds."""

    def __init__(self, console: Console, nodes: NodeMap, source: str, *, live: bool) -> None:
        self.console = console
        self.nodes = nodes
        self.source = source
        self.summary: Summary | None = None
        self.report: SubmitReport | None = None
        self.act = "starting"
        self._live = Live(console=console, get_renderable=self.draw, refresh_per_second=_FRAMES_HZ) if live else None
        self._printed_s = 0.0
        self._printed_act = self._printed_line = ""
        self._is_over = False

    def start(self) -> None:
        """Starts drawing."""
        if self._live:
            self._live.start()

    def stop(self) -> None:
        """Stops drawing and leaves the last picture on the screen; may be called twice."""
        self._is_over = True
        if self._live:
            self._live.stop()

    def on_answer(self, report: SubmitReport, workload: Workload | None) -> None:
        """Updates the view with the answer to one submission."""
        self.report = report
        if workload is not None:
            self.nodes.add_workload(workload)

    def show_phase(self, act: str) -> None:
        """Shows the current activity."""
        self.act = act
        self.tick()

    def tick(self) -> None:
        """Prints a line if there is no live view, the last line is old, and there is something new to say."""
        if self._live is not None or self._is_over:
            return
        now_s = time.monotonic()
        line = self._line()
        is_old = now_s - self._printed_s >= _LINE_EVERY_S
        if line == self._printed_line or (self.act == self._printed_act and not is_old):
            return
        self._printed_s, self._printed_act, self._printed_line = now_s, self.act, line
        self.console.print(line, soft_wrap=True)

    def _line(self) -> str:
        parts = [self.act]
        if self.report and self.report.done:
            parts.append(f"{self.report.done}/{self.report.total} tasks, {self.report.rate_hz:,.0f}/s")
        summary = self.summary
        if summary and summary.gpus:
            parts.append(f"{summary.nodes_ready} nodes")
            parts.append(f"{summary.allocated_gpu_milli / summary.gpus / 10:.1f} % of GPUs allocated")
            modelled, measured = format_power(summary.modelled_power_w), format_power(summary.measured_power_w)
            parts.append(f"{modelled} modelled, {measured} measured")
        return "; ".join(parts)

    def _progress(self, width: int) -> Text:
        report = self.report
        if report is None or not report.total:
            return Text(f"{self.act} ...", style="bold")
        text = Text.assemble((f"{self.act}  ", "bold"))
        text.append_text(terminal_rendering.render_bar(report.done / report.total, max(10, width - 60)))
        text.append(f"  {report.done:,}/{report.total:,} tasks  {report.rate_hz:,.0f}/s  {report.elapsed_s:.1f} s")
        return text

    def draw(self) -> RenderableType:
        """Draws the whole picture."""
        width, height = self.console.size.width - 4, self.console.size.height
        parts: list[Any] = [Text(), self._progress(width)]
        rows_most = max(8, height - _ROWS_ELSEWHERE)
        parts += [Text(), terminal_rendering.render_fleet_map(self.nodes.shares(), width=width, rows_most=rows_most)]
        title = f"Eelgrid demo, openb trace {self.source}"
        if self.summary is None:
            return Group(Rule(title, align="left", style="grey37"), *parts)
        if self.summary.pending_reasons:
            parts += [Text("waiting for", style="grey62"), terminal_rendering.render_pending_reasons(self.summary)]
        return terminal_rendering.render_summary(self.summary, title, *parts)


_PICTURE_WIDTH = 118


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFigures:
    """One child process: total CPU time, memory, and CPU share once everything is placed."""

    name: str
    cpu_s: float | None
    steady_cpu_share: float | None
    memory_bytes: int | None
    peak_memory_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoReport:
    """The figures of one run."""

    trace: str
    trace_where: str
    nodes: int
    gpus: int
    tasks: int
    placed: int
    pending: int
    refused: int
    pending_reasons: dict[str, int]
    refused_reasons: dict[str, str]
    allocated_gpu: float
    allocated_gpu_share: float
    modelled_power_w: float
    modelled_power_per_allocated_gpu_w: float | None
    measured_power_w: float | None
    measured_power_per_allocated_gpu_w: float | None
    measured_gpus: int
    decision_p50_s: float
    decision_p99_s: float
    submit_p50_s: float
    submit_p99_s: float
    submit_in_flight: int
    repeats: int
    agents: int
    samples_received: int
    samples_lost: int
    start_controller_s: float
    start_fleet_s: float
    submit_s: float
    total_s: float
    processes: tuple[ProcessFigures, ...]
    notes: tuple[str, ...] = ()


def _watts(power_w: float | None, per_gpu_w: float | None) -> str:
    return f"{format_power(power_w)}; {format_power(per_gpu_w)} per GPU in use"


def print_report(console: Console, report: DemoReport) -> None:
    """Prints the final table."""
    table = Table(title="Result", title_justify="left", show_header=False, box=None, padding=(0, 2))
    table.add_column(style="grey62")
    table.add_column()
    table.add_row("trace", f"{report.trace} ({report.trace_where})")
    table.add_row("agents", f"{report.agents:,} streams over gRPC, {report.gpus:,} GPUs")
    table.add_row(
        "tasks", f"{report.tasks:,}: {report.placed:,} placed, {report.pending:,} waiting, {report.refused:,} refused"
    )
    for reason, count in report.pending_reasons.items():
        table.add_row("", f"{count:,} waiting: {reason}")
    for name, reason in list(report.refused_reasons.items())[:5]:
        table.add_row("", f"{name} refused: {reason}")
    table.add_row("GPUs allocated", f"{format_percent(report.allocated_gpu_share, 1)} ({report.allocated_gpu:,.1f})")
    table.add_row("power, modelled", _watts(report.modelled_power_w, report.modelled_power_per_allocated_gpu_w))
    measured = _watts(report.measured_power_w, report.measured_power_per_allocated_gpu_w)
    table.add_row("power, measured", f"{measured}; GPUs only, {report.measured_gpus:,} report")
    for name, p50_s, p99_s in (
        ("decision", report.decision_p50_s, report.decision_p99_s),
        (f"submit, {report.submit_in_flight} at once", report.submit_p50_s, report.submit_p99_s),
    ):
        table.add_row(name, f"p50 {format_milliseconds(p50_s)}, p99 {format_milliseconds(p99_s)}")
    table.add_row("samples", f"{report.samples_received:,} received, {report.samples_lost:,} lost")
    table.add_row(
        "time",
        f"controller ready {report.start_controller_s:.1f} s, fleet joined {report.start_fleet_s:.1f} s, "
        f"tasks {report.submit_s:.1f} s ({report.tasks / report.submit_s:,.0f}/s), all {report.total_s:.1f} s",
    )
    for process in report.processes:
        table.add_row(process.name, _process(process))
    for note in report.notes:
        table.add_row("note", note)
    console.print()
    console.print(table)


def print_addresses(console: Console, addresses: Sequence[tuple[str, str]], commands: Sequence[str]) -> None:
    """Prints the addresses and commands to try, as plain lines, so that a terminal finds the links."""
    console.print("\nEverything keeps running until Ctrl-C:")
    width = max(len(name) for name, _ in addresses)
    for name, address in addresses:
        console.print(f"  {name.ljust(width)}  {address}", soft_wrap=True, highlight=False)
    console.print("\nTry:")
    for command in commands:
        console.print(f"  {command}", soft_wrap=True, highlight=False)


def _process(process: ProcessFigures) -> str:
    if process.cpu_s is None or process.memory_bytes is None:
        return "no figures: the process had ended"
    steady = f", {format_percent(process.steady_cpu_share, 1)} of a core when idle" if process.steady_cpu_share else ""
    peak = f" (peak {format_memory(process.peak_memory_bytes)})" if process.peak_memory_bytes else ""
    return f"{process.cpu_s:.1f} s CPU{steady}, {format_memory(process.memory_bytes)} resident{peak}"


def print_gpus(console: Console, gpus: Sequence[GpuStatus]) -> None:
    """Prints a table of this machine's own GPUs, as its agent reports them."""
    table = Table(title="This machine, observed only", title_justify="left", box=None, padding=(0, 2))
    for title in ("node", "GPU", "product", "power", "busy", "memory", "temperature"):
        table.add_column(title, header_style="grey62")
    for gpu in gpus:
        busy = "-" if gpu.utilization_ratio is None else format_percent(gpu.utilization_ratio, 1)
        used = "-" if gpu.memory_used_bytes is None else format_memory(gpu.memory_used_bytes)
        degrees = "-" if gpu.temperature_c is None else f"{gpu.temperature_c:.0f} °C"
        table.add_row(
            gpu.node_name, str(gpu.gpu.index), gpu.gpu.product, format_power(gpu.power_w), busy, used, degrees
        )
    console.print(table)


def export_picture(path: Path, scene: DemoView, report: DemoReport) -> None:
    """Writes the final screen as SVG, drawn again on a recording console."""
    console = Console(record=True, width=_PICTURE_WIDTH, height=48, file=io.StringIO(), color_system="truecolor")
    scene.console = console
    console.print(scene.draw())
    print_report(console, report)
    # rich's own format fetches a font from the network of whoever looks; any monospace font will do.
    plain = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    path.write_text(console.export_svg(title="make demo", code_format=plain), encoding="utf-8")
