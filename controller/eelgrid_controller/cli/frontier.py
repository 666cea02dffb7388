"""eelctl frontier: energy against latency and throughput of a described fleet, or of the running one.

Owns the options, the table and the file of results. Reading is frontier_files' and
frontier_running's, the computation frontier/'s, the picture frontier_picture's.
"""

import csv
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from eelgrid_controller.cli.errors import CliError, RequestRefused
from eelgrid_controller.cli.output import ProgressBar, TableColumn, echo, print_plain, text_table, use_colour
from eelgrid_controller.cli.settings import CliSettings, output_option
from eelgrid_protos.safe_text import escape_csv_cell

if TYPE_CHECKING:
    from eelgrid_controller.whatif.frontier.sweep import Frontier, FrontierRow


_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_WRITTEN = click.Path(dir_okay=False, path_type=Path)


def _of(gpus: Any) -> str:
    return " ".join(f"{count}x{model}" for model, count in gpus.items())


def _columns(rate_hz: float) -> tuple[TableColumn["FrontierRow"], ...]:
    def energy(row: "FrontierRow") -> str:
        return "" if row.plan is None else f"{row.plan.power_w / rate_hz:.4g}"

    return (
        TableColumn("OBJECTIVE", lambda row: f"{row.latency_s:.4g} s", right=True),
        TableColumn("WATTS", lambda row: "" if row.plan is None else f"{row.plan.power_w:,.1f}", right=True),
        TableColumn("J/REQUEST", energy, right=True),
        TableColumn("RATES", lambda row: f"x{row.factor:.4g}", right=True),
        TableColumn("GPUS", lambda row: f"lacks {row.binding_constraint}" if row.plan is None else _of(row.plan.gpus)),
        TableColumn("MARK", lambda row: row.mark, colour=lambda row: "green" if row.mark else None),
        TableColumn("EFFICIENT", lambda row: "yes" if row.is_efficient else "no", wide=True),
    )


def _plain(row: "FrontierRow", rate_hz: float) -> dict[str, Any]:
    """The row in SI units; null where the rates are not carried."""
    plan = row.plan
    return {
        "latency_s": row.latency_s,
        "carried": plan is not None,
        "power_w": None if plan is None else plan.power_w,
        "serving_w": None if plan is None else plan.serving_w,
        "energy_per_request_j": None if plan is None else plan.power_w / rate_hz,
        "largest_factor": row.factor,
        "largest_rate_hz": row.factor * rate_hz,
        "efficient": row.is_efficient,
        "mark": row.mark,
        "lacks": dict(row.lacks),
        "gpus": {} if plan is None else dict(plan.gpus),
        "instances": [
            {
                "service": placed.service,
                "gpu_model": placed.configuration.gpu_model,
                "gpus": placed.configuration.gpus,
                "processes": placed.configuration.processes,
                "power_limit_w": placed.configuration.power_limit_w,
                "instances": placed.instances,
            }
            for placed in (() if plan is None else plan.placed)
        ],
    }


def _cells(plain: dict[str, Any]) -> dict[str, Any]:
    """The same as cells of a CSV file; empty where there is nothing."""
    flat = {key: value for key, value in plain.items() if key != "instances"}
    for key in ("carried", "efficient"):
        flat[key] = int(flat[key])
    return flat | {key: _of(flat[key]) for key in ("lacks", "gpus")}


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    try:
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows([{name: escape_csv_cell(value) for name, value in row.items()} for row in rows])
    except OSError as error:
        raise CliError(f"{path}: {error.strerror}", "name another file with --out") from None


def _draw(path: Path, found: "Frontier") -> None:
    from eelgrid_controller.cli.frontier_plot import draw_frontier

    try:
        draw_frontier(path, found)
    except (OSError, ValueError) as error:  # ValueError: an ending that is no format of pictures
        what = (getattr(error, "strerror", None) or str(error)).partition("(")[0].strip()
        raise CliError(f"{path}: {what}", "name another file with --plot, such as frontier.png") from None


def _read_described_inputs(points: Path | None, services: Path | None) -> Any:
    from eelgrid_controller.cli.frontier_files import read_points, read_services

    if points is None or services is None:
        raise click.UsageError("give --points and --services, or --running for the fleet that the controller has")
    asked, fleet = read_services(services)
    return read_points(points), asked, fleet


def _fetch_running_fleet(settings: CliSettings, factor: float) -> Any:
    from eelgrid_controller.cli.connection import connect_operators
    from eelgrid_controller.cli.frontier_running import read_running_fleet

    with connect_operators(settings) as client:
        return read_running_fleet(client, timeout_s=settings.timeout_s, factor=factor)


def _compute_frontier(measured: Any, asked: Any, fleet: Any, objectives: int) -> "Frontier":
    from eelgrid_controller.optional_imports import import_library
    from eelgrid_controller.profiles.errors import ServingError
    from eelgrid_controller.whatif.frontier.sweep import compute_frontier

    import_library("scipy.optimize", "the frontier", "'eelgrid[bench]'")
    progress: ProgressBar | None = None

    def tell(done: int, total: int) -> None:
        nonlocal progress
        progress = progress or ProgressBar("computing", "objectives done", total)
        progress(done)

    try:
        return compute_frontier(measured, asked, fleet, objectives_most=objectives, tell=tell)
    except ServingError as error:
        raise RequestRefused(error.problem, error.remedy) from None
    finally:
        if progress is not None:
            progress.stop()


def _print_frontier(settings: CliSettings, found: "Frontier") -> None:
    """The table on stdout, and beside it what it does not show."""
    wide = settings.output == "wide"
    before = (None, *found.rows)
    shown = [
        row
        for row, last in zip(found.rows, before, strict=False)
        if wide or row.is_efficient or row.mark or (row.plan is None and (last is None or row.factor > last.factor))
    ]
    columns = [column for column in _columns(found.rate_hz) if wide or not column.wide]
    for line in text_table(columns, shown, headers=settings.headers, colour=use_colour()):
        echo(line)
    service, latency_s = found.tightest
    echo(f"below {latency_s:.4g} s: {service} has no point so fast", err=True)
    if found.objectives > len(found.rows):
        echo(f"{len(found.rows)} of {found.objectives} objectives, taken evenly", err=True)
    if hidden := len(found.rows) - len(shown):
        echo(f"{hidden} objectives that gain nothing left out: -o wide shows them", err=True)
    for reason, count in found.passed_over.items():
        echo(f"{count} points passed over: {reason}", err=True)


@click.command()
@click.option("--points", type=_FILE, help="CSV of measured points (docs/how-to/frontier.md).")
@click.option("--services", type=_FILE, help="YAML: services with their rates, and the fleet.")
@click.option("--running", is_flag=True, help="Of the fleet that the controller has, at the rates of now.")
@click.option(
    "--rates",
    type=click.FloatRange(0.001, 1000.0),
    default=1.0,
    help="With --running: what if rates were so many times.",
)
@click.option("--out", type=_WRITTEN, help="Write all rows to a CSV file.")
@click.option("--plot", type=_WRITTEN, help="Draw energy against latency; needs matplotlib.")
@click.option(
    "--objectives", type=click.IntRange(2, 200), default=200, show_default=True, help="At most so many objectives."
)
@output_option
@click.pass_context
def frontier(
    context: click.Context,
    /,
    *,
    points: Path | None,
    services: Path | None,
    running: bool,
    rates: float,
    out: Path | None,
    plot: Path | None,
    objectives: int,
) -> None:
    """Energy against latency and throughput, of a described fleet or the running one, computed on this machine.

    For each latency objective at which the choice can change: the least watts of the fleet that keep
    all services at their rates, and the largest factor on all rates that it can carry. Marked are what
    the weightings performance, balanced (the knee) and energy would take.

    Exits with 1 if the fleet carries the rates at no objective.
    """
    if plot is not None:
        from eelgrid_controller.cli.frontier_plot import load_pyplot

        load_pyplot()  # that it lacks is said before the work
    settings: CliSettings = context.obj
    known = _fetch_running_fleet(settings, rates) if running else _read_described_inputs(points, services)
    measured, asked, fleet = known
    found = _compute_frontier(measured, asked, fleet, objectives)
    rows = [_plain(row, found.rate_hz) for row in found.rows]
    if out is not None:
        _write(out, [_cells(row) for row in rows])
    if plot is not None:
        _draw(plot, found)
    if settings.output in {"json", "yaml"}:
        plain = {
            "rate_hz": found.rate_hz,
            "tightest": {"service": found.tightest[0], "latency_s": found.tightest[1]},
            "objectives": found.objectives,
            "passed_over": dict(found.passed_over),
            "rows": rows,
        }
        print_plain(settings, plain, ())
    else:
        _print_frontier(settings, found)
    if found.rows[-1].plan is None:
        last = found.rows[-1]
        raise CliError(
            f"the fleet carries {last.factor:.4g} of the rates at best, at {last.latency_s:.4g} s",
            f"add {last.binding_constraint}, or ask for lower rates",
        )
