"""Kueue's Workloads get the boost that preempting them would cost, where a ClusterQueue asks for it.

Owns the informers and the writes of it. Must not know the cost (`kubernetes/preemption_cost.py`).

Theory. Where Kueue is served its ClusterQueues are watched; Workloads are not, until a queue names
a largest boost. From then on all Workloads of such queues are judged every `every_s`, and
patched where their boost is another, with uid and resource version, while this process leads. One that fails is
judged again in the next turn.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from eelgrid_controller.adapters.kubernetes.abilities import Surroundings
from eelgrid_controller.adapters.kubernetes.errors import ClusterError
from eelgrid_controller.adapters.kubernetes.informer import Informer
from eelgrid_controller.adapters.kubernetes.port import Object, Served
from eelgrid_controller.adapters.kubernetes.resources import CLUSTER_QUEUES, KUEUE_WORKLOADS, Resource
from eelgrid_controller.kubernetes.errors import KubernetesUnreadable
from eelgrid_controller.kubernetes.preemption_cost import boost, boosted_of, boosting, interrupted_of, most_of

__all__ = ["VERSIONS", "BoostsPart"]

VERSIONS = ("v1beta2", "v1beta1")
_MOST = 50_000
_EVERY_S = 15.0
_LOOK_S = 1.0  # whether any queue asks for it
_WRITES_MOST = 64  # in one turn


class BoostsPart:
    """Boosts of one cluster's Workloads."""

    def __init__(
        self,
        around: Surroundings,
        served: Served,
        *,
        wasteful: Callable[[str], bool],
        every_s: float = _EVERY_S,
    ) -> None:
        """`wasteful` says of the uid of a Workload's owner whether it wastes."""
        self.written = 0
        self.failures = 0
        self._around = around
        self._queues = served.find(CLUSTER_QUEUES, VERSIONS)
        self._workloads = served.find(KUEUE_WORKLOADS, VERSIONS)
        self._wasteful = wasteful
        self._every_s = every_s

    async def run(self) -> None:
        """Judge for ever, or not at all where Kueue is not served."""
        if self._queues is None or self._workloads is None:
            return
        queues, workloads = self._informer(self._queues), self._informer(self._workloads)
        async with asyncio.TaskGroup() as group:
            group.create_task(queues.run())
            await queues.synced()
            is_begun = False
            while True:
                most = {key.name: most_of(one) for key, one in queues.objects.items()}
                if any(most.values()) and not is_begun:
                    is_begun = True
                    group.create_task(workloads.run())
                    await workloads.synced()
                if is_begun:
                    await self._turn(list(workloads.objects.values()), most, self._workloads)
                await asyncio.sleep(self._every_s if is_begun else _LOOK_S)

    def _informer(self, resource: Resource) -> Informer:
        around = self._around
        return Informer(
            around.cluster, resource, rng=around.rng, monotonic_s=around.clock.monotonic_s, log=around.log,
            keep=_pruned, most=_MOST,
        )  # fmt: skip

    async def _turn(self, workloads: list[Object], most: Mapping[str, int], resource: Resource) -> None:
        writes = 0
        for workload in workloads:
            if self._around.elector.term() is None or writes >= _WRITES_MOST:
                return
            body = self._judged(workload, most)
            if body is None:
                continue
            writes += 1
            metadata = workload["metadata"]
            try:
                await self._around.cluster.patch(resource, metadata["name"], body, namespace=metadata["namespace"])
            except ClusterError as error:
                self.failures += 1
                self._around.log.info("workload=%s boosted=no error=%s", metadata["name"], error)
            else:
                self.written += 1

    def _judged(self, workload: Object, most: Mapping[str, int]) -> dict[str, Any] | None:
        """The patch that a Workload needs."""
        admission = (workload.get("status") or {}).get("admission") or {}
        limit = most.get(str(admission.get("clusterQueue", "")), 0)
        has = boosted_of(workload)
        if not limit and has.ours is None:
            return None
        owners = workload["metadata"].get("ownerReferences") or ()
        is_wasteful = any(self._wasteful(owner["uid"]) for owner in owners)
        try:
            run = interrupted_of(workload, now_s=self._around.clock.now_ns() / 1e9, is_wasteful=is_wasteful)
        except KubernetesUnreadable as error:
            self._around.log.debug("workload=%s read=no error=%s", workload["metadata"]["name"], error)
            return None
        before = int(has.ours) if has.ours is not None and has.ours.isdigit() else 0
        return boosting(workload, boost(run, limit, before) if run is not None else 0)


def _pruned(found: Object) -> Object:
    """Without who wrote which field."""
    return {**found, "metadata": {key: value for key, value in found["metadata"].items() if key != "managedFields"}}
