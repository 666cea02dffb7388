"""eelctl shadow: a second policy that follows the cluster on a copy, and how it compares.

Owns the options and how the report reads. Must not know how the shadow decides.
"""

from collections.abc import Iterator
from datetime import UTC, datetime

import click

from eelgrid_controller.cli.connection import operators
from eelgrid_controller.cli.policy import wanted_weights
from eelgrid_controller.cli.settings import Settings, printing
from eelgrid_controller.cli.tables import document, text_table
from eelgrid_controller.cli.whatif import differences_table, totals_table
from eelgrid_protos.messages import (
    OBJECTIVES,
    GetPolicyRequest,
    GetShadowRequest,
    ShadowReport,
    StartShadowRequest,
    StopShadowRequest,
    Weights,
)

__all__ = ["shadow"]

_SHOWN = 20


def _lines(report: ShadowReport) -> Iterator[str]:
    weights = report.weights
    yield (
        f"shadow {report.objective}: power {weights.power:g}, fragmentation {weights.fragmentation_w:g} W, stranding "
        f"{weights.stranding_w:g} W"
    )
    began = datetime.fromtimestamp(report.started_ns / 1e9, UTC).isoformat(timespec="seconds")
    yield f"since {began} (revision {report.started_revision}), {report.events:,} events, now revision {report.revision}"
    yield ""
    yield from totals_table(report.live, report.shadow, "CLUSTER", "SHADOW")
    yield ""
    yield (
        f"Of what was submitted since and still runs or waits: {report.alike:,} placed alike, {report.elsewhere:,} elsewhere, "
        f"{report.live_alone:,} by the cluster alone, {report.shadow_alone:,} by the shadow alone, "
        f"{report.neither:,} by neither."
    )
    if report.differences:
        yield ""
        yield from text_table(differences_table("CLUSTER", "SHADOW"), report.differences[:_SHOWN])


@click.group()
def shadow() -> None:
    """Let a second policy follow the cluster on a copy, and compare."""


@shadow.command()
@click.option("--objective", type=click.Choice(list(OBJECTIVES)), help="A named weighting.")
@click.option("--weight", multiple=True, metavar="NAME=VALUE", help="One weight, the others as in force; repeatable.")
@printing
@click.pass_obj
def start(settings: Settings, objective: str | None, weight: tuple[str, ...]) -> None:
    """Begin from the cluster as it is; a shadow before it ends."""
    if not (objective or weight):
        raise click.UsageError("name the other policy: --objective or --weight")
    with operators(settings) as client:

        def in_force() -> Weights:
            weights: Weights = client.get_policy(GetPolicyRequest(), timeout=settings.timeout_s).policy.weights
            return weights

        wanted = wanted_weights(objective, weight, in_force)
        report = client.start_shadow(StartShadowRequest(weights=wanted), timeout=settings.timeout_s).report
        document(settings, report, _lines(report))


@shadow.command()
@printing
@click.pass_obj
def show(settings: Settings) -> None:
    """Compare the cluster with its shadow."""
    with operators(settings) as client:
        report = client.get_shadow(GetShadowRequest(), timeout=settings.timeout_s).report
        document(settings, report, _lines(report))


@shadow.command()
@printing
@click.pass_obj
def stop(settings: Settings) -> None:
    """Compare once more and end the shadow."""
    with operators(settings) as client:
        report = client.stop_shadow(StopShadowRequest(), timeout=settings.timeout_s).report
        document(settings, report, _lines(report))
