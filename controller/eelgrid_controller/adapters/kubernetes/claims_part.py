"""Mode `dra` as a part of a controller: claims, slices and classes followed, allocations written.

Owns the informers, the rounds, the order of a grant's writes, and that nothing is sent in a term that is
over. Must not know which pod gets which device (`kubernetes/claiming.py`).

Theory. What happens goes into one queue, and a round takes all of it, as in `engine.py`. The
claims of a grant are written many at a time, each by the version that was looked at, and the answers are taken
for what the watch will tell later; then the gates go at once. At the beginning of a term all
claims are read from the server itself: what the leader before wrote last may not have been
heard yet. A write does not outlive the term that it was begun in.
"""

import asyncio
from collections import deque
from collections.abc import Sequence

from eelgrid_controller.adapters.kubernetes.abilities import Part, Surroundings
from eelgrid_controller.adapters.kubernetes.claim_writes import ClaimWrites, pruned_claim
from eelgrid_controller.adapters.kubernetes.elector import Term, is_of
from eelgrid_controller.adapters.kubernetes.errors import ClusterError
from eelgrid_controller.adapters.kubernetes.held import Delta
from eelgrid_controller.adapters.kubernetes.informer import Informer
from eelgrid_controller.adapters.kubernetes.lookups import Lookups
from eelgrid_controller.adapters.kubernetes.port import Key as ObjectKey
from eelgrid_controller.adapters.kubernetes.port import Object
from eelgrid_controller.adapters.kubernetes.resources import DEVICE_CLASSES, RESOURCE_CLAIMS, RESOURCE_SLICES
from eelgrid_controller.adapters.kubernetes.retry import Limits
from eelgrid_controller.adapters.kubernetes.under_way import UnderWay
from eelgrid_controller.errors import ControllerError
from eelgrid_controller.kubernetes.claim_events import (
    ClaimGone,
    ClaimSeen,
    ClassGone,
    ClassSeen,
    Event,
    Free,
    Grant,
    Instruction,
    Led,
    Listed,
    NodeGone,
    NodeSeen,
    NotLed,
    PodGone,
    Recreate,
    Sliced,
    SliceGone,
    SliceSeen,
    Strip,
    Synced,
    Tell,
    Ticked,
)
from eelgrid_controller.kubernetes.claim_sight import seen_of
from eelgrid_controller.kubernetes.claiming import Claiming, ClaimingSettings
from eelgrid_controller.kubernetes.errors import KubernetesUnreadable
from eelgrid_controller.kubernetes.gate_events import NodeSliced
from eelgrid_controller.kubernetes.holders import Ref
from eelgrid_controller.kubernetes.owners import Refused
from eelgrid_controller.kubernetes.times import stamp_text
from eelgrid_controller.kubernetes.views import node_of

__all__ = ["ClaimsPart", "make"]

_LIMITS = Limits(attempts=4, whole_s=15.0, first_s=0.1, most_s=3.0)
_BATCH_S = 0.02
_TICK_S = 1.0
_AT_ONCE = 24
_CLAIMS_MOST = 300_000
_SLICES_MOST = 100_000
_AGAIN_S = 1.0
_METADATA = ("name", "namespace", "uid", "resourceVersion", "ownerReferences", "deletionTimestamp")


class EngineRestarted(ControllerError):
    """The engine began anew: pods and nodes are followed by other informers now."""


def make(around: Surroundings) -> Part:
    """The part, for `placing.py`."""
    return ClaimsPart(around)


def pruned(found: Object) -> Object:
    """A slice or a class: its head and its spec."""
    metadata = {key: found["metadata"][key] for key in ("name", "uid", "resourceVersion")}
    return {"metadata": metadata, "spec": found.get("spec") or {}}


class ClaimsPart:
    """One cluster's claims, allocated while this one leads."""

    def __init__(self, around: Surroundings, settings: ClaimingSettings | None = None) -> None:
        gate = around.engine.settings.gate
        self.settings = settings or ClaimingSettings(unbound_s=gate.unbound_s)
        self._around = around
        self._engine = around.engine
        self._cluster = around.cluster
        self._log = around.log
        self._is_running = False
        self._queue: deque[Event] = deque()
        self._wake = asyncio.Event()
        self._under_way = UnderWay(self._log, "claims")
        around.engine.hear_pods(self._pods)
        around.engine.hear_nodes(self._nodes)
        around.elector.hear(self._term)

    # Life

    async def run(self) -> None:
        """Allocate until cancelled; raises where it has to begin anew."""
        around, clock = self._around, self._around.clock
        self.machine = Claiming(self.settings)
        self._queue.clear()
        self._epoch: int | None = None
        self._needing: dict[Ref, dict[ObjectKey, None]] = {}
        self.writes = ClaimWrites(around, self.feed)
        self._lookups = Lookups(self._cluster, done=self._looked_up, monotonic_s=clock.monotonic_s, log=self._log)
        informers = [
            Informer(
                self._cluster, kind, rng=around.rng, monotonic_s=clock.monotonic_s, log=self._log, keep=keep, most=most
            )
            for kind, keep, most in (
                (RESOURCE_CLAIMS, pruned_claim, _CLAIMS_MOST),
                (RESOURCE_SLICES, pruned, _SLICES_MOST),
                (DEVICE_CLASSES, pruned, 10_000),
            )
        ]
        for informer, heard in zip(informers, (self._claims, self._slices, self._classes), strict=True):
            informer.hear(heard)
        try:
            async with asyncio.TaskGroup() as group:
                for informer in informers[1:]:
                    group.create_task(informer.run())
                await self._begin()
                # Claims are read after pods: of each pod that is there, its claims are known.
                group.create_task(informers[0].run())
                group.create_task(self._ticks())
                group.create_task(self._rounds())
                for informer in informers:
                    await informer.synced()
                self.feed(Synced())
                self._log.info("claims=synced claims=%d slices=%d", *(len(one.objects) for one in informers[:2]))
                self._term(around.elector.term())
        finally:
            self._is_running = False
            await self._under_way.end()

    async def _begin(self) -> None:
        """All pods and nodes that there are, and from now on what becomes of them."""
        self._seen = self._engine.pods, self._engine.nodes
        await self._engine.nodes.synced()
        await self._engine.pods.synced()
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
            self._lookups.forget_old()
            self.feed(Ticked())

    # What happens

    def feed(self, event: Event) -> None:
        """An event for the next round."""
        self._queue.append(event)
        self._wake.set()

    def _term(self, term: Term | None) -> None:
        if not self._is_running:
            return
        epoch = term.epoch if term is not None else None
        if epoch is None:
            self.feed(NotLed())
        elif epoch != self._epoch:
            self.feed(Led(epoch))
            self._under_way.begin(self._list(epoch))
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
                self.feed(Listed(epoch, [pruned_claim(one) for one in found.items]))
                self._log.info("claims=listed count=%d epoch=%d", len(found.items), epoch)
                return

    def _leads(self, epoch: int) -> bool:
        return is_of(self._around.elector.term(), epoch)

    def _pods(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas if self._is_running else ():
            if delta.new is None:
                assert delta.old is not None
                self.feed(PodGone(delta.old["metadata"]["uid"]))
            else:
                self._pod(delta.key, delta.new)

    def _pod(self, key: ObjectKey, found: Object) -> None:
        event = seen_of(found, self._lookups.found)
        member = event.claimant.member if event.claimant is not None else None
        if isinstance(member, Refused) and member.needs is not None:
            self._needing.setdefault(member.needs, {})[key] = None
            self._under_way.begin(self._lookups.look(member.needs))
        self.feed(event)

    def _looked_up(self, ref: Ref) -> None:
        for key in self._needing.pop(ref, {}):
            found = self._engine.pods.objects.get(key)
            if found is not None:
                self._pod(key, found)

    def _nodes(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas if self._is_running else ():
            if delta.new is None:
                self.feed(NodeGone(delta.key.name))
            else:
                self._node(delta.new)

    def _node(self, found: Object) -> None:
        try:
            self.feed(NodeSeen(node_of(found)))
        except KubernetesUnreadable as error:
            self._log.warning("node=%s read=no error=%s", found["metadata"].get("name"), error)

    def _claims(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            self.feed(ClaimSeen(delta.new) if delta.new is not None else ClaimGone(delta.old or {}))

    def _slices(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            self.feed(SliceSeen(delta.key.name, delta.new["spec"]) if delta.new else SliceGone(delta.key.name))

    def _classes(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            self.feed(ClassSeen(delta.new) if delta.new is not None else ClassGone(delta.key.name))

    # What is done

    async def _rounds(self) -> None:
        while True:
            await self._wake.wait()
            await asyncio.sleep(_BATCH_S)
            self._wake.clear()
            events, self._queue = list(self._queue), deque()
            stamp = stamp_text(self._around.clock.now_ns() // 1_000_000_000)
            for one in self.machine.take(events, self._around.clock.monotonic_s(), stamp):
                self._do(one)

    def _do(self, one: Instruction) -> None:
        match one:
            case Grant():
                self._under_way.begin(self.writes.grant(one))
            case Free():
                self._under_way.begin(self.writes.free(one))
            case Sliced(name, count):
                self._engine.feed(NodeSliced(name, count))
            case Strip():
                self._under_way.begin(self._engine.writes.strip(one))
            case Recreate():
                self._under_way.begin(self._engine.writes.recreate(one))
            case Tell():
                self._log.info("pod=%s told=%s", one.key, one.text)
                if self._around.elector.term() is not None:
                    self._engine.writes.tell(one)
