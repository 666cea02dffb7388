"""Move reconciler: moves running pods where the core placed them, and off drained nodes and lost GPUs.

`MoveWriter` makes the calls at the API server, one at a time.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from eelgrid_controller.core.core import CommitResult
from eelgrid_controller.engines.kubernetes.api.errors import (
    ClusterError,
    Conflict,
    Forbidden,
    NotServed,
    ObjectNotFound,
    StaleTerm,
)
from eelgrid_controller.engines.kubernetes.api.informer import Delta, Informer
from eelgrid_controller.engines.kubernetes.api.port import (
    DEPLOYMENTS,
    HORIZONTAL_POD_AUTOSCALERS,
    JOBS,
    NODES,
    POD_DISRUPTION_BUDGETS,
    PODS,
    REPLICA_SETS,
    Object,
    ObjectKey,
)
from eelgrid_controller.engines.kubernetes.api.retry import RetryingWriter, RetryLimits, call_with_retries
from eelgrid_controller.engines.kubernetes.model.objects import Pod, controller_of, parse_pod
from eelgrid_controller.engines.kubernetes.model.pod_group import PodKey
from eelgrid_controller.engines.kubernetes.model.quantities import KubernetesUnreadable, format_time
from eelgrid_controller.engines.kubernetes.model.status_reporting import EventReference
from eelgrid_controller.engines.kubernetes.model.well_known import (
    ANNOTATION_DRAIN,
    ANNOTATION_DRAINED,
    ANNOTATION_EVICT_AT,
    ANNOTATION_MOVE,
    ANNOTATION_MOVED_AT,
    DELETION_COST,
    LABEL_MOVING,
)
from eelgrid_controller.engines.kubernetes.pods.gate_events import MoveFinished, ReplacementStarted
from eelgrid_controller.engines.kubernetes.pods.migration import (
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
    drain_status,
    find_blocking_budget,
    moves_alone,
    next_eviction_step,
    next_surge_step,
    parse_deployment,
    resumed_order,
    survives_evictions,
)
from eelgrid_controller.engines.kubernetes.pods.plan_annotation import MoveNote, format_move_note, parse_move_note
from eelgrid_controller.engines.kubernetes.reconcilers.gate_engine import ReconcilerContext
from eelgrid_controller.engines.kubernetes.reconcilers.move_orders import MoveOrders, has_room, restore_places
from eelgrid_controller.engines.kubernetes.reconcilers.reconciler import (
    CLUSTER_KEY,
    ClusterContext,
    EventRecorder,
    Reconciler,
    Result,
)
from eelgrid_controller.state.events import WorkloadMoved

_LIMITS = RetryLimits(attempts=3, whole_s=8.0, first_s=0.1, most_s=2.0)
_T = TypeVar("_T")


class MoveWriter:
    """Calls for moves, repeated with backoff; writes only while this controller leads."""

    def __init__(self, context: ClusterContext, *, events: EventRecorder, log: logging.Logger) -> None:
        self.forbidden = 0  # evictions that a budget forbade
        self.scaled = 0
        self._context = context
        self._cluster = context.cluster
        self._events = events
        self._log = log
        self._writer = RetryingWriter(rng=context.rng, monotonic_s=context.clock.monotonic_s, limits=_LIMITS)

    # What is read

    async def deployment_name(self, pod: Pod) -> str:
        """The Deployment above a pod's ReplicaSet; empty where there is none."""
        owner = pod.owner
        if owner is None or owner.kind != "ReplicaSet":
            return ""
        found = await self._call_with_retries(
            lambda: self._cluster.get(REPLICA_SETS, owner.name, namespace=pod.namespace)
        )
        above = controller_of(found)
        return above.name if above is not None and above.kind == "Deployment" else ""

    async def deployment(self, namespace: str, name: str) -> Object | None:
        """A Deployment as it is; None if it is gone."""
        try:
            return await self._call_with_retries(lambda: self._cluster.get(DEPLOYMENTS, name, namespace=namespace))
        except ObjectNotFound:
            return None

    async def list_moving_deployments(self) -> Sequence[Object]:
        """Deployments that carry a move."""
        return (await self._call_with_retries(lambda: self._cluster.list(DEPLOYMENTS, labels=LABEL_MOVING))).items

    async def autoscaler(self, namespace: str, deployment: str) -> str:
        """The autoscaler of a Deployment; empty where there is none."""
        try:
            found = await self._call_with_retries(
                lambda: self._cluster.list(HORIZONTAL_POD_AUTOSCALERS, namespace=namespace)
            )
        except NotServed:
            return ""
        except Forbidden:
            return "possibly an autoscaler (this controller may not list them)"
        for one in found.items:
            target = (one.get("spec") or {}).get("scaleTargetRef") or {}
            if target.get("kind") == "Deployment" and target.get("name") == deployment:
                return f"the HorizontalPodAutoscaler {one['metadata']['name']}"
        return ""

    async def job(self, namespace: str, name: str) -> Object | None:
        """A Job; None if it is gone."""
        try:
            return await self._call_with_retries(lambda: self._cluster.get(JOBS, name, namespace=namespace))
        except ObjectNotFound:
            return None

    # What is written

    async def mark_pod(self, asked: MarkPod) -> None:
        """Write a note and a deletion cost onto a pod."""
        text = None if asked.note is None else format_move_note(asked.note)
        at = None if asked.evict_s is None else format_time(int(asked.evict_s))
        annotations = {ANNOTATION_MOVE: text, DELETION_COST: asked.cost, ANNOTATION_EVICT_AT: at}
        await self._annotate(asked.pod, annotations)

    async def mark_arrival(self, pod: Pod, now_s: float) -> None:
        """Note on a pod that it came by a move."""
        await self._annotate(pod, {ANNOTATION_MOVED_AT: f"{now_s:.0f}"})

    async def _annotate(self, pod: Pod, annotations: Mapping[str, str | None]) -> None:
        body = {"metadata": {"uid": pod.uid, "annotations": annotations}}
        await self._written(lambda: self._cluster.patch(PODS, pod.name, body, namespace=pod.namespace))

    async def scale(self, asked: ScaleDeployment) -> None:
        """Write a note and a number of replicas onto a Deployment, if it still is the one that was looked at."""
        its = asked.deployment
        metadata = {
            "uid": its.uid,
            "resourceVersion": its.version,
            "labels": {LABEL_MOVING: None if asked.note is None else "true"},
            "annotations": {ANNOTATION_MOVE: None if asked.note is None else format_move_note(asked.note)},
        }
        body: dict[str, Any] = {"metadata": metadata}
        if asked.replicas is not None:
            body["spec"] = {"replicas": asked.replicas}
        await self._written(lambda: self._cluster.patch(DEPLOYMENTS, its.name, body, namespace=its.namespace))
        self.scaled += asked.replicas is not None

    async def evict(self, pods: Sequence[Pod]) -> str:
        """Evict all of these pods, or none where a budget forbids one; why not, empty if all were."""
        if len(pods) > 1 and (why := await self._forbidden(pods)):
            self.forbidden += 1
            return why
        why = ""
        for is_dry in (True, False) if len(pods) > 1 else (False,):
            for pod in pods:
                try:
                    await self._evict(pod, is_dry=is_dry)
                except (ObjectNotFound, Conflict):
                    continue  # it is gone, or another of its name is there
                except (Forbidden, StaleTerm):
                    raise
                except ClusterError as error:
                    self.forbidden += 1
                    why = str(error)
                    if is_dry:
                        return why
        return why

    async def _forbidden(self, pods: Sequence[Pod]) -> str:
        namespace = pods[0].namespace
        budgets = (
            await self._call_with_retries(lambda: self._cluster.list(POD_DISRUPTION_BUDGETS, namespace=namespace))
        ).items
        if not budgets:
            return ""
        labels = []
        for pod in pods:
            if pod.is_ready:
                found = await self._call_with_retries(partial(self._cluster.get, PODS, pod.name, namespace=namespace))
                labels.append(found["metadata"].get("labels") or {})
        return find_blocking_budget(budgets, labels)

    async def _evict(self, pod: Pod, *, is_dry: bool) -> None:
        await self._written(lambda: self._cluster.evict(pod.name, namespace=pod.namespace, uid=pod.uid, is_dry=is_dry))

    async def annotate_node(self, name: str, annotations: Mapping[str, str | None]) -> None:
        """Write annotations to a node."""
        body = {"metadata": {"annotations": annotations}}
        await self._written(lambda: self._cluster.patch(NODES, name, body))

    def record_event(self, kind: str, key: PodKey, uid: str, text: str, *, is_warning: bool = False) -> None:
        """Queue an Event about a pod or a node."""
        self._log.info("%s=%s event=%s", kind.lower(), key.name, text)
        self._events.record(
            EventReference("v1", kind, key.namespace, key.name, uid),
            text,
            is_warning=is_warning,
            action="Moving",
            reason="EelgridProblem" if is_warning else "EelgridMove",
        )

    async def _written(self, call: Callable[[], Awaitable[_T]]) -> _T:
        return await self._writer.write(call, may_send=lambda: self._context.elector.term() is not None)

    async def _call_with_retries(self, call: Callable[[], Awaitable[_T]]) -> _T:
        context = self._context
        return await call_with_retries(
            call, rng=context.rng, is_idempotent=True, limits=_LIMITS, monotonic_s=context.clock.monotonic_s
        )


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
            if delta.old is not None and (delta.new is None or _uid(delta.new) != _uid(delta.old)):
                self._remove_pod(delta.old)
            if delta.new is not None:
                self._put(delta.key, delta.new)

    def _put(self, key: ObjectKey, found: Object) -> None:
        uid, owner = _uid(found), controller_of(found)
        self._keys[uid] = key
        if owner is not None:
            self._owned.setdefault(owner.uid, {})[uid] = key
        if ANNOTATION_MOVE in (found["metadata"].get("annotations") or {}):
            self.noted[uid] = key
        else:
            self.noted.pop(uid, None)

    def _remove_pod(self, found: Object) -> None:
        uid, owner = _uid(found), controller_of(found)
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
        if found is None or _uid(found) != uid:
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


def _uid(found: Object) -> str:
    return str(found["metadata"]["uid"])


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
        super().__init__(around, "moves")
        self.mover = MoveQueue(_BOUNDS)
        self.writes = MoveWriter(around, events=self.events, log=self.log)
        self.orders = MoveOrders(around.engine, self.log)
        self.pace = _PACE
        self._around = around
        self._pods = OwnedPods()
        self._runs: dict[str, _MoveRun] = {}
        self._look_s = 0.0
        self._said: dict[str, str] = {}  # of drained nodes
        around.engine.add_pod_listener(self._on_pods)
        around.loop.listeners.append(self._on_commit)

    # What happens

    def _now_s(self) -> float:
        return self.clock.now_ns() / 1e9

    def _on_pods(self, deltas: Sequence[Delta]) -> None:
        self._pods.on_deltas(self._around.engine.pods, deltas)
        for delta in deltas:
            if delta.new is None and delta.old is not None:
                self.mover.release_claim(str(delta.old["metadata"]["uid"]))
            elif delta.old is None and delta.new is not None and self.mover.running:
                found = self._pods.pod(str(delta.new["metadata"]["uid"]))
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
        self._runs, self._said = {}, {}
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
            if pod.is_gated:
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

    async def _observe_orders(self) -> None:
        core = self._around.loop.core
        orders, drained = self.orders.orders_from_drained_nodes(core)
        moved = list(self.orders.orders_from_services(core))
        wanted = {order.name for order in (*orders, *moved)}
        for order in [one for one in self.mover.waiting.values() if not one.workload and one.name not in wanted]:
            self.mover.withdraw_order(order.name)
        for order in moved:
            self.mover.request_move(order, self._now_s())
        for order in (*orders, *self.orders.orders_from_lost_gpus(core)):
            if not self.mover.has_order(order) and await has_room(self._around.loop, order):
                self.mover.request_move(order, self._now_s())
        await self._annotate_drains(drained)

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
            job = await self.writes.job(pod.namespace, order.owner_name)
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
        found = await self.writes.deployment(namespace, note.deployment)
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
        """Restore places that no pod has taken, or release them."""
        if not order.workload:
            return
        here = [pod for going in order.goes if (pod := self._pods.pod(going.uid)) is not None]
        if here and not is_done:
            await restore_places(self._around.loop, self.orders, order, here, self.log)
        for going in order.goes:
            self._around.engine.feed(MoveFinished(order.unit, going.uid))

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
