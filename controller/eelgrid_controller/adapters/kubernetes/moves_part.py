"""Ability `moves`: running pods go where the core has moved them, and off nodes that are drained.

Owns the loop: which orders are under way, in whose term, and what becomes of their places.
Must not know the steps of a move (`kubernetes/surging.py`, `evicting.py`), which are asked
for (`move_orders.py`), nor how anything is written (`move_writes.py`).

Theory. Each turn looks at every move under way and takes one step of it. A step is read from
objects as they are, the Deployment asked for anew each time, so it does not matter what was
lost. In a new term, moves are found by their notes, on pods and Deployments, and go on. A
move that fails is undone: its marks go, and its place is moved back in the core, or let go
where the old one is not free any more. Nothing moves where agents may not act either.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from eelgrid_controller.adapters.kubernetes.abilities import Surroundings
from eelgrid_controller.adapters.kubernetes.errors import ClusterError, Conflict, Forbidden
from eelgrid_controller.adapters.kubernetes.held import Delta
from eelgrid_controller.adapters.kubernetes.move_orders import MoveOrders
from eelgrid_controller.adapters.kubernetes.move_places import has_room, put_back
from eelgrid_controller.adapters.kubernetes.move_writes import MoveWrites
from eelgrid_controller.adapters.kubernetes.owned_pods import OwnedPods
from eelgrid_controller.command import Committed
from eelgrid_controller.events import WorkloadMoved
from eelgrid_controller.kubernetes.draining import Drained, status_of
from eelgrid_controller.kubernetes.evicting import Evict, evict, survives
from eelgrid_controller.kubernetes.gate_events import Key, MoveOver, Replaces
from eelgrid_controller.kubernetes.move_notes import Note, note_of
from eelgrid_controller.kubernetes.moving import Bounds, Manner, Mover, Order, goes_alone, order_of
from eelgrid_controller.kubernetes.names import ANNOTATION_DRAIN, ANNOTATION_DRAINED, DELETION_COST
from eelgrid_controller.kubernetes.surging import Mark, Over, Pace, Scale, Scene, Wait, deployment_of, surge
from eelgrid_controller.kubernetes.views import Pod

__all__ = ["MovesPart"]

_BOUNDS, _PACE = Bounds(), Pace()
_TURN_S = 0.5
_LOOK_S = 5.0  # at drained nodes and lost GPUs


@dataclass(slots=True)
class _Run:
    """One move under way."""

    order: Order
    notes: tuple[Note, ...]
    is_told: bool = False
    is_begun: bool = False  # something was done that has to be undone
    last: str = ""  # why the last eviction did not come about
    next_s: float = 0.0
    ending: Over | None = None  # how it ends if what was written last was written


class MovesPart:
    """The ability; a part."""

    def __init__(self, around: Surroundings) -> None:
        self.mover = Mover(_BOUNDS)
        self.writes = MoveWrites(around)
        self.orders = MoveOrders(around.engine, around.log)
        self.pace = _PACE
        self._around = around
        self._pods = OwnedPods()
        self._runs: dict[str, _Run] = {}
        self._epoch: int | None = None
        self._look_s = 0.0
        self._said: dict[str, str] = {}  # of drained nodes
        around.engine.hear_pods(self._heard_pods)
        around.loop.listeners.append(self._committed)

    # What happens

    def _now_s(self) -> float:
        return self._around.clock.now_ns() / 1e9

    def _heard_pods(self, deltas: Sequence[Delta]) -> None:
        self._pods.take(self._around.engine.pods, deltas)
        for delta in deltas:
            if delta.new is None and delta.old is not None:
                self.mover.gone(str(delta.old["metadata"]["uid"]))
            elif delta.old is None and delta.new is not None and self.mover.running:
                found = self._pods.pod(str(delta.new["metadata"]["uid"]))
                if found is not None:
                    self._claim(found)

    def _claim(self, pod: Pod) -> None:
        # Told before the engine tells of the pod itself: so it is never another unit first.
        if unit := self.mover.claim(pod):
            self._around.engine.feed(Replaces(pod.uid, unit))

    def _committed(self, committed: Committed) -> None:
        for event in committed.events:
            if isinstance(event, WorkloadMoved) and self._around.elector.term() is not None:
                self.orders.heard(event, self._now_s())

    # Life

    async def run(self) -> None:
        """Move pods until cancelled."""
        self._epoch = None
        while True:
            await asyncio.sleep(_TURN_S)
            term = self._around.elector.term()
            if term is None or not self._around.engine.pods.is_synced:
                self._epoch = None
                continue
            if term.epoch != self._epoch:
                await self._begin(term.epoch)
            await self._turn()

    async def _begin(self, epoch: int) -> None:
        """A new term: moves that were begun are found, and places that nobody will come to are let go."""
        self.mover = Mover(self.mover.bounds)
        self._runs, self._said = {}, {}
        found = {note.uid: note for _, note in self._noted()}
        for one in await self.writes.moving():
            deployment = deployment_of(one)
            if deployment.note is None:
                continue
            note = found[deployment.note.uid] = replace(deployment.note, deployment=deployment.name)
            if self._pods.pod(note.uid) is None:
                gone = Pod(uid=note.uid, namespace=deployment.namespace, name=note.pod, labels={}, annotations={})
                self._resume(order_of(note, gone), (note,))
        gangs: dict[str, list[tuple[Pod, Note]]] = {}
        for pod, note in self._noted():
            manner = Manner.EVICT if note.evict_s else Manner.SURGE
            gangs.setdefault(note.uid if goes_alone(note.unit, manner) else note.unit, []).append(
                (pod, found[note.uid])
            )
        for gang in gangs.values():
            orders = [order_of(note, pod) for pod, note in gang]
            goes = tuple(order.goes[0] for order in orders)
            self._resume(orders[0]._replace(goes=goes), tuple(note for _, note in gang))
        known = {going.uid for order in self.mover.running.values() for going in order.goes}
        for unit in self._around.engine.gate.units.values():
            if not self.orders.is_new(unit.workload_id):
                for uid in set(unit.moving.values()) - known:
                    self._around.engine.feed(MoveOver(unit.name, uid))
        self._epoch = epoch

    def _noted(self) -> list[tuple[Pod, Note]]:
        pods = (self._pods.pod(uid) for uid in list(self._pods.noted))
        return [
            (pod, note)
            for pod in pods
            if pod is not None and (note := note_of(pod.annotations)) is not None and note.uid == pod.uid
        ]

    def _resume(self, order: Order, notes: tuple[Note, ...]) -> None:
        self._around.log.info("move=%s resumed pods=%d to=%s", order.unit, len(notes), notes[0].to or "-")
        self.mover.begin(order)
        self._runs[order.name] = _Run(order, notes, is_told=True, is_begun=True)
        for pod in self._pods.of(order.owner_uid):
            if pod.is_gated:
                self._claim(pod)

    async def _turn(self) -> None:
        core, now_s = self._around.loop.core, self._now_s()
        for order in self.orders.of_core(core, now_s):
            if not self.mover.offer(order, now_s):
                await self._refuse(order, "too many moves are asked for, or it is being moved already")
        if now_s >= self._look_s:
            self._look_s = now_s + _LOOK_S
            await self._look()
        # A place that is kept is kept from others: what may not move now gives it back.
        bounds = self.mover.bounds
        late = dict.fromkeys(self.mover.late(now_s), f"its turn has not come in {bounds.wait_s:g} s")
        for order in self.mover.waiting.values():
            if order.workload and self.mover.rests(order, self._pods.pod, now_s):
                late[order] = f"it came by a move less than {bounds.again_s:g} s ago"
        for order, why in late.items():
            self.mover.withdraw(order.name)
            await self._refuse(order, why)
        for order in list(self.mover.due(self._pods.pod, now_s)):
            await self._start(order, now_s)
        for run in list(self._runs.values()):
            if run.next_s <= now_s:
                try:
                    await self._step(run)
                except Conflict as error:  # looked at anew in the next turn
                    self._around.log.debug("move=%s step=again error=%s", run.order.unit, error)
                except ClusterError as error:
                    if isinstance(error, Forbidden) and not run.is_begun:
                        await self._end(run, Over(is_done=False, why=str(error)))
                        continue
                    run.next_s = now_s + 2.0
                    self._around.log.warning("move=%s step=failed error=%s", run.order.unit, error)

    async def _look(self) -> None:
        core = self._around.loop.core
        orders, drained = self.orders.of_nodes(core)
        moved = list(self.orders.of_services(core))
        wanted = {order.name for order in (*orders, *moved)}
        for order in [one for one in self.mover.waiting.values() if not one.workload and one.name not in wanted]:
            self.mover.withdraw(order.name)
        for order in moved:
            self.mover.offer(order, self._now_s())
        for order in (*orders, *self.orders.of_lost(core)):
            if not self.mover.knows(order) and await has_room(self._around.loop, order):
                self.mover.offer(order, self._now_s())
        await self._say(drained)

    async def _say(self, drained: dict[str, Drained]) -> None:
        """On each drained node, how far it is; on one that is drained no more, nothing."""
        nodes = self._around.engine.nodes.objects
        for key, node in nodes.items():
            before = (node["metadata"].get("annotations") or {}).get(ANNOTATION_DRAINED)
            text = status_of(drained[key.name]) if key.name in drained else None
            if before == text or (text is None and before is None) or self._said.get(key.name) == text:
                continue
            self._said[key.name] = text or ""
            try:
                await self.writes.node_says(key.name, {ANNOTATION_DRAINED: text})
            except ClusterError as error:
                self._around.log.warning("node=%s says=no error=%s", key.name, error)
            if text is not None:
                name = Key("", key.name)
                await self.writes.tell("Node", name, key.name, f"{ANNOTATION_DRAIN}: {text}")

    # One move

    async def _start(self, order: Order, now_s: float) -> None:
        self._runs[order.name] = run = _Run(order, tuple(self._notes(order, now_s)))
        places = {going.node_name for going in order.goes} | {going.to for going in order.goes if going.to}
        core = self._around.loop.core
        observed = sorted(name for name in places if not self.orders.is_enforced(core, name))
        if observed:
            to = next((f" to {going.to}" for going in order.goes if going.to), "")
            await self._end(run, Over(is_done=False, why=f"would be moved{to}: {observed[0]} is only observed"))
            return
        try:
            problem = await self._problem(run)
        except ClusterError as error:
            problem = str(error)
        if problem:
            await self._end(run, Over(is_done=False, why=problem))

    def _notes(self, order: Order, now_s: float) -> list[Note]:
        evict_s = now_s + min(order.grace_s, self.mover.bounds.grace_most_s) if order.manner is Manner.EVICT else 0.0
        return [
            Note(
                uid=going.uid, pod=going.key.name, unit=order.unit, workload=order.workload, replica=going.replica,
                to=going.to, owner=order.owner_uid, since_s=now_s, evict_s=evict_s, cause=order.cause,
            )
            for going in order.goes
        ]  # fmt: skip

    async def _problem(self, run: _Run) -> str:
        """Why a move does not begin; a Deployment is looked for."""
        order = run.order
        going = order.goes[0]
        pod = self._pods.pod(going.uid)
        if pod is None:
            return "the pod is gone"
        if order.manner is Manner.SURGE:
            name = await self.writes.deployment_name(pod)
            run.notes = tuple(replace(note, deployment=name) for note in run.notes)
            return "" if name else "no Deployment is above its ReplicaSet"
        if len(order.goes) > self.mover.bounds.gang_most:
            return f"its gang has {len(order.goes)} pods, and {self.mover.bounds.gang_most} may move at once"
        if order.owner_kind == "Job":
            job = await self.writes.job(pod.namespace, order.owner_name)
            if job is not None and not survives(job, len(order.goes)):
                return "its Job would fail: raise backoffLimit, or let podFailurePolicy ignore DisruptionTarget"
        return ""

    async def _step(self, run: _Run) -> None:
        if not run.is_told:
            run.is_told = True
            await self._tell_begun(run)
        order = run.order
        if order.manner is Manner.SURGE:
            await self._surge(run)
            return
        pods = {going.uid: pod for going in order.goes if (pod := self._pods.pod(going.uid)) is not None}
        step = evict(run.notes, pods, self.pace, self._now_s(), arrived=self._has_arrived(order), last=run.last)
        match step:
            case Mark():
                await self.writes.mark(step)
            case Evict(found):
                run.last = await self.writes.evict(found)
                run.is_begun = run.is_begun or not run.last
                if run.last:
                    run.next_s = self._now_s() + self.pace.retry_s
                    await self._tell(run, f"not evicted yet: {run.last}", is_warning=True)
            case Over():
                await self._end(run, step)

    async def _surge(self, run: _Run) -> None:
        note, namespace = run.notes[0], run.order.goes[0].key.namespace
        found = await self.writes.deployment(namespace, note.deployment)
        deployment = deployment_of(found) if found is not None else None
        is_ours = deployment is not None and deployment.note is not None and deployment.note.uid == note.uid
        other = "" if is_ours else await self.writes.autoscaler(namespace, note.deployment)
        step = surge(note, Scene(deployment, list(self._pods.of(note.owner)), other), self.pace, self._now_s())
        match step:
            case Mark():
                await self.writes.mark(step)
            case Scale():
                run.ending = step.over
                await self.writes.scale(step)
                run.is_begun = True
                if step.over is not None:
                    await self._end(run, step.over)
            case Over():
                # What was written last may have been written although no answer came.
                await self._end(run, run.ending or step)
            case Wait():
                pass

    def _has_arrived(self, order: Order) -> bool:
        """Whether every place that is kept has a pod that goes there."""
        unit = self._around.engine.gate.units.get(order.unit)
        if unit is None or not order.workload or unit.workload_id != order.workload:
            return True
        return all(
            (member := unit.members.get(unit.slots.get(replica, ""))) is not None and not member.is_waiting
            for replica in unit.places
        )

    # Its end

    async def _refuse(self, order: Order, why: str) -> None:
        """An order that does not begin; a move of the same pods that is under way goes on."""
        await self._tell(_Run(order, ()), f"not moved: {why}", is_warning=True)
        await self._give_back(order, is_done=False)

    async def _end(self, run: _Run, over: Over) -> None:
        order = run.order
        came = self._came(run)
        self._runs.pop(order.name, None)
        self.mover.withdraw(order.name)
        self.mover.end(order, is_done=over.is_done)
        text = f"moved: {over.why}" if over.is_done else f"not moved: {over.why}"
        await self._tell(run, text, is_warning=not over.is_done, pod=came if over.is_done else None)
        try:
            if over.is_done and came is not None:
                await self.writes.came(came, self._now_s())
            for going in order.goes:
                pod = self._pods.pod(going.uid)
                if pod is not None and note_of(pod.annotations) is not None:
                    await self.writes.mark(Mark(pod, None, pod.annotations.get(DELETION_COST)))
        except ClusterError as error:
            self._around.log.warning("move=%s cleaned=no error=%s", order.unit, error)
        await self._give_back(order, is_done=over.is_done)

    async def _give_back(self, order: Order, *, is_done: bool) -> None:
        """What no pod has come to is put back to where the old one stands, or let go."""
        if not order.workload:
            return
        here = [pod for going in order.goes if (pod := self._pods.pod(going.uid)) is not None]
        if here and not is_done:
            await put_back(self._around.loop, self.orders, order, here, self._around.log)
        for going in order.goes:
            self._around.engine.feed(MoveOver(order.unit, going.uid))

    def _came(self, run: _Run) -> Pod | None:
        """The pod that came in the stead of the old one."""
        for uid in self.mover.claimed_by(run.order):
            if (pod := self._pods.pod(uid)) is not None:
                return pod
        if run.order.manner is Manner.EVICT:
            return None
        gone = {going.uid for going in run.order.goes}
        others = [pod for pod in self._pods.of(run.order.owner_uid) if pod.uid not in gone and not pod.is_terminal]
        return max(others, key=lambda pod: (pod.created_s or 0.0, pod.name), default=None)

    async def _tell_begun(self, run: _Run) -> None:
        order, going = run.order, run.order.goes[0]
        to = f" to {going.to}" if going.to else ""
        gang = f" with {len(order.goes) - 1} more of its gang" if len(order.goes) > 1 else ""
        grace = max(0.0, run.notes[0].evict_s - self._now_s())
        how = "another pod is made before" if order.manner is Manner.SURGE else f"evicted in {grace:.0f} s"
        await self._tell(run, f"moves from {going.node_name}{to}{gang}: {order.cause}; {how}")

    async def _tell(self, run: _Run, text: str, *, is_warning: bool = False, pod: Pod | None = None) -> None:
        going = run.order.goes[0]
        key, uid = (Key(pod.namespace, pod.name), pod.uid) if pod is not None else (going.key, going.uid)
        await self.writes.tell("Pod", key, uid, text, is_warning=is_warning)
