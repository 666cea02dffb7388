"""From a training job's promise and placement to what the steering is told of it; or why it cannot be.

Owns which limits may be set on a job's GPUs, its holdings and its relatives. Must not
know windows, nor which limit is chosen.

Theory. Slowdowns are relative to the largest limit, and the largest is the default of the
GPUs: what the job would have without a planner. The least is the highest of the boards'
least limits. Between them lie limits of one step, 25 W as in Zeus's traces, or the next
multiple that makes LIMITS of them at most: each limit more has to be tried.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from eelgrid_controller.power.changes import Holding
from eelgrid_controller.power.curves import Curve, from_points
from eelgrid_controller.power.promise import BestEffort, Deadline, MaxSlowdown, Promise
from eelgrid_controller.power.refusals import PowerRefused
from eelgrid_controller.profiles.points import Configuration, Point
from eelgrid_protos.catalogue import Catalogue
from eelgrid_protos.messages import Gpu, Workload

__all__ = [
    "LIMITS_WANTED",
    "Board",
    "board_of",
    "gpus_by_node",
    "holdings_of",
    "limits_between",
    "promise_of",
    "relatives_of",
]

LIMITS_WANTED = 12
_STEP_W = 25.0
_RELATIVES_MOST = 256


class Board(NamedTuple):
    """What may be set on a GPU."""

    least_w: float
    default_w: float


def board_of(gpu: Gpu, catalogue: Catalogue) -> Board | None:
    """By its driver, else by the catalogue; None where neither tells."""
    product = catalogue.products.get(gpu.catalogue_key)
    default_w = gpu.power_limit_default_w or (product.power_default_w if product else None)
    least_w = gpu.power_limit_min_w or (product.power_min_w if product else None)
    if default_w is None or least_w is None or not 0.0 < least_w <= default_w:
        return None
    return Board(least_w, default_w)


def limits_between(boards: Iterable[Board]) -> tuple[float, ...]:
    """The limits to choose from, falling; the default alone where the boards take no other."""
    known = list(boards)
    default_w, least_w = min(board.default_w for board in known), max(board.least_w for board in known)
    step_w = _STEP_W * max(1, math.ceil((default_w - least_w) / _STEP_W / (LIMITS_WANTED - 1)))
    count = math.floor(max(0.0, default_w - least_w) / step_w + 1e-9)
    return tuple(default_w - step_w * number for number in range(count + 1))


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
