"""Gate engine: feeds events of the API server and of the core to the gate, and carries out its instructions.

It holds the informers of pods and nodes that the other reconcilers read, too.
"""

import asyncio
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

from eelgrid_controller.core.steps import CommitResult
from eelgrid_controller.engines.core_port import CoreCommandPort
from eelgrid_controller.engines.kubernetes.api.election import LeadershipTerm
from eelgrid_controller.engines.kubernetes.api.informer import Delta, Informer
from eelgrid_controller.engines.kubernetes.api.port import NODES, PODS, Object, ObjectKey
from eelgrid_controller.engines.kubernetes.model.inference_service import (
    InferenceService,
    ServiceIndex,
    scale_target_of,
)
from eelgrid_controller.engines.kubernetes.model.node_inventory import matches_inventory
from eelgrid_controller.engines.kubernetes.model.objects import (
    KubeNode,
    Pod,
    PodShapeCache,
    controller_of,
    parse_node,
    parse_pod,
)
from eelgrid_controller.engines.kubernetes.model.pod_group import ObjectRef
from eelgrid_controller.engines.kubernetes.model.power_policy import PlacePower
from eelgrid_controller.engines.kubernetes.model.quantities import KubernetesUnreadable
from eelgrid_controller.engines.kubernetes.model.queue_labels import NO_QUEUE_LABELS, QueueLabels
from eelgrid_controller.engines.kubernetes.model.scheduler_support import awaits_binding
from eelgrid_controller.engines.kubernetes.pods.admission_review import AdmissionPin
from eelgrid_controller.engines.kubernetes.pods.gate import Gate
from eelgrid_controller.engines.kubernetes.pods.gate_events import (
    AdmissionAbandoned,
    AdoptUnit,
    AnnotatePod,
    BindPod,
    CancelUnit,
    DeclineAdmitted,
    GateEvent,
    GateInstruction,
    GatePodView,
    GateSynced,
    GateTicked,
    InferenceServiceDeleted,
    InferenceServiceUpdated,
    KubeNodeDeleted,
    KubeNodeUpdated,
    LeadershipAcquired,
    LeadershipLost,
    NodeAcknowledged,
    PinAdmitted,
    PodAdmitted,
    PodDeleted,
    PodUpdated,
    RecordEvent,
    RecreatePod,
    RemoveGate,
    ReportPlacement,
    RereadPod,
    RetryPending,
    ScaleUnit,
    SubmitUnit,
    UngatePod,
    UnitCancelled,
    UnitDeferred,
    UnitPlaced,
    UnitRefused,
)
from eelgrid_controller.engines.kubernetes.pods.intent import view_pod
from eelgrid_controller.engines.kubernetes.pods.placement_unit import GateSettings
from eelgrid_controller.engines.kubernetes.pods.plan_annotation import ADMITTED_UID_PREFIX, PodPlan, format_plan
from eelgrid_controller.engines.kubernetes.reconcilers.core_commands import (
    GATE_ID_PREFIXES,
    CoreCommandRunner,
    is_gate_workload,
    status_event,
)
from eelgrid_controller.engines.kubernetes.reconcilers.reconciler import (
    CLUSTER_KEY,
    ClusterContext,
    EventInbox,
    Reconciler,
    Result,
)
from eelgrid_controller.engines.kubernetes.reconcilers.related_objects import (
    LocalQueues,
    OwnerLookups,
    RelatedObjects,
    prune_node,
    prune_pod,
)
from eelgrid_controller.engines.kubernetes.reconcilers.writers import PodWriter
from eelgrid_controller.engines.node_reports import RegisterNode, RemoveNode, ReportUsage
from eelgrid_controller.objectives.forecasts import ForecastQuestion, ProfileForecast
from eelgrid_controller.state.events import PolicyChanged, PreemptionStarted
from eelgrid_controller.state.queue_usage import list_leaf_queues
from eelgrid_controller.state.telemetry import DeviceReports
from eelgrid_protos.messages import ListPromisesResponse

# A prediction where nothing was measured; None while it is being made.
ForecastLookup: TypeAlias = Callable[[ForecastQuestion], ProfileForecast | None]

_AT_ONCE = 50


class PodRecalls:
    """Reads pods again whose gate was removed long ago, a few at a time."""

    def __init__(self, pods: Informer, tell: Callable[[ObjectKey, Object], None]) -> None:
        self.uids: set[str] = set()  # of those that are read so
        self._pods = pods
        self._tell = tell
        self._asked: deque[RereadPod] = deque()

    def add_recall(self, one: RereadPod) -> bool:
        """Queue a pod; returns whether `run` has to be started for it."""
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


_LOOKED_UP_EVERY_S = 0.05
_ANSWERS = (UnitPlaced, UnitDeferred, UnitCancelled, UnitRefused)
# Without the ability to evict, until work that was placed with it may be found as a victim again.
_NOT_EVICTED_AGAIN_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GateEngineSettings:
    """Settings of the gate engine."""

    gate: GateSettings = field(default_factory=GateSettings)
    batch_s: float = 0.1
    tick_s: float = 1.0
    admission_s: float = 1.0  # that a review may wait for a place; the pod is bound when there is one, then
    writes_at_once: int = 24
    leaves_claims: bool = False  # another part places pods that get their devices by claims
    pods_most: int = 300_000
    nodes_most: int = 20_000


class GateEngine(Reconciler[str]):
    """Places one cluster's pods by one core, and holds pods and nodes for the other reconcilers."""

    def __init__(
        self,
        context: ClusterContext,
        *,
        loop: CoreCommandPort,
        has_agent: Callable[[str], bool],
        settings: GateEngineSettings,
        awaits_agent: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """`has_agent` says of a node whether an agent speaks for it, `awaits_agent` whether it has not done so yet."""
        super().__init__(context, "gate", max_concurrent_writes=settings.writes_at_once)
        self.resync_s = settings.tick_s
        self.rest_s = settings.batch_s
        self.rounds = 0
        self.events_taken = 0
        self.unreadable = 0
        self.round_s = 0.0  # the longest
        self.settings = settings
        self.leaves_slices = False  # pods that ask for slices are placed by a reconciler of their own
        self._loop = loop
        self._has_agent = has_agent
        self._awaits_agent = awaits_agent
        self._inbox: EventInbox[GateEvent] = EventInbox(lambda: self.queue.add(CLUSTER_KEY))
        self._nodes: dict[str, KubeNodeUpdated] = {}  # as they were told
        self._nodes_heard: list[Callable[[Sequence[Delta]], None]] = []
        self._pods_heard: list[Callable[[Sequence[Delta]], None]] = []
        self.services = ServiceIndex()
        # What else has to be known before anything is decided; each wait is bounded.
        self.awaited: list[Callable[[], Awaitable[None]]] = []
        self.asked = CoreCommandRunner(loop, feed=self.feed, monotonic_s=self.clock.monotonic_s, log=self.log)
        self.reset()
        loop.outside.own_ids.update(GATE_ID_PREFIXES)
        loop.listeners.append(self._on_event)
        context.elector.add_listener(self._term)

    def reset(self) -> None:
        """Everything that a run has of its own."""
        settings = self.settings
        self._is_running = False
        self._admitted: dict[str, asyncio.Future[AdmissionPin | None]] = {}  # reviews that wait, by uid of ours
        self._inbox.drain()
        self._nodes.clear()
        self._epoch: int | None = None
        self._has_led = False  # the gate of this run was told that it leads
        self.gate = Gate(settings.gate)
        self._loop.eligibility.rules = self.gate.others.rules
        self.pods = self.make_informer(PODS, keep=prune_pod, max_objects=settings.pods_most)
        self.nodes = self.make_informer(NODES, keep=prune_node, max_objects=settings.nodes_most)
        self.pods.add_listener(self._pod_deltas)
        self.nodes.add_listener(self._node_deltas)
        self.lookups = OwnerLookups(self, pods=lambda: self.pods.objects, done=self._pod)
        self.related = RelatedObjects(self, feed=self.feed)
        self.queue_labels, self._local_queues = (
            NO_QUEUE_LABELS,
            LocalQueues(
                self, is_needed=lambda: bool(self._loop.core.state.policy.queues), changed=self._update_queue_labels
            ),
        )
        self._shapes = PodShapeCache()
        self._recalls = PodRecalls(self.pods, self._pod)
        self.writes = PodWriter(self, pods=lambda: self.pods.objects, feed=self.feed)

    # Life

    def is_ready(self) -> bool:
        """Always: the gate takes events from the beginning, and decides nothing before it is synced and leads."""
        return True

    async def start(self, group: asyncio.TaskGroup) -> None:
        """Tell the gate everything that there is."""
        self._update_queue_labels()
        for part in (self.pods.run, self.nodes.run, self.related.run, self._local_queues.run, self.writes.run):
            group.create_task(part())
        await self.nodes.wait_synced()
        await self.pods.wait_synced()
        while self.lookups.is_waiting:  # noqa: ASYNC110  # once, at the start
            await asyncio.sleep(_LOOKED_UP_EVERY_S)
        await self._local_queues.wait_known()
        for wait in self.awaited:
            await wait()
        for service in self.services.services:
            self.feed(InferenceServiceUpdated(service))
        await self._loop.read(self._known)
        self._term(self.term())
        self.feed(GateSynced())
        self.log.info("kubernetes=synced pods=%d nodes=%d", len(self.pods.objects), len(self.nodes.objects))

    def _known(self, core: Any) -> None:
        """Feeds what the core holds, before anything is decided."""
        self._is_running = True
        # Of a policy that changed while the lists were read.
        self._update_queue_labels()
        for workload in core.state.workloads.values():
            if is_gate_workload(workload.workload_id):
                self.feed(status_event(workload))
                if workload.preempted_for and not self.settings.gate.moves:
                    self._refuse_preemption(workload.workload_id)
        for name in core.state.nodes:
            self.feed(NodeAcknowledged(name))

    # What happens

    def add_pod_listener(self, callback: Callable[[Sequence[Delta]], None]) -> None:
        """Tell changes of pods to others, too, in this run and in those after it; each run begins with all pods."""
        self._pods_heard.append(callback)

    def add_node_listener(self, callback: Callable[[Sequence[Delta]], None]) -> None:
        """Call a callback with changes of nodes, in the same way."""
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
        """Give the gate an event in its next round."""
        self._inbox.put(event)
        if self._admitted and isinstance(event, _ANSWERS):
            self.queue.hurry(CLUSTER_KEY)

    def _on_event(self, committed: CommitResult) -> None:
        if self._is_running:
            self.asked.on_commit(committed)
            for event in committed.events:
                if isinstance(event, PolicyChanged):
                    self._update_queue_labels()
                elif isinstance(event, PreemptionStarted) and not self.settings.gate.moves:
                    for name in filter(is_gate_workload, event.victims):
                        self._refuse_preemption(name)

    def _refuse_preemption(self, workload_id: str) -> None:
        """Lets a victim run on that was placed while pods were evicted here."""
        why = "nothing here evicts pods: start the controller with --kubernetes-abilities moves"
        self.tasks.start_task(self.asked.refuse_preemption(workload_id, why, again_s=_NOT_EVICTED_AGAIN_S))

    def _update_queue_labels(self) -> None:
        """What the labels of queues stand for now; waiting pods are read again if that has changed.

        A queue NAMESPACE/NAME that is declared goes before the ClusterQueue of the LocalQueue of that name.
        """
        leaves = list_leaf_queues(self._loop.core.state.policy.queues)
        labels = QueueLabels(
            reads_owners=bool(leaves),
            cluster_queues={
                key: name
                for key, name in self._local_queues.found.items()
                if name in leaves and "/".join(key) not in leaves
            },
        )
        if labels == self.queue_labels:
            return
        self.queue_labels = labels
        for key, found in list(self.pods.objects.items()):
            if (found.get("spec") or {}).get("schedulingGates") or awaits_binding(found):
                self._pod(key, found)

    def _term(self, term: LeadershipTerm | None) -> None:
        epoch = term.epoch if term is not None else None
        if term is None:
            self.feed(LeadershipLost(is_led=bool(self.context.elector.holder)))
        elif epoch != self._epoch:
            self.tasks.start_task(self._begin_term(term))
        if epoch != self._epoch:
            self.log.info("kubernetes=%s epoch=%s", "leading" if term else "following", epoch or "-")
        self._epoch = epoch

    async def _begin_term(self, term: LeadershipTerm) -> None:
        """Lead, when all is known that the leader before has written; at once where that was this run."""
        is_continued = term.is_continued and self._has_led
        if not is_continued:
            await self.pods.wait_listed_since(self.clock.monotonic_s())
        if self.leads(term.epoch):
            self._has_led = True
            self.feed(LeadershipAcquired(term.epoch, is_continued))

    def _pod_deltas(self, deltas: Sequence[Delta]) -> None:
        for callback in self._pods_heard:
            callback(deltas)
        for delta in deltas:
            if delta.new is None:
                self._recalls.uids.discard(delta.uid)
                self.feed(PodDeleted(delta.uid))
                continue
            self._pod(delta.key, delta.new)

    def _pod(self, key: ObjectKey, found: Object) -> None:
        try:
            pod = parse_pod(found, self._shapes)
            if pod.is_bound_by_us and not self.settings.gate.binds:
                pod = replace(pod, scheduler_name="")  # whoever binds it, it is not us
            sight, needs = self._view(pod, found)
        except KubernetesUnreadable as error:
            self._unread("pod", found, error)
            return
        if pod.awaits_placement:
            self.related.require_for(pod)
        if needs is None:
            self._recalls.uids.discard(pod.uid)
        else:
            self.lookups.wait_for(needs, key)
        if needs is None or not sight.pod.awaits_placement:
            # A waiting pod is nobody's until it is known whose: a moment as another unit would cost its place.
            self.feed(PodUpdated(sight))

    def _view(self, pod: Pod, found: Object) -> tuple[GatePodView, ObjectRef | None]:
        """What the gate makes of a pod, and what has to be looked up first."""
        sight, needs = view_pod(
            pod,
            found,
            self.lookups.found,
            self.services,
            recalls=pod.uid in self._recalls.uids,
            queues=self.queue_labels,
            leaves_slices=self.leaves_slices,
            leaves_claims=self.settings.leaves_claims,
        )
        may_evict = self.settings.gate.moves and self.queue_labels.reads_owners
        if not may_evict and sight.spec is not None:
            # Nobody here evicts it, or nobody asks: the journal is what older versions read.
            sight = sight._replace(spec=replace(sight.spec, evicted_by_engine=False))
        return sight, needs

    # Pods that are being admitted

    async def find_pin(self, candidate: Mapping[str, Any]) -> AdmissionPin | None:
        """The node of a pod that the API server is about to create, once its plan is in the journal; else None.

        Where that takes longer than `admission_s`, the answer names the plan alone, and the pod is bound by it.
        """
        sight, term = self._view_candidate(candidate), self.term()
        if sight is None or term is None:
            return None
        uid = sight.pod.uid
        answer: asyncio.Future[AdmissionPin | None] = asyncio.get_running_loop().create_future()
        self._admitted[uid] = answer
        is_answered = False
        try:
            self.feed(PodAdmitted(sight))
            self.queue.hurry(CLUSTER_KEY)
            async with asyncio.timeout(self.settings.admission_s):
                pin = await answer
                is_answered = True
        except TimeoutError:
            pin = AdmissionPin("", format_plan(PodPlan(term.epoch, sight.unit, 0, "", uid=uid)))
        finally:
            self._admitted.pop(uid, None)
            if not is_answered:
                self.feed(AdmissionAbandoned(uid))
        return pin

    def _view_candidate(self, candidate: Mapping[str, Any]) -> GatePodView | None:
        """A candidate as the gate sees a pod, with a uid of ours; None where it is not placed now."""
        metadata = candidate["metadata"]
        namespace, name = str(metadata["namespace"]), metadata.get("name") or metadata.get("generateName")
        leads = self.is_started and self.term() is not None and self.settings.gate.binds
        if self._loop.lag_s > self.settings.admission_s / 2.0:
            return None  # the core is behind: a review would wait, and could not be answered in time
        if not leads or not self.gate.may_pin_admitted(namespace, self.clock.monotonic_s()):
            return None
        uid = f"{ADMITTED_UID_PREFIX}{uuid.uuid4()}"
        created = datetime.fromtimestamp(self.clock.now_ns() // 1_000_000_000, UTC).isoformat()
        head = {**metadata, "uid": uid, "name": str(name or uid).rstrip("-."), "creationTimestamp": created}
        try:
            found = prune_pod({"metadata": head, "spec": candidate["spec"]})
            pod = parse_pod(found, self._shapes)
            sight, needs = self._view(pod, found)
        except (KubernetesUnreadable, AttributeError, KeyError, TypeError, ValueError) as error:
            self.log.debug("pod=%s/%s pinned=no error=%s", namespace, name, error)
            return None
        if needs is not None:
            self.tasks.start_task(self.lookups.find_owner(needs))  # for the next pod of this owner
            return None
        is_alone = sight.unit == f"pod-{uid}" and sight.spec is not None and not sight.waits_for
        if not is_alone or sight.spec is None:
            return None
        # Nobody is evicted for a pod that may never come.
        return sight._replace(spec=replace(sight.spec, never_preempts=True))

    def _answer_admitted(self, one: PinAdmitted | DeclineAdmitted) -> None:
        answer = self._admitted.get(one.uid)
        if answer is None or answer.done():
            return
        if isinstance(one, DeclineAdmitted):
            answer.set_result(None)
        elif self.leads(one.epoch):
            answer.set_result(AdmissionPin(one.node_name, one.plan))
        # Else the review's time runs out, and its pod is the next leader's.

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
        self.log.warning("%s=%s read=no error=%s", kind, found["metadata"].get("name"), error)

    def resync(self) -> None:
        """Time passes: nodes may have got an agent, and the gate's waits may be over."""
        for seen in list(self._nodes.values()):
            if self._node_event(seen.node)[1:] != seen[1:]:
                self._node(seen.node)
        self.lookups.expire_entries()
        self.feed(GateTicked())

    # What is done

    async def reconcile(self, _: str) -> Result | None:
        """Run one round of the gate over all events since the last."""
        events = self._inbox.drain()
        start_s = self.clock.monotonic_s()
        for one in self.gate.on_events(events, start_s):
            self._do(one)
        self.rounds += 1
        self.events_taken += len(events)
        self.round_s = max(self.round_s, self.clock.monotonic_s() - start_s)
        return None

    def _do(self, one: GateInstruction) -> None:
        match one:
            case RecordEvent():
                self.log.info("pod=%s event=%s", one.key, one.text)
                if self.term() is not None:
                    self.writes.record_event(one)
            case UngatePod() | BindPod() | AnnotatePod() | RemoveGate() | RecreatePod():
                self.tasks.start_task(self.writes.execute_instruction(one))
            case PinAdmitted() | DeclineAdmitted():
                self._answer_admitted(one)
            case ReportPlacement():
                if self.term() is not None:
                    self.writes.report_placement(one)
            case RetryPending():
                self.tasks.start_task(self.asked.reconsider())
            case RereadPod():
                if self._recalls.add_recall(one):
                    self.tasks.start_task(self._recalls.run())
            case RegisterNode(inventory) if self._has_agent(inventory.node_name):
                pass  # it came a moment ago, and says what the node is
            case (
                RegisterNode() | RemoveNode() | ReportUsage() | SubmitUnit() | AdoptUnit() | CancelUnit() | ScaleUnit()
            ):
                self.tasks.start_task(self.asked.execute_command(one))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconcilerContext(ClusterContext):
    """What a reconciler beside the gate uses; `engine` holds pods and nodes, and tells their changes (`add_pod_listener`)."""

    loop: CoreCommandPort
    engine: GateEngine
    devices: DeviceReports
    data: Path  # where the journal is
    draws: Callable[[], Mapping[str, PlacePower]]  # power below each budget of the policy, as measured last
    foresees: ForecastLookup | None = None
    promises: Callable[[], ListPromisesResponse] = ListPromisesResponse  # how services keep theirs now
