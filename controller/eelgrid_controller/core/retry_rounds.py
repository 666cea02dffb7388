"""Rounds over the pending work: what is tried in which order, up to a bound of attempts in each step.

`RetryRounds` remembers where the round continues and what its last step has learned; `_RetryStep` is one step, and
applies its events. Must not know why capacity became free, nor how events become durable.

Theory. Work is tried by priority and submission or, with queues, in the order of fair share. What does not fit is given
its reason, and equal requests behind it are not tried again as long as the state is the same. Work that its queue
entitles to it makes room by preemption; else the first that waits for capacity gets a reserved start, beside which the
rest may be backfilled.
"""

import itertools
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping

from eelgrid_controller.core.backfill import BackfillPlanner
from eelgrid_controller.core.capacity_holds import CapacityHolds
from eelgrid_controller.core.gang_starts import GangStarts
from eelgrid_controller.core.preemptions import ApplyEvent, Preemptions, SettleDecision
from eelgrid_controller.placement.explanations import (
    describe_pending_reason,
    make_outcome_event,
)
from eelgrid_controller.placement.placer import WorkloadPlacer, may_start_limited
from eelgrid_controller.placement.planner import PlacementDecision
from eelgrid_controller.queueing.admission import QueueHold, QueueIndex, describe_queue_hold
from eelgrid_controller.queueing.fair_share import NOT_BY_QUOTA, FairRound
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import (
    Event,
    PricesQuoted,
    WorkloadDeferred,
)
from eelgrid_controller.state.gangs import JobGang
from eelgrid_controller.state.node_allocations import is_sliced
from eelgrid_controller.state.pending_queue import PendingTicket
from eelgrid_controller.state.spending import spending_reason
from eelgrid_protos.messages import (
    ResourceRequest,
    Workload,
    WorkloadSpec,
)

# An attempt costs 10 to 300 µs, so that a step with a full round stays under a tenth of a second.
_TRIES_MOST = 256
# A search with closed nodes (placer.py) takes milliseconds: it counts as this many attempts.
_SEARCH_TRIES = 32
# Tickets skipped because an equal request has just failed.
_SCANNED_MOST = 4096
# With queues the next of them costs 20 to 40 µs.
_FAIR_SCANNED_MOST = 1024

QuotePrices = Callable[[int, ResourceRequest | None], tuple[PricesQuoted, ...]]


class RetryRounds:
    """Tries pending work in rounds, a bounded number of attempts per step; with queues, in the order of fair share."""

    def __init__(
        self,
        state: ClusterState,
        chooser: WorkloadPlacer,
        queues: QueueIndex,
        backfill: BackfillPlanner,
        preemptions: Preemptions,
        *,
        holds: CapacityHolds,
        gangs: GangStarts,
    ) -> None:
        self._state, self._chooser, self._queues = state, chooser, queues
        self._backfill, self._preemptions, self._holds, self._gangs = backfill, preemptions, holds, gangs
        # Where the round continues; None between rounds.
        self._resume: PendingTicket | None = None
        # With queues the round itself, and the queues that it is over.
        self._fair_round: FairRound | None = None
        self._generation = queues.generation
        # What the last step has learned, at which revision of the state: the next one of the round begins with it.
        self._learned: tuple[int, dict[Hashable, tuple[int, str]]] = (-1, {})
        # What of the pending work is alike, and which kinds of it failed, at the same revision.
        self._kinds = _WaitingKinds()
        # Capacity was freed in the middle of a round: another round follows. A new core cannot know whether the last
        # round was cut short.
        self._again = len(state.pending) > 0

    @property
    def is_due(self) -> bool:
        """Whether a round is unfinished or due."""
        return self._resume is not None or self._fair_round is not None or self._again

    def on_capacity_freed(self) -> None:
        """Requests another round over all pending work."""
        self._again = True

    def retry_step(
        self, apply: ApplyEvent, settle: SettleDecision, quoted: QuotePrices, now_ns: int
    ) -> tuple[list[Event], frozenset[str]]:
        """Continues the round, up to the bounds; returns the events, already applied, and their nodes."""
        if self._generation != self._queues.generation:
            # Other queues are in force: what is left of a round is part of the next.
            self._generation = self._queues.generation
            self._again |= self._resume is not None or self._fair_round is not None
            self._resume = self._fair_round = None
        step = _RetryStep(
            self._state,
            self._chooser,
            self._queues,
            self._backfill,
            self._preemptions,
            holds=self._holds,
            gangs=self._gangs,
            kinds=self._kinds,
            apply=apply,
            settle=settle,
            quoted=quoted,
            now_ns=now_ns,
        )
        is_new = self._resume is None and self._fair_round is None
        if is_new or self._learned[0] != self._state.revision:
            self._kinds.begin_step(len(self._state.pending))
        if is_new:
            step.apply_all(self._backfill.begin_round(now_ns))
            self._holds.begin_round(now_ns)
        elif self._learned[0] == self._state.revision:
            step.failed = self._learned[1]
        self._continue_round(step, now_ns)
        self._learned = self._state.revision, step.failed
        if self._resume is None and self._fair_round is None:
            step.apply_all(self._backfill.end_round(now_ns))
            step.apply_all(self._holds.end_round(now_ns))
        return step.events, step.nodes

    def _continue_round(self, step: "_RetryStep", now_ns: int) -> None:
        if self._queues.is_active:
            self._continue_fair_round(step, now_ns)
            self._again |= step.has_preempted
            return
        if self._resume is None:
            self._again = False
        tickets = self._state.pending.next_tickets(self._resume, _SCANNED_MOST)
        untried = step.try_all(tickets)
        if untried is not None:
            # The round continues after the ticket before it; the first is always tried.
            self._resume = tickets[tickets.index(untried) - 1]
        else:
            self._resume = tickets[-1] if len(tickets) == _SCANNED_MOST else None

    def _continue_fair_round(self, step: "_RetryStep", now_ns: int) -> None:
        if self._fair_round is None:
            self._again = False
            self._fair_round = self._queues.begin_round(now_ns, skips_refused=True)
        step.fair_round = self._fair_round
        untried = step.try_all(itertools.islice(self._fair_round, _FAIR_SCANNED_MOST))
        if untried is not None:
            self._fair_round.push_back(untried)
        elif self._fair_round.is_over:
            self._fair_round = None


def _find_scale(spec: WorkloadSpec) -> int:
    """Returns what work must have in common, besides its request, for more replicas to wait where fewer do.

    A budget that holds fewer later may never hold more, which so start at a lower limit.
    """
    return spec.replicas if may_start_limited(spec) else 0


class _WaitingKinds:
    """What pending work shares, by a number, so that thousands that wait alike are passed over in a fraction of a ms.

    Right as long as no rule is of single workloads: without queues, reservations, spending limits and engines' rules that are
    not about specs.
    """

    __slots__ = ("_numbers", "_waits", "failed", "known", "passed")

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        # By workload: the spec that was looked at, the number of what it asks for, and its replicas.
        self.known: dict[str, tuple[WorkloadSpec, int, int]] = {}
        # By number: the smallest number of replicas that did not fit, and why.
        self.failed: dict[int, tuple[int, str]] = {}
        # A number for each kind and what kept it from starting, and by workload the one as which it was passed over: it
        # is again, as long as it is the same object.
        self._waits: dict[tuple[int, tuple[int, str]], int] = {}
        self.passed: dict[str, tuple[Workload, int]] = {}

    def begin_step(self, pending: int) -> None:
        """Forgets what failed, and work that waits no longer once that is most of what is known."""
        self.failed.clear()
        most = 2 * pending + _SCANNED_MOST
        if len(self.known) > most or len(self._waits) > most:
            self.known.clear()
            self._numbers.clear()
            self._waits.clear()
            self.passed.clear()

    def learn(self, workload_id: str, spec: WorkloadSpec) -> tuple[WorkloadSpec, int, int]:
        """Returns what is known of a workload from now on."""
        of_nodes = spec.required_traits, spec.process is not None
        kind = spec.request, *of_nodes, spec.has_promised_deadline, spec.shared_load, _find_scale(spec)
        found = spec, self._numbers.setdefault(kind, len(self._numbers)), spec.replicas
        self.known[workload_id] = found
        return found

    def note_failure(self, workload_id: str, spec: WorkloadSpec, why: tuple[int, str]) -> None:
        """Notes what keeps a workload from starting, and all that ask for the same."""
        self.failed[self.learn(workload_id, spec)[1]] = why

    def pass_over(self, workload: Workload) -> bool:
        """Returns whether work waits for what it waited for, and no start is promised to it."""
        kind = self.known.get(workload.workload_id)
        if kind is None or kind[0] is not workload.spec:
            kind = self.learn(workload.workload_id, workload.spec)
        why = self.failed.get(kind[1])
        if why is None or workload.promise is not None or kind[2] < why[0] or workload.reason != why[1]:
            return False
        self.passed[workload.workload_id] = workload, self._waits.setdefault((kind[1], why), len(self._waits))
        return True

    def leave_out_passed(
        self, tickets: Iterable[PendingTicket], workloads: Mapping[str, Workload]
    ) -> list[PendingTicket]:
        """Leaves out what was passed over before, unchanged, for what fails now: `pass_over` would say the same."""
        find, failing = self.passed.get, {self._waits.get(item, -1) for item in self.failed.items()}
        return [
            ticket
            for ticket in tickets
            if (found := find(ticket[2])) is None or found[1] not in failing or found[0] is not workloads[ticket[2]]
        ]


class _RetryStep:
    """One step over pending work: what it has learned, and the events that it has applied."""

    def __init__(
        self,
        state: ClusterState,
        chooser: WorkloadPlacer,
        queues: QueueIndex,
        backfill: BackfillPlanner,
        preemptions: Preemptions,
        *,
        holds: CapacityHolds,
        gangs: GangStarts,
        kinds: _WaitingKinds,
        apply: ApplyEvent,
        settle: SettleDecision,
        quoted: QuotePrices,
        now_ns: int,
    ) -> None:
        self.events: list[Event] = []
        self.nodes: frozenset[str] = frozenset()
        self.fair_round: FairRound | None = None
        self._state, self._chooser, self._queues, self._workloads = state, chooser, queues, state.workloads
        self._preemptions, self.has_preempted = preemptions, False
        self._apply, self._settle, self._quoted, self._now_ns = apply, settle, quoted, now_ns
        self._backfill, self._holds, self._gangs, self._kinds = backfill, holds, gangs, kinds
        # By request, traits and closed nodes: the smallest number of replicas that did not fit, and why; of work that
        # would delay other work, also by what is expected of it.
        self.failed: dict[Hashable, tuple[int, str]] = {}
        self._tries = 0
        # After a start all work waits some seconds for agents: that is not written as a new reason of each workload.
        self._has_news = not state.awaits_agents

    def try_all(self, tickets: Iterable[PendingTicket]) -> PendingTicket | None:
        """Tries each workload, or gives it its new reason; returns the one at which the bound of attempts is reached."""
        workloads, failed, find_hold = self._workloads, self.failed, self._state.spending.blocking_limit
        has_rules, has_queues = self._chooser.uses_engine_rules, self._queues.is_active
        # Spending limits, and rules that an engine has beside the spec, are of single workloads.
        rules = self._chooser.eligibility.rules
        has_equals = (rules is None or rules.follows_specs) and not self._state.spending.over
        # Then a request that has failed is all that is to be known of work behind it: a queue of thousands is looked
        # through for each GPU that becomes free.
        is_plain = has_equals and not (has_queues or self._state.policy.reservations or len(self._state.nominations))
        for ticket in self._skip_waiting(tickets) if is_plain else tickets:
            workload = workloads[ticket[2]]
            if self._is_settled(workload):
                continue
            spec = workload.spec
            gang = self._gangs.find_bound(workload)
            if gang is not None:
                if self._tries >= _TRIES_MOST:
                    return ticket
                self._try_gang(workload, gang)
                continue
            # What holds work whatever the capacity costs no attempt.
            hold = find_hold(spec)
            reason = "" if hold is None else spending_reason(hold)
            if has_queues and not reason:
                spec, reason = self._admit(spec)
            waits_for_capacity = not reason
            if waits_for_capacity:
                closed = self._backfill.list_closed_nodes(workload, self._now_ns)
                binding = tuple(hold.queue for hold in self._holds.list_binding(workload, is_round=True))
                of_nodes = spec.required_traits, spec.process is not None, closed
                kind: Hashable = (spec.request, *of_nodes, binding, spec.shared_load, _find_scale(spec))
                # An engine's rules, and a start that is kept, apply to this workload only.
                is_judged = has_rules(ticket[2]) or self._backfill.holds_start(workload)
                why = None if is_judged else failed.get(kind) or failed.get(self._backfill.get_term(kind, workload))
                if why is None or spec.replicas < why[0]:
                    if self._tries >= _TRIES_MOST:
                        return ticket
                    decision = self._decide(workload, spec, closed)
                    if decision.placements:
                        self._place(workload, spec, decision)
                        continue
                    why = (spec.replicas, describe_pending_reason(spec.request, decision))
                    if not is_judged:
                        failed[self._backfill.get_term(kind, workload) if decision.withheld else kind] = why
                    if is_plain and not (is_judged or decision.withheld or binding):
                        self._kinds.note_failure(ticket[2], workload.spec, why)
                reason = why[1]
            may_get_room = hold is None and self._preemptions.may_get_room(workload)
            if may_get_room:
                if self._tries >= _TRIES_MOST:
                    return ticket
                if self._preempt(workload):
                    continue
                if self._preemptions.is_searching(ticket[2]):
                    return ticket
            # Watts are not what the ends of work are known to free.
            if waits_for_capacity and not reason.startswith("budget:"):
                self._keep_capacity(workload, spec)
            self._give_reason(workload, reason)
            # What a quota refuses it refuses whatever starts are reserved.
            may_skip = has_equals and (not waits_for_capacity or self._backfill.may_skip_equals(workload))
            if self.fair_round is not None and may_skip:
                is_refused = hold is None and not waits_for_capacity and not may_get_room
                version = self._queues.get_use_version(spec) if is_refused else NOT_BY_QUOTA
                self._skip_equals(self.fair_round, reason, version)
        return None

    def _is_settled(self, workload: Workload) -> bool:
        """Returns whether nothing is to be tried for work: others place it, it is nominated, or began with its gang."""
        key, preemptions = workload.workload_id, self._preemptions
        return (
            is_sliced(workload)
            or key not in self._state.pending
            or preemptions.is_nominated(key)
            or preemptions.makes_room(key)
        )

    def _skip_waiting(self, tickets: Iterable[PendingTicket]) -> Iterator[PendingTicket]:
        """Leaves out work that waits for what it waited for, and for which nothing is kept or reserved."""
        left, kinds = deque(tickets), self._kinds
        # Each time that twice as many kinds have failed, so that many kinds cost few passes.
        failures_due, reserves = 1, self._backfill.reserves_more
        while left:
            if len(kinds.failed) >= failures_due and not reserves:
                failures_due = 2 * len(kinds.failed)
                left = deque(kinds.leave_out_passed(left, self._workloads))
                continue
            ticket = left.popleft()
            if reserves or not kinds.pass_over(self._workloads[ticket[2]]):
                yield ticket
                reserves = self._backfill.reserves_more

    def _try_gang(self, workload: Workload, gang: JobGang) -> None:
        """Starts the gang of a part, or gives the part its new reason; the first part that a round meets decides for all."""
        kind = "gang", next(iter(gang.live))
        if kind not in self.failed:
            self._apply_quotes()
            searches = self._chooser.searches
            found = self._gangs.decide(gang, self._now_ns)
            self._tries += len(gang.live) + _SEARCH_TRIES * (self._chooser.searches - searches)
            for start in found.starts:
                self._place(start.workload, start.spec, start.decision)
            if found.starts:
                return
            self.failed[kind] = (0, found.reason)
            first = self._workloads[gang.list_required()[0]]
            if found.waits_for_capacity:
                self._reserve_start(first)
        self._give_reason(workload, self.failed[kind][1])

    def _keep_capacity(self, workload: Workload, spec: WorkloadSpec) -> None:
        """Holds freed capacity for work that waits for it alone, and reserves its start, as far as it is owed these."""
        searches = self._chooser.searches
        if self.fair_round is not None:
            self._holds.hold_for(workload, spec, self.fair_round.past, self._now_ns)
        self._tries += _SEARCH_TRIES * (self._chooser.searches - searches)
        self._reserve_start(workload)

    def _reserve_start(self, workload: Workload) -> None:
        """Reserves the start of work that waits for capacity, if one is owed to it."""
        if not self._backfill.reserves_for(workload):
            return
        searches = self._chooser.searches
        self.apply_all(self._backfill.reserve_start(workload, self._now_ns))
        self._tries += _SEARCH_TRIES * (self._chooser.searches - searches)

    def _preempt(self, workload: Workload) -> bool:
        """Makes room for work that has failed by quota or capacity; returns whether it starts or is nominated."""
        checks = self._preemptions.checks
        step = self._preemptions.try_start(workload, self._apply, self._settle, self._now_ns)
        self._tries += _SEARCH_TRIES * (self._preemptions.checks - checks)
        self.events += step.events
        self.nodes |= step.nodes
        if not step.events:
            return False
        self.has_preempted = True
        # What is free now is other than what was tried.
        self.failed.clear()
        if self.fair_round is not None:
            self._queues.note_start(self.fair_round, workload)
        return True

    def _skip_equals(self, fair_round: FairRound, reason: str, use_version: int) -> None:
        """Skips work of the same shape, user and queue, which waits for the same reason."""
        others = [key for _, _, key in fair_round.skip_equals(reason) if self._workloads[key].reason != reason]
        if not self._has_news or len(self.events) + len(others) > 2 * _TRIES_MOST:
            return
        for key in others:
            self._defer(key, reason)
        fair_round.note_reason(reason, use_version)

    def _give_reason(self, workload: Workload, reason: str) -> None:
        """Gives work its reason for waiting if it is new, as far as the events of a step reach."""
        if self._has_news and workload.reason != reason and len(self.events) < 2 * _TRIES_MOST:
            self._defer(workload.workload_id, reason)

    def _defer(self, workload_id: str, reason: str) -> None:
        deferred = WorkloadDeferred(time_ns=self._now_ns, workload_id=workload_id, reason=reason)
        self._apply(deferred)
        self.events.append(deferred)

    def _admit(self, spec: WorkloadSpec) -> tuple[WorkloadSpec, str]:
        """Returns what the workload's queue lets start, or why it lets nothing."""
        admitted = self._queues.admit(spec, self._list_models)
        return (spec, describe_queue_hold(admitted)) if isinstance(admitted, QueueHold) else (admitted, "")

    def _place(self, workload: Workload, spec: WorkloadSpec, decision: PlacementDecision) -> None:
        event, touched = self._settle(make_outcome_event(workload.workload_id, spec.request, decision, self._now_ns))
        self.nodes |= touched
        self.events.append(event)
        if self.fair_round is not None:
            self._queues.note_start(self.fair_round, workload)

    def _list_models(self) -> Iterable[str]:
        return self._chooser.snapshot().models

    def apply_all(self, events: Iterable[Event]) -> None:
        """Applies events that follow from the step."""
        for event in events:
            self._apply(event)
            self.events.append(event)

    def _apply_quotes(self, request: ResourceRequest | None = None) -> None:
        for quotes in self._quoted(self._now_ns, request):
            self._apply(quotes)
            self.events.append(quotes)

    def _decide(self, workload: Workload, spec: WorkloadSpec, closed: frozenset[str]) -> PlacementDecision:
        # Where a failure may be followed by a preemption or a reserved start, these are chosen by new prices as well.
        has_sequel = self.fair_round is not None or self._backfill.reserves_for(workload)
        self._apply_quotes(None if has_sequel else spec.request)
        searches = self._chooser.searches
        decision = self._holds.decide(workload, spec, self._now_ns, closed=closed, is_round=True)
        self._tries += 1 + _SEARCH_TRIES * (self._chooser.searches - searches)
        return decision
