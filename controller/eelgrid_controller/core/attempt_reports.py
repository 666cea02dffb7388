"""Attempt reports: what follows from what agents and engines tell of processes, also of those whose start the journal lost.

Must not know how reports arrive, nor what takes the room of work that has ended.

Theory of recovered ends. While starts are withheld (state/journal_losses.py), each agent tells again which attempts have
ended by themselves on its node. One of a workload that waits here, and whose next attempt it would be, ran by entries that
are lost; so did a later attempt of one that is placed, which is looked at again when that has returned to the queue. An
agent that tells so knows what was run: it gives the digest of the process, so that no node ends work that it never had, and
no id that was used again ends other work; a run that began before the submission is of an earlier workload of that id. Once
all processes have succeeded, or one has failed and no other attempt may follow, the workload has ended. Any other starts
again.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from eelgrid_controller.core.claimed_starts import may_have_started
from eelgrid_controller.core.interference_estimates import InterferenceEstimates
from eelgrid_controller.core.job_control import plan_end
from eelgrid_controller.core.progress_estimates import ProgressEstimates
from eelgrid_controller.core.quarantine import Quarantine
from eelgrid_controller.state.attempts import (
    drop_undurable,
    find_outcome,
    has_stopped,
    is_stale,
    make_attempt_event,
    recover_attempts,
)
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import AttemptEnded, Event, RecoveredAttempt, WorkloadCompleted, WorkloadEvicted
from eelgrid_protos.messages import AttemptStatus, Workload
from eelgrid_protos.plain_messages import digest_plain, to_plain

# So much a node's clock may be behind.
_SKEW_NS = 60 * 10**9
# Attempts of one workload that lost entries may have begun.
_LATER_MOST = 8


class AttemptReports:
    """Turns what is told of attempts into events."""

    def __init__(
        self, state: ClusterState, quarantine: Quarantine, observers: Sequence[Callable[[AttemptStatus], object]]
    ) -> None:
        """`observers` are called with each status of a current attempt."""
        self._state, self._quarantine, self._observers = state, quarantine, observers
        self._progress = ProgressEstimates(state)
        self.interference = InterferenceEstimates(state)
        self.recovered = RecoveredEnds(state)
        # By node, workload, replica and attempt: what was told of attempts whose start is not known yet.
        self._early: dict[str, dict[tuple[str, int, int], AttemptStatus]] = {}

    def record(
        self,
        node_name: str | None,
        statuses: Sequence[AttemptStatus],
        apply: Callable[[Event], frozenset[str]],
        now_ns: int,
    ) -> tuple[list[Event], frozenset[str], int]:
        """Records what the agent of a node, or with None an engine, reports.

        Returns the events, already applied, their nodes, and how many reports are about earlier attempts.
        """
        events, nodes, stale = list[Event](), frozenset[str](), 0

        def do(event: Event) -> None:
            nonlocal nodes
            nodes |= apply(event)
            events.append(event)

        for status in statuses:
            workload = self._state.workloads.get(status.workload_id)
            if workload is None or is_stale(workload, node_name, status):
                recovered = self._recover(node_name, workload, status, now_ns)
                if recovered is None:
                    stale += 1
                else:
                    do(recovered)
                continue
            for observe in self._observers:
                observe(status)
            self.interference.observe(workload, status)
            expected = self._progress.observe(workload, status, now_ns)
            if expected is not None:
                do(expected)
                workload = self._state.workloads[workload.workload_id]
            event = make_attempt_event(workload, status, now_ns)
            if event is None:
                continue
            do(event)
            now = self._state.workloads[workload.workload_id]
            for cordon in self._quarantine.plan(now, status, now_ns) if isinstance(event, AttemptEnded) else ():
                do(cordon)
            outcome = find_outcome(now)
            if outcome is not None:
                do(plan_end(now, *outcome, now_ns=now_ns))
            elif now.requeuing and has_stopped(now):
                do(WorkloadEvicted(time_ns=now_ns, workload_id=now.workload_id, reason=now.reason))
        return events, nodes, stale

    def pop_early(self, node_name: str) -> list[AttemptStatus]:
        """Takes what a node told of attempts before their start was known; told once, it is not told again."""
        return list(self._early.pop(node_name, {}).values())

    def forget_told(self) -> None:
        """Forgets what was told of attempts whose start is not known: from now on such reports are of earlier attempts."""
        self._early.clear()
        self.recovered.forget_told()

    def _recover(
        self, node_name: str | None, workload: Workload | None, status: AttemptStatus, now_ns: int
    ) -> WorkloadCompleted | None:
        """Returns the event by which work has ended whose start was lost; a report of what may start yet is kept."""
        if workload is None or node_name is None or not self._state.losses.withholds_starts:
            return None
        recovered = self.recovered.record(node_name, workload, status, now_ns)
        if recovered is None and _is_next(workload, status, attempts_most=1):
            key = status.workload_id, status.replica, status.attempt
            self._early.setdefault(node_name, {})[key] = status
        return recovered


class RecoveredEnds:
    """What agents have told of ended attempts while starts are withheld, as long as their workloads have not ended."""

    def __init__(self, state: ClusterState) -> None:
        self._state = state
        # By workload, then by attempt and replica.
        self._told: dict[str, dict[tuple[int, int], RecoveredAttempt]] = {}

    def record(
        self, node_name: str, workload: Workload, status: AttemptStatus, now_ns: int
    ) -> WorkloadCompleted | None:
        """Records a report of a later attempt; returns the event, not yet applied, if the work waits and has ended by that."""
        if not _is_later_attempt(workload, status):
            return None
        told = self._told.setdefault(workload.workload_id, {})
        one = RecoveredAttempt(node_name=node_name, status=drop_undurable(status))
        told[status.attempt, status.replica] = one
        return self._plan_end(workload, now_ns)

    def forget_told(self) -> None:
        """Forgets what was told."""
        self._told.clear()

    def has_later(self, workload: Workload) -> bool:
        """Returns whether a later attempt of a workload was told of."""
        return any(attempt > workload.attempt for attempt, _ in self._told.get(workload.workload_id, ()))

    def plan_ends(self, now_ns: int) -> list[WorkloadCompleted]:
        """Returns how work has ended that waits by now, as it was told before."""
        workloads = (self._state.workloads.get(key) for key in list(self._told))
        ends = (self._plan_end(workload, now_ns) for workload in workloads if workload is not None)
        return [event for event in ends if event is not None]

    def _plan_end(self, workload: Workload, now_ns: int) -> WorkloadCompleted | None:
        if not may_have_started(self._state, workload):
            return None
        told, attempt = self._told[workload.workload_id], workload.attempt + 1
        recovered = tuple(told[key] for key in sorted(told) if key[0] == attempt)
        is_whole = len(recovered) == workload.spec.replicas
        if not recovered or (not is_whole and all(one.status.is_success for one in recovered)):
            return None
        ended = recover_attempts(workload, recovered)
        outcome = find_outcome(ended)
        event = None if outcome is None else plan_end(ended, *outcome, now_ns=now_ns)
        if not isinstance(event, WorkloadCompleted):
            return None
        del self._told[workload.workload_id]
        return replace(event, recovered=recovered)


def _is_later_attempt(workload: Workload, status: AttemptStatus) -> bool:
    """Returns whether a status is of a run that entries must have started that are lost."""
    process = workload.spec.process
    if process is None or workload.phase.is_ended:
        return False
    is_next = _is_next(workload, status, attempts_most=_LATER_MOST)
    is_later = status.started_ns > 0 and status.started_ns + _SKEW_NS >= workload.submitted_ns
    return (
        is_next and is_later and status.is_over and status.process_digest == digest_plain(to_plain(process, brief=True))
    )


def _is_next(workload: Workload, status: AttemptStatus, *, attempts_most: int) -> bool:
    is_next = workload.attempt < status.attempt <= workload.attempt + attempts_most
    return is_next and status.replica < workload.spec.replicas
