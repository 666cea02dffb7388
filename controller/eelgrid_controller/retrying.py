"""Rounds of tries over the waiting work: where one stands, and how much of it is done in one step.

Owns the bounds and the place where a round goes on. Must not know how a decision is made
or what an event changes: both are handed in.

Theory. Waiting work is tried when capacity appears, the highest priority first, up to a
bound for each step; where it stopped is remembered. Capacity only shrinks within a step, so
a request that found no room needs no second try there.
"""

from collections.abc import Callable

from eelgrid_controller.choosing import Chooser
from eelgrid_controller.events import Event, PricesQuoted, WorkloadDeferred, WorkloadPlaced
from eelgrid_controller.explain import reason
from eelgrid_controller.outcomes import outcome
from eelgrid_controller.pending import Ticket
from eelgrid_controller.replicas import sliced
from eelgrid_controller.spending.words import spending_reason
from eelgrid_controller.state import ClusterState
from eelgrid_protos.messages import ResourceRequest

__all__ = ["Retrying"]

# A try costs 10 to 300 µs, so that a step with a full round stays under a tenth of a second.
_TRIES_MOST = 256
# A search with closed nodes (choosing.py) takes milliseconds: it counts as so many tries.
_SEARCH_TRIES = 32
# Tickets passed over because their kind has just failed.
_SCANNED_MOST = 4096

Apply = Callable[[Event], frozenset[str]]
# Applies an outcome, or in its stead that the workload waits; which of them.
Settle = Callable[[WorkloadPlaced | WorkloadDeferred], tuple[Event, frozenset[str]]]
Quoted = Callable[[int], tuple[PricesQuoted, ...]]


class Retrying:
    """One core's rounds."""

    def __init__(self, state: ClusterState, chooser: Chooser) -> None:
        self._state, self._chooser = state, chooser
        # Where the round of tries goes on; None between rounds.
        self._resume: Ticket | None = None
        # Capacity appeared in the middle of a round: another round follows. A core that
        # begins cannot know whether the last round was cut short.
        self._again = len(state.pending) > 0

    @property
    def is_due(self) -> bool:
        """Whether a round was cut short, or is to begin."""
        return self._resume is not None or self._again

    def capacity_appeared(self) -> None:
        """Everything that waits is to be tried once more."""
        self._again = True

    def step(self, apply: Apply, settle: Settle, quoted: Quoted, now_ns: int) -> tuple[list[Event], frozenset[str]]:
        """Tries from where the last step stopped, up to the bounds; the events, already applied, and their nodes."""
        events: list[Event] = []
        nodes: frozenset[str] = frozenset()
        # Fewest replicas that found no room and why, by request and traits.
        failed: dict[tuple[ResourceRequest, tuple[str, ...]], tuple[int, str]] = {}
        tries = 0
        # After a start everything waits for agents, for some seconds: that is no news for each workload.
        has_news = all(record.is_heard or not record.is_ready for record in self._state.nodes.values())
        if self._resume is None:
            self._again = False
        tickets = self._state.pending.after(self._resume, _SCANNED_MOST)
        for ticket in tickets:
            workload = self._state.workloads[ticket[2]]
            spec = workload.spec
            if sliced(workload):
                self._resume = ticket
                continue
            kind = spec.request, spec.required_traits
            hold = self._state.spending.holds(spec)
            # Who waits for money says nothing of room, and costs no try.
            why = failed.get(kind) if hold is None else (0, spending_reason(hold))
            is_judged = self._chooser.judges(ticket[2])
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
                decision = self._chooser.decide(spec, workload_id=ticket[2])
                tries += 1 + _SEARCH_TRIES * (self._chooser.searches - searches)
                if decision.placements:
                    event, touched = settle(outcome(ticket[2], decision, now_ns))
                    nodes |= touched
                    events.append(event)
                    self._resume = ticket
                    continue
                why = (spec.replicas, reason(decision))
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
