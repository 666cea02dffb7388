"""Rounds of placement attempts over waiting work: the position of the round, and the work of one step."""

from collections.abc import Callable

from eelgrid_controller.placement.explanations import describe_pending_reason, make_outcome_event
from eelgrid_controller.placement.placer import WorkloadPlacer
from eelgrid_controller.state.cluster_state import ClusterState, PendingTicket
from eelgrid_controller.state.events import Event, PricesQuoted, WorkloadDeferred, WorkloadPlaced
from eelgrid_controller.state.replica_changes import is_sliced
from eelgrid_controller.state.spending import spending_reason
from eelgrid_protos.messages import ResourceRequest

# A try costs 10 to 300 µs, so that a step with a full round stays under a tenth of a second.
_TRIES_MOST = 256
# A search with closed nodes (placer.py) takes milliseconds: it counts as so many tries.
_SEARCH_TRIES = 32
# Tickets passed over because their kind has just failed.
_SCANNED_MOST = 4096

ApplyEvent = Callable[[Event], frozenset[str]]
# Applies an outcome, or in its stead that the workload waits; which of them.
SettleDecision = Callable[[WorkloadPlaced | WorkloadDeferred], tuple[Event, frozenset[str]]]
QuotePrices = Callable[[int], tuple[PricesQuoted, ...]]


class RetryRounds:
    """One core's rounds."""

    def __init__(self, state: ClusterState, chooser: WorkloadPlacer) -> None:
        self._state, self._chooser = state, chooser
        # Where the round of tries goes on; None between rounds.
        self._resume: PendingTicket | None = None
        # Capacity appeared in the middle of a round: another round follows. A core that
        # begins cannot know whether the last round was cut short.
        self._again = len(state.pending) > 0

    @property
    def is_due(self) -> bool:
        """Whether a round was cut short, or is to begin."""
        return self._resume is not None or self._again

    def on_capacity_freed(self) -> None:
        """Everything that waits is to be tried once more."""
        self._again = True

    def retry_step(
        self, apply: ApplyEvent, settle: SettleDecision, quoted: QuotePrices, now_ns: int
    ) -> tuple[list[Event], frozenset[str]]:
        """Tries from where the last step stopped, up to the bounds; the events, already applied, and their nodes."""
        events: list[Event] = []
        nodes: frozenset[str] = frozenset()
        # Fewest replicas that found no room and why, by request and traits.
        failed: dict[tuple[ResourceRequest, tuple[str, ...]], tuple[int, str]] = {}
        tries = 0
        # After a start everything waits for agents, for some seconds: that is no news for each workload.
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
            # Who waits for money says nothing of room, and costs no try.
            why = failed.get(kind) if hold is None else (0, spending_reason(hold))
            is_judged = self._chooser.uses_engine_rules(ticket[2])
            if is_judged and hold is None:
                # What its engine answers is of this workload alone.
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
                # What stood in the way is no longer what stands in the way.
                deferred = WorkloadDeferred(time_ns=now_ns, workload_id=ticket[2], reason=why[1])
                apply(deferred)
                events.append(deferred)
            self._resume = ticket
        if len(tickets) < _SCANNED_MOST:
            self._resume = None
        return events, nodes
