"""Namespaces, claims, volumes and storage classes: held for as long as pods are judged by them.

Owns when they are begun to be watched, and whether they may be read. Must not know what they are good
for. Nothing is watched before a gated pod needs it: most clusters have many claims, and few pods that
wait for GPUs name any. What may not be read is tried again by the informer; until it can be, whoever
needs it hears so and leaves such pods to kube-scheduler.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from eelgrid_controller.adapters.kubernetes.errors import Forbidden, NotServed
from eelgrid_controller.adapters.kubernetes.held import Delta
from eelgrid_controller.adapters.kubernetes.informer import Informer
from eelgrid_controller.adapters.kubernetes.port import Cluster, Object
from eelgrid_controller.adapters.kubernetes.pruning import (
    pruned_claim,
    pruned_namespace,
    pruned_storage_class,
    pruned_volume,
)
from eelgrid_controller.adapters.kubernetes.resources import (
    NAMESPACES,
    PERSISTENT_VOLUME_CLAIMS,
    PERSISTENT_VOLUMES,
    STORAGE_CLASSES,
    Resource,
)
from eelgrid_controller.kubernetes import eligibility
from eelgrid_controller.kubernetes.gate_events import Event, Key, RelatedKnown, RelatedSeen
from eelgrid_controller.kubernetes.scheduling_constraints import claim_of, needs_namespaces, storage_class_of, volume_of
from eelgrid_controller.kubernetes.views import Pod

__all__ = ["RELATED_MOST", "RelatedObjects"]

# Objects of one kind that are held: pruned to some 500 bytes, a hundred MB at the most.
RELATED_MOST = 200_000
_LOOKED_AT_EVERY_S = 0.2


def _labels_of(found: Mapping[str, Any]) -> dict[str, str]:
    return dict(found["metadata"].get("labels") or {})


_KINDS: Mapping[str, Sequence[tuple[Resource, Callable[[Object], Object], Callable[[Object], Any]]]] = {
    eligibility.NAMESPACES: ((NAMESPACES, pruned_namespace, _labels_of),),
    eligibility.VOLUMES: (
        (PERSISTENT_VOLUME_CLAIMS, pruned_claim, claim_of),
        (PERSISTENT_VOLUMES, pruned_volume, volume_of),
        (STORAGE_CLASSES, pruned_storage_class, storage_class_of),
    ),
}


class RelatedObjects:
    """Informers of what pods are judged by, each begun when it is first needed."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        feed: Callable[[Event], None],
        rng: random.Random,
        monotonic_s: Callable[[], float],
        log: logging.Logger,
    ) -> None:
        self._cluster = cluster
        self._feed = feed
        self._rng = rng
        self._monotonic_s = monotonic_s
        self._log = log
        self._wanted: asyncio.Queue[str] = asyncio.Queue()
        self._begun: set[str] = set()

    def need_for(self, pod: Pod) -> None:
        """A gated pod is going to be judged."""
        if pod.relations.claims:
            self._need(eligibility.VOLUMES)
        if needs_namespaces(pod):
            self._need(eligibility.NAMESPACES)

    def _need(self, kind: str) -> None:
        if kind not in self._begun:
            self._begun.add(kind)
            self._wanted.put_nowait(kind)

    async def run(self) -> None:
        """Watch what is needed until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                kind = await self._wanted.get()
                informers = [self._informer(*one) for one in _KINDS[kind]]
                for informer in informers:
                    group.create_task(informer.run())
                group.create_task(self._report(kind, informers))

    def _informer(
        self, resource: Resource, keep: Callable[[Object], Object], read: Callable[[Object], Any]
    ) -> Informer:
        def told(deltas: Sequence[Delta]) -> None:
            for delta in deltas:
                value = None if delta.new is None else read(delta.new)
                self._feed(RelatedSeen(resource.plural, Key(*delta.key), value))

        informer = Informer(
            self._cluster, resource, rng=self._rng, monotonic_s=self._monotonic_s, log=self._log, keep=keep,
            most=RELATED_MOST,
        )  # fmt: skip
        informer.hear(told)
        return informer

    async def _report(self, kind: str, informers: Sequence[Informer]) -> None:
        """Tell whether all of a kind are known, each time that changes."""
        told: bool | None = None
        while told is not True:
            if all(one.is_synced for one in informers):
                now: bool | None = True
            elif any(not one.is_synced and isinstance(one.last_error, Forbidden | NotServed) for one in informers):
                now = False
            else:
                now = None
            if now is not None and now is not told:
                told = now
                self._log.info("kubernetes=%s readable=%s", kind, "yes" if now else "no")
                self._feed(RelatedKnown(kind, now))
            await asyncio.sleep(_LOOKED_AT_EVERY_S)
