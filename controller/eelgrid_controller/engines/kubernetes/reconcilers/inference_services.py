"""InferenceService reconciler: reads services and targets, scales them and writes their status."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from eelgrid_controller.engines.kubernetes.api.elector import is_of
from eelgrid_controller.engines.kubernetes.api.errors import ClusterError, Conflict, ObjectNotFound
from eelgrid_controller.engines.kubernetes.api.informer import Informer
from eelgrid_controller.engines.kubernetes.api.port import (
    DEPLOYMENTS,
    INFERENCE_SERVICES,
    PODS,
    STATEFUL_SETS,
    Object,
    ObjectKey,
)
from eelgrid_controller.engines.kubernetes.api.retry import RetryLimits, call_with_retries
from eelgrid_controller.engines.kubernetes.model.inference_service import (
    InferenceService,
    ScaleTarget,
    ServiceMode,
    ServiceRejection,
    metrics_url,
    parse_service,
)
from eelgrid_controller.engines.kubernetes.model.status_reporting import ConditionSet
from eelgrid_controller.engines.kubernetes.model.well_known import DELETION_COST
from eelgrid_controller.engines.kubernetes.pods.placement_unit import PlacementUnit
from eelgrid_controller.engines.kubernetes.reconcilers.pod_writer import StaleTerm
from eelgrid_controller.engines.kubernetes.reconcilers.reconciler import ReconcilerContext
from eelgrid_controller.engines.kubernetes.services.scaling import (
    ReplicaCounts,
    ScaleSubresourceWriter,
    ServiceFacts,
    SetDeletionCost,
    SetReplicas,
    build_service_status,
    count_replicas,
    is_same_status,
    rejected_status,
)
from eelgrid_controller.placement.gpu_power import PriorPowerModel
from eelgrid_controller.state.engine_reports import ReplicaBounds
from eelgrid_protos import catalogue
from eelgrid_protos.messages import ServiceStatus

_LOOK_S = 1.0
_STATUS_S = 5.0
_WORDS_S = 30.0  # between two statuses that differ in words and measured times alone
_SYNC_S = 15.0  # for which placing waits until services are known
_SERVICES_MOST = 5_000
_TARGETS_MOST = 100_000
_LIMITS = RetryLimits(attempts=3, whole_s=10.0, first_s=0.2, most_s=2.0)
_KINDS = {"Deployment": DEPLOYMENTS, "StatefulSet": STATEFUL_SETS}


@dataclass(slots=True)
class _Kept:
    """What is kept of one service between looks."""

    scaling: ScaleSubresourceWriter = field(default_factory=ScaleSubresourceWriter)
    conditions: ConditionSet = field(default_factory=ConditionSet)
    told: Mapping[str, Any] = field(default_factory=dict)  # its status, as written last
    told_s: float = -math.inf
    workload_id: str = ""
    refused: str = ""
    grown: dict[str, bool] = field(default_factory=dict)  # by uid of pods: whether they served when first seen
    writing: asyncio.Task[None] | None = None


class InferenceServiceReconciler:
    """All InferenceServices of one cluster."""

    def __init__(self, around: ReconcilerContext) -> None:
        self.looks = 0
        self.scaled = 0
        self.marked = 0
        self.statuses = 0
        self.failed = 0
        self._around = around
        self._power = PriorPowerModel(catalogue.load_catalogue())
        self._kept: dict[str, _Kept] = {}
        self._read: dict[
            str, tuple[str, InferenceService | ServiceRejection]
        ] = {}  # by uid, with the version that was read
        self._is_known = asyncio.Event()
        around.engine.awaited.append(self._known)
        self._start()

    def _start(self) -> None:
        around = self._around

        def informer(resource: Any, most: int, keep: Callable[[Object], Object] | None = None) -> Informer:
            return Informer(
                around.cluster,
                resource,
                rng=around.rng,
                monotonic_s=around.clock.monotonic_s,
                log=around.log,
                most=most,
                keep=keep,
            )

        self._services = informer(INFERENCE_SERVICES, _SERVICES_MOST)
        self._targets = {kind: informer(found, _TARGETS_MOST, _prune_object) for kind, found in _KINDS.items()}

    async def _known(self) -> None:
        """Until services have been read once; a cluster that serves none of them is not waited for."""
        try:
            async with asyncio.timeout(_SYNC_S):
                await self._is_known.wait()
        except TimeoutError:
            self._around.log.warning("services=unknown seconds=%g action=place_without", _SYNC_S)

    async def run(self) -> None:
        """Look and write until cancelled."""
        self._start()
        try:
            async with asyncio.TaskGroup() as group:
                for one in (self._services, *self._targets.values()):
                    group.create_task(one.run())
                group.create_task(self._looks())
        finally:
            for kept in self._kept.values():
                if kept.writing is not None:
                    kept.writing.cancel()

    async def _looks(self) -> None:
        for one in (self._services, *self._targets.values()):
            await one.wait_synced()
        while True:
            self.reconcile_services()
            self._is_known.set()
            await asyncio.sleep(_LOOK_S)

    # Looking

    def reconcile_services(self) -> None:
        """One look at all services, and what is to be written."""
        self.looks += 1
        around, at_s = self._around, self._around.clock.monotonic_s()
        found = {str(one["metadata"]["uid"]): one for one in self._services.objects.values()}
        read = {uid: self._service(uid, one) for uid, one in found.items()}
        around.engine.set_services([one for one in read.values() if isinstance(one, InferenceService)])
        for uid in self._kept.keys() - found.keys():
            self._forget_service(uid)
        standings = {one.workload_id: one for one in around.promises().services}
        for uid, one in read.items():
            kept = self._kept.get(uid)
            if kept is None:
                kept = self._kept[uid] = self._begun(found[uid], one)
            rival = around.engine.services.find_rival(uid)
            if isinstance(one, InferenceService) and rival is not None:
                text = f"{one.target} is served by InferenceService {rival.name}, which is older"
                one = ServiceRejection("TargetTaken", "spec.targetRef", text, "delete one of the two")  # noqa: PLW2901
            if isinstance(one, ServiceRejection):
                self._silence(kept)
                generation = int(found[uid]["metadata"].get("generation") or 0)
                told = rejected_status(one, generation, kept.conditions, around.clock.now_ns())
                self._write(kept, found[uid], told, [], at_s)
                continue
            unit = around.engine.gate.units.get(one.unit_name)
            seen = count_replicas(unit)
            told_scale = kept.scaling.reconcile_replicas(one, self._version(one.target), seen, at_s)
            self._publish_overrides(one, unit, kept)
            facts = self._facts(unit, seen, kept, standings.get(kept.workload_id))
            told = build_service_status(one, kept.scaling, facts, kept.conditions, around.clock.now_ns())
            self._write(kept, found[uid], told, told_scale, at_s)

    def _service(self, uid: str, found: Object) -> InferenceService | ServiceRejection:
        version = str(found["metadata"]["resourceVersion"])
        known = self._read.get(uid)
        if known is None or known[0] != version:
            known = self._read[uid] = version, parse_service(found)
        read = known[1]
        if isinstance(read, ServiceRejection):
            return read
        target = self._target(read.target)
        if target is None:
            return read
        spec = target.get("spec") or {}
        return replace(read, wanted=int(spec.get("replicas", 1)), surge=max_surge(read.target.kind, spec))

    def _target(self, target: ScaleTarget) -> Object | None:
        return self._targets[target.kind].objects.get(ObjectKey(target.namespace, target.name))

    def _version(self, target: ScaleTarget) -> str:
        found = self._target(target)
        return "" if found is None else str(found["metadata"]["resourceVersion"])

    @staticmethod
    def _begun(found: Object, read: InferenceService | ServiceRejection) -> _Kept:
        """What the object's own status says of before."""
        status = found.get("status") or {}
        kept = _Kept(conditions=ConditionSet.from_json(status.get("conditions")), told=status)
        is_same = status.get("observedGeneration") == found["metadata"].get("generation")
        if isinstance(read, InferenceService) and read.mode is ServiceMode.ENFORCE and is_same:
            agreed = status.get("desiredReplicas")
            kept.scaling.agreed = agreed if isinstance(agreed, int) else None
        return kept

    def _publish_overrides(self, service: InferenceService, unit: PlacementUnit | None, kept: _Kept) -> None:
        outside = self._around.loop.outside
        workload_id = "" if unit is None else unit.workload_id
        if kept.workload_id and kept.workload_id != workload_id:
            outside.forget_workload(kept.workload_id)
        kept.workload_id = workload_id
        if unit is None:
            return
        outside.bounds[workload_id] = ReplicaBounds(service.least, service.most)
        if kept.scaling.advice:
            outside.advised[workload_id] = kept.scaling.advice
        else:
            outside.advised.pop(workload_id, None)
        pages, grown = {}, {}
        for replica, uid in unit.slots.items() if service.pages is not None else ():
            member = unit.members.get(uid)
            if member is not None and member.sight.pod.pod_ip and member.sight.pod.node_name and not member.is_over:
                assert service.pages is not None
                pages[replica] = metrics_url(service.pages, member.sight.pod.pod_ip)
                grown[uid] = kept.grown.get(uid, member.sight.pod.is_ready)
        outside.pages[workload_id], kept.grown = pages, grown
        outside.grown[workload_id] = frozenset(replica for replica in pages if grown[unit.slots[replica]])

    def _facts(
        self, unit: PlacementUnit | None, seen: ReplicaCounts, kept: _Kept, standing: ServiceStatus | None
    ) -> ServiceFacts:
        state = self._around.loop.core.state
        workload = state.workloads.get(kept.workload_id)
        models, watts = [], []
        for placement in () if workload is None else workload.placements:
            node = state.nodes.get(placement.node_name)
            gpus = [] if node is None else [one for one in node.inventory.gpus if one.uuid in placement.gpu_uuids]
            models += [gpu.model for gpu in gpus]
            watts += [self._power.gpu(gpu) for gpu in gpus]
        waiting = [] if unit is None else unit.waiting_members
        is_known = bool(watts) and all(one.source != "default" for one in watts)
        return ServiceFacts(
            seen=seen,
            is_begun=workload is not None and bool(workload.placements),
            waits=next((one.told for one in waiting if one.told), ""),
            gpu_models=tuple(models),
            power_w=sum(one.busy_w for one in watts) if is_known else None,
            standing=standing,
            refused=kept.refused,
        )

    def _silence(self, kept: _Kept) -> None:
        if kept.workload_id:
            self._around.loop.outside.forget_workload(kept.workload_id)
            kept.workload_id = ""

    def _forget_service(self, uid: str) -> None:
        kept = self._kept.pop(uid)
        self._read.pop(uid, None)
        self._silence(kept)
        if kept.writing is not None:
            kept.writing.cancel()

    # Writing

    def _write(
        self,
        kept: _Kept,
        found: Object,
        told: tuple[dict[str, Any], ConditionSet],
        scale: list[SetDeletionCost | SetReplicas],
        at_s: float,
    ) -> None:
        term = self._around.elector.term()
        if term is None or (kept.writing is not None and not kept.writing.done()):
            return
        status, conditions = told
        since_s = at_s - kept.told_s
        is_new = since_s >= _STATUS_S and not is_same_status(status, kept.told, is_rough=since_s < _WORDS_S)
        if not scale and not is_new:
            return
        kept.conditions = conditions if is_new else kept.conditions
        kept.writing = asyncio.create_task(self._carry_out(kept, found, status if is_new else None, scale, term.epoch))

    async def _carry_out(
        self,
        kept: _Kept,
        found: Object,
        status: dict[str, Any] | None,
        scale: list[SetDeletionCost | SetReplicas],
        epoch: int,
    ) -> None:
        name = f"{found['metadata']['namespace']}/{found['metadata']['name']}"
        try:
            for one in scale:
                await (
                    self._mark(one, epoch) if isinstance(one, SetDeletionCost) else self._set(one, kept, name, epoch)
                )
            kept.refused = "" if scale else kept.refused
        except (Conflict, ObjectNotFound, StaleTerm) as error:
            self._around.log.debug("service=%s scaled=no error=%s action=look_again", name, error)
        except ClusterError as error:
            self.failed += 1
            kept.refused = str(error)
            self._around.log.warning("service=%s scaled=no error=%s", name, error)
            await asyncio.sleep(_STATUS_S)
        if status is not None:
            await self._write_status(kept, found, status, name, epoch)

    async def _mark(self, mark: SetDeletionCost, epoch: int) -> None:
        body = {"metadata": {"uid": mark.uid, "annotations": {DELETION_COST: mark.cost}}}
        await self._call_in_term(
            epoch, lambda: self._around.cluster.patch(PODS, mark.key.name, body, namespace=mark.key.namespace)
        )
        self.marked += 1

    async def _set(self, asked: SetReplicas, kept: _Kept, name: str, epoch: int) -> None:
        target = asked.target
        body = {"metadata": {"resourceVersion": asked.version}, "spec": {"replicas": asked.replicas}}
        written = await self._call_in_term(
            epoch,
            lambda: self._around.cluster.patch(
                _KINDS[target.kind], target.name, body, namespace=target.namespace, subresource="scale"
            ),
        )
        kept.scaling.on_written(
            asked.replicas, str(written["metadata"]["resourceVersion"]), self._around.clock.monotonic_s()
        )
        self.scaled += 1
        self._around.log.info("service=%s target=%s replicas=%d", name, target.name, asked.replicas)

    async def _write_status(self, kept: _Kept, found: Object, status: dict[str, Any], name: str, epoch: int) -> None:
        metadata = found["metadata"]
        body = {"metadata": {"uid": metadata["uid"]}, "status": status}
        try:
            await self._call_in_term(
                epoch,
                lambda: self._around.cluster.patch(
                    INFERENCE_SERVICES, metadata["name"], body, namespace=metadata["namespace"], subresource="status"
                ),
            )
        except (ClusterError, StaleTerm) as error:
            self.failed += 1
            self._around.log.warning("service=%s status=no error=%s", name, error)
        else:
            self.statuses += 1
            kept.told = status
        kept.told_s = self._around.clock.monotonic_s()

    async def _call_in_term(self, epoch: int, call: Callable[[], Awaitable[Object]]) -> Object:
        async def once() -> Object:
            if not is_of(self._around.elector.term(), epoch):
                raise StaleTerm
            return await call()

        return await call_with_retries(
            once, rng=self._around.rng, is_idempotent=True, limits=_LIMITS, monotonic_s=self._around.clock.monotonic_s
        )


def max_surge(kind: str, spec: Mapping[str, Any]) -> int:
    """How many pods may come beside the replicas while a target is rolled over."""
    strategy = spec.get("strategy") or {}
    if kind != "Deployment" or strategy.get("type", "RollingUpdate") != "RollingUpdate":
        return 0
    most = (strategy.get("rollingUpdate") or {}).get("maxSurge", "25%")
    if isinstance(most, str) and most.endswith("%"):
        return math.ceil(int(spec.get("replicas", 1)) * int(most[:-1]) / 100.0)
    return int(most)


def _prune_object(found: Object) -> Object:
    metadata, spec = found["metadata"], found.get("spec") or {}
    return {
        "metadata": {key: metadata[key] for key in ("name", "namespace", "uid", "resourceVersion") if key in metadata},
        "spec": {key: spec[key] for key in ("replicas", "strategy") if key in spec},
    }
