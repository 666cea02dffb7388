"""ResourceClaims reconciler (mode `dra`): follows claims, slices and classes, and drives the allocator."""

import asyncio
from collections.abc import Sequence

from eelgrid_controller.engines.kubernetes.api.election import LeadershipTerm
from eelgrid_controller.engines.kubernetes.api.errors import call_until_done
from eelgrid_controller.engines.kubernetes.api.informer import Delta
from eelgrid_controller.engines.kubernetes.api.port import (
    DEVICE_CLASSES,
    RESOURCE_CLAIMS,
    RESOURCE_SLICES,
    Object,
    ObjectKey,
    ObjectList,
)
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
    ClaimUpdated,
    DeviceClassDeleted,
    DeviceClassUpdated,
    ResourceSliceDeleted,
    ResourceSliceUpdated,
)
from eelgrid_controller.engines.kubernetes.claims.requests import pod_event_of
from eelgrid_controller.engines.kubernetes.model.objects import parse_node
from eelgrid_controller.engines.kubernetes.model.pod_group import IntentRefusal
from eelgrid_controller.engines.kubernetes.model.quantities import KubernetesUnreadable, format_time
from eelgrid_controller.engines.kubernetes.pods.gate_events import (
    ClaimGpusUpdated,
    GateTicked,
    LeadershipAcquired,
    LeadershipLost,
    PodDeleted,
    RecordEvent,
    RecreatePod,
    RemoveGate,
)
from eelgrid_controller.engines.kubernetes.reconcilers.gate_engine import ReconcilerContext
from eelgrid_controller.engines.kubernetes.reconcilers.reconciler import CLUSTER_KEY, EventInbox, Reconciler, Result
from eelgrid_controller.engines.kubernetes.reconcilers.related_objects import OwnerLookups
from eelgrid_controller.engines.kubernetes.reconcilers.writers import ClaimWriter, prune_resource_claim
from eelgrid_controller.errors import ControllerError

_BATCH_S = 0.02
_WRITES_AT_ONCE = 24
_TICK_S = 1.0

_CLAIMS_MOST = 300_000
_SLICES_MOST = 100_000
_CLASSES_MOST = 10_000
_AGAIN_S = 1.0


class EngineRestarted(ControllerError):
    """The engine began anew: pods and nodes are followed by other informers now."""


def prune_to_spec(found: Object) -> Object:
    """A slice or a class: its head and its spec."""
    metadata = {key: found["metadata"][key] for key in ("name", "uid", "resourceVersion")}
    return {"metadata": metadata, "spec": found.get("spec") or {}}


class ClaimReconciler(Reconciler[str]):
    """Allocates devices to one cluster's ResourceClaims, while this one leads."""

    resync_s = _TICK_S

    def __init__(self, around: ReconcilerContext, settings: ClaimAllocatorSettings | None = None) -> None:
        super().__init__(around, "claims", max_concurrent_writes=_WRITES_AT_ONCE)
        gate = around.engine.settings.gate
        self.settings = settings or ClaimAllocatorSettings(unbound_s=gate.unbound_s)
        self._around = around
        self._engine = around.engine
        self._is_running = False
        # Events of one change come together: claims, pods and slices are judged when all of them are there.
        self._inbox: EventInbox[ClaimEvent] = EventInbox(lambda: self.queue.add(CLUSTER_KEY, _BATCH_S))
        self.reset()
        around.engine.add_pod_listener(self._pods)
        around.engine.add_node_listener(self._nodes)
        around.elector.add_listener(self._term)

    # Life

    def reset(self) -> None:
        """Forget claims; the next run begins from lists."""
        self.machine = ClaimAllocator(self.settings)
        self._inbox.drain()
        self._epoch: int | None = None
        self.writes = ClaimWriter(self, pods=lambda: self._engine.pods.objects, feed=self.feed)
        self._lookups = OwnerLookups(self, pods=lambda: self._engine.pods.objects, done=self._pod)

    def is_ready(self) -> bool:
        """Always: the allocator takes events from the beginning, and decides nothing before it is synced and leads."""
        return True

    async def start(self, group: asyncio.TaskGroup) -> None:
        """Tell the allocator everything that there is."""
        self._seen = self._engine.pods, self._engine.nodes
        claims = self.make_informer(RESOURCE_CLAIMS, keep=prune_resource_claim, max_objects=_CLAIMS_MOST)
        slices = self.make_informer(RESOURCE_SLICES, keep=prune_to_spec, max_objects=_SLICES_MOST)
        classes = self.make_informer(DEVICE_CLASSES, keep=prune_to_spec, max_objects=_CLASSES_MOST)
        claims.add_listener(self._claims)
        slices.add_listener(self._slices)
        classes.add_listener(self._classes)
        group.create_task(slices.run())
        group.create_task(classes.run())
        await self._start()
        # Claims are read after pods: of each pod that is there, its claims are known.
        group.create_task(claims.run())
        for informer in (claims, slices, classes):
            await informer.wait_synced()
        self.feed(ClaimsSynced())
        self.log.info("claims=synced claims=%d slices=%d", len(claims.objects), len(slices.objects))
        self._term(self.term())

    def stop(self) -> None:
        """Nothing is heard between runs."""
        self._is_running = False

    async def _start(self) -> None:
        """Feed all pods and nodes; changes are fed from now on."""
        await self._engine.nodes.wait_synced()
        await self._engine.pods.wait_synced()
        self._is_running = True
        for found in self._engine.nodes.objects.values():
            self._node(found)
        for key, found in self._engine.pods.objects.items():
            self._pod(key, found)

    def resync(self) -> None:
        """Time passes; raises EngineRestarted where pods and nodes are followed by other informers."""
        if self._seen != (self._engine.pods, self._engine.nodes):
            raise EngineRestarted("the gate engine began again from lists", "nothing; so does this reconciler")
        self._lookups.expire_entries()
        self.feed(GateTicked())

    # What happens

    def feed(self, event: ClaimEvent) -> None:
        """Give the allocator an event in its next round."""
        self._inbox.put(event)

    def _term(self, term: LeadershipTerm | None) -> None:
        if not self._is_running:
            return
        epoch = term.epoch if term is not None else None
        if epoch is None:
            self.feed(LeadershipLost())
        elif epoch != self._epoch:
            self.feed(LeadershipAcquired(epoch))
            self.tasks.start_task(self._list(epoch))
        self._epoch = epoch

    async def _list(self, epoch: int) -> None:
        """All claims from the server itself, for as long as the term lasts."""

        async def listed() -> ObjectList | None:
            return await self.cluster.list(RESOURCE_CLAIMS) if self.leads(epoch) else None

        def on_failure(error: Exception) -> None:
            self.log.warning("claims=listed error=%s action=retry", error)

        found = await call_until_done(listed, wait_s=_AGAIN_S, on_failure=on_failure)
        if found is not None:
            self.feed(ClaimsListed(epoch, [prune_resource_claim(one) for one in found.items]))
            self.log.info("claims=listed count=%d epoch=%d", len(found.items), epoch)

    def _pods(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas if self._is_running else ():
            if delta.new is None:
                self.feed(PodDeleted(delta.uid))
            else:
                self._pod(delta.key, delta.new)

    def _pod(self, key: ObjectKey, found: Object) -> None:
        event = pod_event_of(found, self._lookups.found)
        member = event.claimant.member if event.claimant is not None else None
        if isinstance(member, IntentRefusal) and member.needs is not None:
            self._lookups.wait_for(member.needs, key)
        self.feed(event)

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
            self.log.warning("node=%s read=no error=%s", found["metadata"].get("name"), error)

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

    async def reconcile(self, _: str) -> Result | None:
        """Run one round of the allocator over all events since the last."""
        stamp = format_time(self.clock.now_ns() // 1_000_000_000)
        for one in self.machine.on_events(self._inbox.drain(), self.clock.monotonic_s(), stamp):
            self._do(one)
        return None

    def _do(self, one: ClaimInstruction) -> None:
        match one:
            case ClaimGrant():
                self.tasks.start_task(self.writes.grant(one))
            case ClaimDeallocation():
                self.tasks.start_task(self.writes.free(one))
            case ClaimGpusReported(name, count):
                self._engine.feed(ClaimGpusUpdated(name, count))
            case RemoveGate() | RecreatePod():
                self.tasks.start_task(self._engine.writes.execute_instruction(one))
            case RecordEvent():
                self.log.info("pod=%s event=%s", one.key, one.text)
                if self.term() is not None:
                    self._engine.writes.record_event(one)
