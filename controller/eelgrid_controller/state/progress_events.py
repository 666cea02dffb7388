"""Events of the progress of running work: what is known of how long it takes.

Owns their form; the workload keeps what follows from them. Must not know how progress is measured.
"""

from dataclasses import dataclass

from eelgrid_protos.messages import ElasticShare
from eelgrid_protos.quantities import Identifier, Nanoseconds, Seconds


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
