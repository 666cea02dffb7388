"""eelctl profile import, list and predict: measured points of workloads, and predictions.

The file format is that of `eelctl frontier --points` (docs/how-to/frontier.md). Models are fitted on this machine, so
that no controller is slowed down (theory: eelgrid_controller.profiles; accuracy: docs/explanation/profiles.md).
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, product
from pathlib import Path
from typing import Any

import click

from eelgrid_controller.cli.completion import complete_models, complete_profiles
from eelgrid_controller.cli.confirmation import list_names
from eelgrid_controller.cli.connection import (
    CliSettings,
    NameNotFound,
    RequestRefused,
    connect_operators,
    iterate_pages,
    output_option,
)
from eelgrid_controller.cli.nodes import limit_option
from eelgrid_controller.cli.output import (
    ProgressBar,
    TableColumn,
    echo,
    list_options,
    print_list,
    print_plain,
    table_lines,
)
from eelgrid_controller.errors import ControllerError
from eelgrid_controller.formatting import count_noun
from eelgrid_controller.profiles.points import Configuration, Point, ProfileEstimate, ProfilePrediction
from eelgrid_controller.state.measurements import make_profile_point
from eelgrid_protos.catalogue import GpuNameError, load_catalogue, resolve_gpu_models
from eelgrid_protos.messages import (
    POINTS_A_CALL_MOST,
    GetSummaryRequest,
    ListPointsRequest,
    MeasuredPoint,
    QuantileLatency,
    RecordPointsRequest,
)
from eelgrid_protos.quantities import parse_watts

_ASKED_MOST = 1000


def _range(found: ProfileEstimate | None, factor: float = 1.0) -> str:
    if found is None:
        return ""
    low, middle, high = (factor * value for value in (found.lower, found.median, found.upper))
    return f"{middle:.4g} ({low:.4g} to {high:.4g})"


def _basis(one: ProfilePrediction) -> str:
    found = [each for each in (one.throughput_hz, one.power_w, *one.latency_s.values()) if each is not None]
    return min(found, key=lambda each: each.basis).basis.name.lower() if found else ""


def _columns(quantiles: Iterable[float]) -> list[TableColumn[ProfilePrediction]]:
    def latency(quantile: float) -> TableColumn[ProfilePrediction]:
        return TableColumn(
            f"P{100 * quantile:g} ms", lambda one: _range(one.latency_s.get(quantile), 1000.0), right=True
        )

    def place(one: ProfilePrediction) -> str:
        at = one.configuration
        count = f"{at.gpus}x" if at.gpus > 1 else ""
        return f"{count}{at.gpu_model}" + (f" {at.mig_profile}" if at.mig_profile else "")

    return [
        TableColumn("GPU", place),
        TableColumn("BATCH", lambda one: str(one.configuration.batch), right=True),
        TableColumn(
            "LIMIT",
            lambda one: "" if one.configuration.power_limit_w is None else f"{one.configuration.power_limit_w:g} W",
            right=True,
        ),
        TableColumn("THROUGHPUT /s", lambda one: _range(one.throughput_hz), right=True),
        *map(latency, quantiles),
        TableColumn("WATTS", lambda one: _range(one.power_w), right=True),
        TableColumn("FROM", _basis),
    ]


def _numbers(text: str, option: str, *, whole: bool) -> list[float]:
    """Parses `1,4,8` into numbers; raises BadParameter."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        raise click.BadParameter(f"{text!r}; write numbers such as 1,4,8", param_hint=option) from None
    if not all(0.0 < one <= 1e6 and (not whole or one == int(one)) for one in found):
        raise click.BadParameter(f"{text!r}; write {'whole ' if whole else ''}numbers above 0", param_hint=option)
    return found


def _watts(text: str, option: str) -> list[float]:
    """Parses `400W,0.5kW`; raises BadParameter."""
    try:
        found = [parse_watts(part) for part in text.split(",")]
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint=option) from None
    if not all(0.0 < one <= 1e6 for one in found):
        raise click.BadParameter(f"{text!r}; write watts above 0, at most 1MW", param_hint=option)
    return found


def _read_measured_points(settings: CliSettings, file: Path | None) -> list[Point]:
    if file is not None:
        from eelgrid_controller.cli.frontier_inputs import read_points

        return list(read_points(file))
    with connect_operators(settings) as client:
        found = iterate_pages(client.list_points, ListPointsRequest(), "points", timeout_s=settings.timeout_s)
        return [make_profile_point(one) for one in found]


def _predict_configurations(
    points: Sequence[Point], name: str, asked: Sequence[Configuration]
) -> tuple[ProfilePrediction, ...]:
    from eelgrid_controller.errors import import_library

    import_library("sklearn.gaussian_process", "learning", "'eelgrid[controller]'")
    from eelgrid_controller.profiles.learning import learn_family
    from eelgrid_controller.profiles.profile_service import ProfileService

    catalogue = load_catalogue()
    held = ProfileService(catalogue)
    progress = ProgressBar("learning", "points read", len(points))
    try:
        for number, point in enumerate(points):
            try:
                held.observe(point, float(number))
            except ControllerError as error:
                echo(f"skipped a point of {point.workload}: {error}", err=True)
            progress(number + 1)
        for family in held.families_due():
            held.adopt_family(learn_family(held.snapshot(), family, catalogue))
        return held.predict_all(name, asked)
    except ControllerError as error:
        raise RequestRefused(error.problem, error.remedy) from None
    finally:
        progress.stop()


def _plain(one: ProfilePrediction) -> dict[str, Any]:
    def interval(found: ProfileEstimate | None) -> dict[str, Any] | None:
        return None if found is None else {**found._asdict(), "basis": found.basis.name.lower()}

    at = one.configuration
    return {
        "gpu_model": at.gpu_model,
        "mig_profile": at.mig_profile,
        "gpus": at.gpus,
        "batch": at.batch,
        "power_limit_w": at.power_limit_w,
        "throughput_hz": interval(one.throughput_hz),
        "power_w": interval(one.power_w),
        "latency_s": {f"{quantile:g}": interval(found) for quantile, found in one.latency_s.items()},
        "missing": dict(one.missing),
    }


def _lines(settings: CliSettings, found: Sequence[ProfilePrediction]) -> Iterator[str]:
    quantiles = sorted({quantile for one in found for quantile in one.latency_s})
    yield from table_lines(settings, _columns(quantiles), found)
    yield "90 % intervals; FROM is measured, interpolated, borrowed (from other profiles) or prior: docs/explanation/profiles.md"


@click.command("predict")
@click.argument("name", shell_complete=complete_profiles)
@click.option(
    "--gpu",
    "models",
    multiple=True,
    required=True,
    shell_complete=complete_models,
    metavar="MODEL",
    help="GPU model, by any of its names; repeatable.",
)
@click.option("--gpus", default="1", show_default=True, metavar="N,...", help="GPUs per replica.")
@click.option("--slice", "mig_profile", default="", help="MIG profile, for example 1g.10gb.")
@click.option(
    "--batch",
    default="1",
    show_default=True,
    metavar="N,...",
    help="Batch size: samples, or the maximum number of concurrent sequences.",
)
@click.option(
    "--limit",
    "limits",
    default="",
    metavar="WATTS,...",
    help="Power limits: 400W,500W; the default limit if not given.",
)
@click.option(
    "--points",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Read points from this CSV file instead of from the controller.",
)
@output_option
@click.pass_obj
def predict(
    settings: CliSettings,
    /,
    *,
    name: str,
    models: tuple[str, ...],
    gpus: str,
    mig_profile: str,
    batch: str,
    limits: str,
    points: Path | None,
) -> None:
    """Predict throughput, latency and power of profile NAME, with 90 % intervals.

    The configurations need not have been measured.

    \b
    eelctl profile predict chat --gpu H100-SXM5-80GB --batch 8,16 --limit 400W,500W,700W
    """  # noqa: D301
    watts: list[float | None] = [*_watts(limits, "--limit")] if limits else [None]
    told = _read_measured_points(settings, points)
    if not told:
        raise RequestRefused("no measured point is known", "import measurements with eelctl profile import FILE")
    if name not in (known := {one.workload for one in told}):
        raise NameNotFound(f"no points of a profile {name!r} are known", f"name one of {', '.join(sorted(known))}")
    models = _resolve_models(models, {one.configuration.gpu_model for one in told})
    asked = [
        Configuration(gpu_model=model, mig_profile=mig_profile, gpus=int(count), batch=int(size), power_limit_w=limit_w)
        for model, count, size, limit_w in product(
            models, _numbers(gpus, "--gpus", whole=True), _numbers(batch, "--batch", whole=True), watts
        )
    ]
    if len(asked) > _ASKED_MOST:
        raise click.UsageError(f"{len(asked)} configurations are too many; ask for at most {_ASKED_MOST}")
    found = _predict_configurations(told, name, asked)
    if settings.output in {"json", "yaml"}:
        print_plain(settings, [_plain(one) for one in found], ())
    else:
        print_plain(settings, None, _lines(settings, found))
        for one in found:
            for quantity, why in one.missing.items():
                echo(f"{one.configuration.gpu_model}, batch {one.configuration.batch}: no {quantity}: {why}", err=True)


def _resolve_models(names: Sequence[str], measured: Iterable[str]) -> tuple[str, ...]:
    """Returns the catalogue's names of the models, or names that points were measured under; raises BadParameter."""
    try:
        return resolve_gpu_models(names, "--gpu", reported=sorted(measured))
    except GpuNameError as error:
        raise click.BadParameter(f"{error.problem}; {error.remedy}", param_hint="--gpu") from None


def _measured_point(point: Point) -> MeasuredPoint:
    """Converts a point of a file into the contract's message."""
    at = point.configuration
    return MeasuredPoint(
        profile=point.workload,
        gpu_model=at.gpu_model,
        mig_profile=at.mig_profile,
        gpus=at.gpus,
        batch=at.batch,
        processes=at.processes,
        power_limit_w=at.power_limit_w,
        throughput_hz=point.throughput_hz,
        latencies=tuple(
            QuantileLatency(quantile=level, latency_s=value_s) for level, value_s in sorted(point.latency_s.items())
        ),
        power_w=point.power_w,
        source=point.source,
    )


def _latency(quantile: float) -> TableColumn[MeasuredPoint]:
    def cell(point: MeasuredPoint) -> str:
        found = [one.latency_s for one in point.latencies if one.quantile == quantile]
        return f"{1000.0 * found[0]:.4g} ms" if found else ""

    return TableColumn(f"P{100 * quantile:.0f}", cell, right=True, wide=quantile != 0.95)


_COLUMNS: tuple[TableColumn[MeasuredPoint], ...] = (
    TableColumn("PROFILE", lambda one: one.profile),
    TableColumn("GPU", lambda one: (f"{one.gpus}x" if one.gpus > 1 else "") + one.gpu_model),
    TableColumn("SLICE", lambda one: one.mig_profile),
    TableColumn("BATCH", lambda one: str(one.batch), right=True),
    TableColumn("PROCESSES", lambda one: str(one.processes), right=True, wide=True),
    TableColumn("LIMIT", lambda one: "" if one.power_limit_w is None else f"{one.power_limit_w:g} W", right=True),
    TableColumn("THROUGHPUT", lambda one: f"{one.throughput_hz:.5g}/s", right=True),
    *map(_latency, (0.5, 0.95, 0.99)),
    TableColumn("POWER", lambda one: "" if one.power_w is None else f"{one.power_w:.1f} W", right=True),
    TableColumn("SOURCE", lambda one: one.source, wide=True),
)


@click.group()
def profile() -> None:
    """Import or list measured points of workloads, or predict points that were not measured."""


profile.add_command(predict)


@profile.command("import")
@click.argument("points", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.pass_obj
def import_points(settings: CliSettings, points: Path) -> None:
    """Import measured points from a CSV file; a point replaces the earlier one of its configuration."""
    from eelgrid_controller.cli.frontier_inputs import read_points

    recorded = 0
    with connect_operators(settings) as client:
        summary = client.get_summary(GetSummaryRequest(), timeout=settings.timeout_s).summary
        told = [_measured_point(point) for point in read_points(points, [one.model for one in summary.models])]
        for start in range(0, len(told), POINTS_A_CALL_MOST):
            part = tuple(told[start : start + POINTS_A_CALL_MOST])
            recorded += client.record_points(RecordPointsRequest(points=part), timeout=settings.timeout_s).recorded
    click.echo(f"{recorded:,} of {count_noun(len(told), 'point is', 'points are')} new or changed")


@profile.command("list")
@click.argument("name", default="", shell_complete=complete_profiles)
@limit_option
@list_options(*_COLUMNS)
@output_option
@click.pass_obj
def list_points(settings: CliSettings, name: str, limit: int | None) -> None:
    """List the measured points of profile NAME, or of all profiles."""
    with connect_operators(settings) as client:
        request = ListPointsRequest(profile=name)
        found = iterate_pages(
            client.list_points, request, "points", timeout_s=settings.timeout_s, limit=settings.fetch_limit(limit)
        )
        first = next(found, None)
        if first is None and name:
            raise _unknown_profile(client, settings, name)
        points = () if first is None else chain((first,), found)
        empty = "no point matches; import measurements with `eelctl profile import FILE`"
        print_list(settings, _COLUMNS, points, empty=empty, limit=limit)


def _unknown_profile(client: Any, settings: CliSettings, name: str) -> NameNotFound:
    """Names the profiles that there are."""
    every = iterate_pages(client.list_points, ListPointsRequest(), "points", timeout_s=settings.timeout_s)
    known = sorted({point.profile for point in every})
    remedy = "import measurements with `eelctl profile import FILE`"
    if known:
        remedy = f"known are {list_names(known)}; or {remedy}"
    return NameNotFound(f"there is no profile {name!r}", remedy)
