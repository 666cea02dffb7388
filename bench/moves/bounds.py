"""What any set of moves may save in watts at most: two bounds, of which the lower counts.

Owns the bounds. Must not know how moves are searched.

By the moves. After at most K moves, power is at least that of all nodes without what moved, and what the moved work adds
where it goes: nothing, but for whole GPUs, of which it takes as many idle ones as it asks for, at the watts of the
cheapest that it may use. On one node k moves save at most G(k) + C(k):

    G(k)  watts of GPUs of which all holders moved, a holder of several GPUs counted in parts; fractional
    C(k)  watts of CPU packages that sleep if the k that hold most CPU moved

The largest sum over all nodes of the concave envelopes of G + C with K moves is the bound: the K steepest steps.

By the fleet. No placement of all that runs draws less than the linear relaxation of bench.openb.bounds, however many moves.

Both bound watts alone. A gain in fragmentation, stranding and blocks of free GPUs comes besides, and may cost watts.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from bench.moves.scenes import request_of
from bench.openb.bounds import Relaxation
from eelgrid_controller.placement.migration_planner import MigrationProblem, MigrationUnit
from eelgrid_controller.replay.openb_protocol import TraceArrays
from eelgrid_kernels.arrays import Floats
from eelgrid_kernels.cost_terms import PACKAGE_W, active_packages
from eelgrid_kernels.move_search import STAYS
from eelgrid_kernels.node_cost import GPU_PLACEABLE, GPU_WHOLE_MILLI
from eelgrid_protos.messages import ResourceRequest

__all__ = ["bound_fleet_w", "bound_moves_w"]


def bound_fleet_w(problem: MigrationProblem, trace: TraceArrays, relaxation: Relaxation) -> float:
    """Least watts with all that runs placed anywhere."""
    number = {request_of(trace, kind): kind for kind in range(len(trace.specs.cpu_milli))}
    counts = np.zeros(len(number), np.int64)
    for unit in problem.units:
        counts[number[unit.workload.spec.request]] += len(unit.placements)
    return relaxation.power_w(counts)


def bound_moves_w(problem: MigrationProblem) -> float:
    """Most watts that moves within the limit of replicas may save, wherever they go."""
    by_row: dict[int, list[MigrationUnit]] = {}
    for unit in problem.units:
        by_row.setdefault(unit.row, []).append(unit)
    arrival_w: dict[ResourceRequest, float] = {}
    steps = [_node_steps(problem, row, units, arrival_w) for row, units in by_row.items()]
    every = np.sort(np.concatenate(steps))[::-1] if steps else np.zeros(0)
    most = problem.limits.replicas
    return float(every[:most][every[:most] > 0.0].sum())


def _arrival_w(problem: MigrationProblem, request: ResourceRequest) -> float:
    """Least watts that a replica of whole GPUs adds where it goes; 0 for a share, which may go beside others."""
    if request.gpu_count == 0 or request.gpu_milli < GPU_WHOLE_MILLI:
        return 0.0
    nodes = problem.nodes
    allowed = [code for model, code in problem.models.items() if not request.gpu_models or model in request.gpu_models]
    usable = (nodes.gpu_state == GPU_PLACEABLE) & np.isin(nodes.gpu_model, allowed)
    return request.gpu_count * float((nodes.gpu_busy_w - nodes.gpu_idle_w)[usable].min(initial=np.inf))


def _node_steps(
    problem: MigrationProblem, row: int, units: Sequence[MigrationUnit], arrival_w: dict[ResourceRequest, float]
) -> Floats:
    """What each further move off a node saves at most, falling."""
    replicas = [(unit.workload.spec.request, held) for unit in units if unit.manner != STAYS for held in unit.slots]
    for request, _ in replicas:
        if request not in arrival_w:
            arrival_w[request] = _arrival_w(problem, request)
    saved = _gpu_savings(problem, row, units, replicas, arrival_w)
    saved += _package_savings(problem, row, [request.cpu_milli for request, _ in replicas])
    return np.diff(_concave_envelope(saved))


def _gpu_savings(
    problem: MigrationProblem,
    row: int,
    units: Sequence[MigrationUnit],
    replicas: Sequence[tuple[ResourceRequest, tuple[int, ...]]],
    arrival_w: Mapping[ResourceRequest, float],
) -> Floats:
    """G(0), G(1), ... G(replicas) of a node."""
    nodes = problem.nodes
    fixed = {slot for unit in units if unit.manner == STAYS for held in unit.slots for slot in held}
    moves: dict[int, float] = {}
    worth: dict[int, float] = {}
    for request, held in replicas:
        for slot in held:
            moves[slot] = moves.get(slot, 0.0) + 1.0 / len(held)
            gpu_w = float(nodes.gpu_busy_w[row, slot] - nodes.gpu_idle_w[row, slot])
            worth[slot] = worth.get(slot, gpu_w) - arrival_w[request] / len(held)
    items = sorted(
        ((worth[slot] / moves[slot], moves[slot]) for slot in moves if slot not in fixed and worth[slot] > 0.0),
        reverse=True,
    )
    at, total = [0.0], [0.0]
    for rate_w, count in items:
        at.append(at[-1] + count)
        total.append(total[-1] + rate_w * count)
    found: Floats = np.interp(np.arange(len(replicas) + 1, dtype=np.float64), at, total)
    return found


def _package_savings(problem: MigrationProblem, row: int, cpu_milli: Sequence[int]) -> Floats:
    """C(0), C(1), ... C(replicas) of a node."""
    capacity, free = int(problem.nodes.cpu_capacity[row]), int(problem.nodes.cpu_free[row])
    freed = np.concatenate(([0], np.cumsum(sorted(cpu_milli, reverse=True))))
    before = active_packages(capacity, free)
    return np.array([PACKAGE_W * (before - active_packages(capacity, free + int(more))) for more in freed])


def _concave_envelope(values: Floats) -> Floats:
    """The least concave function of 0, 1, ... that is nowhere below."""
    corners: list[int] = []
    for at, value in enumerate(values.tolist()):
        while len(corners) > 1:
            first, last = corners[-2], corners[-1]
            if (values[last] - values[first]) * (at - first) > (value - values[first]) * (last - first):
                break
            corners.pop()
        corners.append(at)
    found: Floats = np.interp(np.arange(len(values), dtype=np.float64), corners, values[corners])
    return found
