"""eelctl profile predict: what a workload would do in configurations that nobody measured.

Owns the options and the table. Points are the controller's, or those of a file; learning
is done here, so that no controller is slowed by it (eelgrid_controller.profiles has the
theory, docs/explanation/profiles.md what the intervals are worth).
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import click

from eelgrid_controller.cli.connection import operators, pages
from eelgrid_controller.cli.failure import Refused
from eelgrid_controller.cli.progress import Progress
from eelgrid_controller.cli.settings import Settings, printing
from eelgrid_controller.cli.tables import Column, coloured, echo, printed, text_table
from eelgrid_controller.errors import ControllerError
from eelgrid_controller.measured import planned
from eelgrid_controller.profiles.answers import Estimate, Prediction
from eelgrid_controller.profiles.points import Configuration, Point
from eelgrid_protos.catalogue import load
from eelgrid_protos.messages import ListPointsRequest

__all__ = ["predict"]

_ASKED_MOST = 1000


def _range(found: Estimate | None, factor: float = 1.0) -> str:
    if found is None:
        return ""
    low, middle, high = (factor * value for value in (found.lower, found.median, found.upper))
    return f"{middle:.4g} ({low:.4g} to {high:.4g})"


def _basis(one: Prediction) -> str:
    found = [each for each in (one.throughput_hz, one.power_w, *one.latency_s.values()) if each is not None]
    return min(found, key=lambda each: each.basis).basis.name.lower() if found else ""


def _columns(quantiles: Iterable[float]) -> list[Column[Prediction]]:
    def latency(quantile: float) -> Column[Prediction]:
        return Column(f"P{100 * quantile:g} ms", lambda one: _range(one.latency_s.get(quantile), 1000.0), right=True)

    def place(one: Prediction) -> str:
        at = one.configuration
        count = f"{at.gpus}x" if at.gpus > 1 else ""
        return f"{count}{at.gpu_model}" + (f" {at.mig_profile}" if at.mig_profile else "")

    return [
        Column("GPU", place),
        Column("BATCH", lambda one: str(one.configuration.batch), right=True),
        Column(
            "LIMIT",
            lambda one: "" if one.configuration.power_limit_w is None else f"{one.configuration.power_limit_w:g} W",
            right=True,
        ),
        Column("THROUGHPUT /s", lambda one: _range(one.throughput_hz), right=True),
        *map(latency, quantiles),
        Column("WATTS", lambda one: _range(one.power_w), right=True),
        Column("FROM", _basis),
    ]


def _numbers(text: str, option: str, *, whole: bool) -> list[float]:
    """`1,4,8` as numbers; raises BadParameter."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        raise click.BadParameter(f"{text!r}; write numbers such as 1,4,8", param_hint=option) from None
    if not all(0.0 < one <= 1e6 and (not whole or one == int(one)) for one in found):
        raise click.BadParameter(f"{text!r}; write {'whole ' if whole else ''}numbers above 0", param_hint=option)
    return found


def _told(settings: Settings, file: Path | None) -> list[Point]:
    if file is not None:
        from eelgrid_controller.cli.frontier_files import read_points

        return list(read_points(file))
    with operators(settings) as client:
        found = pages(client.list_points, ListPointsRequest(), "points", timeout_s=settings.timeout_s)
        return [planned(one) for one in found]


def _predicted(points: Sequence[Point], name: str, asked: Sequence[Configuration]) -> tuple[Prediction, ...]:
    from eelgrid_controller.profiles.family import learn_family
    from eelgrid_controller.profiles.held import Held
    from eelgrid_controller.replay.libraries import library

    library("scipy.optimize", "learning", "'eelgrid[controller]'")

    catalogue = load()
    held = Held(catalogue)
    progress = Progress("learning", "points told", len(points))
    try:
        for number, point in enumerate(points):
            try:
                held.observe(point, float(number))
            except ControllerError as error:
                echo(f"a point of {point.workload} is passed over: {error}", err=True)
            progress(number + 1)
        for family in held.due():
            held.adopt(learn_family(held.snapshot(), family, catalogue))
        return held.predict_all(name, asked)
    except ControllerError as error:
        raise Refused(error.problem, error.remedy) from None
    finally:
        progress.stop()


def _plain(one: Prediction) -> dict[str, Any]:
    def interval(found: Estimate | None) -> dict[str, Any] | None:
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


def _lines(settings: Settings, found: Sequence[Prediction]) -> Iterator[str]:
    quantiles = sorted({quantile for one in found for quantile in one.latency_s})
    yield from text_table(_columns(quantiles), found, headers=settings.headers, colour=coloured())
    yield "90 % intervals; measured, interpolated, borrowed from other profiles, or prior: docs/explanation/profiles.md"


@click.command("predict")
@click.argument("name")
@click.option("--gpu", "models", multiple=True, required=True, metavar="MODEL", help="GPU model; repeatable.")
@click.option("--gpus", default="1", show_default=True, metavar="N,...", help="GPUs of a replica.")
@click.option("--slice", "mig_profile", default="", help="MIG profile, such as 1g.10gb.")
@click.option("--batch", default="1", show_default=True, metavar="N,...", help="Samples, or most sequences at once.")
@click.option("--limit", "limits", default="", metavar="WATTS,...", help="Power limits; without them the default.")
@click.option(
    "--points", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="A file instead of the controller."
)
@printing
@click.pass_obj
def predict(
    settings: Settings, /, *, name: str, models: tuple[str, ...], gpus: str, mig_profile: str, batch: str, limits: str,
    points: Path | None,
) -> None:  # fmt: skip
    """Say what profile NAME would do in configurations, measured or not, with 90 % intervals."""
    watts: list[float | None] = [*_numbers(limits, "--limit", whole=False)] if limits else [None]
    asked = [
        Configuration(gpu_model=model, mig_profile=mig_profile, gpus=int(count), batch=int(size), power_limit_w=limit_w)
        for model, count, size, limit_w in product(
            models, _numbers(gpus, "--gpus", whole=True), _numbers(batch, "--batch", whole=True), watts
        )
    ]
    if len(asked) > _ASKED_MOST:
        raise click.UsageError(f"these are {len(asked)} configurations; ask for at most {_ASKED_MOST}")
    told = _told(settings, points)
    if not told:
        raise Refused("no point is known", "tell what was measured with eelctl profile import FILE")
    found = _predicted(told, name, asked)
    if settings.output in {"json", "yaml"}:
        printed(settings, [_plain(one) for one in found], ())
    else:
        printed(settings, None, _lines(settings, found))
        for one in found:
            for quantity, why in one.missing.items():
                echo(f"{one.configuration.gpu_model}, batch {one.configuration.batch}: no {quantity}: {why}", err=True)
