"""Nodes and pods by way of the API alone, and a log of where each pod was bound and what its plan said."""

import asyncio
import contextlib
import json
import random
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from logging import getLogger
from typing import Any, NamedTuple, Self

from eelgrid_controller.engines.kubernetes.api.client import HttpClusterClient, RequestLimits
from eelgrid_controller.engines.kubernetes.api.errors import ObjectAlreadyExists, ObjectNotFound
from eelgrid_controller.engines.kubernetes.api.informer import Delta, Informer, InformerTiming
from eelgrid_controller.engines.kubernetes.api.kubeconfig import find_access
from eelgrid_controller.engines.kubernetes.api.port import NAMESPACES, NODES, PODS, Object
from eelgrid_controller.engines.kubernetes.model.well_known import ANNOTATION_PLAN, GATE, LABEL_MANAGED, SCHEDULER
from eelgrid_controller.engines.kubernetes.pods.plan_annotation import pinned_node

__all__ = ["Rig", "Rush", "Seen", "pod"]

AT_ONCE = 32
_BOUND_WITHIN_S = 300.0
_READY = {
    "type": "Ready",
    "status": "True",
    "reason": "Fake",
    "lastHeartbeatTime": "2026-01-01T00:00:00Z",
    "lastTransitionTime": "2026-01-01T00:00:00Z",
}


@dataclass
class Seen:
    """What was seen of one pod."""

    uid: str
    name: str
    created_s: float
    node: str = ""
    pinned: str = ""
    plan: dict[str, Any] = field(default_factory=dict)
    plans: int = 0  # different plans that it carried
    bound_s: float | None = None
    gone_s: float | None = None


def pod(name: str, *, gpus: int = 1, mode: str = "gate", **more: Any) -> Object:
    """A pod; `more` goes into its metadata, `spec` of it into its spec.

    `mode` says what is done about it at its admission: in "gate" it has the gate, in "scheduler" our scheduler's name,
    in "admission" the label by which our webhook is asked; in all others nothing.
    """
    amounts = {"cpu": "100m", "memory": "64Mi", "nvidia.com/gpu": str(gpus)}
    spec: dict[str, Any] = {
        "containers": [
            {
                "name": "main",
                "image": "none",
                "resources": {"requests": amounts, "limits": {"nvidia.com/gpu": str(gpus)}},
            }
        ],
        "terminationGracePeriodSeconds": 0,
        **more.pop("spec", {}),
    }
    metadata = {"name": name, **more}
    if mode == "scheduler":
        spec["schedulerName"] = SCHEDULER
    elif mode == "gate":
        spec["schedulingGates"] = [{"name": GATE}]
    if mode in ("gate", "admission"):
        metadata["labels"] = {LABEL_MANAGED: "true", **more.get("labels", {})}
    return {"metadata": metadata, "spec": spec}


class Rush(NamedTuple):
    """Pods that were created at once, and what became of them."""

    bound: list[Seen]
    seconds: float  # from the first creation to the last binding
    created_s: float  # of these, for the creation of all


class Rig:
    """One cluster, seen and changed through its API."""

    def __init__(self, kubeconfig: str, namespace: str = "default") -> None:
        self.namespace = namespace
        self.cluster = HttpClusterClient(
            find_access({}, kubeconfig=kubeconfig), bounds=RequestLimits(at_once=AT_ONCE, request_s=30.0)
        )
        self.seen: dict[str, Seen] = {}
        self._changed = asyncio.Event()
        self._informer = Informer(
            self.cluster,
            PODS,
            rng=random.Random(0),
            monotonic_s=time.monotonic,
            log=getLogger("rig"),
            keep=_kept,
            pace=InformerTiming(first_wait_s=0.1, most_wait_s=1.0),
        )
        self._informer.add_listener(self._heard)

    async def __aenter__(self) -> Self:
        self._watching = asyncio.create_task(self._informer.run())
        await self._informer.wait_synced()
        return self

    async def __aexit__(self, *reason: object) -> None:
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)
        await self.cluster.close()

    def _heard(self, deltas: Sequence[Delta]) -> None:
        now_s = time.monotonic()
        for delta in deltas:
            if delta.new is None:
                if delta.old is not None and delta.old["metadata"]["uid"] in self.seen:
                    self.seen[delta.old["metadata"]["uid"]].gone_s = now_s
                continue
            metadata = delta.new["metadata"]
            found = self.seen.setdefault(metadata["uid"], Seen(metadata["uid"], metadata["name"], now_s))
            text = metadata["annotations"].get(ANNOTATION_PLAN)
            plan = json.loads(text) if text else {}
            if plan and plan != found.plan:
                found.plan, found.plans = plan, found.plans + 1
                found.pinned = pinned_node(delta.new)
            node = delta.new["spec"].get("nodeName", "")
            if node and found.bound_s is None:
                found.node, found.bound_s = node, now_s
        self._changed.set()

    async def until(self, check: Callable[[], bool], *, within_s: float) -> bool:
        """Whether it came true in time."""
        try:
            async with asyncio.timeout(within_s):
                while not check():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return check()
        return True

    def alive(self) -> list[Seen]:
        """Pods that are there."""
        return [one for one in self.seen.values() if one.gone_s is None]

    async def namespace_made(self) -> None:
        """Our namespace, and the account that every pod has."""
        with contextlib.suppress(ObjectAlreadyExists):
            await self.cluster.create(NAMESPACES, {"metadata": {"name": self.namespace}})

    async def make_nodes(self, count: int, *, gpus: int = 8, prefix: str = "n") -> list[str]:
        """Nodes without kubelets, as many; those that are there stay."""
        amounts = {"cpu": "64", "memory": "512Gi", "pods": "110", "nvidia.com/gpu": str(gpus)}
        names = [f"{prefix}{index:04d}" for index in range(count)]

        async def make(name: str) -> None:
            try:
                await self.cluster.create(
                    NODES, {"metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}}}
                )
            except ObjectAlreadyExists:
                return
            body = {"status": {"capacity": amounts, "allocatable": amounts, "conditions": [_READY]}}
            await self.cluster.patch(NODES, name, body, subresource="status")

        await gathered(make(name) for name in names)
        return names

    async def make(self, pods: Iterable[Object]) -> None:
        """Pods, many at once."""
        await gathered(self.cluster.create(PODS, one, namespace=self.namespace) for one in pods)

    async def rush(self, pods: Sequence[Object]) -> Rush:
        """Pods at once, until all are bound or five minutes are over; nothing else may be alive."""
        start_s = time.monotonic()
        await self.make(pods)
        created_s = time.monotonic() - start_s
        await self.until(
            lambda: sum(one.bound_s is not None for one in self.alive()) >= len(pods), within_s=_BOUND_WITHIN_S
        )
        bound = [one for one in self.alive() if one.bound_s is not None]
        return Rush(bound, max((one.bound_s or 0.0 for one in bound), default=start_s) - start_s, created_s)

    async def clear(self) -> None:
        """Delete all pods of ours and see them gone."""

        async def delete(name: str) -> None:
            with contextlib.suppress(ObjectNotFound):
                await self.cluster.delete(PODS, name, namespace=self.namespace, grace_s=0)

        await gathered(delete(one.name) for one in self.alive())
        await self.until(lambda: not self.alive(), within_s=120.0)
        self.seen.clear()


async def gathered(work: Iterable[Coroutine[Any, Any, Any]]) -> None:
    """All of them, so many at once; one that fails ends it."""
    turns = asyncio.Semaphore(AT_ONCE)

    async def one(part: Coroutine[Any, Any, Any]) -> None:
        async with turns:
            await part

    async with asyncio.TaskGroup() as group:
        for part in work:
            group.create_task(one(part))


def _kept(found: Object) -> Object:
    metadata, spec = found["metadata"], found["spec"]
    head = {key: metadata[key] for key in ("name", "namespace", "uid", "resourceVersion")}
    return {
        "metadata": {**head, "annotations": metadata.get("annotations") or {}},
        "spec": {"nodeName": spec.get("nodeName", ""), "affinity": spec.get("affinity")},
    }
