"""Moves of running pods to where the core placed them, and off drained nodes and lost GPUs.

`move_orders` and `preemptions` find which moves are due, and `MoveReconciler` takes one step of each at a time.
"""

import asyncio
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from eelgrid_controller.core.core import Core
from eelgrid_controller.core.steps import CommitResult
from eelgrid_controller.engines.core_port import CoreCommandPort
from eelgrid_controller.engines.kubernetes.api.errors import (
    ClusterError,
    Conflict,
    Forbidden,
    RetryLimits,
    StaleTerm,
)
from eelgrid_controller.engines.kubernetes.api.informer import Delta, Informer
from eelgrid_controller.engines.kubernetes.api.port import DEPLOYMENTS, JOBS, Object, ObjectKey, uid_of
from eelgrid_controller.engines.kubernetes.model.objects import Pod, controller_of, parse_pod
from eelgrid_controller.engines.kubernetes.model.pod_group import PodKey
from eelgrid_controller.engines.kubernetes.model.quantities import KubernetesUnreadable
from eelgrid_controller.engines.kubernetes.model.well_known import (
    ANNOTATION_DRAIN,
    ANNOTATION_DRAINED,
    ANNOTATION_MOVE,
    ANNOTATION_PLAN,
    DELETION_COST,
)
from eelgrid_controller.engines.kubernetes.pods.gate_events import MoveFinished, ReplacementStarted
from eelgrid_controller.engines.kubernetes.pods.migration import (
    CordonMarks,
    DrainProgress,
    EvictPods,
    MarkPod,
    MoveEnded,
    MoveLimits,
    MoveMethod,
    MoveOrder,
    MoveQueue,
    MoveTimeouts,
    ScaleDeployment,
    SurgeState,
    WaitStep,
    cordon_marks,
    cordon_patch,
    drain_status,
    moves_alone,
    next_eviction_step,
    next_surge_step,
    parse_deployment,
    resumed_order,
    survives_evictions,
)
from eelgrid_controller.engines.kubernetes.pods.plan_annotation import MoveNote, parse_move_note, plan_for_pod
from eelgrid_controller.engines.kubernetes.reconcilers.gate_engine import ReconcilerContext
from eelgrid_controller.engines.kubernetes.reconcilers.move_orders import MoveOrders, has_room
from eelgrid_controller.engines.kubernetes.reconcilers.preemptions import REFUSED_AGAIN_S, list_preemptions
from eelgrid_controller.engines.kubernetes.reconcilers.reconciler import CLUSTER_KEY, Reconciler, Result
from eelgrid_controller.engines.kubernetes.reconcilers.writers import MoveWriter
from eelgrid_controller.state.cordons import DrainTerms
from eelgrid_controller.state.events import WorkloadMoved
from eelgrid_protos.errors import ContractError
from eelgrid_protos.faults import Fault
from eelgrid_protos.messages import Move, Placement, ReplicaMove, WorkloadPhase


async def restore_places(
    loop: CoreCommandPort, orders: MoveOrders, order: MoveOrder, pods: Sequence[Pod], log: logging.Logger
) -> bool:
    """Move the places of pods that did not go back to where they stand; where they cannot be had they are let go."""
    moves = _back(loop.core, order, pods)
    if moves is None:
        return False
    orders.expect_reversal(order.workload)
    try:
        await loop.apply_moves((moves,), is_back=True)
    except (Fault, ContractError) as error:
        orders.cancel_reversal(order.workload)
        log.info("workload=%s restored=no error=%s", order.workload, error)
        return False
    return True


def _back(core: Core, order: MoveOrder, pods: Sequence[Pod]) -> Move | None:
    workload = core.state.workloads.get(order.workload)
    if workload is None or workload.phase is not WorkloadPhase.PLACED:
        return None
    here = {pod.uid: pod for pod in pods}
    places = {place.replica: place for place in workload.placements}
    replicas = []
    for going in order.goes:
        source, pod = places.get(going.replica), here.get(going.uid)
        if source is None or pod is None or not going.to or source.node_name != going.to:
            continue
        plan = plan_for_pod(pod.uid, pod.annotations.get(ANNOTATION_PLAN, ""))
        record = core.state.nodes.get(pod.node_name)
        if plan is None or record is None or plan.node_name != pod.node_name:
            return None
        uuids = {gpu.index: gpu.uuid for gpu in record.inventory.gpus}
        if not set(plan.devices) <= set(uuids) or len(plan.devices) != len(source.gpu_uuids):
            return None
        target = Placement(
            replica=going.replica,
            node_name=pod.node_name,
            gpu_uuids=tuple(uuids[index] for index in plan.devices),
            gpu_indexes=plan.devices,
        )
        replicas.append(ReplicaMove(source=source, target=target))
    return Move(workload_id=order.workload, replicas=tuple(replicas)) if replicas else None


class OwnedPods:
    """Pods of the engine by uid and by owner."""

    def __init__(self) -> None:
        self.noted: dict[str, ObjectKey] = {}  # pods that carry the note of a move, by uid
        self._informer: Informer | None = None
        self._keys: dict[str, ObjectKey] = {}
        self._owned: dict[str, dict[str, ObjectKey]] = {}

    def on_deltas(self, informer: Informer, deltas: Sequence[Delta]) -> None:
        """Update the index by changes of the pods that an informer holds."""
        if informer is not self._informer:
            self._informer = informer
            for kept in (self.noted, self._keys, self._owned):
                kept.clear()
        for delta in deltas:
            if delta.old is not None and (delta.new is None or uid_of(delta.new) != uid_of(delta.old)):
                self._remove_pod(delta.old)
            if delta.new is not None:
                self._put(delta.key, delta.new)

    def _put(self, key: ObjectKey, found: Object) -> None:
        uid, owner = uid_of(found), controller_of(found)
        self._keys[uid] = key
        if owner is not None:
            self._owned.setdefault(owner.uid, {})[uid] = key
        if ANNOTATION_MOVE in (found["metadata"].get("annotations") or {}):
            self.noted[uid] = key
        else:
            self.noted.pop(uid, None)

    def _remove_pod(self, found: Object) -> None:
        uid, owner = uid_of(found), controller_of(found)
        self._keys.pop(uid, None)
        self.noted.pop(uid, None)
        if owner is not None and (owned := self._owned.get(owner.uid)) is not None:
            owned.pop(uid, None)
            if not owned:
                del self._owned[owner.uid]

    def pod(self, uid: str) -> Pod | None:
        """A pod as it is held; None where it is gone."""
        key = self._keys.get(uid)
        found = self._informer.objects.get(key) if key is not None and self._informer is not None else None
        if found is None or uid_of(found) != uid:
            return None
        try:
            return parse_pod(found)
        except KubernetesUnreadable:
            return None

    def pods_of(self, owner_uid: str) -> Iterator[Pod]:
        """The pods of an owner."""
        for uid in list(self._owned.get(owner_uid, ())):
            found = self.pod(uid)
            if found is not None:
                yield found


_LIMITS = RetryLimits(attempts=3, whole_s=8.0, first_s=0.1, most_s=2.0)
_BOUNDS, _PACE = MoveLimits(), MoveTimeouts()
_TURN_S = 0.5
_LOOK_S = 5.0  # at drained nodes and lost GPUs


@dataclass(slots=True)
class _MoveRun:
    """A move in progress."""

    order: MoveOrder
    notes: tuple[MoveNote, ...]
    is_told: bool = False
    is_begun: bool = False  # something was done that has to be undone
    last: str = ""  # why the last eviction did not come about
    next_s: float = 0.0
    ending: MoveEnded | None = None  # how it ends if what was written last was written


class MoveReconciler(Reconciler[str]):
    """Moves running pods to where the core placed them, and off drained nodes and lost GPUs."""

    def __init__(self, around: ReconcilerContext) -> None:
        super().__init__(around, "moves", limits=_LIMITS)
        self.mover = MoveQueue(_BOUNDS)
        self.writes = MoveWriter(self)
        self.orders = MoveOrders(around.engine, self.log)
        self.pace = _PACE
        self._around = around
        self._pods = OwnedPods()
        self._runs: dict[str, _MoveRun] = {}
        self._look_s = 0.0
        self._said: dict[str, str] = {}  # of drained nodes
        self._looked_at = set[str]()  # nodes whose cordons are known in this term
        around.engine.add_pod_listener(self._on_pods)
        around.loop.listeners.append(self._on_commit)

    # What happens

    def _now_s(self) -> float:
        return self.clock.now_ns() / 1e9

    def _on_pods(self, deltas: Sequence[Delta]) -> None:
        self._pods.on_deltas(self._around.engine.pods, deltas)
        for delta in deltas:
            if delta.new is None:
                self.mover.release_claim(delta.uid)
            elif delta.old is None and self.mover.running:
                found = self._pods.pod(delta.uid)
                if found is not None:
                    self._claim(found)

    def _claim(self, pod: Pod) -> None:
        # Told before the engine tells of the pod itself: so it is never another unit first.
        if unit := self.mover.claim_place(pod):
            self._around.engine.feed(ReplacementStarted(pod.uid, unit))

    def _on_commit(self, committed: CommitResult) -> None:
        for event in committed.events:
            if isinstance(event, WorkloadMoved) and self.term() is not None:
                self.orders.on_moved(event, self._now_s())

    # Life

    def is_ready(self) -> bool:
        """While this one leads and knows all pods."""
        return super().is_ready() and self._around.engine.pods.is_synced

    async def start(self, _: asyncio.TaskGroup) -> None:
        """Pods and nodes are the engine's."""
        self.queue.add(CLUSTER_KEY, _TURN_S)

    async def begin_term(self, _: int) -> None:
        """A new term: moves that were begun are found, and places that nobody will come to are let go."""
        self.mover = MoveQueue(self.mover.bounds)
        self._runs, self._said, self._looked_at = {}, {}, set()
        found = {note.uid: note for _, note in self._pods_with_notes()}
        for one in await self.writes.list_moving_deployments():
            deployment = parse_deployment(one)
            if deployment.note is None:
                continue
            note = found[deployment.note.uid] = replace(deployment.note, deployment=deployment.name)
            if self._pods.pod(note.uid) is None:
                gone = Pod(uid=note.uid, namespace=deployment.namespace, name=note.pod, labels={}, annotations={})
                self._resume(resumed_order(note, gone), (note,))
        gangs: dict[str, list[tuple[Pod, MoveNote]]] = {}
        for pod, note in self._pods_with_notes():
            manner = MoveMethod.EVICT if note.evict_s else MoveMethod.SURGE
            gangs.setdefault(note.uid if moves_alone(note.unit, manner) else note.unit, []).append(
                (pod, found[note.uid])
            )
        for gang in gangs.values():
            orders = [resumed_order(note, pod) for pod, note in gang]
            goes = tuple(order.goes[0] for order in orders)
            self._resume(orders[0]._replace(goes=goes), tuple(note for _, note in gang))
        known = {going.uid for order in self.mover.running.values() for going in order.goes}
        for unit in self._around.engine.gate.units.values():
            if not self.orders.is_new(unit.workload_id):
                for uid in set(unit.moving.values()) - known:
                    self._around.engine.feed(MoveFinished(unit.name, uid))

    def _pods_with_notes(self) -> list[tuple[Pod, MoveNote]]:
        pods = (self._pods.pod(uid) for uid in list(self._pods.noted))
        return [
            (pod, note)
            for pod in pods
            if pod is not None and (note := parse_move_note(pod.annotations)) is not None and note.uid == pod.uid
        ]

    def _resume(self, order: MoveOrder, notes: tuple[MoveNote, ...]) -> None:
        self.log.info("move=%s resumed pods=%d to=%s", order.unit, len(notes), notes[0].to or "-")
        self.mover.mark_started(order)
        self._runs[order.name] = _MoveRun(order, notes, is_told=True, is_begun=True)
        for pod in self._pods.pods_of(order.owner_uid):
            if pod.awaits_placement:
                self._claim(pod)

    async def reconcile(self, _: str) -> Result | None:
        """Queue orders, start those that are due, and take the next step of each move in progress."""
        await self._run_cycle()
        return Result(_TURN_S)

    async def _run_cycle(self) -> None:
        core, now_s = self._around.loop.core, self._now_s()
        for order in self.orders.orders_from_core(core, now_s):
            if not self.mover.request_move(order, now_s):
                await self._refuse(order, "too many moves are queued, or it is being moved already")
        await self._observe_preemptions(core, now_s)
        if now_s >= self._look_s:
            self._look_s = now_s + _LOOK_S
            await self._observe_orders()
        # A place that is kept is kept from others: what may not move now gives it back.
        bounds = self.mover.bounds
        late = dict.fromkeys(self.mover.overdue_orders(now_s), f"it could not start within {bounds.wait_s:g} s")
        for order in self.mover.waiting.values():
            if order.workload and self.mover.is_cooling_down(order, self._pods.pod, now_s):
                late[order] = f"it was moved less than {bounds.again_s:g} s ago"
        for order, why in late.items():
            self.mover.withdraw_order(order.name)
            await self._refuse(order, why)
        for order in list(self.mover.start_due_orders(self._pods.pod, now_s)):
            await self._start(order, now_s)
        for run in list(self._runs.values()):
            if run.next_s <= now_s:
                try:
                    await self._advance_move(run)
                except (Conflict, StaleTerm) as error:  # looked at anew in the next turn
                    self.log.debug("move=%s step=retry error=%s", run.order.unit, error)
                except ClusterError as error:
                    if isinstance(error, Forbidden) and not run.is_begun:
                        await self._end(run, MoveEnded(is_done=False, why=str(error)))
                        continue
                    run.next_s = now_s + 2.0
                    self.log.warning("move=%s step=failed error=%s", run.order.unit, error)

    async def _observe_preemptions(self, core: Core, now_s: float) -> None:
        """Asks victims to go, at once; those that cannot, or that nobody waits for any more, run on."""
        for one in list_preemptions(core, self._around.engine.gate.units):
            if isinstance(one, MoveOrder):
                self.mover.request_move(one, now_s)
                continue
            # Before its move ends, which refuses what is a victim still.
            await self._around.engine.asked.refuse_preemption(one.workload_id, one.why, again_s=one.again_s)
            self.mover.withdraw_order(one.unit)
            if (run := self._runs.get(one.unit)) is not None:
                await self._end(run, MoveEnded(is_done=False, why=one.why))

    async def _observe_orders(self) -> None:
        core = self._around.loop.core
        await self._sync_cordons(core)
        now_ns = self.clock.now_ns()
        orders, drained = self.orders.orders_from_drained_nodes(core, now_ns)
        moved = list(self.orders.orders_from_services(core))
        wanted = {order.name for order in (*orders, *moved)}
        for order in [one for one in self.mover.waiting.values() if not one.workload and one.name not in wanted]:
            if not order.is_preemption:
                self.mover.withdraw_order(order.name)
        for order in moved:
            self.mover.request_move(order, self._now_s())
        for order in (*orders, *self.orders.orders_from_gpus(core, now_ns)):
            may_go = not self.mover.has_order(order) and (order.is_forced or await has_room(self._around.loop, order))
            if may_go:
                self.mover.request_move(order, self._now_s())
        await self._annotate_drains(drained)

    async def _sync_cordons(self, core: Core) -> None:
        """Cordons and drains nodes as operators asked by eelctl; takes away no more than was written for them.

        A leader without a journal learns of cordons by what is written on the nodes: the first look at a node in a term
        takes them over.
        """
        for key, node in list(self._around.engine.nodes.objects.items()):
            record = core.state.nodes.get(key.name)
            if record is None:
                continue
            marks = cordon_marks(node)
            try:
                if key.name not in self._looked_at and record.cordon is None and any(marks):
                    self.log.warning("node=%s cordoned=taken_over drain=%s", key.name, marks.drain)
                    await self._around.loop.cordon_node(
                        key.name,
                        reason="taken over from the node's annotation",
                        drain=DrainTerms() if marks.drain else None,
                    )
                self._looked_at.add(key.name)
                cordon = record.cordon
                is_drained = cordon is not None and cordon.drain is not None
                body = cordon_patch(node, CordonMarks(cordon is not None, is_drained))
                # What was just written is in the informer a moment later: the same patch again changes nothing.
                if body:
                    await self.writes.patch_node(key.name, body)
                    word = "drained" if is_drained else "uncordoned" if cordon is None else cordon.describe()
                    self.writes.record_event(
                        "Node", PodKey("", key.name), key.name, f"by an operator of Eelgrid: {word}"
                    )
            except (ClusterError, Fault) as error:
                self.log.warning("node=%s cordon=failed error=%s", key.name, error)

    async def _annotate_drains(self, drained: dict[str, DrainProgress]) -> None:
        """On each drained node, how far it is; on one that is drained no more, nothing."""
        nodes = self._around.engine.nodes.objects
        for key, node in nodes.items():
            before = (node["metadata"].get("annotations") or {}).get(ANNOTATION_DRAINED)
            text = drain_status(drained[key.name]) if key.name in drained else None
            if before == text or (text is None and before is None) or self._said.get(key.name) == text:
                continue
            self._said[key.name] = text or ""
            try:
                await self.writes.annotate_node(key.name, {ANNOTATION_DRAINED: text})
            except ClusterError as error:
                self.log.warning("node=%s annotated=no error=%s", key.name, error)
            if text is not None:
                name = PodKey("", key.name)
                self.writes.record_event("Node", name, key.name, f"{ANNOTATION_DRAIN}: {text}")

    # One move

    async def _start(self, order: MoveOrder, now_s: float) -> None:
        self._runs[order.name] = run = _MoveRun(order, tuple(self._notes(order, now_s)))
        places = {going.node_name for going in order.goes} | {going.to for going in order.goes if going.to}
        core = self._around.loop.core
        observed = sorted(name for name in places if not self.orders.is_enforced(core, name))
        if observed:
            to = next((f" to {going.to}" for going in order.goes if going.to), "")
            await self._end(
                run, MoveEnded(is_done=False, why=f"would be moved{to}: {observed[0]} is in an observe-only pool")
            )
            return
        try:
            problem = await self._problem(run)
        except ClusterError as error:
            problem = str(error)
        if problem:
            await self._end(run, MoveEnded(is_done=False, why=problem))

    def _notes(self, order: MoveOrder, now_s: float) -> list[MoveNote]:
        evict_s = (
            now_s + min(order.grace_s, self.mover.bounds.grace_most_s) if order.manner is MoveMethod.EVICT else 0.0
        )
        return [
            MoveNote(
                uid=going.uid,
                pod=going.key.name,
                unit=order.unit,
                workload=order.workload,
                replica=going.replica,
                to=going.to,
                owner=order.owner_uid,
                since_s=now_s,
                evict_s=evict_s,
                cause=order.cause,
            )
            for going in order.goes
        ]

    async def _problem(self, run: _MoveRun) -> str:
        """Why a move cannot begin, empty where it can; finds the Deployment of a surge."""
        order = run.order
        going = order.goes[0]
        pod = self._pods.pod(going.uid)
        if pod is None:
            return "the pod is gone"
        if order.manner is MoveMethod.SURGE:
            name = await self.writes.deployment_name(pod)
            run.notes = tuple(replace(note, deployment=name) for note in run.notes)
            return "" if name else "its ReplicaSet belongs to no Deployment"
        if len(order.goes) > self.mover.bounds.gang_most:
            return f"its gang has {len(order.goes)} pods, and {self.mover.bounds.gang_most} may move at once"
        if order.owner_kind == "Job":
            job = await self.writes.find_object(JOBS, pod.namespace, order.owner_name)
            if job is not None and not survives_evictions(job, len(order.goes)):
                return "its Job would fail: raise backoffLimit, or let podFailurePolicy ignore DisruptionTarget"
        return ""

    async def _advance_move(self, run: _MoveRun) -> None:
        if not run.is_told:
            run.is_told = True
            self._record_start(run)
        order = run.order
        if order.manner is MoveMethod.SURGE:
            await self._surge(run)
            return
        pods = {going.uid: pod for going in order.goes if (pod := self._pods.pod(going.uid)) is not None}
        step = next_eviction_step(
            run.notes, pods, self.pace, self._now_s(), arrived=self._has_arrived(order), last=run.last
        )
        match step:
            case MarkPod():
                await self.writes.mark_pod(step)
            case EvictPods(found):
                run.last = await self.writes.evict(found)
                run.is_begun = run.is_begun or not run.last
                if run.last:
                    run.next_s = self._now_s() + self.pace.retry_s
                    self._record_event(run, f"not evicted yet: {run.last}", is_warning=True)
            case MoveEnded():
                await self._end(run, step)

    async def _surge(self, run: _MoveRun) -> None:
        note, namespace = run.notes[0], run.order.goes[0].key.namespace
        found = await self.writes.find_object(DEPLOYMENTS, namespace, note.deployment)
        deployment = parse_deployment(found) if found is not None else None
        is_ours = deployment is not None and deployment.note is not None and deployment.note.uid == note.uid
        other = "" if is_ours else await self.writes.autoscaler(namespace, note.deployment)
        step = next_surge_step(
            note, SurgeState(deployment, list(self._pods.pods_of(note.owner)), other), self.pace, self._now_s()
        )
        match step:
            case MarkPod():
                await self.writes.mark_pod(step)
            case ScaleDeployment():
                run.ending = step.over
                await self.writes.scale(step)
                run.is_begun = True
                if step.over is not None:
                    await self._end(run, step.over)
            case MoveEnded():
                # What was written last may have been written although no answer came.
                await self._end(run, run.ending or step)
            case WaitStep():
                pass

    def _has_arrived(self, order: MoveOrder) -> bool:
        """Whether every place that is kept has a pod that goes there."""
        unit = self._around.engine.gate.units.get(order.unit)
        if unit is None or not order.workload or unit.workload_id != order.workload:
            return True
        return all(
            (member := unit.members.get(unit.slots.get(replica, ""))) is not None and not member.is_waiting
            for replica in unit.places
        )

    # Its end

    async def _refuse(self, order: MoveOrder, why: str) -> None:
        """An order that does not begin; a move of the same pods that is under way goes on."""
        self._record_event(_MoveRun(order, ()), f"not moved: {why}", is_warning=True)
        await self._give_back(order, is_done=False)

    async def _end(self, run: _MoveRun, over: MoveEnded) -> None:
        order = run.order
        came = self._came(run)
        self._runs.pop(order.name, None)
        self.mover.withdraw_order(order.name)
        self.mover.finish_order(order, is_done=over.is_done)
        text = f"moved: {over.why}" if over.is_done else f"not moved: {over.why}"
        self._record_event(run, text, is_warning=not over.is_done, pod=came if over.is_done else None)
        try:
            if over.is_done and came is not None:
                await self.writes.mark_arrival(came, self._now_s())
            for going in order.goes:
                pod = self._pods.pod(going.uid)
                if pod is not None and parse_move_note(pod.annotations) is not None:
                    await self.writes.mark_pod(MarkPod(pod, None, pod.annotations.get(DELETION_COST)))
        except ClusterError as error:
            self.log.warning("move=%s cleanup=failed error=%s", order.unit, error)
        await self._give_back(order, is_done=over.is_done)

    async def _give_back(self, order: MoveOrder, *, is_done: bool) -> None:
        """Restore places that no pod has taken, or release them; a victim that did not go runs on."""
        if not order.workload:
            if not is_done:
                await self._refuse_preemption(order)
            return
        here = [pod for going in order.goes if (pod := self._pods.pod(going.uid)) is not None]
        if here and not is_done:
            await restore_places(self._around.loop, self.orders, order, here, self.log)
        for going in order.goes:
            self._around.engine.feed(MoveFinished(order.unit, going.uid))

    async def _refuse_preemption(self, order: MoveOrder) -> None:
        unit = self._around.engine.gate.units.get(order.unit)
        found = None if unit is None else self._around.loop.core.state.workloads.get(unit.workload_id)
        if found is not None and found.preempted_for:
            why = "its pods could not be evicted"
            await self._around.engine.asked.refuse_preemption(found.workload_id, why, again_s=REFUSED_AGAIN_S)

    def _came(self, run: _MoveRun) -> Pod | None:
        """The pod that came in the stead of the old one."""
        for uid in self.mover.claimant_uids(run.order):
            if (pod := self._pods.pod(uid)) is not None:
                return pod
        if run.order.manner is MoveMethod.EVICT:
            return None
        gone = {going.uid for going in run.order.goes}
        others = [pod for pod in self._pods.pods_of(run.order.owner_uid) if pod.uid not in gone and not pod.is_terminal]
        return max(others, key=lambda pod: (pod.created_s or 0.0, pod.name), default=None)

    def _record_start(self, run: _MoveRun) -> None:
        order, going = run.order, run.order.goes[0]
        to = f" to {going.to}" if going.to else ""
        gang = f" with {len(order.goes) - 1} more of its gang" if len(order.goes) > 1 else ""
        grace = max(0.0, run.notes[0].evict_s - self._now_s())
        how = "its replacement is created first" if order.manner is MoveMethod.SURGE else f"evicted in {grace:.0f} s"
        self._record_event(run, f"moves from {going.node_name}{to}{gang}: {order.cause}; {how}")

    def _record_event(self, run: _MoveRun, text: str, *, is_warning: bool = False, pod: Pod | None = None) -> None:
        going = run.order.goes[0]
        key, uid = (PodKey(pod.namespace, pod.name), pod.uid) if pod is not None else (going.key, going.uid)
        self.writes.record_event("Pod", key, uid, text, is_warning=is_warning)
