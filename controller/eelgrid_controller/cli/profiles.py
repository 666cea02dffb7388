"""eelctl profile import, list and predict: measured points of workloads in configurations.

Owns the options; the file is that of `eelctl frontier --points` (docs/how-to/frontier.md).
"""

from pathlib import Path

import click

from eelgrid_controller.cli.connection import operators, pages
from eelgrid_controller.cli.listings import limit_option
from eelgrid_controller.cli.predictions import predict
from eelgrid_controller.cli.settings import Settings, printing
from eelgrid_controller.cli.tables import Column, listing
from eelgrid_controller.profiles.points import Point
from eelgrid_protos.messages import (
    POINTS_A_CALL_MOST,
    ListPointsRequest,
    MeasuredPoint,
    QuantileLatency,
    RecordPointsRequest,
)

__all__ = ["profile"]


def _told(point: Point) -> MeasuredPoint:
    """A point of a file as the contract has it."""
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


def _latency(quantile: float) -> Column[MeasuredPoint]:
    def cell(point: MeasuredPoint) -> str:
        found = [one.latency_s for one in point.latencies if one.quantile == quantile]
        return f"{1000.0 * found[0]:.4g} ms" if found else ""

    return Column(f"P{100 * quantile:.0f}", cell, right=True, wide=quantile != 0.95)


_COLUMNS: tuple[Column[MeasuredPoint], ...] = (
    Column("PROFILE", lambda one: one.profile),
    Column("GPU", lambda one: (f"{one.gpus}x" if one.gpus > 1 else "") + one.gpu_model),
    Column("SLICE", lambda one: one.mig_profile),
    Column("BATCH", lambda one: str(one.batch), right=True),
    Column("PROCESSES", lambda one: str(one.processes), right=True, wide=True),
    Column("LIMIT", lambda one: "" if one.power_limit_w is None else f"{one.power_limit_w:g} W", right=True),
    Column("THROUGHPUT", lambda one: f"{one.throughput_hz:.5g}/s", right=True),
    *map(_latency, (0.5, 0.95, 0.99)),
    Column("POWER", lambda one: "" if one.power_w is None else f"{one.power_w:.1f} W", right=True),
    Column("SOURCE", lambda one: one.source, wide=True),
)


@click.group()
def profile() -> None:
    """Tell or list what was measured of workloads, or predict what was not."""


profile.add_command(predict)


@profile.command("import")
@click.argument("points", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.pass_obj
def import_points(settings: Settings, points: Path) -> None:
    """Tell the controller the points of a CSV file; one of a configuration that is known replaces it."""
    from eelgrid_controller.cli.frontier_files import read_points

    told = [_told(point) for point in read_points(points)]
    recorded = 0
    with operators(settings) as client:
        for start in range(0, len(told), POINTS_A_CALL_MOST):
            part = tuple(told[start : start + POINTS_A_CALL_MOST])
            recorded += client.record_points(RecordPointsRequest(points=part), timeout=settings.timeout_s).recorded
    click.echo(f"{recorded} of {len(told)} points are new or changed")


@profile.command("list")
@click.argument("name", default="")
@limit_option
@printing
@click.pass_obj
def list_points(settings: Settings, name: str, limit: int | None) -> None:
    """List the points of profile NAME, or all."""
    with operators(settings) as client:
        request = ListPointsRequest(profile=name)
        found = pages(client.list_points, request, "points", timeout_s=settings.timeout_s, limit=limit)
        listing(settings, _COLUMNS, found, empty="no point matches; tell some with `eelctl profile import FILE`")
