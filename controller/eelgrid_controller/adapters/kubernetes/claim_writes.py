"""The writes of mode `dra`: claims with their allocations, and gates that go.

Owns their attempts, their order within a grant, how many are under way, and that nothing is sent in a
term that is over. Must not know why anything is written.

Theory. A claim is written whole by the version that was looked at, so it may be sent again: whatever was done
in between, the second is refused. Where it is refused the claim is read, since the answer to the first may have been
lost. The answer to a write is taken for what the watch tells later. A write does not outlive its term.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from eelgrid_controller.adapters.kubernetes.abilities import Surroundings
from eelgrid_controller.adapters.kubernetes.errors import ClusterError, NotFound
from eelgrid_controller.adapters.kubernetes.port import Key as ObjectKey
from eelgrid_controller.adapters.kubernetes.port import Object
from eelgrid_controller.adapters.kubernetes.resources import PODS, RESOURCE_CLAIMS
from eelgrid_controller.adapters.kubernetes.retry import Limits, with_retries
from eelgrid_controller.adapters.kubernetes.writes import Stale, failure_of
from eelgrid_controller.kubernetes.claim_events import (
    ClaimSeen,
    Event,
    Failure,
    Free,
    FreeFailed,
    Grant,
    Granted,
    GrantFailed,
    Release,
    Write,
)  # fmt: skip
from eelgrid_controller.kubernetes.names import ANNOTATION_PLAN
from eelgrid_controller.kubernetes.patches import stripping, ungating

__all__ = ["ClaimWrites", "pruned_claim"]

_LIMITS = Limits(attempts=4, whole_s=15.0, first_s=0.1, most_s=3.0)
_AT_ONCE = 24
_METADATA = ("name", "namespace", "uid", "resourceVersion", "ownerReferences", "deletionTimestamp")


def pruned_claim(found: Object) -> Object:
    """A claim without what nobody reads; its status may be written from it."""
    metadata = {key: found["metadata"][key] for key in _METADATA if key in found["metadata"]}
    return {"metadata": metadata, "spec": found["spec"], "status": found.get("status") or {}}


class ClaimWrites:
    """Carries out grants and what undoes them."""

    def __init__(self, around: Surroundings, feed: Callable[[Event], None]) -> None:
        """What came of each is fed back."""
        self.granted = 0  # claims written
        self.released = 0  # gates removed, or plans renewed
        self.freed = 0
        self.failed: dict[Failure, int] = dict.fromkeys(Failure, 0)
        self._feed = feed
        self._cluster = around.cluster
        self._engine = around.engine
        self._elector = around.elector
        self._monotonic_s = around.clock.monotonic_s
        self._rng = around.rng
        self._log = around.log
        self._turns = asyncio.Semaphore(_AT_ONCE)

    async def grant(self, one: Grant) -> None:
        """All claims, then all pods; what of it failed is told when nothing of it is under way any more."""
        wrote = await asyncio.gather(*(self._write(write, one.epoch) for write in one.writes))
        failed = [found for found in wrote if found is not None]
        if not failed:
            let = await asyncio.gather(*(self._release(release, one.epoch) for release in one.releases))
            failed = [found for found in let if found is not None]
        for uid, failure, why in failed:
            self._feed(GrantFailed(one.unit, uid, failure, why))
        if not failed:
            self._feed(Granted(one.unit))

    async def _write(self, one: Write, epoch: int) -> tuple[str, Failure, str] | None:
        failed = await self._status(one.body, epoch)
        if failed is not None:
            return (one.uid, *failed)
        self.granted += 1
        return None

    async def free(self, one: Free) -> None:
        """Take an allocation away."""
        failed = await self._status(one.body, one.epoch)
        if failed is not None:
            self._feed(FreeFailed(one.uid, *failed))
            return
        self.freed += 1
        self._log.info("claim=%s freed reason=%s", one.key, one.why)

    async def _status(self, body: Any, epoch: int) -> tuple[Failure, str] | None:
        """Write a claim's status; after a conflict the claim is read, since the answer to a first attempt may be lost."""
        metadata = body["metadata"]
        name, namespace = metadata["name"], metadata["namespace"]

        async def call() -> Object:
            return await self._cluster.replace(RESOURCE_CLAIMS, body, subresource="status")

        failed, told = await self._tried(call, epoch)
        if failed is not None and failed[0] is Failure.CONFLICT:
            try:
                told = await self._cluster.get(RESOURCE_CLAIMS, name, namespace=namespace)
            except NotFound:
                failed = Failure.GONE, "the claim is gone"
            except ClusterError as error:
                self._log.debug("claim=%s/%s read=no error=%s", namespace, name, error)
        if told is not None:
            self._feed(ClaimSeen(pruned_claim(told)))
        if failed is not None and failed[0] not in (Failure.CONFLICT, Failure.GONE, Failure.STALE):
            self._log.warning("claim=%s/%s written=no failure=%s error=%s", namespace, name, failed[0].name, failed[1])
        return failed

    async def _release(self, one: Release, epoch: int) -> tuple[str, Failure, str] | None:
        namespace, name = one.key

        async def call() -> Object:
            pod = self._engine.pods.objects.get(ObjectKey(namespace, name))
            head = {} if pod is None else pod["metadata"]
            if pod is None or (head.get("uid"), head.get("resourceVersion")) != (one.uid, one.version):
                raise Stale
            if one.is_pinned:
                body = ungating(pod, one.node_name, one.plan)
            else:
                body = stripping(pod)
                body["metadata"]["annotations"] = {ANNOTATION_PLAN: one.plan}
            return await self._cluster.patch(PODS, name, body, namespace=namespace)

        failed, _ = await self._tried(call, epoch)
        if failed is not None:
            return (one.uid, *failed)
        self.released += 1
        return None

    async def _tried(
        self, call: Callable[[], Awaitable[Object]], epoch: int
    ) -> tuple[tuple[Failure, str] | None, Object | None]:
        """Makes a write in its turn and in its term: why it was not made, or what the server answered."""

        async def guarded() -> Object:
            term = self._elector.term()
            if term is None or term.epoch != epoch:
                raise Stale
            try:
                async with asyncio.timeout(max(0.0, term.until_s - self._monotonic_s())):
                    return await call()
            except TimeoutError:
                raise Stale from None

        try:
            async with self._turns:
                told = await with_retries(
                    guarded, rng=self._rng, is_idempotent=True, limits=_LIMITS,
                    monotonic_s=self._monotonic_s,
                )  # fmt: skip
        except (ClusterError, Stale) as error:
            failure = failure_of(error)
            self.failed[failure] += 1
            return (failure, str(error)), None
        return None, told
