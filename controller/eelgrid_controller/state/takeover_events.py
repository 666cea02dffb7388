"""Events of a takeover: a controller that starts on a journal, whose last entries may be lost, and what agents know of these.

Owns their form; `JournalLosses` and the node records keep what follows from them. Must not know how claims are compared.

    ControllerStarted -> (NodeHeard | NodeReconciled | NodeAhead -> NodeReconciled), of each node -> StartsResumed
"""

from dataclasses import dataclass
from typing import Annotated

from eelgrid_protos.messages import UNKNOWN_WORKLOADS_MOST
from eelgrid_protos.quantities import Count, Identifier, Many, Name, Nanoseconds, Uint64


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerStarted:
    """A controller started on this journal: until agents connect, what their nodes hold is unknown.

    `timeline` is that of the database's log in its term, 0 without one. If it `withholds_starts`, entries are lost or may
    be, and nothing starts until StartsResumed.
    """

    time_ns: Nanoseconds
    timeline: Uint64 = 0
    withholds_starts: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeHeard:
    """A node's agent answered Welcome for the first time since the controller started; it holds nothing unknown."""

    time_ns: Nanoseconds
    node_name: Name


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAhead:
    """A node's agent holds a plan that was never in this journal: the journal's later entries are lost.

    `assignments` is the number of assignments that the agent holds under that plan and that the journal does not
    know; None if the agent cannot tell.
    """

    time_ns: Nanoseconds
    node_name: Name
    plan_epoch: Uint64
    assignments: Count | None = None
    workload_ids: Annotated[tuple[Identifier, ...], Many(UNKNOWN_WORKLOADS_MOST)] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReconciled:
    """What a node held beyond the journal is known or released; later plans have epochs above its own."""

    time_ns: Nanoseconds
    node_name: Name
    plan_epoch: Uint64 = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StartsResumed:
    """All agents that can be there have said what they hold: pending work starts again."""

    time_ns: Nanoseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalRolledBack:
    """An operator accepted the loss of acknowledged entries; `last` is None if their number is unknown."""

    time_ns: Nanoseconds
    first: Uint64
    last: Uint64 | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlansWithdrawn:
    """A write that failed for its callers, and may have been stored, was removed: its plan epochs are not given again.

    `plan_epoch` is the highest that it gave to any node. A promoted standby may still have the write.
    """

    time_ns: Nanoseconds
    plan_epoch: Uint64


LossEvent = ControllerStarted | StartsResumed | JournalRolledBack | PlansWithdrawn
