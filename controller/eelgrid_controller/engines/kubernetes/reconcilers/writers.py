"""What reconcilers write at the API server: pods and their gates, ResourceClaims, and moves.

Each writer uses the bounds, the retries and the term check of the reconciler that it writes for.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

from eelgrid_controller.engines.kubernetes.api.errors import (
    AnswerUnreadable,
    ClusterError,
    ClusterUnreachable,
    Conflict,
    Forbidden,
    Invalid,
    NotServed,
    ObjectNotFound,
    ServerFault,
    StaleTerm,
)
from eelgrid_controller.engines.kubernetes.api.port import (
    DEPLOYMENTS,
    HORIZONTAL_POD_AUTOSCALERS,
    NODES,
    POD_DISRUPTION_BUDGETS,
    PODS,
    REPLICA_SETS,
    RESOURCE_CLAIMS,
    Object,
    ObjectKey,
    PatchKind,
    Resource,
)
from eelgrid_controller.engines.kubernetes.claims.events import (
    ClaimDeallocation,
    ClaimEvent,
    ClaimGrant,
    ClaimStatusWrite,
    ClaimUpdated,
    DeallocationFailed,
    GrantFailed,
    GrantWritten,
    PodRelease,
)
from eelgrid_controller.engines.kubernetes.model.objects import Pod, controller_of
from eelgrid_controller.engines.kubernetes.model.pod_group import PodKey
from eelgrid_controller.engines.kubernetes.model.quantities import format_time
from eelgrid_controller.engines.kubernetes.model.scheduler_support import awaits_binding
from eelgrid_controller.engines.kubernetes.model.status_reporting import EventReference
from eelgrid_controller.engines.kubernetes.model.well_known import (
    ANNOTATION_EVICT_AT,
    ANNOTATION_MOVE,
    ANNOTATION_MOVED_AT,
    ANNOTATION_PLAN,
    CONDITION_PLACEMENT,
    DELETION_COST,
    LABEL_MOVING,
)
from eelgrid_controller.engines.kubernetes.pods.gate_events import (
    AnnotateFailed,
    AnnotatePod,
    BindPod,
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
from eelgrid_controller.engines.kubernetes.pods.migration import MarkPod, ScaleDeployment, find_blocking_budget
from eelgrid_controller.engines.kubernetes.pods.placement_unit import NO_NODE, NO_ROOM
from eelgrid_controller.engines.kubernetes.pods.plan_annotation import (
    annotation_patch,
    format_move_note,
    gate_removal_patch,
    ungating_patch,
)
from eelgrid_controller.engines.kubernetes.reconcilers.reconciler import Reconciler

# Conditions of pods that wait to be written: some megabytes. What is dropped is written at another look.
_REPORTS_MOST = 10_000
_REPORT_EVERY_S = 0.02


class PodWriter:
    """Writes pods as the gate's instructions say."""

    def __init__(
        self,
        reconciler: Reconciler[str],
        *,
        pods: Callable[[], Mapping[ObjectKey, Object]],
        feed: Callable[[GateEvent], None],
    ) -> None:
        """`pods` gives what is held now, `feed` takes the result of each write."""
        self.ungated = 0
        self.bound = 0
        self.stripped = 0
        self.recreated = 0
        self.failed: dict[WriteFailure, int] = dict.fromkeys(WriteFailure, 0)
        self.reports_sent = 0
        self.reports_dropped = 0
        # Called with what was asked and the time at which the patch began, once a pod is pinned or bound.
        self.listeners: list[Callable[[UngatePod | BindPod, int], None]] = []
        self._reconciler = reconciler
        self._cluster = reconciler.cluster
        self._clock = reconciler.clock
        self._log = reconciler.log
        self._pods = pods
        self._feed = feed
        self._reports: dict[str, ReportPlacement] = {}  # by uid: the last alone
        self._reported = asyncio.Event()

    def execute_instruction(
        self, asked: UngatePod | BindPod | RemoveGate | AnnotatePod | RecreatePod
    ) -> Coroutine[Any, Any, None]:
        """Carry out one instruction about a pod."""
        match asked:
            case UngatePod():
                return self.ungate(asked)
            case BindPod():
                return self.bind(asked)
            case RemoveGate():
                return self.remove_gate(asked)
            case AnnotatePod():
                return self.annotate_pod(asked)
            case RecreatePod():
                return self.delete_for_recreation(asked)

    async def ungate(self, asked: UngatePod) -> None:
        """Pin a pod and remove its gate."""
        start_ns = self._clock.now_ns()
        if await self._patch(asked, lambda pod: ungating_patch(pod, asked.node_name, asked.plan), asked.epoch):
            self.ungated += 1
            self._note_placed(asked, "ungated", start_ns)

    async def bind(self, asked: BindPod) -> None:
        """Bind a pod, and write its plan with it."""
        start_ns = self._clock.now_ns()
        namespace, name = asked.key

        async def send(_: Mapping[str, Any]) -> None:
            await self._cluster.bind(
                name,
                namespace=namespace,
                node_name=asked.node_name,
                uid=asked.uid,
                resource_version=asked.version,
                annotations={ANNOTATION_PLAN: asked.plan},
            )

        if self._tell(asked, await self._write_pod(asked, send, asked.epoch), asked.epoch):
            self.bound += 1
            self._note_placed(asked, "bound", start_ns)
            self._reconciler.events.record(
                EventReference("v1", "Pod", namespace, name, asked.uid),
                f"Successfully assigned {namespace}/{name} to {asked.node_name}",
                is_warning=False,
                action="Binding",
                reason="Scheduled",
                is_routine=True,
            )

    def _note_placed(self, asked: UngatePod | BindPod, deed: str, start_ns: int) -> None:
        for listener in self.listeners:
            listener(asked, start_ns)
        self._log.debug("pod=%s %s node=%s epoch=%d", asked.key, deed, asked.node_name, asked.epoch)

    async def remove_gate(self, asked: RemoveGate) -> None:
        """Remove a pod's gate and pin nothing."""
        if await self._patch(asked, gate_removal_patch, asked.epoch):
            self.stripped += 1
            self._log.warning("pod=%s gate=removed reason=%s", asked.key, asked.why)

    async def delete_for_recreation(self, asked: RecreatePod) -> None:
        """Delete a pod, so that its owner creates another."""
        namespace, name = asked.key

        async def call() -> None:
            await self._cluster.delete(PODS, name, namespace=namespace, uid=asked.uid, resource_version=asked.version)

        failed = await self._try_write(call, asked.epoch)
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

    async def _patch(
        self, asked: UngatePod | RemoveGate, body: Callable[[Mapping[str, Any]], dict[str, Any]], epoch: int | None
    ) -> bool:
        return self._tell(asked, await self._patch_pod(asked, body, epoch), epoch)

    def _tell(
        self, asked: UngatePod | BindPod | RemoveGate, failed: tuple[WriteFailure, str] | None, epoch: int | None
    ) -> bool:
        """Feeds what came of a write; whether it was done."""
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

        async def send(pod: Mapping[str, Any]) -> None:
            await self._cluster.patch(PODS, name, body(pod), namespace=namespace, is_brief=True)

        return await self._write_pod(asked, send, epoch)

    async def _write_pod(
        self,
        asked: UngatePod | BindPod | RemoveGate | AnnotatePod,
        send: Callable[[Mapping[str, Any]], Awaitable[None]],
        epoch: int | None,
    ) -> tuple[WriteFailure, str] | None:
        """Writes against the version that was looked at, while the term lasts; None if it was done."""
        is_open = False  # an attempt may have been carried out though no answer said so

        async def call() -> None:
            nonlocal is_open
            pod = _unchanged(self._pods(), asked)
            try:
                await send(pod)
            except (ClusterUnreachable, ServerFault, AnswerUnreadable) as error:
                is_open = is_open or not isinstance(error, ClusterUnreachable) or error.is_sent
                raise

        failed = await self._try_write(call, epoch)
        if failed is None:
            return None
        failure, text = failed
        if failure is WriteFailure.STALE and is_open:
            failure = WriteFailure.BUSY
        if failure not in (WriteFailure.STALE, WriteFailure.CONFLICT, WriteFailure.GONE):
            self._log.warning("pod=%s patched=no failure=%s error=%s", asked.key, failure.name.lower(), text)
        return failure, text

    async def _try_write(
        self, call: Callable[[], Awaitable[None]], epoch: int | None
    ) -> tuple[WriteFailure, str] | None:
        """Makes a write in its turn and in its term; None if it was made, else why not, which is counted."""
        try:
            await self._reconciler.write(call, may_send=lambda: epoch is None or self._reconciler.leads(epoch))
        except ClusterError as error:
            failure = describe_failure(error)
            self.failed[failure] += 1
            return failure, str(error)
        return None

    # Events for people

    def record_event(self, told: RecordEvent) -> None:
        """Queue an Event about a pod; of one that we bind with the reason, action and type that kube-scheduler gives."""
        is_ours = awaits_binding(self._pods().get(ObjectKey(*told.key)) or {})
        reason = "EelgridProblem" if told.is_warning else "EelgridWaiting"
        self._reconciler.events.record(
            EventReference("v1", "Pod", *told.key, told.uid),
            told.text,
            is_warning=told.is_warning or is_ours,
            action="Scheduling" if is_ours else "Placing",
            reason="FailedScheduling" if is_ours else reason,
        )

    def report_placement(self, asked: ReportPlacement) -> None:
        """Queue the condition of a pod's placement, in the stead of one that is queued; the oldest goes where there are too many."""
        if self._reports.pop(asked.uid, None) is None and len(self._reports) >= _REPORTS_MOST:
            del self._reports[next(iter(self._reports))]
            self.reports_dropped += 1
        self._reports[asked.uid] = asked
        self._reported.set()

    async def run(self) -> None:
        """Write conditions, not many a second, until cancelled."""
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
        if found.is_true or not awaits_binding(pod):
            return {"metadata": {"uid": asked.uid}, "status": {"conditions": [condition]}}
        # Of this version alone: one that has been bound meanwhile is scheduled.
        head = {"uid": asked.uid, "resourceVersion": pod["metadata"]["resourceVersion"]}
        return {"metadata": head, "status": {"conditions": [condition, _scheduled_condition(pod, condition)]}}


# What more nodes would help against; only of these the cluster autoscaler is to know.
_FOR_WANT_OF_NODES = frozenset({NO_NODE, NO_ROOM})


def _scheduled_condition(pod: Mapping[str, Any], placement: Mapping[str, Any]) -> dict[str, Any]:
    """PodScheduled as whoever schedules a pod has to write it."""
    told = [one for one in (pod.get("status") or {}).get("conditions") or () if one["type"] == "PodScheduled"]
    since = told[0].get("lastTransitionTime") if told and told[0].get("status") == "False" else None
    return {
        **placement,
        "type": "PodScheduled",
        "reason": "Unschedulable" if placement["reason"] in _FOR_WANT_OF_NODES else placement["reason"],
        "lastTransitionTime": since or placement["lastTransitionTime"],
    }


def _unchanged(
    pods: Mapping[ObjectKey, Object], asked: UngatePod | BindPod | RemoveGate | AnnotatePod | PodRelease
) -> Object:
    """The pod that an instruction is about; raises StaleTerm where it is another, or changed since."""
    pod = pods.get(ObjectKey(*asked.key))
    metadata = {} if pod is None else pod["metadata"]
    if pod is None or (metadata.get("uid"), metadata.get("resourceVersion")) != (asked.uid, asked.version):
        raise StaleTerm
    return pod


def describe_failure(error: Exception) -> WriteFailure:
    """Classify the error of a write."""
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


_CLAIM_METADATA = ("name", "namespace", "uid", "resourceVersion", "ownerReferences", "deletionTimestamp")


def prune_resource_claim(found: Object) -> Object:
    """A claim without what nobody reads; its status may be written from it."""
    metadata = {key: found["metadata"][key] for key in _CLAIM_METADATA if key in found["metadata"]}
    return {"metadata": metadata, "spec": found["spec"], "status": found.get("status") or {}}


class ClaimWriter:
    """Writes claim allocations and releases pods, and frees allocations."""

    def __init__(
        self,
        reconciler: Reconciler[str],
        *,
        pods: Callable[[], Mapping[ObjectKey, Object]],
        feed: Callable[[ClaimEvent], None],
    ) -> None:
        """`pods` gives what is held now, `feed` takes the result of each write."""
        self._reconciler = reconciler
        self._cluster = reconciler.cluster
        self._log = reconciler.log
        self._pods = pods
        self._feed = feed

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
        return None if failed is None else (one.uid, *failed)

    async def free(self, one: ClaimDeallocation) -> None:
        """Remove the allocation of a claim."""
        failed = await self._status(one.body, one.epoch)
        if failed is not None:
            self._feed(DeallocationFailed(one.uid, *failed))
            return
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
            pod = _unchanged(self._pods(), one)
            if one.is_pinned:
                body = ungating_patch(pod, one.node_name, one.plan)
            else:
                body = gate_removal_patch(pod)
                body["metadata"]["annotations"] = {ANNOTATION_PLAN: one.plan}
            return await self._cluster.patch(PODS, name, body, namespace=namespace)

        failed, _ = await self._try_write(call, epoch)
        return None if failed is None else (one.uid, *failed)

    async def _try_write(
        self, call: Callable[[], Awaitable[Object]], epoch: int
    ) -> tuple[tuple[WriteFailure, str] | None, Object | None]:
        """Makes a write in its turn and in its term: why it was not made, or what the server answered."""

        async def bounded() -> Object:
            term = self._reconciler.term()
            if term is None:
                raise StaleTerm
            try:
                async with asyncio.timeout(max(0.0, term.until_s - self._reconciler.clock.monotonic_s())):
                    return await call()
            except TimeoutError:
                raise StaleTerm from None

        try:
            return None, await self._reconciler.write(bounded, epoch=epoch)
        except ClusterError as error:
            return (describe_failure(error), str(error)), None


class MoveWriter:
    """Calls for moves, repeated with backoff; writes only while this controller leads."""

    def __init__(self, reconciler: Reconciler[str]) -> None:
        self.forbidden = 0  # evictions that a budget forbade
        self._cluster = reconciler.cluster
        self._events = reconciler.events
        self._log = reconciler.log
        self._read = reconciler.read
        self._write = reconciler.write

    # What is read

    async def deployment_name(self, pod: Pod) -> str:
        """The Deployment above a pod's ReplicaSet; empty where there is none."""
        owner = pod.owner
        if owner is None or owner.kind != "ReplicaSet":
            return ""
        found = await self._read(lambda: self._cluster.get(REPLICA_SETS, owner.name, namespace=pod.namespace))
        above = controller_of(found)
        return above.name if above is not None and above.kind == "Deployment" else ""

    async def find_object(self, resource: Resource, namespace: str, name: str) -> Object | None:
        """An object as it is; None if it is gone."""
        try:
            return await self._read(lambda: self._cluster.get(resource, name, namespace=namespace))
        except ObjectNotFound:
            return None

    async def list_moving_deployments(self) -> Sequence[Object]:
        """Deployments that carry a move."""
        return (await self._read(lambda: self._cluster.list(DEPLOYMENTS, labels=LABEL_MOVING))).items

    async def autoscaler(self, namespace: str, deployment: str) -> str:
        """The autoscaler of a Deployment; empty where there is none."""
        try:
            found = await self._read(lambda: self._cluster.list(HORIZONTAL_POD_AUTOSCALERS, namespace=namespace))
        except NotServed:
            return ""
        except Forbidden:
            return "possibly an autoscaler (this controller may not list them)"
        for one in found.items:
            target = (one.get("spec") or {}).get("scaleTargetRef") or {}
            if target.get("kind") == "Deployment" and target.get("name") == deployment:
                return f"the HorizontalPodAutoscaler {one['metadata']['name']}"
        return ""

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
        await self._write(lambda: self._cluster.patch(PODS, pod.name, body, namespace=pod.namespace))

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
        await self._write(lambda: self._cluster.patch(DEPLOYMENTS, its.name, body, namespace=its.namespace))

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
        budgets = (await self._read(lambda: self._cluster.list(POD_DISRUPTION_BUDGETS, namespace=namespace))).items
        if not budgets:
            return ""
        labels = []
        for pod in pods:
            if pod.is_ready:
                found = await self._read(partial(self._cluster.get, PODS, pod.name, namespace=namespace))
                labels.append(found["metadata"].get("labels") or {})
        return find_blocking_budget(budgets, labels)

    async def _evict(self, pod: Pod, *, is_dry: bool) -> None:
        await self._write(lambda: self._cluster.evict(pod.name, namespace=pod.namespace, uid=pod.uid, is_dry=is_dry))

    async def annotate_node(self, name: str, annotations: Mapping[str, str | None]) -> None:
        """Write annotations to a node."""
        body = {"metadata": {"annotations": annotations}}
        await self._write(lambda: self._cluster.patch(NODES, name, body))

    async def patch_node(self, name: str, body: Object) -> None:
        """Write a merge patch to a node."""
        await self._write(lambda: self._cluster.patch(NODES, name, body))

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
