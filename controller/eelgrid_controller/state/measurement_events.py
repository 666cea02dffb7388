"""Events of what is measured of running work: points of its profile, how long it takes to serve, how far it is.

Owns their form; the state keeps what follows from them. Must not know how anything is measured.
"""

from dataclasses import dataclass
from typing import Annotated

from eelgrid_controller.state.measurements import MeasuredStart
from eelgrid_protos.messages import POINTS_A_CALL_MOST, ElasticShare, MeasuredPoint
from eelgrid_protos.quantities import Identifier, Many, Nanoseconds, Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class PointsMeasured:
    """Points measured of workloads; each replaces the earlier point of its configuration."""

    time_ns: Nanoseconds
    points: Annotated[tuple[MeasuredPoint, ...], Many(POINTS_A_CALL_MOST)]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartsMeasured:
    """Replicas of services serve now, after so long."""

    time_ns: Nanoseconds
    starts: Annotated[tuple[MeasuredStart, ...], Many(POINTS_A_CALL_MOST)]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadShareChanged:
    """The share of a live elastic job changed: its progress was measured, or while it waits it was given another size.

    A pending one is no longer promised the start that it had.
    """

    time_ns: Nanoseconds
    workload_id: Identifier
    share: ElasticShare


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeExpected:
    """A running job takes so long in all, from its start, by what its process reports of its progress."""

    time_ns: Nanoseconds
    workload_id: Identifier
    runtime_s: Seconds
