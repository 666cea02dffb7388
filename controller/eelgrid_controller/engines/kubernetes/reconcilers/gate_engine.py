"""Gate engine: feeds events of the API server and of the core to the gate, and executes its commands.

`PodRecalls` reads pods again whose gate was removed long ago.
"""

import asyncio
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from eelgrid_controller.clock import Clock
from eelgrid_controller.core.command import CommitResult
from eelgrid_controller.engines.kubernetes.api.elector import LeadershipTerm, is_of
from eelgrid_controller.engines.kubernetes.api.informer import Informer
from eelgrid_controller.engines.kubernetes.api.object_store import Delta
from eelgrid_controller.engines.kubernetes.api.port import NODES, PODS, ClusterClient, Object, ObjectKey
from eelgrid_controller.engines.kubernetes.api.retry import BackgroundTasks
from eelgrid_controller.engines.kubernetes.model.inference_service import (
    InferenceService,
    ServiceIndex,
    scale_target_of,
)
from eelgrid_controller.engines.kubernetes.model.node_inventory import matches_inventory
from eelgrid_controller.engines.kubernetes.model.objects import (
    KubeNode,
    PodShapeCache,
    controller_of,
    parse_node,
    parse_pod,
)
from eelgrid_controller.engines.kubernetes.model.owners import ObjectRef
from eelgrid_controller.engines.kubernetes.model.quantities import KubernetesUnreadable
from eelgrid_controller.engines.kubernetes.pods.gate import Gate
from eelgrid_controller.engines.kubernetes.pods.gate_events import (
    AdoptUnit,
    AnnotatePod,
    CancelUnit,
    GateEvent,
    GateInstruction,
    GateSynced,
    GateTicked,
    InferenceServiceDeleted,
    InferenceServiceUpdated,
    KubeNodeDeleted,
    KubeNodeUpdated,
    LeadershipAcquired,
    LeadershipLost,
    NodeAcknowledged,
    PodDeleted,
    PodUpdated,
    RecordEvent,
    RecreatePod,
    RegisterNode,
    RemoveGate,
    RemoveNode,
    ReportPlacement,
    ReportUsage,
    RereadPod,
    RetryPending,
    ScaleUnit,
    SubmitUnit,
    UngatePod,
)
from eelgrid_controller.engines.kubernetes.pods.pod_view import view_pod
from eelgrid_controller.engines.kubernetes.pods.unit_steps import GateSettings
from eelgrid_controller.engines.kubernetes.reconcilers.core_commands import (
    CoreCommandPort,
    CoreCommandRunner,
    is_gate_workload,
    status_event,
)
from eelgrid_controller.engines.kubernetes.reconcilers.pod_writer import PodWriter
from eelgrid_controller.engines.kubernetes.reconcilers.related_objects import (
    OwnerLookups,
    RelatedObjects,
    prune_node,
    prune_pod,
)

_AT_ONCE = 50


class PodRecalls:
    """Pods that are to be told of again."""

    def __init__(self, pods: Informer, tell: Callable[[ObjectKey, Object], None]) -> None:
        self.uids: set[str] = set()  # of those that are read so
        self._pods = pods
        self._tell = tell
        self._asked: deque[RereadPod] = deque()

    def add_recall(self, one: RereadPod) -> bool:
        """One more; whether `run` has to be begun for it."""
        self._asked.append(one)
        return len(self._asked) == 1

    async def run(self) -> None:
        """Tell of them, a few at a time."""
        await asyncio.sleep(0)
        while self._asked:
            uid, key = self._asked[0]
            found = self._pods.objects.get(ObjectKey(*key))
            if found is not None and found["metadata"]["uid"] == uid:
                self.uids.add(uid)
                self._tell(ObjectKey(*key), found)
            self._asked.popleft()
            if len(self._asked) % _AT_ONCE == 0:
                await asyncio.sleep(0)


_AGAIN_S = 5.0
_LOOKED_UP_EVERY_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class GateEngineSettings:
    """How the engine runs."""

    identity: str
    gate: GateSettings = field(default_factory=GateSettings)
    batch_s: float = 0.1
    tick_s: float = 1.0
    writes_at_once: int = 24
    leaves_claims: bool = False  # another part places pods that get their devices by claims
    pods_most: int = 300_000
    nodes_most: int = 20_000


class LeadershipSource(Protocol):
    """What the engine needs of the elector."""

    @property
    def holder(self) -> str:
        """Who leads, as far as is known."""

    def term(self) -> LeadershipTerm | None:
        """The term that runs at this moment."""

    def add_listener(self, callback: Callable[[LeadershipTerm | None], None]) -> None:
        """Tell the beginning and the end of terms."""


class GateEngine:
    """One cluster's pods, placed by one core."""

    def __init__(
        self,
        *,
        cluster: ClusterClient,
        loop: CoreCommandPort,
        elector: LeadershipSource,
        has_agent: Callable[[str], bool],
        settings: GateEngineSettings,
        clock: Clock,
        rng: random.Random,
        log: logging.Logger,
        awaits_agent: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """`has_agent` says of a node whether an agent speaks for it, `awaits_agent` whether it has not done so yet."""
        self.rounds = 0
        self.events = 0
        self.unreadable = 0
        self.failures = 0
        self.round_s = 0.0  # the longest
        self.settings = settings
        self.leaves_slices = False  # pods that ask for slices are placed by a part of their own
        self._loop = loop
        self._elector = elector
        self._has_agent = has_agent
        self._awaits_agent = awaits_agent
        self._clock = clock
        self._log = log
        self._queue: deque[GateEvent] = deque()
        self._wake = asyncio.Event()
        self._nodes: dict[str, KubeNodeUpdated] = {}  # as they were told
        self._epoch: int | None = None
        self._has_led = False  # the gate of this run was told that it leads
        self._cluster = cluster
        self._rng = rng
        self._under_way = BackgroundTasks(log, "kubernetes")
        self._nodes_heard: list[Callable[[Sequence[Delta]], None]] = []
        self._pods_heard: list[Callable[[Sequence[Delta]], None]] = []
        self.services = ServiceIndex()
        # What else has to be known before anything is decided; each wait is bounded.
        self.awaited: list[Callable[[], Awaitable[None]]] = []
        self.asked = CoreCommandRunner(loop, feed=self.feed, monotonic_s=clock.monotonic_s, log=log)
        self._start()
        loop.listeners.append(self._on_event)
        elector.add_listener(self._term)

    def _start(self) -> None:
        """Everything that a run has of its own."""
        clock, log, rng, settings = self._clock, self._log, self._rng, self.settings
        self._is_running = False
        self._queue.clear()
        self._nodes.clear()
        self._epoch = None
        self._has_led = False
        self.gate = Gate(settings.gate)
        self._loop.eligibility.rules = self.gate.others.rules
        self.pods = Informer(
            self._cluster,
            PODS,
            rng=rng,
            monotonic_s=clock.monotonic_s,
            log=log,
            keep=prune_pod,
            most=settings.pods_most,
        )
        self.nodes = Informer(
            self._cluster,
            NODES,
            rng=rng,
            monotonic_s=clock.monotonic_s,
            log=log,
            keep=prune_node,
            most=settings.nodes_most,
        )
        self.pods.add_listener(self._pod_deltas)
        self.nodes.add_listener(self._node_deltas)
        self.lookups = OwnerLookups(self._cluster, done=self._on_owner_found, monotonic_s=clock.monotonic_s, log=log)
        self.related = RelatedObjects(self._cluster, feed=self.feed, rng=rng, monotonic_s=clock.monotonic_s, log=log)
        self._shapes = PodShapeCache()
        self._needing: dict[ObjectRef, dict[ObjectKey, None]] = {}
        self._recalls = PodRecalls(self.pods, self._pod)
        self.writes = PodWriter(
            self._cluster,
            pods=lambda: self.pods.objects,
            leads=self._leads,
            feed=self.feed,
            identity=settings.identity,
            at_once=settings.writes_at_once,
            clock=clock,
            rng=rng,
            log=log,
        )

    # Life

    async def run(self) -> None:
        """Place pods until cancelled; a run that fails is followed by another."""
        while True:
            try:
                await self._run()
            except Exception:  # noqa: BLE001  # the next run begins from lists
                self.failures += 1
                self._log.exception("kubernetes=failed action=begin_again seconds=%g", _AGAIN_S)
            finally:
                await self._under_way.end()
            await asyncio.sleep(_AGAIN_S)
            self._start()

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for part in (self.pods.run, self.nodes.run, self.related.run, self.writes.run, self._ticks, self._rounds):
                group.create_task(part())
            await self.nodes.wait_synced()
            await self.pods.wait_synced()
            while self._needing:  # noqa: ASYNC110  # once, at the start
                await asyncio.sleep(_LOOKED_UP_EVERY_S)
            for wait in self.awaited:
                await wait()
            for service in self.services.services:
                self.feed(InferenceServiceUpdated(service))
            await self._loop.read(self._known)
            self._term(self._elector.term())
            self.feed(GateSynced())
            self._log.info("kubernetes=synced pods=%d nodes=%d", len(self.pods.objects), len(self.nodes.objects))

    def _known(self, core: Any) -> None:
        """What the core holds, told before anything is decided."""
        self._is_running = True
        for workload in core.state.workloads.values():
            if is_gate_workload(workload.workload_id):
                self.feed(status_event(workload))
        for name in core.state.nodes:
            self.feed(NodeAcknowledged(name))

    # What happens

    def add_pod_listener(self, callback: Callable[[Sequence[Delta]], None]) -> None:
        """Tell changes of pods to others, too, in this run and in those after it; each run begins with all pods."""
        self._pods_heard.append(callback)

    def add_node_listener(self, callback: Callable[[Sequence[Delta]], None]) -> None:
        """Tell changes of nodes to others, in the same way."""
        self._nodes_heard.append(callback)

    def set_services(self, services: Iterable[InferenceService]) -> None:
        """From now on the pods of these services' targets are their replicas."""
        before = {service.unit_name: service for service in self.services.services}
        changed = self.services.replace_services(services)
        after = {service.unit_name: service for service in self.services.services}
        for unit in before.keys() - after.keys():
            self.feed(InferenceServiceDeleted(unit))
        for unit, service in after.items():
            if before.get(unit) != service:
                self.feed(InferenceServiceUpdated(service))
        if not changed:
            return
        for key, found in list(self.pods.objects.items()):
            if scale_target_of(key.namespace, controller_of(found)) in changed:
                self._pod(key, found)

    def feed(self, event: GateEvent) -> None:
        """An event for the next round."""
        self._queue.append(event)
        self._wake.set()

    def _on_event(self, committed: CommitResult) -> None:
        if self._is_running:
            self.asked.on_commit(committed)

    def _term(self, term: LeadershipTerm | None) -> None:
        epoch = term.epoch if term is not None else None
        if term is None:
            self.feed(LeadershipLost(is_led=bool(self._elector.holder)))
        elif epoch != self._epoch:
            self._under_way.start_task(self._begin_term(term))
        if epoch != self._epoch:
            self._log.info("kubernetes=%s epoch=%s", "leading" if term else "following", epoch or "-")
        self._epoch = epoch

    async def _begin_term(self, term: LeadershipTerm) -> None:
        """Lead, when all is known that the leader before has written; at once where that was this run."""
        is_continued = term.is_continued and self._has_led
        if not is_continued:
            await self.pods.wait_listed_since(self._clock.monotonic_s())
        if self._leads(term.epoch):
            self._has_led = True
            self.feed(LeadershipAcquired(term.epoch, is_continued))

    def _leads(self, epoch: int) -> bool:
        return is_of(self._elector.term(), epoch)

    def _pod_deltas(self, deltas: Sequence[Delta]) -> None:
        for callback in self._pods_heard:
            callback(deltas)
        for delta in deltas:
            if delta.new is None:
                assert delta.old is not None
                self._recalls.uids.discard(delta.old["metadata"]["uid"])
                self.feed(PodDeleted(delta.old["metadata"]["uid"]))
                continue
            self._pod(delta.key, delta.new)

    def _pod(self, key: ObjectKey, found: Object) -> None:
        try:
            pod = parse_pod(found, self._shapes)
            sight, needs = view_pod(
                pod,
                found,
                self.lookups.found,
                self.services,
                recalls=pod.uid in self._recalls.uids,
                leaves_slices=self.leaves_slices,
                leaves_claims=self.settings.leaves_claims,
            )
        except KubernetesUnreadable as error:
            self._unread("pod", found, error)
            return
        if pod.is_gated:
            self.related.require_for(pod)
        if needs is None:
            self._recalls.uids.discard(pod.uid)
        else:
            self._needing.setdefault(needs, {})[key] = None
            self._under_way.start_task(self.lookups.find_owner(needs))
        if needs is None or not sight.pod.is_gated:
            # A gated pod is nobody's until it is known whose: a moment as another unit would cost its place.
            self.feed(PodUpdated(sight))

    def _on_owner_found(self, ref: ObjectRef) -> None:
        """An object above pods is known: those that needed it are judged again."""
        for key in self._needing.pop(ref, {}):
            found = self.pods.objects.get(key)
            if found is not None:
                self._pod(key, found)

    def _node_deltas(self, deltas: Sequence[Delta]) -> None:
        for callback in self._nodes_heard:
            callback(deltas)
        for delta in deltas:
            name = delta.key.name
            if delta.new is None:
                self._nodes.pop(name, None)
                self.feed(KubeNodeDeleted(name))
                continue
            try:
                node = parse_node(delta.new)
            except KubernetesUnreadable as error:
                self._unread("node", delta.new, error)
                continue
            self._node(node)

    def _node(self, node: KubeNode) -> None:
        seen = self._node_event(node)
        before = self._nodes.get(node.name)
        if before is None or before[1:] != seen[1:] or not node.is_equivalent(before.node):
            self._nodes[node.name] = seen
            self.feed(seen)

    def _node_event(self, node: KubeNode) -> KubeNodeUpdated:
        name, awaits = node.name, False
        if self._awaits_agent(name):
            # What the journal has of a node is good for as long as its kubelet says nothing else.
            record = self._loop.core.state.nodes.get(name)
            awaits = record is None or not matches_inventory(node, record.inventory)
        return KubeNodeUpdated(node, self._has_agent(name), awaits)

    def _unread(self, kind: str, found: Object, error: KubernetesUnreadable) -> None:
        self.unreadable += 1
        self._log.warning("%s=%s read=no error=%s", kind, found["metadata"].get("name"), error)

    async def _ticks(self) -> None:
        while True:
            await asyncio.sleep(self.settings.tick_s)
            for seen in list(self._nodes.values()):
                if self._node_event(seen.node)[1:] != seen[1:]:
                    self._node(seen.node)
            self.lookups.expire_entries()
            self.feed(GateTicked())

    # What is done

    async def _rounds(self) -> None:
        next_s = 0.0
        while True:
            await self._wake.wait()
            await asyncio.sleep(max(0.0, next_s - self._clock.monotonic_s()))
            self._wake.clear()
            events, self._queue = list(self._queue), deque()
            start_s = self._clock.monotonic_s()
            told = self.gate.on_events(events, start_s)
            for one in told:
                self._do(one)
            self.rounds += 1
            self.events += len(events)
            end_s = self._clock.monotonic_s()
            self.round_s = max(self.round_s, end_s - start_s)
            next_s = end_s + self.settings.batch_s

    def _do(self, one: GateInstruction) -> None:
        match one:
            case RecordEvent():
                self._log.info("pod=%s told=%s", one.key, one.text)
                if self._elector.term() is not None:
                    self.writes.record_event(one)
            case UngatePod():
                self._under_way.start_task(self.writes.ungate(one))
            case AnnotatePod():
                self._under_way.start_task(self.writes.annotate_pod(one))
            case RemoveGate():
                self._under_way.start_task(self.writes.remove_gate(one))
            case RecreatePod():
                self._under_way.start_task(self.writes.delete_for_recreation(one))
            case ReportPlacement():
                if self._elector.term() is not None:
                    self.writes.report_placement(one)
            case RetryPending():
                self._under_way.start_task(self.asked.reconsider())
            case RereadPod():
                if self._recalls.add_recall(one):
                    self._under_way.start_task(self._recalls.run())
            case RegisterNode(inventory) if self._has_agent(inventory.node_name):
                pass  # it came a moment ago, and says what the node is
            case (
                RegisterNode() | RemoveNode() | ReportUsage() | SubmitUnit() | AdoptUnit() | CancelUnit() | ScaleUnit()
            ):
                self._under_way.start_task(self.asked.execute_command(one))
