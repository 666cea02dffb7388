"""What the demo leaves behind: a table, summary.json and a picture.

Owns the names and units of the figures; a figure that could not be taken is
null with a reason in `notes`, never a number.
"""

import io
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.table import Table

from eelgrid_controller.demo.scene import Scene
from eelgrid_controller.spelling import memory_text, milliseconds_text, percent_text, watts_text
from eelgrid_protos.messages import GpuStatus

__all__ = [
    "DemoReport",
    "ProcessFigures",
    "Times",
    "export_picture",
    "print_addresses",
    "print_gpus",
    "print_report",
    "write_summary",
]

_PICTURE_WIDTH = 118


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFigures:
    """One child process: its whole CPU time, its memory, and its CPU share once everything is placed."""

    name: str
    cpu_s: float | None
    steady_cpu_share: float | None
    memory_bytes: int | None
    peak_memory_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Until the controller answered, from then until all nodes had joined, and the whole."""

    controller_s: float
    fleet_s: float
    total_s: float


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


def write_summary(path: Path, report: DemoReport) -> None:
    """The report as JSON."""
    path.write_text(json.dumps(asdict(report), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _watts(power_w: float | None, per_gpu_w: float | None) -> str:
    return f"{watts_text(power_w)}; {watts_text(per_gpu_w)} for each GPU in use"


def print_report(console: Console, report: DemoReport) -> None:
    """The table at the end."""
    table = Table(title="What happened", title_justify="left", show_header=False, box=None, padding=(0, 2))
    table.add_column(style="grey62")
    table.add_column()
    table.add_row("trace", f"{report.trace} ({report.trace_where})")
    table.add_row("agents", f"{report.agents:,} streams over gRPC, {report.gpus:,} GPUs")
    table.add_row(
        "tasks", f"{report.tasks:,}: {report.placed:,} placed, {report.pending:,} wait, {report.refused:,} refused"
    )
    for reason, count in report.pending_reasons.items():
        table.add_row("", f"{count:,} wait: {reason}")
    for name, reason in list(report.refused_reasons.items())[:5]:
        table.add_row("", f"{name} refused: {reason}")
    table.add_row("GPUs allocated", f"{percent_text(report.allocated_gpu_share, 1)} ({report.allocated_gpu:,.1f})")
    table.add_row("power, modelled", _watts(report.modelled_power_w, report.modelled_power_per_allocated_gpu_w))
    measured = _watts(report.measured_power_w, report.measured_power_per_allocated_gpu_w)
    table.add_row("power, measured", f"{measured}; GPUs only, {report.measured_gpus:,} report")
    for name, p50_s, p99_s in (
        ("decision", report.decision_p50_s, report.decision_p99_s),
        (f"submit, {report.submit_in_flight} at once", report.submit_p50_s, report.submit_p99_s),
    ):
        table.add_row(name, f"p50 {milliseconds_text(p50_s)}, p99 {milliseconds_text(p99_s)}")
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
    """Where everything is that runs on, and what to try; plain lines, so that a terminal finds the links."""
    console.print("\nEverything runs on until Ctrl-C:")
    width = max(len(name) for name, _ in addresses)
    for name, address in addresses:
        console.print(f"  {name.ljust(width)}  {address}", soft_wrap=True, highlight=False)
    console.print("\nTry:")
    for command in commands:
        console.print(f"  {command}", soft_wrap=True, highlight=False)


def _process(process: ProcessFigures) -> str:
    if process.cpu_s is None or process.memory_bytes is None:
        return "no figures: the process was gone"
    steady = f", {percent_text(process.steady_cpu_share, 1)} of a core at rest" if process.steady_cpu_share else ""
    peak = f" (peak {memory_text(process.peak_memory_bytes)})" if process.peak_memory_bytes else ""
    return f"{process.cpu_s:.1f} s CPU{steady}, {memory_text(process.memory_bytes)} resident{peak}"


def print_gpus(console: Console, gpus: Sequence[GpuStatus]) -> None:
    """A table of this machine's own GPUs, as its agent reports them."""
    table = Table(title="This machine, observed only", title_justify="left", box=None, padding=(0, 2))
    for title in ("node", "GPU", "product", "power", "busy", "memory", "temperature"):
        table.add_column(title, header_style="grey62")
    for gpu in gpus:
        busy = "-" if gpu.utilization_ratio is None else percent_text(gpu.utilization_ratio, 1)
        used = "-" if gpu.memory_used_bytes is None else memory_text(gpu.memory_used_bytes)
        degrees = "-" if gpu.temperature_c is None else f"{gpu.temperature_c:.0f} °C"
        table.add_row(gpu.node_name, str(gpu.gpu.index), gpu.gpu.product, watts_text(gpu.power_w), busy, used, degrees)
    console.print(table)


def export_picture(path: Path, scene: Scene, report: DemoReport) -> None:
    """The final screen as SVG, drawn once more on a console that records."""
    console = Console(record=True, width=_PICTURE_WIDTH, height=48, file=io.StringIO(), color_system="truecolor")
    scene.console = console
    console.print(scene.draw())
    print_report(console, report)
    # rich's own format fetches a font from the network of whoever looks; any monospace font will do.
    plain = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    path.write_text(console.export_svg(title="make demo", code_format=plain), encoding="utf-8")
