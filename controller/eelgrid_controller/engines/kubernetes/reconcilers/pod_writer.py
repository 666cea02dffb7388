"""Writes to pods: gates, annotations, deletions, conditions, and Events."""

import asyncio
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from eelgrid_controller.clock import Clock
from eelgrid_controller.engines.kubernetes.api.errors import (
    AnswerUnreadable,
    ClusterError,
    ClusterUnreachable,
    Conflict,
    Forbidden,
    Invalid,
    ObjectNotFound,
    ServerFault,
)
from eelgrid_controller.engines.kubernetes.api.port import EVENTS, PODS, ClusterClient, Object, ObjectKey, PatchKind
from eelgrid_controller.engines.kubernetes.api.retry import RetryLimits, call_with_retries
from eelgrid_controller.engines.kubernetes.model.quantities import format_time
from eelgrid_controller.engines.kubernetes.model.status_reporting import EventReference, build_event
from eelgrid_controller.engines.kubernetes.model.well_known import CONDITION_PLACEMENT
from eelgrid_controller.engines.kubernetes.pods.gate_events import (
    AnnotateFailed,
    AnnotatePod,
    DeleteFailed,
    GateEvent,
    PatchDone,
    PatchFailed,
    RecordEvent,
    RecreatePod,
    RemoveGate,
    ReportPlacement,
    UngatePod,
    WriteFailure,
)
from eelgrid_controller.engines.kubernetes.pods.plan_annotation import (
    annotation_patch,
    gate_removal_patch,
    ungating_patch,
)

_LIMITS = RetryLimits(attempts=4, whole_s=15.0, first_s=0.1, most_s=3.0)
_TELLS_MOST = 1_000
_TELL_EVERY_S = 0.02
# Conditions of pods that wait to be written: some megabytes. What is dropped is written at another look.
_REPORTS_MOST = 10_000
_REPORT_EVERY_S = 0.02


class StaleTerm(Exception):
    """The term is over."""


class PodWriter:
    """Carries out what the gate wants written."""

    def __init__(
        self,
        cluster: ClusterClient,
        *,
        pods: Callable[[], Mapping[ObjectKey, Object]],
        leads: Callable[[int], bool],
        feed: Callable[[GateEvent], None],
        identity: str,
        at_once: int,
        clock: Clock,
        rng: random.Random,
        log: logging.Logger,
    ) -> None:
        """`pods` gives what is held now, `leads` whether this one leads in an epoch at this moment."""
        self.ungated = 0
        self.stripped = 0
        self.recreated = 0
        self.annotated = 0
        self.failed: dict[WriteFailure, int] = dict.fromkeys(WriteFailure, 0)
        self.tells_sent = 0
        self.tells_dropped = 0
        # Called with what was asked and the time at which the patch began, once a pod is pinned.
        self.listeners: list[Callable[[UngatePod, int], None]] = []
        self._cluster = cluster
        self._pods = pods
        self._leads = leads
        self._feed = feed
        self._identity = identity
        self._turns = asyncio.Semaphore(at_once)
        self._clock = clock
        self._rng = rng
        self._log = log
        self.reports_sent = 0
        self.reports_dropped = 0
        self._tells: deque[RecordEvent] = deque()
        self._told = asyncio.Event()
        self._reports: dict[str, ReportPlacement] = {}  # by uid: the last alone
        self._reported = asyncio.Event()

    async def ungate(self, asked: UngatePod) -> None:
        """Pin a pod and remove its gate."""
        start_ns = self._clock.now_ns()
        if await self._patch(asked, lambda pod: ungating_patch(pod, asked.node_name, asked.plan), asked.epoch):
            self.ungated += 1
            for listener in self.listeners:
                listener(asked, start_ns)
            self._log.debug("pod=%s ungated node=%s epoch=%d", asked.key, asked.node_name, asked.epoch)

    async def remove_gate(self, asked: RemoveGate) -> None:
        """Remove a pod's gate and pin nothing."""
        if await self._patch(asked, gate_removal_patch, asked.epoch):
            self.stripped += 1
            self._log.warning("pod=%s gate=removed reason=%s", asked.key, asked.why)

    async def delete_for_recreation(self, asked: RecreatePod) -> None:
        """Delete a pod whose owner makes another."""
        namespace, name = asked.key

        async def call() -> None:
            if not self._leads(asked.epoch):
                raise StaleTerm
            await self._cluster.delete(PODS, name, namespace=namespace, uid=asked.uid, resource_version=asked.version)

        failed = await self._try_write(call)
        if failed is not None:
            failure, text = failed
            self._log.warning("pod=%s recreated=no error=%s", asked.key, text)
            self._feed(DeleteFailed(asked.uid, failure, text))
            return
        self.recreated += 1
        self._log.warning("pod=%s recreated=yes reason=%s", asked.key, asked.why)

    async def annotate_pod(self, asked: AnnotatePod) -> None:
        """Write annotations of a pod; that it was done is seen at the pod."""
        failed = await self._patch_pod(asked, lambda pod: annotation_patch(pod, asked.annotations), asked.epoch)
        if failed is not None:
            self._feed(AnnotateFailed(asked.uid, *failed))
        else:
            self.annotated += 1

    async def _patch(
        self, asked: UngatePod | RemoveGate, body: Callable[[Mapping[str, Any]], dict[str, Any]], epoch: int | None
    ) -> bool:
        failed = await self._patch_pod(asked, body, epoch)
        if failed is not None:
            self._feed(PatchFailed(asked.uid, *failed, epoch=epoch))
            return False
        self._feed(PatchDone(asked.uid))
        return True

    async def _patch_pod(
        self,
        asked: UngatePod | RemoveGate | AnnotatePod,
        body: Callable[[Mapping[str, Any]], dict[str, Any]],
        epoch: int | None,
    ) -> tuple[WriteFailure, str] | None:
        """Patches the version that was looked at, while the term lasts; None if it was done."""
        namespace, name = asked.key
        is_open = False  # an attempt may have been carried out though no answer said so

        async def call() -> None:
            nonlocal is_open
            pod = self._pods().get(ObjectKey(namespace, name))
            is_it = pod is not None and _is(pod, asked.uid, asked.version)
            if pod is None or not is_it or (epoch is not None and not self._leads(epoch)):
                raise StaleTerm
            try:
                await self._cluster.patch(PODS, name, body(pod), namespace=namespace, is_brief=True)
            except (ClusterUnreachable, ServerFault, AnswerUnreadable) as error:
                is_open = is_open or not isinstance(error, ClusterUnreachable) or error.is_sent
                raise

        failed = await self._try_write(call)
        if failed is None:
            return None
        failure, text = failed
        if failure is WriteFailure.STALE and is_open:
            failure = WriteFailure.BUSY
        if failure not in (WriteFailure.STALE, WriteFailure.CONFLICT, WriteFailure.GONE):
            self._log.warning("pod=%s patched=no failure=%s error=%s", asked.key, failure.name.lower(), text)
        return failure, text

    async def _try_write(self, call: Callable[[], Awaitable[None]]) -> tuple[WriteFailure, str] | None:
        """Makes a write in its turn; None if it was made, else why not, which is counted."""
        try:
            async with self._turns:
                await self._call_with_retries(call)
        except (ClusterError, StaleTerm) as error:
            failure = describe_failure(error)
            self.failed[failure] += 1
            return failure, str(error)
        return None

    async def _call_with_retries(self, call: Callable[[], Awaitable[None]]) -> None:
        await call_with_retries(
            call, rng=self._rng, is_idempotent=True, limits=_LIMITS, monotonic_s=self._clock.monotonic_s
        )

    # Events for people

    def record_event(self, told: RecordEvent) -> None:
        """Queue an Event; the oldest goes where there are too many."""
        if len(self._tells) >= _TELLS_MOST:
            self._tells.popleft()
            self.tells_dropped += 1
        self._tells.append(told)
        self._told.set()

    async def run(self) -> None:
        """Send Events and conditions, not many a second, until cancelled."""
        await asyncio.gather(self._run_tells(), self._run_reports())

    def report_placement(self, asked: ReportPlacement) -> None:
        """Queue the condition of a pod's placement, in the stead of one that is queued; the oldest goes where there are too many."""
        if self._reports.pop(asked.uid, None) is None and len(self._reports) >= _REPORTS_MOST:
            del self._reports[next(iter(self._reports))]
            self.reports_dropped += 1
        self._reports[asked.uid] = asked
        self._reported.set()

    async def _run_reports(self) -> None:
        while True:
            await self._reported.wait()
            while self._reports:
                uid = next(iter(self._reports))
                asked = self._reports.pop(uid)
                try:
                    await self._cluster.patch(
                        PODS,
                        asked.key.name,
                        self._status(asked),
                        PatchKind.STRATEGIC,
                        namespace=asked.key.namespace,
                        subresource="status",
                        is_brief=True,
                    )
                except ClusterError as error:
                    self.reports_dropped += 1
                    self._log.debug("pod=%s condition=no error=%s", asked.key, error)
                else:
                    self.reports_sent += 1
                await asyncio.sleep(_REPORT_EVERY_S)
            self._reported.clear()

    def _status(self, asked: ReportPlacement) -> dict[str, Any]:
        """A strategic merge patch: conditions are merged by their type. The uid refuses another pod of the same name."""
        found = asked.condition
        pod = self._pods().get(ObjectKey(*asked.key)) or {}
        status, now = "True" if found.is_true else "False", format_time(self._clock.now_ns() // 1_000_000_000)
        told = [one for one in (pod.get("status") or {}).get("conditions") or () if one["type"] == CONDITION_PLACEMENT]
        since = told[0].get("lastTransitionTime") if told and told[0].get("status") == status else None
        condition = {
            "type": CONDITION_PLACEMENT,
            "status": status,
            "reason": found.reason,
            "message": found.message,
            "lastTransitionTime": since or now,
        }
        return {"metadata": {"uid": asked.uid}, "status": {"conditions": [condition]}}

    async def _run_tells(self) -> None:
        while True:
            await self._told.wait()
            while self._tells:
                told = self._tells.popleft()
                try:
                    await self._cluster.create(EVENTS, self._event(told), namespace=told.key.namespace)
                except ClusterError as error:
                    self.tells_dropped += 1
                    self._log.debug("pod=%s told=no error=%s", told.key, error)
                else:
                    self.tells_sent += 1
                await asyncio.sleep(_TELL_EVERY_S)
            self._told.clear()

    def _event(self, told: RecordEvent) -> dict[str, Any]:
        return build_event(
            EventReference("v1", "Pod", *told.key, told.uid),
            told.text,
            is_warning=told.is_warning,
            action="Placing",
            reason="EelgridProblem" if told.is_warning else "EelgridWaiting",
            identity=self._identity,
            now_ns=self._clock.now_ns(),
        )


def _is(pod: Object, uid: str, version: str) -> bool:
    metadata = pod["metadata"]
    return bool(metadata.get("uid") == uid and metadata.get("resourceVersion") == version)


def describe_failure(error: Exception) -> WriteFailure:
    """What came of a write, in the words of events."""
    match error:
        case StaleTerm():
            return WriteFailure.STALE
        case Conflict():
            return WriteFailure.CONFLICT
        case ObjectNotFound():
            return WriteFailure.GONE
        case Invalid():
            return WriteFailure.INVALID
        case Forbidden():
            return WriteFailure.FORBIDDEN
    return WriteFailure.BUSY
