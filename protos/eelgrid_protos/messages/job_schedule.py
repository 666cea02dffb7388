"""Job schedules: what a workload waits for before its turn, how often it runs again, and by when it ends.

Mirrored by workload.proto.
"""

from collections.abc import Iterator
from typing import Annotated

from eelgrid_protos.errors import Violation
from eelgrid_protos.quantities import Identifier, Many, Nanoseconds, OpenEnum, Range
from eelgrid_protos.values import dataclass

# Workloads on which one may depend, and how often it may be started again after a failure.
DEPENDENCIES_MOST = 64
RETRIES_MOST = 100


class DependencyCondition(OpenEnum):
    """How another workload must have ended; NOT_SUCCEEDED is failed or cancelled."""

    UNSPECIFIED = 0
    SUCCEEDED = 1
    ENDED = 2
    NOT_SUCCEEDED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDependency:
    """A workload, or all elements of an array, that must have ended before another one starts."""

    workload_id: Identifier
    condition: DependencyCondition = DependencyCondition.SUCCEEDED
    # Of an array for an array: each element waits only for the one with its own index.
    each: bool = False

    def violations(self) -> Iterator[Violation]:
        """Checks that the condition is set."""
        if self.condition is DependencyCondition.UNSPECIFIED:
            yield Violation("condition", "is not set or not known here", "choose succeeded, ended or not_succeeded")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSchedule:
    """What a workload waits for before capacity, queue and priority count."""

    # It does not start before this time; 0 for at once.
    begin_ns: Nanoseconds = 0
    # All of them must be met.
    after: Annotated[tuple[JobDependency, ...], Many(DEPENDENCIES_MOST)] = ()
    # How often it is started again after a failed attempt.
    retries_most: Annotated[int, Range(0, RETRIES_MOST)] = 0
    # It never runs a second time, whatever stops it.
    no_requeue: bool = False

    def violations(self) -> Iterator[Violation]:
        """Checks that each dependency is named once, and that it is not to run again where it must not."""
        if self.no_requeue and self.retries_most:
            yield Violation("no_requeue", f"is set with retries_most {self.retries_most}", "leave one of them out")
        names = [one.workload_id for one in self.after]
        if len(set(names)) < len(names):
            yield Violation("after", "names a workload twice", "name each workload once, with one condition")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDeadline:
    """By when a workload must have ended: promised or refused at submission, or accepted without a promise."""

    end_ns: Nanoseconds
    best_effort: bool = False
