"""Retry rounds: placement attempts over all pending work, a bounded number per step, until all was tried.

Owns the position of the round and its bounds. Must not know how a place is found, nor when a step runs.
"""

from collections.abc import Callable

from eelgrid_controller.placement.explanations import describe_pending_reason, make_outcome_event
from eelgrid_controller.placement.placer import WorkloadPlacer
from eelgrid_controller.state.cluster_state import ClusterState, PendingTicket
from eelgrid_controller.state.events import Event, PricesQuoted, WorkloadDeferred, WorkloadPlaced
from eelgrid_controller.state.node_allocations import is_sliced
from eelgrid_controller.state.spending import spending_reason
from eelgrid_protos.messages import ResourceRequest

# An attempt costs 10 to 300 µs, so that a step with a full round stays under a tenth of a second.
_TRIES_MOST = 256
# A search with closed nodes (placer.py) takes milliseconds: it counts as this many attempts.
_SEARCH_TRIES = 32
# Tickets skipped because an equal request has just failed.
_SCANNED_MOST = 4096

ApplyEvent = Callable[[Event], frozenset[str]]
# Applies an outcome, or defers the workload instead; returns the event that was applied.
SettleDecision = Callable[[WorkloadPlaced | WorkloadDeferred], tuple[Event, frozenset[str]]]
QuotePrices = Callable[[int], tuple[PricesQuoted, ...]]


class RetryRounds:
    """Tries pending work in rounds, a bounded number of attempts per step."""

    def __init__(self, state: ClusterState, chooser: WorkloadPlacer) -> None:
        self._state, self._chooser = state, chooser
        # Where the round continues; None between rounds.
        self._resume: PendingTicket | None = None
        # Capacity was freed in the middle of a round: another round follows. A new core cannot know whether the last
        # round was cut short.
        self._again = len(state.pending) > 0

    @property
    def is_due(self) -> bool:
        """Whether a round is unfinished or due."""
        return self._resume is not None or self._again

    def on_capacity_freed(self) -> None:
        """Requests another round over all pending work."""
        self._again = True

    def retry_step(
        self, apply: ApplyEvent, settle: SettleDecision, quoted: QuotePrices, now_ns: int
    ) -> tuple[list[Event], frozenset[str]]:
        """Continues the round, up to the bounds; returns the events, already applied, and their nodes."""
        events: list[Event] = []
        nodes: frozenset[str] = frozenset()
        # By request and traits: the smallest number of replicas that did not fit, and why.
        failed: dict[tuple[ResourceRequest, tuple[str, ...]], tuple[int, str]] = {}
        tries = 0
        # After a start all work waits some seconds for agents: that is not written as a new reason of each workload.
        has_news = all(record.is_reported or not record.is_ready for record in self._state.nodes.values())
        if self._resume is None:
            self._again = False
        tickets = self._state.pending.next_tickets(self._resume, _SCANNED_MOST)
        for ticket in tickets:
            workload = self._state.workloads[ticket[2]]
            spec = workload.spec
            if is_sliced(workload):
                self._resume = ticket
                continue
            kind = spec.request, spec.required_traits
            hold = self._state.spending.blocking_limit(spec)
            # Work held by a spending limit says nothing about capacity, and costs no attempt.
            why = failed.get(kind) if hold is None else (0, spending_reason(hold))
            is_judged = self._chooser.uses_engine_rules(ticket[2])
            if is_judged and hold is None:
                # An engine's rules apply to this workload only.
                why = None
            if why is None or spec.replicas < why[0]:
                if tries >= _TRIES_MOST:
                    return events, nodes
                for quotes in quoted(now_ns):
                    apply(quotes)
                    events.append(quotes)
                searches = self._chooser.searches
                decision = self._chooser.decide_placement(spec, workload_id=ticket[2])
                tries += 1 + _SEARCH_TRIES * (self._chooser.searches - searches)
                if decision.placements:
                    event, touched = settle(make_outcome_event(ticket[2], decision, now_ns))
                    nodes |= touched
                    events.append(event)
                    self._resume = ticket
                    continue
                why = (spec.replicas, describe_pending_reason(decision))
                if not is_judged:
                    failed[kind] = why
            if has_news and workload.reason != why[1] and len(events) < 2 * _TRIES_MOST:
                # The reason for waiting has changed.
                deferred = WorkloadDeferred(time_ns=now_ns, workload_id=ticket[2], reason=why[1])
                apply(deferred)
                events.append(deferred)
            self._resume = ticket
        if len(tickets) < _SCANNED_MOST:
            self._resume = None
        return events, nodes
