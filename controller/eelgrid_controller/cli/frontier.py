"""eelctl frontier: energy against latency and throughput of a described fleet, or of the running one.

Owns the options, the table, the file of results and the plot. Inputs are read by frontier_inputs, the computation is
whatif.frontier's; both are imported when the command runs.
"""

import csv
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from eelgrid_controller.cli.connection import CliError, CliSettings, FiniteRange, RequestRefused, output_option
from eelgrid_controller.cli.output import (
    ProgressBar,
    TableColumn,
    echo,
    print_plain,
    text_table,
    use_colour,
    visible_columns,
)
from eelgrid_controller.errors import import_library
from eelgrid_controller.formatting import count_noun
from eelgrid_protos.safe_text import escape_csv_cell

if TYPE_CHECKING:
    from eelgrid_controller.cli.frontier_inputs import DescribedFleet
    from eelgrid_controller.whatif.frontier import Frontier, FrontierRow, TrainingStep

_INSTALL = "'eelgrid[replay]'"
# Where a mark is written, in points from its own.
_LINES = {"performance": "-", "balanced": (0, (7, 3)), "energy": ":"}
_BESIDE = {"performance": (8, 8), "balanced": (10, 12), "energy": (-4, -20)}


def load_pyplot() -> Any:
    """Imports matplotlib for drawing without a display; raises LibraryMissing."""
    import_library("matplotlib", "--plot", _INSTALL).use("Agg")
    return import_library("matplotlib.pyplot", "--plot", _INSTALL)


def draw_frontier(path: Path, found: "Frontier") -> None:
    """Draws energy per request over the latency objective, with training also the power over how much is trained.

    Where services run on MIG slices, the GPUs in use are drawn below. The steps show what holds between objectives.
    """
    plt = load_pyplot()
    figure, axes = _make_figure(plt, found)
    rows = [(row, row.plan) for row in found.rows if row.plan is not None]
    unit, what = (
        (1000.0, "power of the fleet, kW") if found.training else (found.rate_hz, "energy of the fleet, J per request")
    )
    efficient = [(row, plan) for row, plan in rows if row.is_efficient]
    if short := [row.latency_s for row in found.rows if row.plan is None]:
        axes.axvspan(short[0], rows[0][0].latency_s if rows else short[-1], color="0.9", label="too few GPUs")
    axes.step(
        [row.latency_s for row, _ in rows],
        [plan.power_w / unit for _, plan in rows],
        where="post",
        color="0.6",
        linewidth=1.0,
        zorder=1,
    )
    points = axes.scatter(
        [row.latency_s for row, _ in efficient],
        [plan.power_w / unit for _, plan in efficient],
        c=[row.factor * found.rate_hz for row, _ in efficient],
        cmap="viridis",
        s=42,
        zorder=2,
    )
    for row, plan in rows:
        if row.mark:
            at = row.latency_s, plan.power_w / unit
            offset = _BESIDE[row.mark.split(",")[-1]]
            axes.plot(*at, "o", markersize=12, markerfacecolor="none", markeredgecolor="crimson", zorder=3)
            axes.annotate(row.mark, at, xytext=offset, textcoords="offset points", fontsize=10, color="crimson")
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(
        import_library("matplotlib.ticker", "--plot", _INSTALL).LogLocator(subs=(1.0, 2.0, 5.0))
    )
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("")
    axes.margins(x=0.1, y=0.12)
    if not _uses_slices(found):
        axes.set_xlabel("latency objective, s")
    axes.set_ylabel(what)
    axes.set_title(f"{found.rate_hz:g} requests a second; colour: the most that the fleet carries", fontsize=11)
    axes.grid(alpha=0.3, which="both")
    figure.colorbar(points, label="requests a second")
    if short:
        axes.legend(fontsize=9)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _make_figure(plt: Any, found: "Frontier") -> tuple[Any, Any]:
    """Makes the figure and draws all but the main part, whose axes are returned."""
    sliced, trained = _uses_slices(found), bool(found.training)
    parts = [["main", "training"] if trained else ["main"]]
    if sliced:
        parts.append(["gpus", "training"] if trained else ["gpus"])
    figure, axes = plt.subplot_mosaic(
        parts,
        figsize=(14 if trained else 9, 7.5 if sliced else 5.5),
        layout="constrained",
        width_ratios=(3, 2) if trained else (1,),
        height_ratios=(5, 2) if sliced else (1,),
    )
    if trained:
        _draw_training(axes["training"], found)
    if sliced:
        axes["gpus"].sharex(axes["main"])
        _draw_gpus(axes["gpus"], found)
    return figure, axes["main"]


def _draw_gpus(axes: Any, found: "Frontier") -> None:
    """Draws how many GPUs are in use at each objective, whole and, by model, partitioned into MIG slices."""
    rows = [(row.latency_s, row.plan) for row in found.rows if row.plan is not None]
    partitioned = [plan.partitioned_gpus for _, plan in rows]
    models = dict.fromkeys(model for counts in partitioned for model in counts)
    heights = [
        [sum(plan.gpus.values()) - sum(counts.values()) for (_, plan), counts in zip(rows, partitioned, strict=True)]
    ]
    heights += [[counts.get(model, 0) for counts in partitioned] for model in models]
    labels = ["whole GPUs", *(f"{model} in slices" for model in models)]
    colours = ("0.75", "tab:blue", "tab:orange", "tab:green", "tab:purple", "tab:brown")
    below = [0] * len(rows)
    for number, (label, counts) in enumerate(zip(labels, heights, strict=True)):
        above = [low + count for low, count in zip(below, counts, strict=True)]
        colour = colours[0] if number == 0 else colours[1 + (number - 1) % (len(colours) - 1)]
        axes.fill_between([at for at, _ in rows], below, above, step="post", color=colour, linewidth=0.0, label=label)
        below = above
    axes.set_ylim(bottom=0.0)
    axes.set_xlabel("latency objective, s")
    axes.set_ylabel("GPUs in use")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=9)


def _draw_training(axes: Any, found: "Frontier") -> None:
    """Draws the power of the fleet over how much is trained, a line for each marked objective."""
    for row in found.rows:
        steps = [step for step in found.training if step.latency_s == row.latency_s]
        if row.mark and steps:
            axes.plot(
                [step.factor * found.training_hz for step in steps],
                [step.power_w / 1000.0 for step in steps],
                # Lines of two objectives may be the same.
                linestyle=_LINES[row.mark.split(",")[-1]],
                marker="o",
                markersize=4,
                label=f"{row.mark}: {row.latency_s:.3g} s",
            )
    axes.axvline(found.training_hz, color="0.6", linewidth=1.0, linestyle="--", label="what is asked for")
    axes.set_xlim(left=0.0)
    axes.set_xlabel("training, units of work per second")
    axes.set_ylabel("power of the fleet, kW")
    axes.set_title("what training takes, beside services that keep an objective", fontsize=11)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9)


_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_WRITTEN = click.Path(dir_okay=False, path_type=Path)


def _of(gpus: Any) -> str:
    return " ".join(f"{count}x{model}" for model, count in gpus.items())


def _uses_slices(found: "Frontier") -> bool:
    return any(row.plan is not None and row.plan.partitioned for row in found.rows)


def _slices_of(slices: Any) -> str:
    """Returns numbers of slices by model and profile as text: `2x1g.6gb 1x2g.12gb of A30`."""
    models = dict.fromkeys(model for model, _ in slices)
    return ", ".join(
        " ".join(f"{count}x{profile}" for (other, profile), count in slices.items() if other == model) + f" of {model}"
        for model in models
    )


def _columns(found: "Frontier") -> tuple[TableColumn["FrontierRow"], ...]:
    def energy(row: "FrontierRow") -> str:
        return "" if row.plan is None else f"{row.plan.power_w / found.rate_hz:.4g}"

    def partitioned(row: "FrontierRow") -> str:
        return "" if row.plan is None else _of(row.plan.partitioned_gpus)

    trained = (TableColumn["FrontierRow"]("TRAINING", lambda row: f"x{row.training_factor:.4g}", right=True),)
    return (
        TableColumn("OBJECTIVE", lambda row: f"{row.latency_s:.4g} s", right=True),
        TableColumn("WATTS", lambda row: "" if row.plan is None else f"{row.plan.power_w:,.1f}", right=True),
        # What training draws is not the services'.
        *(() if found.training_hz else (TableColumn["FrontierRow"]("J/REQUEST", energy, right=True),)),
        TableColumn("RATES", lambda row: f"x{row.factor:.4g}", right=True),
        *(trained if found.training_hz else ()),
        TableColumn("GPUS", lambda row: f"lacks {row.binding_constraint}" if row.plan is None else _of(row.plan.gpus)),
        *((TableColumn["FrontierRow"]("PARTITIONED", partitioned),) if _uses_slices(found) else ()),
        TableColumn("MARK", lambda row: row.mark, colour=lambda row: "green" if row.mark else None),
        TableColumn("EFFICIENT", lambda row: "yes" if row.is_efficient else "no", wide=True),
    )


class _ServicePlaces(NamedTuple):
    """Where a service, or training jobs, run at a marked objective."""

    latency_s: float
    name: str
    whole: str
    slices: str


_PLACES_COLUMNS = (
    TableColumn[_ServicePlaces]("OBJECTIVE", lambda one: f"{one.latency_s:.4g} s", right=True),
    TableColumn[_ServicePlaces]("SERVICE", lambda one: one.name),
    TableColumn[_ServicePlaces]("WHOLE GPUS", lambda one: one.whole),
    TableColumn[_ServicePlaces]("SLICES", lambda one: one.slices),
)


def _list_places(found: "Frontier") -> list[_ServicePlaces]:
    """Lists what each service runs on at the marked objectives."""
    places = []
    for row in found.rows:
        if row.plan is None or not row.mark:
            continue
        for name in dict.fromkeys(placed.service for placed in row.plan.placed):
            whole, slices = Counter[str](), Counter[tuple[str, str]]()
            for where, count in ((one.configuration, one.instances) for one in row.plan.placed if one.service == name):
                if where.mig_profile:
                    slices[where.gpu_model, where.mig_profile] += count
                else:
                    whole[where.gpu_model] += count * where.gpus
            places.append(_ServicePlaces(row.latency_s, name, _of(whole), _slices_of(slices)))
    return places


def _training_columns(found: "Frontier") -> tuple[TableColumn["TrainingStep"], ...]:
    """Columns of what training costs; J/UNIT is what a unit of work adds, or of all that is trained together."""
    base_w = {step.latency_s: step.power_w for step in found.training if not step.factor}

    def energy(step: "TrainingStep") -> str:
        added_w = step.power_w - base_w[step.latency_s]
        return f"{added_w / (step.factor * found.training_hz):.4g}" if step.factor else ""

    return (
        TableColumn("OBJECTIVE", lambda step: f"{step.latency_s:.4g} s", right=True),
        TableColumn("TRAINING", lambda step: f"x{step.factor:.3g}", right=True),
        TableColumn("UNITS/S", lambda step: f"{step.factor * found.training_hz:.3g}", right=True),
        TableColumn("WATTS", lambda step: f"{step.power_w:,.1f}", right=True),
        TableColumn("J/UNIT", energy, right=True),
    )


def _plain(row: "FrontierRow", found: "Frontier") -> dict[str, Any]:
    """Returns the row in SI units, with None where the fleet cannot carry the rates."""
    plan, rate_hz = row.plan, found.rate_hz
    return {
        "latency_s": row.latency_s,
        "carried": plan is not None,
        "power_w": None if plan is None else plan.power_w,
        "serving_w": None if plan is None else plan.serving_w,
        "energy_per_request_j": None if plan is None or found.training_hz else plan.power_w / rate_hz,
        "largest_factor": row.factor,
        "largest_rate_hz": row.factor * rate_hz,
        "largest_training_factor": row.training_factor,
        "efficient": row.is_efficient,
        "mark": row.mark,
        "lacks": dict(row.lacks),
        "gpus": {} if plan is None else dict(plan.gpus),
        "partitioned": {} if plan is None else dict(plan.partitioned_gpus),
        "layouts": [
            {"gpu_model": one.gpu_model, "slices": dict(one.slices), "gpus": one.gpus}
            for one in (() if plan is None else plan.partitioned)
        ],
        "instances": [
            {
                "service": placed.service,
                "gpu_model": placed.configuration.gpu_model,
                "mig_profile": placed.configuration.mig_profile,
                "gpus": placed.configuration.gpus,
                "processes": placed.configuration.processes,
                "power_limit_w": placed.configuration.power_limit_w,
                "instances": placed.instances,
            }
            for placed in (() if plan is None else plan.placed)
        ],
    }


def _cells(plain: dict[str, Any]) -> dict[str, Any]:
    """Returns the row as cells of a CSV file."""
    flat = {key: value for key, value in plain.items() if key not in {"instances", "layouts"}}
    slices = Counter[tuple[str, str]]()
    for placed in plain["instances"]:
        if placed["mig_profile"]:
            slices[placed["gpu_model"], placed["mig_profile"]] += placed["instances"]
    for key in ("carried", "efficient"):
        flat[key] = int(flat[key])
    texts = {key: _of(flat[key]) for key in ("lacks", "gpus", "partitioned")}
    return flat | texts | {"slices": _slices_of(slices)}


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    try:
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows([{name: escape_csv_cell(value) for name, value in row.items()} for row in rows])
    except OSError as error:
        raise CliError(f"{path}: {error.strerror}", "name another file with --out") from None


def _draw(path: Path, found: "Frontier") -> None:
    try:
        draw_frontier(path, found)
    except (OSError, ValueError) as error:  # ValueError: an ending that is no format of pictures
        what = (getattr(error, "strerror", None) or str(error)).partition("(")[0].strip()
        raise CliError(f"{path}: {what}", "name another file with --plot, for example frontier.png") from None


def _read_described_inputs(points: Path | None, services: Path | None) -> Any:
    from eelgrid_controller.cli.frontier_inputs import read_points, read_services

    if points is None or services is None:
        raise click.UsageError("give --points and --services, or --running for the fleet of the controller")
    described = read_services(services)
    return read_points(points, tuple(described.pools), checks_slices=True), described


def _fetch_running_fleet(settings: CliSettings, factor: float) -> Any:
    from eelgrid_controller.cli.connection import connect_operators
    from eelgrid_controller.cli.frontier_inputs import read_running_fleet

    with connect_operators(settings) as client:
        return read_running_fleet(client, timeout_s=settings.timeout_s, factor=factor)


def _compute_frontier(measured: Any, fleet: "DescribedFleet", objectives: int) -> "Frontier":
    from eelgrid_controller.profiles.points import ServingError
    from eelgrid_controller.whatif.frontier import compute_frontier

    for module in ("highspy", "scipy.sparse"):
        import_library(module, "the frontier", "'eelgrid[controller]'")
    progress: ProgressBar | None = None

    def tell(done: int, total: int) -> None:
        nonlocal progress
        progress = progress or ProgressBar("computing", "objectives done", total)
        progress(done)

    try:
        return compute_frontier(
            measured,
            fleet.services,
            fleet.pools,
            training=fleet.training,
            objectives_most=objectives,
            tell=tell,
        )
    except ServingError as error:
        raise RequestRefused(error.problem, error.remedy) from None
    finally:
        if progress is not None:
            progress.stop()


def _print_frontier(settings: CliSettings, found: "Frontier") -> None:
    """Prints the table to stdout, and to stderr what it leaves out."""
    wide = settings.output == "wide"
    before = (None, *found.rows)
    shown = [
        row
        for row, last in zip(found.rows, before, strict=False)
        if wide or row.is_efficient or row.mark or (row.plan is None and (last is None or row.factor > last.factor))
    ]
    columns = visible_columns(settings, _columns(found))
    for line in text_table(columns, shown, headers=settings.headers, colour=use_colour()):
        echo(line)
    if found.training:
        echo("")
        for line in text_table(_training_columns(found), found.training, headers=settings.headers):
            echo(line)
    if places := _list_places(found) if _uses_slices(found) else []:
        echo("")
        for line in text_table(_PLACES_COLUMNS, places, headers=settings.headers):
            echo(line)
    service, latency_s = found.tightest
    echo(f"below {latency_s:.4g} s: {service} has no measured point that fast", err=True)
    if found.objectives > len(found.rows):
        echo(f"{len(found.rows)} of {found.objectives} objectives, evenly spaced", err=True)
    if hidden := len(found.rows) - len(shown):
        echo(f"{count_noun(hidden, 'objective')} without a gain hidden: -o wide shows all", err=True)
    for reason, count in found.passed_over.items():
        echo(f"{count_noun(count, 'point')} skipped: {reason}", err=True)


@click.command()
@click.option("--points", type=_FILE, help="CSV file of measured points (docs/how-to/frontier.md).")
@click.option("--services", type=_FILE, help="YAML file of services and training with their rates, and of the fleet.")
@click.option("--running", is_flag=True, help="Use the fleet of the controller, at its current rates.")
@click.option(
    "--rates",
    type=FiniteRange(0.001, 1000.0),
    default=1.0,
    help="With --running: multiply all rates by this factor.",
)
@click.option("--out", type=_WRITTEN, help="Write all rows to a CSV file.")
@click.option("--plot", type=_WRITTEN, help="Draw energy against latency; requires matplotlib.")
@click.option(
    "--objectives",
    type=click.IntRange(2, 200),
    default=200,
    show_default=True,
    help="Maximum number of latency objectives.",
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
    """Compute energy against latency and throughput, of a described fleet or of the running one.

    For each latency objective at which the choice can change, shows the lowest power at which the fleet keeps all
    services, and training jobs, at their rates, and the largest factor on these that it can carry: RATES on those of the
    services, TRAINING on those of the training, each beside the other at its rates. MARK names what the objectives
    performance, balanced (the knee) and energy would choose; at these a second table shows the power by how much is
    trained. Points of MIG slices put services on partitioned GPUs; PARTITIONED counts these, and a table shows the
    slices of each service at the marked objectives. Everything is computed on this machine.

    Exits with 1 if the fleet cannot carry the rates at any objective.

    \b
    eelctl frontier --points points.csv --services services.yaml --plot frontier.png
    eelctl frontier --running --rates 1.5
    """  # noqa: D301
    if rates != 1.0 and not running:
        raise click.UsageError(
            "--rates multiplies the rates of --running; change those of a described fleet in its file"
        )
    if plot is not None:
        load_pyplot()  # fails before the computation if it is missing
    settings: CliSettings = context.obj
    known = _fetch_running_fleet(settings, rates) if running else _read_described_inputs(points, services)
    measured, fleet = known
    found = _compute_frontier(measured, fleet, objectives)
    rows = [_plain(row, found) for row in found.rows]
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
            "notes": list(fleet.notes),
            "training_hz": found.training_hz,
            "training": [
                {"latency_s": step.latency_s, "factor": step.factor, "power_w": step.power_w} for step in found.training
            ],
            "rows": rows,
        }
        print_plain(settings, plain, ())
    else:
        _print_frontier(settings, found)
        for note in fleet.notes:
            echo(note, err=True)
    if found.rows[-1].plan is None:
        last = found.rows[-1]
        raise CliError(
            f"the fleet carries at most {last.factor:.4g} of the rates, at {last.latency_s:.4g} s",
            f"add {last.binding_constraint}, or lower the rates",
        )
