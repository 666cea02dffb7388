"""Reads and writes of a move at the API server, one call at a time."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from eelgrid_controller.engines.kubernetes.api.errors import (
    ClusterError,
    Conflict,
    Forbidden,
    NotServed,
    ObjectNotFound,
)
from eelgrid_controller.engines.kubernetes.api.port import (
    DEPLOYMENTS,
    EVENTS,
    HORIZONTAL_POD_AUTOSCALERS,
    JOBS,
    NODES,
    POD_DISRUPTION_BUDGETS,
    PODS,
    REPLICA_SETS,
    Object,
    PatchKind,
)
from eelgrid_controller.engines.kubernetes.api.retry import RetryLimits, call_with_retries
from eelgrid_controller.engines.kubernetes.model.objects import Pod, controller_of
from eelgrid_controller.engines.kubernetes.model.quantities import format_time
from eelgrid_controller.engines.kubernetes.model.status_reporting import EventReference, build_event
from eelgrid_controller.engines.kubernetes.model.well_known import (
    ANNOTATION_EVICT_AT,
    ANNOTATION_MOVE,
    ANNOTATION_MOVED_AT,
    DELETION_COST,
    LABEL_MOVING,
)
from eelgrid_controller.engines.kubernetes.pods.disruption import find_blocking_budget
from eelgrid_controller.engines.kubernetes.pods.gate_events import PodKey
from eelgrid_controller.engines.kubernetes.pods.migration import MarkPod, ScaleDeployment
from eelgrid_controller.engines.kubernetes.pods.plan_annotation import format_move_note
from eelgrid_controller.engines.kubernetes.reconcilers.reconciler import ReconcilerContext

_LIMITS = RetryLimits(attempts=3, whole_s=8.0, first_s=0.1, most_s=2.0)
_T = TypeVar("_T")


class MoveWriter:
    """Calls for moves."""

    def __init__(self, around: ReconcilerContext) -> None:
        self.forbidden = 0  # evictions that a budget forbade
        self.scaled = 0
        self.told = 0
        self._around = around
        self._cluster = around.cluster

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
        """Who else scales a Deployment; empty where nobody does."""
        try:
            found = await self._call_with_retries(
                lambda: self._cluster.list(HORIZONTAL_POD_AUTOSCALERS, namespace=namespace)
            )
        except NotServed:
            return ""
        except Forbidden:
            return "an autoscaler (this controller may not list them) perhaps"
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
                except Forbidden:
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
                found = await self._call_with_retries(
                    lambda pod=pod: self._cluster.get(PODS, pod.name, namespace=namespace)
                )  # type: ignore[misc]
                labels.append(found["metadata"].get("labels") or {})
        return find_blocking_budget(budgets, labels)

    async def _evict(self, pod: Pod, *, is_dry: bool) -> None:
        await self._written(lambda: self._cluster.evict(pod.name, namespace=pod.namespace, uid=pod.uid, is_dry=is_dry))

    async def annotate_node(self, name: str, annotations: Mapping[str, str | None]) -> None:
        """Write annotations of ours onto a node."""
        body = {"metadata": {"annotations": annotations}}
        await self._written(lambda: self._cluster.patch(NODES, name, body))

    async def patch_node(self, name: str, body: Sequence[Mapping[str, Any]]) -> None:
        """A JSON patch of a node, which tests what it was made from."""
        await self._written(lambda: self._cluster.patch(NODES, name, body, PatchKind.JSON))

    async def record_event(self, kind: str, key: PodKey, uid: str, text: str, *, is_warning: bool = False) -> None:
        """An Event; one that is not accepted is not repeated."""
        around = self._around
        body = build_event(
            EventReference("v1", kind, key.namespace, key.name, uid),
            text,
            is_warning=is_warning,
            action="Moving",
            reason="EelgridProblem" if is_warning else "EelgridMove",
            identity=around.identity,
            now_ns=around.clock.now_ns(),
        )
        around.log.info("%s=%s told=%s", kind.lower(), key.name, text)
        try:
            await self._cluster.create(EVENTS, body, namespace=body["metadata"]["namespace"])
        except ClusterError as error:
            around.log.debug("event=lost error=%s", error)
        else:
            self.told += 1

    async def _written(self, call: Callable[[], Awaitable[_T]]) -> _T:
        async def led() -> _T:
            if self._around.elector.term() is None:
                raise Conflict("the term is over", "another leads")
            return await call()

        return await self._call_with_retries(led)

    async def _call_with_retries(self, call: Callable[[], Awaitable[_T]]) -> _T:
        around = self._around
        return await call_with_retries(
            call, rng=around.rng, is_idempotent=True, limits=_LIMITS, monotonic_s=around.clock.monotonic_s
        )
