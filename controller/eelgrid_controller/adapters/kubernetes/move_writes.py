"""What a move reads from and writes to the API server, one call at a time.

Owns how each is sent: its preconditions, its attempts, and that nothing is written in a term
that is over. Must not know why. What does not succeed raises a ClusterError, and is decided
anew from newer objects.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from eelgrid_controller.adapters.kubernetes.abilities import Surroundings
from eelgrid_controller.adapters.kubernetes.errors import ClusterError, Conflict, Forbidden, NotFound, NotServed
from eelgrid_controller.adapters.kubernetes.port import Object, PatchKind
from eelgrid_controller.adapters.kubernetes.resources import (
    DEPLOYMENTS,
    EVENTS,
    HORIZONTAL_POD_AUTOSCALERS,
    JOBS,
    NODES,
    POD_DISRUPTION_BUDGETS,
    PODS,
    REPLICA_SETS,
)
from eelgrid_controller.adapters.kubernetes.retry import Limits, with_retries
from eelgrid_controller.kubernetes.budgets import forbids
from eelgrid_controller.kubernetes.gate_events import Key
from eelgrid_controller.kubernetes.move_notes import note_text
from eelgrid_controller.kubernetes.names import (
    ANNOTATION_EVICT_AT,
    ANNOTATION_MOVE,
    ANNOTATION_MOVED_AT,
    DELETION_COST,
    LABEL_MOVING,
)
from eelgrid_controller.kubernetes.people_events import Regarding, event_of
from eelgrid_controller.kubernetes.surging import Mark, Scale
from eelgrid_controller.kubernetes.times import stamp_text
from eelgrid_controller.kubernetes.views import Pod, owner_of

__all__ = ["MoveWrites"]

_LIMITS = Limits(attempts=3, whole_s=8.0, first_s=0.1, most_s=2.0)
_T = TypeVar("_T")


class MoveWrites:
    """Calls for moves."""

    def __init__(self, around: Surroundings) -> None:
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
        found = await self._tried(lambda: self._cluster.get(REPLICA_SETS, owner.name, namespace=pod.namespace))
        above = owner_of(found)
        return above.name if above is not None and above.kind == "Deployment" else ""

    async def deployment(self, namespace: str, name: str) -> Object | None:
        """A Deployment as it is; None if it is gone."""
        try:
            return await self._tried(lambda: self._cluster.get(DEPLOYMENTS, name, namespace=namespace))
        except NotFound:
            return None

    async def moving(self) -> Sequence[Object]:
        """Deployments that carry a move."""
        return (await self._tried(lambda: self._cluster.list(DEPLOYMENTS, labels=LABEL_MOVING))).items

    async def autoscaler(self, namespace: str, deployment: str) -> str:
        """Who else scales a Deployment; empty where nobody does."""
        try:
            found = await self._tried(lambda: self._cluster.list(HORIZONTAL_POD_AUTOSCALERS, namespace=namespace))
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
            return await self._tried(lambda: self._cluster.get(JOBS, name, namespace=namespace))
        except NotFound:
            return None

    # What is written

    async def mark(self, asked: Mark) -> None:
        """Write a note and a deletion cost onto a pod."""
        text = None if asked.note is None else note_text(asked.note)
        at = None if asked.evict_s is None else stamp_text(int(asked.evict_s))
        annotations = {ANNOTATION_MOVE: text, DELETION_COST: asked.cost, ANNOTATION_EVICT_AT: at}
        await self._annotate(asked.pod, annotations)

    async def came(self, pod: Pod, now_s: float) -> None:
        """Note on a pod that it came by a move."""
        await self._annotate(pod, {ANNOTATION_MOVED_AT: f"{now_s:.0f}"})

    async def _annotate(self, pod: Pod, annotations: Mapping[str, str | None]) -> None:
        body = {"metadata": {"uid": pod.uid, "annotations": annotations}}
        await self._written(lambda: self._cluster.patch(PODS, pod.name, body, namespace=pod.namespace))

    async def scale(self, asked: Scale) -> None:
        """Write a note and a number of replicas onto a Deployment, if it still is the one that was looked at."""
        its = asked.deployment
        metadata = {
            "uid": its.uid,
            "resourceVersion": its.version,
            "labels": {LABEL_MOVING: None if asked.note is None else "true"},
            "annotations": {ANNOTATION_MOVE: None if asked.note is None else note_text(asked.note)},
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
                except (NotFound, Conflict):
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
        budgets = (await self._tried(lambda: self._cluster.list(POD_DISRUPTION_BUDGETS, namespace=namespace))).items
        if not budgets:
            return ""
        labels = []
        for pod in pods:
            if pod.is_ready:
                found = await self._tried(lambda pod=pod: self._cluster.get(PODS, pod.name, namespace=namespace))  # type: ignore[misc]
                labels.append(found["metadata"].get("labels") or {})
        return forbids(budgets, labels)

    async def _evict(self, pod: Pod, *, is_dry: bool) -> None:
        await self._written(lambda: self._cluster.evict(pod.name, namespace=pod.namespace, uid=pod.uid, is_dry=is_dry))

    async def node_says(self, name: str, annotations: Mapping[str, str | None]) -> None:
        """Write annotations of ours onto a node."""
        body = {"metadata": {"annotations": annotations}}
        await self._written(lambda: self._cluster.patch(NODES, name, body))

    async def node_patch(self, name: str, body: Sequence[Mapping[str, Any]]) -> None:
        """A JSON patch of a node, which tests what it was made from."""
        await self._written(lambda: self._cluster.patch(NODES, name, body, PatchKind.JSON))

    async def tell(self, kind: str, key: Key, uid: str, text: str, *, is_warning: bool = False) -> None:
        """An Event; one that is not accepted is not repeated."""
        around = self._around
        body = event_of(
            Regarding("v1", kind, key.namespace, key.name, uid), text, is_warning=is_warning, action="Moving",
            reason="EelgridProblem" if is_warning else "EelgridMove", identity=around.identity,
            now_ns=around.clock.now_ns(),
        )  # fmt: skip
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

        return await self._tried(led)

    async def _tried(self, call: Callable[[], Awaitable[_T]]) -> _T:
        around = self._around
        return await with_retries(
            call, rng=around.rng, is_idempotent=True, limits=_LIMITS, monotonic_s=around.clock.monotonic_s
        )
