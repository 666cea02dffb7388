"""The share of an elastic job with a promised deadline: how it scales, and how far it is; mirrored by workload.proto."""

from typing import Annotated

from eelgrid_protos.quantities import Many, Nanoseconds, Range, RequiredLabel
from eelgrid_protos.values import dataclass

# Numbers of replicas of which the throughput of one job is kept.
SCALING_RATES_MOST = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRate:
    """The throughput of a job on a number of replicas, in units of work a second."""

    replicas: Annotated[int, Range(1, 10_000)]
    rate_hz: Annotated[float, Range(0.0, 1e9, "Hz")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticShare:
    """What the deadline of an elastic job is planned with: rates in ascending order, and the work done at a time."""

    # With which it was admitted, and which it asked for.
    replicas: Annotated[int, Range(1, 10_000)]
    replicas_asked: Annotated[int, Range(0, 10_000)] = 0
    rates: Annotated[tuple[ScalingRate, ...], Many(SCALING_RATES_MOST)] = ()
    work_done: Annotated[float, Range(0.0, 1e18)] = 0.0
    # In the future while it restarts after a change of its replicas.
    at_ns: Nanoseconds = 0
    # Its rate over the one above, as last measured.
    pace: Annotated[float, Range(0.01, 100.0)] = 1.0
    # It is planned on one of these, or on one of all.
    gpu_models_asked: Annotated[tuple[RequiredLabel, ...], Many(64)] = ()
