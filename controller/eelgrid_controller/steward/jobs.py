"""From a training job's promise and placement to what the steering is told of it; or why it cannot be.

Owns a job's holdings, its promise and its relatives. Must not know windows, nor which
limit is chosen.

Theory. Slowdowns are relative to the largest limit, and the largest is the default of the
GPUs: what the job would have without a planner.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence

from eelgrid_controller.power.changes import Holding
from eelgrid_controller.power.curves import Curve, from_points
from eelgrid_controller.power.promise import BestEffort, Deadline, MaxSlowdown, Promise
from eelgrid_controller.power.refusals import PowerRefused
from eelgrid_controller.profiles.points import Configuration, Point
from eelgrid_protos.messages import Workload

__all__ = [
    "gpus_by_node",
    "holdings_of",
    "promise_of",
    "relatives_of",
]

_RELATIVES_MOST = 256


def gpus_by_node(workload: Workload) -> dict[str, tuple[str, ...]]:
    """The GPUs of a job on each of its nodes, by UUID; in order of nodes."""
    found: dict[str, list[str]] = {}
    for placement in workload.placements:
        found.setdefault(placement.node_name, []).extend(placement.gpu_uuids)
    return {name: tuple(sorted(found[name])) for name in sorted(found)}


def holdings_of(
    workload: Workload, restored_w: Mapping[str, float], budgets: Mapping[str, tuple[str, ...]]
) -> tuple[Holding, ...]:
    """One for each node; `restored_w` is the sum of the defaults of its GPUs there, `budgets` the lowest by node."""
    return tuple(
        Holding(f"{workload.workload_id}/{node}", node, len(uuids), budgets.get(node, ()), restored_w.get(node))
        for node, uuids in gpus_by_node(workload).items()
    )


def promise_of(workload: Workload) -> Promise:
    """The promise as the power planner has it; a deadline counts from when the job was placed."""
    training = workload.spec.training
    assert training is not None, "only jobs with a promise are steered"
    if training.slowdown_most is not None:
        return MaxSlowdown(training.slowdown_most)
    if training.deadline_ns:
        # One that has passed already is told from what the job then cannot keep, not refused here.
        return Deadline(training.work, max(1.0, (training.deadline_ns - workload.placed_ns) / 1e9))
    return BestEffort(training.energy_weight or 0.0)


def relatives_of(points: Iterable[Point], gpu_model: str) -> tuple[Curve, ...]:
    """Curves of jobs that were measured at several limits of this GPU model; what makes no curve is left out."""

    def apart(point: Point) -> tuple[str, Configuration]:
        running = point.configuration
        return point.workload, Configuration(
            running.gpu_model, running.mig_profile, running.gpus, running.batch, running.processes, None,
            running.clock_mhz, running.label,
        )  # fmt: skip

    fit = [
        point
        for point in points
        if point.configuration.gpu_model == gpu_model
        and not point.configuration.mig_profile
        and point.configuration.power_limit_w is not None
        and point.power_w is not None
    ]
    made: list[Curve] = []
    for _, group in itertools.groupby(sorted(fit, key=lambda point: _order(*apart(point))), key=apart):
        curve = _curve(list(group))
        if curve is not None and len(made) < _RELATIVES_MOST:
            made.append(curve)
    return tuple(made)


def _order(name: str, running: Configuration) -> tuple[str, int, int, int, int, str]:
    return name, running.gpus, running.batch, running.processes, running.clock_mhz or 0, running.label


def _curve(points: Sequence[Point]) -> Curve | None:
    try:
        curve = from_points(points)
    except PowerRefused:
        return None
    return curve if len(curve.points) > 1 else None
