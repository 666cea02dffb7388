"""What any placement of the same work may save in watts at most: the bound by the fleet, beside the product's by the moves.

Owns that bound. Must not know how moves are searched.

No placement of all that runs draws less than the linear relaxation of bench.openb.bounds, however many moves. The bound
by the moves is `eelgrid_controller.placement.migration_planner.bound_saved_w`; the lower of the two counts. Both bound
watts alone: a gain in fragmentation, stranding and blocks of free GPUs comes besides, and may cost watts.
"""

import numpy as np

from bench.moves.scenes import request_of
from bench.openb.bounds import Relaxation
from eelgrid_controller.placement.migration_planner import MigrationProblem
from eelgrid_controller.replay.openb_protocol import TraceArrays

__all__ = ["bound_fleet_w"]


def bound_fleet_w(problem: MigrationProblem, trace: TraceArrays, relaxation: Relaxation) -> float:
    """Least watts with all that runs placed anywhere."""
    number = {request_of(trace, kind): kind for kind in range(len(trace.specs.cpu_milli))}
    counts = np.zeros(len(number), np.int64)
    for unit in problem.units:
        counts[number[unit.workload.spec.request]] += len(unit.placements)
    return relaxation.power_w(counts)
