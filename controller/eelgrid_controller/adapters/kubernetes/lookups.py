"""Objects above pods, looked up when a pod's place in a gang stands on them.

Owns what was found, for how long, and that each is asked for once at a time. Must not know
what stands in them (`kubernetes/holders.py`). An object that changes is read again with the
next pod that needs it after `_AGE_S`; one that is not there or not served is remembered as
such, for as long.
"""

import asyncio
import logging
from collections.abc import Callable

from eelgrid_controller.adapters.kubernetes.errors import ClusterError, NotFound
from eelgrid_controller.adapters.kubernetes.port import Cluster, Served
from eelgrid_controller.adapters.kubernetes.resources import (
    JOB_SETS,
    JOBS,
    LEADER_WORKER_SETS,
    POD_GROUPS,
    PYTORCH_JOBS,
    Resource,
)
from eelgrid_controller.kubernetes.holders import KUBEFLOW, Holder, Ref, holder_of

__all__ = ["Lookups"]

_AGE_S = 60.0
_AGAIN_S = 2.0
_MOST = 20_000
_VERSIONS = ("v1", "v1beta2", "v1beta1", "v1alpha3", "v1alpha2", "v1alpha1")
_KINDS = {
    ("batch", "Job"): JOBS,
    ("jobset.x-k8s.io", "JobSet"): JOB_SETS,
    ("leaderworkerset.x-k8s.io", "LeaderWorkerSet"): LEADER_WORKER_SETS,
    ("scheduling.k8s.io", "PodGroup"): POD_GROUPS,
    **{("kubeflow.org", kind): PYTORCH_JOBS._replace(plural=f"{kind.lower()}s", kind=kind) for kind in KUBEFLOW},
}


class Lookups:
    """What is known of objects above pods; `found` is read by whoever judges pods."""

    def __init__(
        self, cluster: Cluster, *, done: Callable[[Ref], None], monotonic_s: Callable[[], float], log: logging.Logger
    ) -> None:
        """`done` hears of each object that is known from now on."""
        self.found: dict[Ref, Holder | None] = {}
        self.asked = 0
        self._cluster = cluster
        self._done = done
        self._monotonic_s = monotonic_s
        self._log = log
        self._until_s: dict[Ref, float] = {}
        self._under_way: set[Ref] = set()
        self._served: Served | None = None

    def forget_old(self) -> None:
        """Let go of what is too old; the next pod asks again."""
        now_s = self._monotonic_s()
        for ref in [ref for ref, until_s in self._until_s.items() if until_s <= now_s]:
            self.found.pop(ref, None)
            del self._until_s[ref]

    async def look(self, ref: Ref) -> None:
        """Find an object, unless that is under way."""
        if ref in self._under_way or ref in self.found:
            return
        self._under_way.add(ref)
        try:
            while True:
                try:
                    holder = await self._get(ref)
                except ClusterError as error:
                    self._log.warning("object=%s read=no error=%s action=again", ref, error)
                    await asyncio.sleep(_AGAIN_S)
                else:
                    break
        finally:
            self._under_way.discard(ref)
        if len(self.found) >= _MOST:
            oldest = next(iter(self.found))
            self.found.pop(oldest)
            self._until_s.pop(oldest, None)
        self.found[ref] = holder
        self._until_s[ref] = self._monotonic_s() + _AGE_S
        self._done(ref)

    async def _get(self, ref: Ref) -> Holder | None:
        kind = await self._kind(ref)
        if kind is None:
            return None
        self.asked += 1
        try:
            return holder_of(ref, await self._cluster.get(kind, ref.name, namespace=ref.namespace))
        except NotFound:
            return None

    async def _kind(self, ref: Ref) -> Resource | None:
        known = _KINDS.get((ref.group, ref.kind))
        if known is None:
            return None
        if self._served is None or self._served.find(known, _VERSIONS) is None:
            self._served = await self._cluster.discover()
        return self._served.find(known, _VERSIONS)
