"""The port of engines that run processes, and what a plan asks of one.

An attempt is one run of one replica's process. An engine starts each attempt once, however often it is asked, keeps it
across restarts of the agent, and reports its end until the controller has seen it: then a plan no longer names it.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum
from typing import NamedTuple, Protocol

from eelgrid_agent.engine.contact import LeaderContact
from eelgrid_protos.messages import Assignment, AttemptStatus, InputChunk, InputResult, LogChunk, LogRequest
from eelgrid_protos.quantities import GPU_MILLI_WHOLE


class SharingStrategy(Enum):
    """How processes share a GPU, by NVIDIA's words for it."""

    # In turns, and without limits.
    TIME_SLICING = "time-slicing"
    # Side by side, each with the multiprocessors and the memory of its share.
    MPS = "mps"


class AttemptKey(NamedTuple):
    """Names one attempt."""

    workload_id: str
    replica: int
    attempt: int


class ProcessEngine(Protocol):
    """Runs processes of this node, which end without `contact` to a controller if it says so.

    `on_change` is called after the status of an attempt has changed, `on_output` after one that is attached has written.
    """

    on_change: Callable[[], None]
    on_output: Callable[[], object]
    contact: LeaderContact

    def adopt(self) -> None:
        """Finds the attempts of the agent's previous run: those that run, and those whose end was not collected."""

    def list_attempts(self) -> Mapping[AttemptKey, AttemptStatus]:
        """Returns every attempt that is not forgotten."""

    def start(self, *assignments: Assignment) -> None:
        """Starts the processes of assignments, unless their attempts are known; a failure becomes the end of its attempt."""

    def drop_waiting(self, wanted: Collection[Assignment]) -> None:
        """Gives up starts that wait for what the engine itself has to do first, but for these."""

    def refuse(self, assignment: Assignment, reason: str, *, gpu_held: bool = False) -> None:
        """Records that an attempt ended before it was started, and never starts it; `gpu_held` is no failure of it."""

    def stop(self, key: AttemptKey) -> None:
        """Asks a running attempt to end, by its stop signal and then by KILL; harmless if repeated."""

    def forget(self, key: AttemptKey) -> None:
        """Drops an attempt that has ended, and later its output."""

    def list_ended(self) -> Sequence[AttemptStatus]:
        """Returns attempts that ended by themselves and are forgotten, the newest first, each with the digest of its process."""

    def read_output(self, request: LogRequest) -> LogChunk:
        """Returns output as it is now."""

    def write_input(self, chunk: InputChunk, on_result: Callable[[InputResult], None]) -> None:
        """Passes standard input on to a process; calls `on_result` once it is taken, or why it is not."""


class PlannedActions(NamedTuple):
    """What an engine must do for a plan."""

    start: tuple[Assignment, ...] = ()
    refuse: tuple[Assignment, ...] = ()
    stop: tuple[AttemptKey, ...] = ()
    forget: tuple[AttemptKey, ...] = ()


def attempt_key(item: Assignment | AttemptStatus) -> AttemptKey:
    """Returns the attempt that an assignment asks for, or that a status is of."""
    return AttemptKey(item.workload_id, item.replica, item.attempt)


def is_gpu_shared(assignment: Assignment) -> bool:
    """Returns whether an assignment has a share of a GPU, beside others; a slice is a device of its own."""
    return bool(assignment.gpu_uuids) and assignment.gpu_milli < GPU_MILLI_WHOLE and assignment.gpu_instance is None


def plan_actions(
    assignments: Iterable[Assignment], possible: Collection[Assignment], known: Mapping[AttemptKey, AttemptStatus]
) -> PlannedActions:
    """Compares a plan with the attempts of an engine.

    `possible` are the assignments whose devices are there: only these are started. What the plan does not name must
    end, and is forgotten once it has.
    """
    wanted = {attempt_key(item): item for item in assignments if item.process is not None}
    startable = {attempt_key(item) for item in possible}
    new = [item for key, item in wanted.items() if key not in known]
    running = {key for key, status in known.items() if not status.is_over}
    return PlannedActions(
        start=tuple(item for item in new if not item.stop and attempt_key(item) in startable),
        refuse=tuple(item for item in new if item.stop),
        stop=tuple(key for key in running if key not in wanted or wanted[key].stop),
        forget=tuple(key for key in known if key not in wanted and key not in running),
    )
