"""ResourceClaims reconciler (mode `dra`): follows claims, slices and classes, and writes allocations."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from eelgrid_controller.engines.kubernetes.api.elector import LeadershipTerm, is_of
from eelgrid_controller.engines.kubernetes.api.errors import ClusterError, ObjectNotFound
from eelgrid_controller.engines.kubernetes.api.informer import Informer
from eelgrid_controller.engines.kubernetes.api.object_store import Delta
from eelgrid_controller.engines.kubernetes.api.port import (
    DEVICE_CLASSES,
    PODS,
    RESOURCE_CLAIMS,
    RESOURCE_SLICES,
    Object,
    ObjectKey,
)
from eelgrid_controller.engines.kubernetes.api.retry import BackgroundTasks, RetryLimits, call_with_retries
from eelgrid_controller.engines.kubernetes.claims.allocator import ClaimAllocator
from eelgrid_controller.engines.kubernetes.claims.demand import ClaimAllocatorSettings
from eelgrid_controller.engines.kubernetes.claims.events import (
    ClaimDeallocation,
    ClaimDeleted,
    ClaimEvent,
    ClaimGpusReported,
    ClaimGrant,
    ClaimInstruction,
    ClaimNodeDeleted,
    ClaimNodeUpdated,
    ClaimsListed,
    ClaimsSynced,
    ClaimStatusWrite,
    ClaimUpdated,
    DeallocationFailed,
    DeviceClassDeleted,
    DeviceClassUpdated,
    GrantFailed,
    GrantWritten,
    PodRelease,
    ResourceSliceDeleted,
    ResourceSliceUpdated,
)
from eelgrid_controller.engines.kubernetes.claims.requests import pod_event_of
from eelgrid_controller.engines.kubernetes.model.objects import parse_node
from eelgrid_controller.engines.kubernetes.model.owners import IntentRefusal, ObjectRef
from eelgrid_controller.engines.kubernetes.model.quantities import KubernetesUnreadable, format_time
from eelgrid_controller.engines.kubernetes.model.well_known import ANNOTATION_PLAN
from eelgrid_controller.engines.kubernetes.pods.gate_events import (
    ClaimGpusUpdated,
    GateTicked,
    LeadershipAcquired,
    LeadershipLost,
    PodDeleted,
    RecordEvent,
    RecreatePod,
    RemoveGate,
    WriteFailure,
)
from eelgrid_controller.engines.kubernetes.pods.plan_annotation import gate_removal_patch, ungating_patch
from eelgrid_controller.engines.kubernetes.reconcilers.pod_writer import StaleTerm, describe_failure
from eelgrid_controller.engines.kubernetes.reconcilers.reconciler import Reconciler, ReconcilerContext
from eelgrid_controller.engines.kubernetes.reconcilers.related_objects import OwnerLookups
from eelgrid_controller.errors import ControllerError

_LIMITS = RetryLimits(attempts=4, whole_s=15.0, first_s=0.1, most_s=3.0)
_AT_ONCE = 24
_METADATA = ("name", "namespace", "uid", "resourceVersion", "ownerReferences", "deletionTimestamp")


def prune_resource_claim(found: Object) -> Object:
    """A claim without what nobody reads; its status may be written from it."""
    metadata = {key: found["metadata"][key] for key in _METADATA if key in found["metadata"]}
    return {"metadata": metadata, "spec": found["spec"], "status": found.get("status") or {}}


class ClaimWriter:
    """Carries out grants and what undoes them."""

    def __init__(self, around: ReconcilerContext, feed: Callable[[ClaimEvent], None]) -> None:
        """What came of each is fed back."""
        self.granted = 0  # claims written
        self.released = 0  # gates removed, or plans renewed
        self.freed = 0
        self.failed: dict[WriteFailure, int] = dict.fromkeys(WriteFailure, 0)
        self._feed = feed
        self._cluster = around.cluster
        self._engine = around.engine
        self._elector = around.elector
        self._monotonic_s = around.clock.monotonic_s
        self._rng = around.rng
        self._log = around.log
        self._turns = asyncio.Semaphore(_AT_ONCE)

    async def grant(self, one: ClaimGrant) -> None:
        """All claims, then all pods; what of it failed is told when nothing of it is under way any more."""
        wrote = await asyncio.gather(*(self._write(write, one.epoch) for write in one.writes))
        failed = [found for found in wrote if found is not None]
        if not failed:
            let = await asyncio.gather(*(self._release(release, one.epoch) for release in one.releases))
            failed = [found for found in let if found is not None]
        for uid, failure, why in failed:
            self._feed(GrantFailed(one.unit, uid, failure, why))
        if not failed:
            self._feed(GrantWritten(one.unit))

    async def _write(self, one: ClaimStatusWrite, epoch: int) -> tuple[str, WriteFailure, str] | None:
        failed = await self._status(one.body, epoch)
        if failed is not None:
            return (one.uid, *failed)
        self.granted += 1
        return None

    async def free(self, one: ClaimDeallocation) -> None:
        """Take an allocation away."""
        failed = await self._status(one.body, one.epoch)
        if failed is not None:
            self._feed(DeallocationFailed(one.uid, *failed))
            return
        self.freed += 1
        self._log.info("claim=%s freed reason=%s", one.key, one.why)

    async def _status(self, body: Any, epoch: int) -> tuple[WriteFailure, str] | None:
        """Write a claim's status; after a conflict the claim is read, since the answer to a first attempt may be lost."""
        metadata = body["metadata"]
        name, namespace = metadata["name"], metadata["namespace"]

        async def call() -> Object:
            return await self._cluster.replace(RESOURCE_CLAIMS, body, subresource="status")

        failed, told = await self._try_write(call, epoch)
        if failed is not None and failed[0] is WriteFailure.CONFLICT:
            try:
                told = await self._cluster.get(RESOURCE_CLAIMS, name, namespace=namespace)
            except ObjectNotFound:
                failed = WriteFailure.GONE, "the claim is gone"
            except ClusterError as error:
                self._log.debug("claim=%s/%s read=no error=%s", namespace, name, error)
        if told is not None:
            self._feed(ClaimUpdated(prune_resource_claim(told)))
        if failed is not None and failed[0] not in (WriteFailure.CONFLICT, WriteFailure.GONE, WriteFailure.STALE):
            self._log.warning("claim=%s/%s written=no failure=%s error=%s", namespace, name, failed[0].name, failed[1])
        return failed

    async def _release(self, one: PodRelease, epoch: int) -> tuple[str, WriteFailure, str] | None:
        namespace, name = one.key

        async def call() -> Object:
            pod = self._engine.pods.objects.get(ObjectKey(namespace, name))
            head = {} if pod is None else pod["metadata"]
            if pod is None or (head.get("uid"), head.get("resourceVersion")) != (one.uid, one.version):
                raise StaleTerm
            if one.is_pinned:
                body = ungating_patch(pod, one.node_name, one.plan)
            else:
                body = gate_removal_patch(pod)
                body["metadata"]["annotations"] = {ANNOTATION_PLAN: one.plan}
            return await self._cluster.patch(PODS, name, body, namespace=namespace)

        failed, _ = await self._try_write(call, epoch)
        if failed is not None:
            return (one.uid, *failed)
        self.released += 1
        return None

    async def _try_write(
        self, call: Callable[[], Awaitable[Object]], epoch: int
    ) -> tuple[tuple[WriteFailure, str] | None, Object | None]:
        """Makes a write in its turn and in its term: why it was not made, or what the server answered."""

        async def guarded() -> Object:
            term = self._elector.term()
            if term is None or term.epoch != epoch:
                raise StaleTerm
            try:
                async with asyncio.timeout(max(0.0, term.until_s - self._monotonic_s())):
                    return await call()
            except TimeoutError:
                raise StaleTerm from None

        try:
            async with self._turns:
                told = await call_with_retries(
                    guarded,
                    rng=self._rng,
                    is_idempotent=True,
                    limits=_LIMITS,
                    monotonic_s=self._monotonic_s,
                )
        except (ClusterError, StaleTerm) as error:
            failure = describe_failure(error)
            self.failed[failure] += 1
            return (failure, str(error)), None
        return None, told


_BATCH_S = 0.02
_TICK_S = 1.0

_CLAIMS_MOST = 300_000
_SLICES_MOST = 100_000
_AGAIN_S = 1.0


class EngineRestarted(ControllerError):
    """The engine began anew: pods and nodes are followed by other informers now."""


def make_claim_reconciler(around: ReconcilerContext) -> Reconciler:
    """The part, for `placing.py`."""
    return ClaimReconciler(around)


def prune_to_spec(found: Object) -> Object:
    """A slice or a class: its head and its spec."""
    metadata = {key: found["metadata"][key] for key in ("name", "uid", "resourceVersion")}
    return {"metadata": metadata, "spec": found.get("spec") or {}}


class ClaimReconciler:
    """One cluster's claims, allocated while this one leads."""

    def __init__(self, around: ReconcilerContext, settings: ClaimAllocatorSettings | None = None) -> None:
        gate = around.engine.settings.gate
        self.settings = settings or ClaimAllocatorSettings(unbound_s=gate.unbound_s)
        self._around = around
        self._engine = around.engine
        self._cluster = around.cluster
        self._log = around.log
        self._is_running = False
        self._queue: deque[ClaimEvent] = deque()
        self._wake = asyncio.Event()
        self._under_way = BackgroundTasks(self._log, "claims")
        around.engine.add_pod_listener(self._pods)
        around.engine.add_node_listener(self._nodes)
        around.elector.add_listener(self._term)

    # Life

    async def run(self) -> None:
        """Allocate until cancelled; raises where it has to begin anew."""
        around, clock = self._around, self._around.clock
        self.machine = ClaimAllocator(self.settings)
        self._queue.clear()
        self._epoch: int | None = None
        self._needing: dict[ObjectRef, dict[ObjectKey, None]] = {}
        self.writes = ClaimWriter(around, self.feed)
        self._lookups = OwnerLookups(
            self._cluster, done=self._on_owner_found, monotonic_s=clock.monotonic_s, log=self._log
        )
        informers = [
            Informer(
                self._cluster, kind, rng=around.rng, monotonic_s=clock.monotonic_s, log=self._log, keep=keep, most=most
            )
            for kind, keep, most in (
                (RESOURCE_CLAIMS, prune_resource_claim, _CLAIMS_MOST),
                (RESOURCE_SLICES, prune_to_spec, _SLICES_MOST),
                (DEVICE_CLASSES, prune_to_spec, 10_000),
            )
        ]
        for informer, heard in zip(informers, (self._claims, self._slices, self._classes), strict=True):
            informer.add_listener(heard)
        try:
            async with asyncio.TaskGroup() as group:
                for informer in informers[1:]:
                    group.create_task(informer.run())
                await self._start()
                # Claims are read after pods: of each pod that is there, its claims are known.
                group.create_task(informers[0].run())
                group.create_task(self._ticks())
                group.create_task(self._rounds())
                for informer in informers:
                    await informer.wait_synced()
                self.feed(ClaimsSynced())
                self._log.info("claims=synced claims=%d slices=%d", *(len(one.objects) for one in informers[:2]))
                self._term(around.elector.term())
        finally:
            self._is_running = False
            await self._under_way.end()

    async def _start(self) -> None:
        """All pods and nodes that there are, and from now on what becomes of them."""
        self._seen = self._engine.pods, self._engine.nodes
        await self._engine.nodes.wait_synced()
        await self._engine.pods.wait_synced()
        self._is_running = True
        for found in self._engine.nodes.objects.values():
            self._node(found)
        for key, found in self._engine.pods.objects.items():
            self._pod(key, found)

    async def _ticks(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            if self._seen != (self._engine.pods, self._engine.nodes):
                raise EngineRestarted("the engine began anew", "nothing; so does this part")
            self._lookups.expire_entries()
            self.feed(GateTicked())

    # What happens

    def feed(self, event: ClaimEvent) -> None:
        """An event for the next round."""
        self._queue.append(event)
        self._wake.set()

    def _term(self, term: LeadershipTerm | None) -> None:
        if not self._is_running:
            return
        epoch = term.epoch if term is not None else None
        if epoch is None:
            self.feed(LeadershipLost())
        elif epoch != self._epoch:
            self.feed(LeadershipAcquired(epoch))
            self._under_way.start_task(self._list(epoch))
        self._epoch = epoch

    async def _list(self, epoch: int) -> None:
        """All claims from the server itself, for as long as the term lasts."""
        while self._leads(epoch):
            try:
                found = await self._cluster.list(RESOURCE_CLAIMS)
            except ClusterError as error:
                self._log.warning("claims=listed error=%s action=again", error)
                await asyncio.sleep(_AGAIN_S)
            else:
                self.feed(ClaimsListed(epoch, [prune_resource_claim(one) for one in found.items]))
                self._log.info("claims=listed count=%d epoch=%d", len(found.items), epoch)
                return

    def _leads(self, epoch: int) -> bool:
        return is_of(self._around.elector.term(), epoch)

    def _pods(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas if self._is_running else ():
            if delta.new is None:
                assert delta.old is not None
                self.feed(PodDeleted(delta.old["metadata"]["uid"]))
            else:
                self._pod(delta.key, delta.new)

    def _pod(self, key: ObjectKey, found: Object) -> None:
        event = pod_event_of(found, self._lookups.found)
        member = event.claimant.member if event.claimant is not None else None
        if isinstance(member, IntentRefusal) and member.needs is not None:
            self._needing.setdefault(member.needs, {})[key] = None
            self._under_way.start_task(self._lookups.find_owner(member.needs))
        self.feed(event)

    def _on_owner_found(self, ref: ObjectRef) -> None:
        for key in self._needing.pop(ref, {}):
            found = self._engine.pods.objects.get(key)
            if found is not None:
                self._pod(key, found)

    def _nodes(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas if self._is_running else ():
            if delta.new is None:
                self.feed(ClaimNodeDeleted(delta.key.name))
            else:
                self._node(delta.new)

    def _node(self, found: Object) -> None:
        try:
            self.feed(ClaimNodeUpdated(parse_node(found)))
        except KubernetesUnreadable as error:
            self._log.warning("node=%s read=no error=%s", found["metadata"].get("name"), error)

    def _claims(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            self.feed(ClaimUpdated(delta.new) if delta.new is not None else ClaimDeleted(delta.old or {}))

    def _slices(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            self.feed(
                ResourceSliceUpdated(delta.key.name, delta.new["spec"])
                if delta.new
                else ResourceSliceDeleted(delta.key.name)
            )

    def _classes(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            self.feed(DeviceClassUpdated(delta.new) if delta.new is not None else DeviceClassDeleted(delta.key.name))

    # What is done

    async def _rounds(self) -> None:
        while True:
            await self._wake.wait()
            await asyncio.sleep(_BATCH_S)
            self._wake.clear()
            events, self._queue = list(self._queue), deque()
            stamp = format_time(self._around.clock.now_ns() // 1_000_000_000)
            for one in self.machine.on_events(events, self._around.clock.monotonic_s(), stamp):
                self._do(one)

    def _do(self, one: ClaimInstruction) -> None:
        match one:
            case ClaimGrant():
                self._under_way.start_task(self.writes.grant(one))
            case ClaimDeallocation():
                self._under_way.start_task(self.writes.free(one))
            case ClaimGpusReported(name, count):
                self._engine.feed(ClaimGpusUpdated(name, count))
            case RemoveGate():
                self._under_way.start_task(self._engine.writes.remove_gate(one))
            case RecreatePod():
                self._under_way.start_task(self._engine.writes.delete_for_recreation(one))
            case RecordEvent():
                self._log.info("pod=%s told=%s", one.key, one.text)
                if self._around.elector.term() is not None:
                    self._engine.writes.record_event(one)
