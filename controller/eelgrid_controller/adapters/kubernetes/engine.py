"""The engine of mode `gate`: what an API server and the core tell goes in, what the gate wants is done.

Owns the order of starting, the rounds, and the tasks. Must not know which pod goes where
(`kubernetes/gate.py`), nor how a write is sent (`writes.py`, `asked.py`).

Theory. Whatever happens becomes an event in one queue; a round takes all that are there and
asks the gate once, so pods that come together are planned together. A round begins at once
when nothing happened for `batch_s`, and that much after the one before otherwise: a pod that
comes alone waits for nobody, a burst is taken in bites. Commands and writes run beside the
rounds and end as events. The gate is told that everything is there when pods and nodes have
been listed and the core's work has been told; a standby goes through all this, too, and
only leads later. It hears of its term when pods have been listed anew since that began: a watch
may be behind what the leader before has written. What goes wrong inside ends the run with a log entry, and another begins
with a gate that is made anew from lists: nothing that matters is kept here alone.
"""

import asyncio
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from eelgrid_controller.adapters.kubernetes.asked import Asked, Commands, is_ours, standing_of
from eelgrid_controller.adapters.kubernetes.elector import Term, is_of
from eelgrid_controller.adapters.kubernetes.held import Delta
from eelgrid_controller.adapters.kubernetes.informer import Informer
from eelgrid_controller.adapters.kubernetes.lookups import Lookups
from eelgrid_controller.adapters.kubernetes.port import Cluster, Key, Object
from eelgrid_controller.adapters.kubernetes.pruning import pruned_node, pruned_pod
from eelgrid_controller.adapters.kubernetes.recalls import Recalls
from eelgrid_controller.adapters.kubernetes.related import RelatedObjects
from eelgrid_controller.adapters.kubernetes.resources import NODES, PODS
from eelgrid_controller.adapters.kubernetes.under_way import UnderWay
from eelgrid_controller.adapters.kubernetes.writes import Writes
from eelgrid_controller.clock import Clock
from eelgrid_controller.command import Committed
from eelgrid_controller.kubernetes.errors import KubernetesUnreadable
from eelgrid_controller.kubernetes.gate import Gate, GateSettings
from eelgrid_controller.kubernetes.gate_events import (
    Adopt,
    Annotate,
    Cancel,
    Event,
    Grow,
    Instruction,
    Join,
    Leave,
    Led,
    NodeGone,
    NodeKnown,
    NodeSeen,
    NotLed,
    Occupy,
    PodGone,
    PodSeen,
    Recall,
    Reconsider,
    Recreate,
    ReportPlacement,
    ServiceGone,
    ServiceSeen,
    Strip,
    Submit,
    Synced,
    Tell,
    Ticked,
    Ungate,
)
from eelgrid_controller.kubernetes.holders import Ref
from eelgrid_controller.kubernetes.nodes import agrees
from eelgrid_controller.kubernetes.serving import Service, Services, target_of
from eelgrid_controller.kubernetes.sight import sight_of
from eelgrid_controller.kubernetes.views import KubeNode, Shapes, node_of, owner_of, pod_of

__all__ = ["Elects", "Engine", "EngineSettings"]

_AGAIN_S = 5.0
_LOOKED_UP_EVERY_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """How the engine runs."""

    identity: str
    gate: GateSettings = field(default_factory=GateSettings)
    batch_s: float = 0.1
    tick_s: float = 1.0
    writes_at_once: int = 24
    leaves_claims: bool = False  # another part places pods that get their devices by claims
    pods_most: int = 300_000
    nodes_most: int = 20_000


class Elects(Protocol):
    """What the engine needs of the elector."""

    @property
    def holder(self) -> str:
        """Who leads, as far as is known."""

    def term(self) -> Term | None:
        """The term that runs at this moment."""

    def hear(self, callback: Callable[[Term | None], None]) -> None:
        """Tell the beginning and the end of terms."""


class Engine:
    """One cluster's pods, placed by one core."""

    def __init__(
        self,
        *,
        cluster: Cluster,
        loop: Commands,
        elector: Elects,
        has_agent: Callable[[str], bool],
        settings: EngineSettings,
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
        self._queue: deque[Event] = deque()
        self._wake = asyncio.Event()
        self._nodes: dict[str, NodeSeen] = {}  # as they were told
        self._epoch: int | None = None
        self._has_led = False  # the gate of this run was told that it leads
        self._cluster = cluster
        self._rng = rng
        self._under_way = UnderWay(log, "kubernetes")
        self._nodes_heard: list[Callable[[Sequence[Delta]], None]] = []
        self._pods_heard: list[Callable[[Sequence[Delta]], None]] = []
        self.services = Services()
        # What else has to be known before anything is decided; each wait is bounded.
        self.awaited: list[Callable[[], Awaitable[None]]] = []
        self.asked = Asked(loop, feed=self.feed, monotonic_s=clock.monotonic_s, log=log)
        self._begin()
        loop.listeners.append(self._heard)
        elector.hear(self._term)

    def _begin(self) -> None:
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
            self._cluster, PODS, rng=rng, monotonic_s=clock.monotonic_s, log=log, keep=pruned_pod,
            most=settings.pods_most,
        )  # fmt: skip
        self.nodes = Informer(
            self._cluster, NODES, rng=rng, monotonic_s=clock.monotonic_s, log=log, keep=pruned_node,
            most=settings.nodes_most,
        )  # fmt: skip
        self.pods.hear(self._pod_deltas)
        self.nodes.hear(self._node_deltas)
        self.lookups = Lookups(self._cluster, done=self._looked_up, monotonic_s=clock.monotonic_s, log=log)
        self.related = RelatedObjects(self._cluster, feed=self.feed, rng=rng, monotonic_s=clock.monotonic_s, log=log)
        self._shapes = Shapes()
        self._needing: dict[Ref, dict[Key, None]] = {}
        self._recalls = Recalls(self.pods, self._pod)
        self.writes = Writes(
            self._cluster, pods=lambda: self.pods.objects, leads=self._leads, feed=self.feed,
            identity=settings.identity, at_once=settings.writes_at_once, clock=clock, rng=rng, log=log,
        )  # fmt: skip

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
            self._begin()

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for part in (self.pods.run, self.nodes.run, self.related.run, self.writes.run, self._ticks, self._rounds):
                group.create_task(part())
            await self.nodes.synced()
            await self.pods.synced()
            while self._needing:  # noqa: ASYNC110  # once, at the start
                await asyncio.sleep(_LOOKED_UP_EVERY_S)
            for wait in self.awaited:
                await wait()
            for service in self.services.all:
                self.feed(ServiceSeen(service))
            await self._loop.read(self._known)
            self._term(self._elector.term())
            self.feed(Synced())
            self._log.info("kubernetes=synced pods=%d nodes=%d", len(self.pods.objects), len(self.nodes.objects))

    def _known(self, core: Any) -> None:
        """What the core holds, told before anything is decided."""
        self._is_running = True
        for workload in core.state.workloads.values():
            if is_ours(workload.workload_id):
                self.feed(standing_of(workload))
        for name in core.state.nodes:
            self.feed(NodeKnown(name))

    # What happens

    def hear_pods(self, callback: Callable[[Sequence[Delta]], None]) -> None:
        """Tell changes of pods to others, too, in this run and in those after it; each run begins with all pods."""
        self._pods_heard.append(callback)

    def hear_nodes(self, callback: Callable[[Sequence[Delta]], None]) -> None:
        """Tell changes of nodes to others, in the same way."""
        self._nodes_heard.append(callback)

    def serve(self, services: Iterable[Service]) -> None:
        """From now on the pods of these services' targets are their replicas."""
        before = {service.unit: service for service in self.services.all}
        changed = self.services.replaced(services)
        after = {service.unit: service for service in self.services.all}
        for unit in before.keys() - after.keys():
            self.feed(ServiceGone(unit))
        for unit, service in after.items():
            if before.get(unit) != service:
                self.feed(ServiceSeen(service))
        if not changed:
            return
        for key, found in list(self.pods.objects.items()):
            if target_of(key.namespace, owner_of(found)) in changed:
                self._pod(key, found)

    def feed(self, event: Event) -> None:
        """An event for the next round."""
        self._queue.append(event)
        self._wake.set()

    def _heard(self, committed: Committed) -> None:
        if self._is_running:
            self.asked.heard(committed)

    def _term(self, term: Term | None) -> None:
        epoch = term.epoch if term is not None else None
        if term is None:
            self.feed(NotLed(is_led=bool(self._elector.holder)))
        elif epoch != self._epoch:
            self._under_way.begin(self._begin_term(term))
        if epoch != self._epoch:
            self._log.info("kubernetes=%s epoch=%s", "leading" if term else "following", epoch or "-")
        self._epoch = epoch

    async def _begin_term(self, term: Term) -> None:
        """Lead, when all is known that the leader before has written; at once where that was this run."""
        is_continued = term.is_continued and self._has_led
        if not is_continued:
            await self.pods.listed_since(self._clock.monotonic_s())
        if self._leads(term.epoch):
            self._has_led = True
            self.feed(Led(term.epoch, is_continued))

    def _leads(self, epoch: int) -> bool:
        return is_of(self._elector.term(), epoch)

    def _pod_deltas(self, deltas: Sequence[Delta]) -> None:
        for callback in self._pods_heard:
            callback(deltas)
        for delta in deltas:
            if delta.new is None:
                assert delta.old is not None
                self._recalls.uids.discard(delta.old["metadata"]["uid"])
                self.feed(PodGone(delta.old["metadata"]["uid"]))
                continue
            self._pod(delta.key, delta.new)

    def _pod(self, key: Key, found: Object) -> None:
        try:
            pod = pod_of(found, self._shapes)
            sight, needs = sight_of(
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
            self.related.need_for(pod)
        if needs is None:
            self._recalls.uids.discard(pod.uid)
        else:
            self._needing.setdefault(needs, {})[key] = None
            self._under_way.begin(self.lookups.look(needs))
        if needs is None or not sight.pod.is_gated:
            # A gated pod is nobody's until it is known whose: a moment as another unit would cost its place.
            self.feed(PodSeen(sight))

    def _looked_up(self, ref: Ref) -> None:
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
                self.feed(NodeGone(name))
                continue
            try:
                node = node_of(delta.new)
            except KubernetesUnreadable as error:
                self._unread("node", delta.new, error)
                continue
            self._node(node)

    def _node(self, node: KubeNode) -> None:
        seen = self._seen(node)
        before = self._nodes.get(node.name)
        if before is None or before[1:] != seen[1:] or not node.is_as(before.node):
            self._nodes[node.name] = seen
            self.feed(seen)

    def _seen(self, node: KubeNode) -> NodeSeen:
        name, awaits = node.name, False
        if self._awaits_agent(name):
            # What the journal has of a node is good for as long as its kubelet says nothing else.
            record = self._loop.core.state.nodes.get(name)
            awaits = record is None or not agrees(node, record.inventory)
        return NodeSeen(node, self._has_agent(name), awaits)

    def _unread(self, kind: str, found: Object, error: KubernetesUnreadable) -> None:
        self.unreadable += 1
        self._log.warning("%s=%s read=no error=%s", kind, found["metadata"].get("name"), error)

    async def _ticks(self) -> None:
        while True:
            await asyncio.sleep(self.settings.tick_s)
            for seen in list(self._nodes.values()):
                if self._seen(seen.node)[1:] != seen[1:]:
                    self._node(seen.node)
            self.lookups.forget_old()
            self.feed(Ticked())

    # What is done

    async def _rounds(self) -> None:
        next_s = 0.0
        while True:
            await self._wake.wait()
            await asyncio.sleep(max(0.0, next_s - self._clock.monotonic_s()))
            self._wake.clear()
            events, self._queue = list(self._queue), deque()
            start_s = self._clock.monotonic_s()
            told = self.gate.take(events, start_s)
            for one in told:
                self._do(one)
            self.rounds += 1
            self.events += len(events)
            end_s = self._clock.monotonic_s()
            self.round_s = max(self.round_s, end_s - start_s)
            next_s = end_s + self.settings.batch_s

    def _do(self, one: Instruction) -> None:
        match one:
            case Tell():
                self._log.info("pod=%s told=%s", one.key, one.text)
                if self._elector.term() is not None:
                    self.writes.tell(one)
            case Ungate():
                self._under_way.begin(self.writes.ungate(one))
            case Annotate():
                self._under_way.begin(self.writes.annotate(one))
            case Strip():
                self._under_way.begin(self.writes.strip(one))
            case Recreate():
                self._under_way.begin(self.writes.recreate(one))
            case ReportPlacement():
                if self._elector.term() is not None:
                    self.writes.report(one)
            case Reconsider():
                self._under_way.begin(self.asked.reconsider())
            case Recall():
                if self._recalls.ask(one):
                    self._under_way.begin(self._recalls.run())
            case Join(inventory) if self._has_agent(inventory.node_name):
                pass  # it came a moment ago, and says what the node is
            case Join() | Leave() | Occupy() | Submit() | Adopt() | Cancel() | Grow():
                self._under_way.begin(self.asked.carry_out(one))
