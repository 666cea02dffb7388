"""The dispatcher: carries out what each workload's record permits, and keeps the records.

One task drives each workload that is not settled: it makes the calls that the record permits, all at once, takes what they
say into the record, and goes on. A round lasts as long as its slowest call, `call_timeout_s` at most; of the clusters
that hold the workload after a round, the first is chosen, so a cluster that does not answer delays a choice by one round and
no more. A change of a record is on disk before the next call is planned from it (rule 1 of `dispatch`); where it cannot be
written, it has not happened.

Must not know how a cluster is called, how records are stored, what clusters' offers cost, nor who may ask for what.
"""

import asyncio
import logging
import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from eelgrid_controller.clock import Clock
from eelgrid_controller.federation.affinity import (
    GangKey,
    GangPlan,
    apply_dependencies,
    check_part,
    get_gang_key,
    list_anchors,
    merge_parts,
    pin_part,
    plan_gang,
    resolve_dependencies,
)
from eelgrid_controller.federation.dispatch import (
    DECISION_LINES_MOST,
    ClusterCall,
    CopyPhase,
    Dispatch,
    StoredRecord,
    Verb,
    add_clusters,
    choose_cluster,
    fail_dispatch,
    give_up,
    hold_dispatch,
    plan_calls,
    record_answer,
    record_failure,
    release_dispatch,
    request_cancel,
    request_move,
)
from eelgrid_controller.federation.ranking import ClusterOffer, RankedOffer, join_offers
from eelgrid_controller.federation.record_store import SETTLED_MOST, StoreFault
from eelgrid_controller.formatting import count_noun
from eelgrid_controller.server.metrics.catalogue import build_family
from eelgrid_protos.errors import Violation
from eelgrid_protos.faults import (
    AlreadyExists,
    DeadlineExceeded,
    FailedPrecondition,
    Fault,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from eelgrid_protos.messages import SubmitWorkloadRequest, Workload, WorkloadPhase, WorkloadSpec
from eelgrid_protos.openmetrics import MetricFamily

_LINE_LETTERS_MOST = 1000
_NO_GANG: GangKey = ("", "", "")
# Looks at running work a second, over all workloads: with more, each is looked at less often.
_LOOKS_HZ = 100.0


class ClusterPort(Protocol):
    """One cluster as the dispatcher uses it; every call is bounded in time and raises Fault."""

    async def call(self, verb: Verb, dispatch: Dispatch) -> Workload:
        """Makes one call about the copy of a workload."""

    async def ask_offer(self, request: SubmitWorkloadRequest) -> ClusterOffer:
        """Asks what the cluster offers for a workload; changes nothing there."""


class RecordPort(Protocol):
    """Where records are kept."""

    async def open(self) -> list[StoredRecord]:
        """Returns all records."""

    async def write(self, dispatch: Dispatch, latest: Workload | None) -> None:
        """Writes a record; it is on disk when this returns. Raises StoreFault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchSettings:
    """What the operator of the front sets."""

    # Between two looks at a workload that its cluster has.
    poll_s: float = 2.0
    # Pauses after a round without an answer: the first, and the longest.
    retry_first_s: float = 0.2
    retry_most_s: float = 15.0
    # A workload that has waited so long since its release goes where it would start now; 0 for never.
    move_after_s: float = 300.0
    # How long the answer to a submission waits for a cluster to have it.
    answer_s: float = 8.0
    live_most: int = 50_000
    settled_most: int = SETTLED_MOST


@dataclass(slots=True)
class _Driven:
    """A workload in memory."""

    dispatch: Dispatch
    latest: Workload | None
    lock: asyncio.Lock
    # Set at each change of the record, and a fresh one then waits for the next.
    changed: asyncio.Event
    wake: asyncio.Event
    # When a cluster last said what its copy is.
    answered_s: dict[str, float] = field(default_factory=dict)
    released_s: float = 0.0
    asked_s: float = 0.0


@dataclass(slots=True)
class _Gang:
    """The parts of one gang that are not settled, by submission; the lock is held while its cluster is chosen."""

    parts: dict[str, _Driven] = field(default_factory=dict)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Dispatcher:
    """Of one front, from `start` until `stop`."""

    def __init__(
        self,
        clusters: Mapping[str, ClusterPort],
        store: RecordPort,
        *,
        rank: Callable[[WorkloadSpec, Sequence[ClusterOffer]], Sequence[RankedOffer]],
        clock: Clock,
        settings: DispatchSettings,
        log: logging.Logger,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self.clusters = clusters
        self._store = store
        self._rank = rank
        self._clock = clock
        self._settings = settings
        self._log = log
        self._sleep = sleep
        self._live: dict[str, _Driven] = {}
        self._settled: OrderedDict[str, StoredRecord] = OrderedDict()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._gangs: dict[GangKey, _Gang] = {}
        # By workload: those that wait for it at the front.
        self._dependents: dict[str, set[str]] = {}
        # By cluster: offers that did not come in time.
        self.left_out: dict[str, int] = dict.fromkeys(clusters, 0)
        # Set by an error of the front itself, which must not go on with a part of its workloads.
        self.failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        """Takes up every record where it was left."""
        for record in await self._store.open():
            if record.dispatch.is_settled:
                self._keep_settled(record)
            else:
                self._begin(record.dispatch, record.latest)

    async def stop(self) -> None:
        """Stops driving; what is under way is taken up again by the next start."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def find(self, workload_id: str) -> StoredRecord | None:
        """Returns the record of a workload, and what its cluster last said of it."""
        driven = self._live.get(workload_id)
        return self._settled.get(workload_id) if driven is None else StoredRecord(driven.dispatch, driven.latest)

    def list_records(self) -> list[StoredRecord]:
        """Returns all records, those that are settled first."""
        live = (StoredRecord(one.dispatch, one.latest) for one in self._live.values())
        return [*self._settled.values(), *live]

    def families(self) -> Iterator[MetricFamily]:
        """What Prometheus reads of the workloads of a front."""
        placed, stuck = dict.fromkeys(self.clusters, 0), dict.fromkeys(self.clusters, 0)
        waiting = 0
        for one in self._live.values():
            waiting += not one.dispatch.chosen
            if one.dispatch.chosen in placed:
                placed[one.dispatch.chosen] += 1
            for copy in one.dispatch.copies:
                if copy.problem and copy.phase is not CopyPhase.ENDED and copy.cluster in stuck:
                    stuck[copy.cluster] += 1
        yield build_family("eelgrid_front_workloads", placed)
        yield build_family("eelgrid_front_stuck_workloads", stuck)
        yield build_family("eelgrid_front_workloads_waiting", waiting)
        yield build_family("eelgrid_front_left_out_total", self.left_out)

    @property
    def live(self) -> int:
        """The number of workloads that are not settled."""
        return len(self._live)

    async def submit(
        self, workload_id: str, request: SubmitWorkloadRequest, *, owner: str, held_by: str = ""
    ) -> StoredRecord:
        """Places a workload into a cluster; repeating it with its id changes nothing. Raises Fault.

        Returns once the chosen cluster has it, or `answer_s` have passed: it is kept then, and goes on. With `held_by` it
        waits at the front until it is released.
        """
        if (found := self.find(workload_id)) is None:
            if len(self._live) >= self._settings.live_most:
                raise ResourceExhausted(f"{len(self._live)} workloads wait or run, which is the limit; cancel some")
            new = Dispatch(
                workload_id=workload_id, request=request, owner=owner, submitted_ns=max(0, self._clock.now_ns())
            )
            if held_by:
                new = hold_dispatch(new, held_by)
            elif get_gang_key(new) is None and not list_anchors(request):
                ranked, lines = await self._ask_clusters((request,), ())
                new = add_clusters(new, ranked, lines)
            # Another call with the same id may have come meanwhile; nothing is awaited from here to `_begin`.
            found = self.find(workload_id)
            if found is None:
                self._check_affinity(new)
                driven = self._begin(new, None, is_written=False)
                # Whether its caller waits or not: it would be on disk, and in no cluster before the next start.
                await asyncio.shield(self._write_first(driven))
                found = StoredRecord(new)
        if found.dispatch.request != request:
            raise AlreadyExists(
                f"workload {workload_id} exists with another spec; choose another id, or leave the id empty"
            )
        return await self._wait_until(workload_id, lambda one: _is_with_cluster(one) or _waits_here(one))

    def _check_affinity(self, new: Dispatch) -> None:
        """Checks that what a new workload belongs with is known; raises InvalidArgument."""
        for name, anchor in list_anchors(new.request):
            if anchor == new.workload_id or self.find(anchor) is None:
                problem = f"is {anchor!r}, and this front has no such workload"
                remedy = "name one that eelctl workloads lists, or submit it to its cluster: eelctl --cluster NAME"
                raise InvalidArgument("a front cannot know when it may start", (Violation(name, problem, remedy),))
        gang = self._gangs.get(get_gang_key(new) or _NO_GANG)
        if gang is not None:
            check_part(new, [one.dispatch for one in gang.parts.values()])

    async def cancel(self, workload_id: str) -> StoredRecord:
        """Ends a workload wherever it is; raises NotFound. A cluster that does not answer is told once it does."""
        await self._request(workload_id, request_cancel)
        return await self._wait_until(workload_id, _is_stopping)

    async def hold(self, workload_id: str, user: str) -> StoredRecord:
        """Holds a workload that is in no cluster yet; raises NotFound, and FailedPrecondition for another."""
        record = await self._request(workload_id, lambda now: hold_dispatch(now, user))
        if not record.dispatch.held_by:
            raise FailedPrecondition(_describe_where(record.dispatch, "hold"))
        return record

    async def release(self, workload_id: str) -> StoredRecord:
        """Lets a workload go that is held at the front; raises NotFound, and FailedPrecondition where its cluster holds it."""
        record = await self._request(workload_id, lambda now: now)
        if record.dispatch.copies and record.latest is not None and record.latest.held_by:
            raise FailedPrecondition(_describe_where(record.dispatch, "release"))
        await self._request(workload_id, release_dispatch)
        return await self._wait_until(workload_id, lambda one: _is_with_cluster(one) or _waits_here(one))

    async def look(self, workload_id: str) -> StoredRecord:
        """Returns the record of a workload after its cluster was looked at, if that answers; raises NotFound."""
        driven = self._live.get(workload_id)
        if driven is not None:
            chosen = ClusterCall(driven.dispatch.chosen, Verb.LOOK)
            if chosen in plan_calls(driven.dispatch):
                await self._make_call(driven, chosen)
        if (record := self.find(workload_id)) is None:
            raise NotFound(f"no workload has the id {workload_id!r}; list workloads to see the ids")
        return record

    async def _request(self, workload_id: str, change: Callable[[Dispatch], Dispatch]) -> StoredRecord:
        driven = self._live.get(workload_id)
        if driven is None:
            if (settled := self._settled.get(workload_id)) is not None:
                return settled
            raise NotFound(f"no workload has the id {workload_id!r}; list workloads to see the ids")
        await self._change(driven, change)
        driven.wake.set()
        return StoredRecord(driven.dispatch, driven.latest)

    async def preview(self, request: SubmitWorkloadRequest) -> tuple[Sequence[RankedOffer], Sequence[str]]:
        """Asks all clusters, and returns their offers, the best first, and the decision in sentences; raises Fault."""
        return await self._gather_offers((request,), tuple(self.clusters))

    # Offers

    async def _ask_clusters(
        self, requests: Sequence[SubmitWorkloadRequest], known: Collection[str]
    ) -> tuple[list[str], Sequence[str]]:
        """Returns the clusters to reserve some workloads in, the best first, and why; raises Fault if none takes all of them.

        Where they would start at once, no second one is asked to reserve them before that has failed to answer.
        """
        ranked, lines = await self._gather_offers(requests, tuple(name for name in self.clusters if name not in known))
        return [one.offer.cluster for one in (ranked[:1] if ranked[0].wait_s <= 0 else ranked)], lines

    async def _ask_for_all(self, name: str, requests: Sequence[SubmitWorkloadRequest]) -> ClusterOffer:
        return join_offers(await asyncio.gather(*(self.clusters[name].ask_offer(one) for one in requests)))

    async def _gather_offers(
        self, requests: Sequence[SubmitWorkloadRequest], names: Sequence[str]
    ) -> tuple[Sequence[RankedOffer], Sequence[str]]:
        if not names:
            raise Unavailable("every cluster was asked already")
        answers = await asyncio.gather(*(self._ask_for_all(name, requests) for name in names), return_exceptions=True)
        offers: list[ClusterOffer] = []
        refused: dict[str, Fault] = {}
        silent: dict[str, Fault] = {}
        for name, answer in zip(names, answers, strict=True):
            match answer:
                case ClusterOffer():
                    offers.append(answer)
                case Unavailable() | DeadlineExceeded():
                    silent[name] = answer
                    self.left_out[name] += 1
                case Fault():
                    refused[name] = answer
                case _:
                    raise answer
        ranked = self._rank(requests[0].spec, offers)
        if not ranked:
            raise _join_faults(refused, silent)
        lines = [one.describe() for one in ranked]
        lines += [f"{name} refuses: {fault.message}" for name, fault in refused.items()]
        lines += [f"{name} did not answer" for name in silent]
        return ranked, lines[:DECISION_LINES_MOST]

    # Records

    def _begin(self, dispatch: Dispatch, latest: Workload | None, *, is_written: bool = True) -> _Driven:
        driven = _Driven(dispatch, latest, asyncio.Lock(), asyncio.Event(), asyncio.Event())
        driven.released_s = driven.asked_s = self._clock.monotonic_s()
        key = dispatch.workload_id
        self._live[key] = driven
        if (gang := get_gang_key(dispatch)) is not None:
            self._gangs.setdefault(gang, _Gang()).parts[key] = driven
        for _, anchor in list_anchors(dispatch.request):
            self._dependents.setdefault(anchor, set()).add(key)
        if is_written:
            self._drive_from_now(driven)
        return driven

    def _forget(self, dispatch: Dispatch) -> None:
        """Removes a workload that is settled, or was never written."""
        key = dispatch.workload_id
        del self._live[key]
        gang_key = get_gang_key(dispatch)
        if gang_key is not None and (gang := self._gangs.get(gang_key)) is not None:
            gang.parts.pop(key, None)
            if not gang.parts:
                del self._gangs[gang_key]
        for _, anchor in list_anchors(dispatch.request):
            if (children := self._dependents.get(anchor)) is not None:
                children.discard(key)
                if not children:
                    del self._dependents[anchor]

    def _wake_others(self, dispatch: Dispatch) -> None:
        """Wakes what waits for a workload that has changed, and the other parts of its gang."""
        for child in self._dependents.get(dispatch.workload_id, ()):
            if child in self._live:
                self._live[child].wake.set()
        gang = self._gangs.get(get_gang_key(dispatch) or _NO_GANG)
        for part in () if gang is None else gang.parts.values():
            if part.dispatch.workload_id != dispatch.workload_id:
                part.wake.set()

    def _drive_from_now(self, driven: _Driven) -> None:
        key = driven.dispatch.workload_id
        task = self._tasks[key] = asyncio.create_task(self._drive(driven), name=f"dispatch {key}")
        task.add_done_callback(self._on_task_end)

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._log.critical("task=%r dispatch=ended error=%s", task.get_name(), error, exc_info=error)
            if not self.failed.done():
                self.failed.set_result(error)

    async def _write_first(self, driven: _Driven) -> None:
        """Writes a new record; until it is on disk, nothing is driven, and a call with its id waits. Raises Fault and ContractError."""
        is_written = False
        try:
            async with driven.lock:
                await self._store.write(driven.dispatch, None)
            is_written = True
        except StoreFault as fault:
            raise Unavailable(f"the front cannot write its records ({fault}); nothing was submitted") from None
        finally:
            if not is_written:
                self._forget(driven.dispatch)
                driven.changed.set()
        self._wake_others(driven.dispatch)
        self._drive_from_now(driven)

    async def _change(
        self, driven: _Driven, change: Callable[[Dispatch], Dispatch], latest: Workload | None = None
    ) -> bool:
        """Changes a record, on disk and then here; returns whether anything changed. Raises Unavailable."""
        async with driven.lock:
            new = change(driven.dispatch)
            is_changed = new.progress != driven.dispatch.progress
            is_due = is_changed and new.durable_progress != driven.dispatch.durable_progress
            # Why it waits is not worth a write, but whoever waits for an answer is told.
            is_told = new.decision != driven.dispatch.decision
            has_news = latest is not None and (driven.latest is None or _is_news(driven.latest, latest))
            if is_due or has_news:
                try:
                    await self._store.write(new, latest or driven.latest)
                except StoreFault as fault:
                    raise Unavailable(f"the front cannot write its records ({fault}); repeat the call") from None
            driven.dispatch, driven.latest = new, latest or driven.latest
        if is_changed or has_news:
            self._wake_others(driven.dispatch)
        if is_changed or has_news or is_told:
            changed, driven.changed = driven.changed, asyncio.Event()
            changed.set()
        return is_changed

    def _keep_settled(self, record: StoredRecord) -> None:
        self._settled[record.dispatch.workload_id] = record
        while len(self._settled) > self._settings.settled_most:
            self._settled.popitem(last=False)

    async def _wait_until(self, workload_id: str, is_done: Callable[[StoredRecord], bool]) -> StoredRecord:
        """Waits until a record is as wanted, or settled, `answer_s` at most; raises Unavailable if it was never written."""
        deadline_s = self._clock.monotonic_s() + self._settings.answer_s
        while True:
            record, driven = self.find(workload_id), self._live.get(workload_id)
            if record is None:
                raise Unavailable("the submission could not be recorded; repeat it")
            left_s = deadline_s - self._clock.monotonic_s()
            if driven is None or is_done(record) or left_s <= 0:
                return record
            try:
                async with asyncio.timeout(left_s):
                    await driven.changed.wait()
            except TimeoutError:
                return record

    # Driving

    async def _drive(self, driven: _Driven) -> None:
        """Goes on until the workload is settled."""
        key, pause_s = driven.dispatch.workload_id, self._settings.retry_first_s
        while not driven.dispatch.is_settled:
            # What comes while a round is under way is seen by the next.
            driven.wake.clear()
            try:
                is_changed = await self._make_round(driven)
            except Fault as fault:
                self._log.warning("workload=%s dispatch=later reason=%r", key, fault.message)
                is_changed = False
            if is_changed:
                pause_s = self._settings.retry_first_s
                continue
            if driven.dispatch.is_settled:
                break
            rest_s, pause_s = self._find_pause(driven, pause_s)
            await self._rest(driven, rest_s)
        self._keep_settled(StoredRecord(driven.dispatch, driven.latest))
        self._forget(driven.dispatch)
        del self._tasks[key]
        driven.changed.set()
        self._wake_others(driven.dispatch)
        self._log.info("workload=%s dispatch=settled cluster=%s", key, driven.dispatch.chosen or "none")

    def _find_pause(self, driven: _Driven, pause_s: float) -> tuple[float, float]:
        """Returns how long to rest before the next round, and what to rest after the one after it."""
        calls = plan_calls(driven.dispatch)
        if calls and all(call.verb is Verb.LOOK for call in calls):
            return max(self._settings.poll_s, len(self._live) / _LOOKS_HZ), self._settings.retry_first_s
        return pause_s, min(2 * pause_s, self._settings.retry_most_s)

    async def _rest(self, driven: _Driven, pause_s: float) -> None:
        """Rests, unless somebody asks for a change."""
        resting = asyncio.ensure_future(self._sleep(pause_s))
        waking = asyncio.ensure_future(driven.wake.wait())
        try:
            await asyncio.wait((resting, waking), return_when=asyncio.FIRST_COMPLETED)
        finally:
            resting.cancel()
            waking.cancel()

    async def _make_round(self, driven: _Driven) -> bool:
        """Makes the calls that the record permits, and records what they say; returns whether it changed."""
        before = driven.dispatch
        if not (before.held_by or before.chosen or before.is_cancelled or before.has_failed):
            await self._find_clusters(driven)
        calls = tuple(call for call in plan_calls(driven.dispatch) if not self._is_known(driven, call))
        outcomes = await asyncio.gather(*(self._make_call(driven, call) for call in calls), return_exceptions=True)
        for error in filter(None, outcomes):
            raise error
        for one in self._list_ready(driven):
            await self._change(one, choose_cluster)
        if driven.dispatch.chosen != before.chosen:
            key, now_s = before.workload_id, self._clock.monotonic_s()
            driven.released_s = driven.asked_s = now_s
            self._log.info("workload=%s chosen=%s before=%s", key, driven.dispatch.chosen, before.chosen)
        # Only of one that was looked at now: what a hold refused may have ended.
        if ClusterCall(driven.dispatch.chosen, Verb.LOOK) in calls:
            await self._consider_move(driven)
        return driven.dispatch.progress != before.progress

    def _is_known(self, driven: _Driven, call: ClusterCall) -> bool:
        """Whether a look would ask for what a cluster has said just now."""
        since_s = self._clock.monotonic_s() - driven.answered_s.get(call.cluster, -math.inf)
        return call.verb is Verb.LOOK and since_s < self._settings.poll_s

    async def _make_call(self, driven: _Driven, call: ClusterCall) -> None:
        dispatch = driven.dispatch
        try:
            if call.cluster not in self.clusters:
                raise Unavailable(f"the front was started without the cluster {call.cluster}; name it with --cluster")
            workload = await self.clusters[call.cluster].call(call.verb, dispatch)
        except Fault as error:
            fault = error
            await self._change(driven, lambda now: record_failure(now, call.cluster, call.verb, fault))
            return
        driven.answered_s[call.cluster] = self._clock.monotonic_s()
        latest = workload if call.cluster == dispatch.chosen else None
        await self._change(driven, lambda now: record_answer(now, call.cluster, call.verb, workload), latest)

    async def _find_clusters(self, driven: _Driven) -> None:
        """Asks the clusters that were not asked for it; without an offer the record stays as it is."""
        dispatch = driven.dispatch
        if get_gang_key(dispatch) is not None:
            await self._gather_gang(driven)
        elif list_anchors(dispatch.request) and not dispatch.copies:
            state = resolve_dependencies(dispatch, self.find)
            await self._change(driven, lambda now: apply_dependencies(now, state))
            if state.waits_for or state.failure:
                return
        dispatch, known = driven.dispatch, [copy.cluster for copy in driven.dispatch.copies]
        pin = dispatch.pinned_to
        if get_gang_key(dispatch) is not None and (not pin or pin in known):
            return
        if all(name in known for name in ((pin,) if pin else self.clusters)):
            await self._change(driven, give_up)
            return
        if not dispatch.needs_clusters:
            return
        if pin:
            await self._change(driven, lambda now: add_clusters(now, (pin,), now.decision))
            return
        try:
            ranked, lines = await self._ask_clusters((dispatch.submission,), known)
        except Fault as fault:
            words = (f"no cluster offers to take it ({fault.message})"[:_LINE_LETTERS_MOST],)
            await self._change(driven, lambda now: now if now.copies else replace(now, decision=words))
            return
        await self._change(driven, lambda now: add_clusters(now, ranked, lines))

    # Gangs

    def _plan_gang(self, dispatch: Dispatch) -> GangPlan:
        gang = self._gangs[get_gang_key(dispatch) or _NO_GANG]
        return plan_gang(one.dispatch for one in gang.parts.values())

    def _list_ready(self, driven: _Driven) -> list[_Driven]:
        """Lists the workloads for which a cluster may be chosen now: this one, or of a gang all parts once each is held."""
        dispatch = driven.dispatch
        gang = self._gangs.get(get_gang_key(dispatch) or _NO_GANG)
        if gang is not None and self._plan_gang(dispatch).may_start:
            return list(gang.parts.values())
        is_loose = any(copy.phase is CopyPhase.RELEASED for copy in dispatch.copies)
        return [driven] if gang is None or is_loose else []

    async def _gather_gang(self, driven: _Driven) -> None:
        """Pins a part to the cluster of its gang; once all parts are there, chooses that cluster for all of them."""
        gang = self._gangs[get_gang_key(driven.dispatch) or _NO_GANG]
        async with gang.lock:
            if driven.dispatch.is_cancelled or driven.dispatch.has_failed:
                # It was cancelled, or failed with another part, while that had the lock.
                return
            plan = self._plan_gang(driven.dispatch)
            parts = [one for one in gang.parts.values() if not one.dispatch.is_cancelled]
            if plan.cluster and plan.may_start and driven.dispatch.find_copy(plan.cluster) is not None:
                # A part that has ended there, before it was chosen, while others were.
                await self._change(driven, give_up)
            elif plan.cluster:
                lines = () if driven.dispatch.pinned_to else (f"{plan.cluster} has its gang",)
                await self._change(driven, lambda now: pin_part(now, plan.cluster, lines))
            elif plan.missing:
                words = (f"gang: waits at the front for {count_noun(plan.missing, 'more part', 'more parts')}",)
                await self._change(driven, lambda now: now if now.copies else replace(now, decision=words))
            elif all(name in plan.refused for name in self.clusters):
                for part in parts:
                    await self._change(part, lambda now: fail_dispatch(now, "every cluster refuses a part of its gang"))
            else:
                await self._pin_gang(parts, plan)

    async def _pin_gang(self, parts: Sequence[_Driven], plan: GangPlan) -> None:
        try:
            ranked, lines = await self._ask_clusters(merge_parts(one.dispatch for one in parts), plan.refused)
        except Fault as fault:
            for part in parts:
                words = (f"gang: no cluster offers to take all parts ({fault.message})"[:_LINE_LETTERS_MOST],)
                await self._change(part, lambda now: replace(now, decision=words))  # noqa: B023
            return
        for part in parts:
            await self._change(part, lambda now: pin_part(now, ranked[0], lines))

    async def _consider_move(self, driven: _Driven) -> None:
        """Has a workload leave that has waited for long, if another cluster would start it now."""
        dispatch, now_s = driven.dispatch, self._clock.monotonic_s()
        copy = dispatch.find_copy(dispatch.chosen)
        is_waiting = driven.latest is not None and driven.latest.phase is WorkloadPhase.PENDING
        if copy is None or copy.phase is not CopyPhase.RELEASED or copy.started or not is_waiting:
            return
        patience_s = self._settings.move_after_s
        if (
            not patience_s
            or not dispatch.may_move
            or dispatch.moving_to
            or now_s - max(driven.released_s, driven.asked_s) < patience_s
        ):
            return
        driven.asked_s = now_s
        # A cluster that the front was started without is none to go to.
        held = (one.cluster for one in dispatch.copies if one.phase is CopyPhase.HELD)
        standby = tuple(name for name in held if name in self.clusters)
        known = [one.cluster for one in dispatch.copies]
        names = standby or tuple(name for name in self.clusters if name not in known)
        if not names:
            return
        try:
            ranked, _ = await self._gather_offers((dispatch.submission,), names)
        except Fault:
            return
        target = next((one.offer.cluster for one in ranked if one.wait_s <= 0), None)
        if target is not None:
            words = "workload=%s move_from=%s move_to=%s reason=waits"
            self._log.info(words, dispatch.workload_id, copy.cluster, target)
            await self._change(driven, lambda now: request_move(now, target))


def _is_with_cluster(record: StoredRecord) -> bool:
    """Whether the chosen cluster has the workload, and nothing holds it there."""
    copy = record.dispatch.find_copy(record.dispatch.chosen)
    return copy is not None and copy.phase in {CopyPhase.RELEASED, CopyPhase.ENDED} and record.latest is not None


def _describe_where(dispatch: Dispatch, verb: str) -> str:
    """Returns why the front neither holds nor releases a workload, and who does."""
    if dispatch.chosen and not dispatch.is_settled:
        key, cluster = dispatch.workload_id, dispatch.chosen
        return f"cluster {cluster} has {key}, and the front leaves it there: eelctl --cluster {cluster} {verb} {key}"
    return f"workload {dispatch.workload_id} has ended or is on its way to a cluster; look again: eelctl explain"


def _waits_here(record: StoredRecord) -> bool:
    """Whether it is in no cluster yet, since it waits for other work, or is held."""
    return not record.dispatch.copies and bool(record.dispatch.decision)


def _is_stopping(record: StoredRecord) -> bool:
    """Whether the chosen cluster has ended the workload, or tells its processes to end."""
    return record.latest is not None and (record.latest.phase.is_ended or bool(record.latest.stopping_ns))


def _is_news(before: Workload, now: Workload) -> bool:
    """Whether an answer differs in what a front that was restarted should still know."""
    return _sum_up(before) != _sum_up(now)


def _sum_up(workload: Workload) -> tuple[object, ...]:
    return workload.phase, workload.reason, workload.placements, workload.stopping_ns, workload.revision


def _join_faults(refused: Mapping[str, Fault], silent: Mapping[str, Fault]) -> Fault:
    """Returns why no cluster offers anything: the refusal of one, with the others in its words."""
    words = [f"{name}: {fault.message}" for name, fault in (*refused.items(), *silent.items())]
    message = f"no cluster takes it ({'; '.join(words)})"
    if not refused:
        return Unavailable(message)
    first = next(iter(refused.values()))
    kind = type(first) if type(first).__init__ is Fault.__init__ else InvalidArgument
    return kind(message, first.violations)
