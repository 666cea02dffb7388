"""InferenceService reconciler: reads services and targets, scales them and writes their status."""

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from eelgrid_controller.engines.kubernetes.api.errors import ClusterError, Conflict, ObjectNotFound, StaleTerm
from eelgrid_controller.engines.kubernetes.api.port import (
    DEPLOYMENTS,
    INFERENCE_SERVICES,
    PODS,
    STATEFUL_SETS,
    Object,
    ObjectKey,
)
from eelgrid_controller.engines.kubernetes.api.retry import RetryLimits
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
from eelgrid_controller.engines.kubernetes.pods.service_scaling import (
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
from eelgrid_controller.engines.kubernetes.reconcilers.gate_engine import ReconcilerContext
from eelgrid_controller.engines.kubernetes.reconcilers.reconciler import CLUSTER_KEY, ParseCache, Reconciler, Result
from eelgrid_controller.placement.power import PriorPowerModel
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
    """What is kept of one service between reconciles."""

    scaling: ScaleSubresourceWriter = field(default_factory=ScaleSubresourceWriter)
    conditions: ConditionSet = field(default_factory=ConditionSet)
    told: Mapping[str, Any] = field(default_factory=dict)  # its status, as written last
    told_s: float = -math.inf
    workload_id: str = ""
    refused: str = ""
    grown: dict[str, bool] = field(default_factory=dict)  # by uid of pods: whether they served when first seen
    writing: asyncio.Task[None] | None = None


class InferenceServiceReconciler(Reconciler[str]):
    """Scales the targets of all InferenceServices of one cluster, and writes the services' status."""

    def __init__(self, around: ReconcilerContext) -> None:
        super().__init__(around, "services", limits=_LIMITS, max_concurrent_writes=_SERVICES_MOST)
        self.looks = 0
        self.scaled = 0
        self.marked = 0
        self.statuses = 0
        self._around = around
        self._power = PriorPowerModel(catalogue.load_catalogue())
        self._kept: dict[str, _Kept] = {}
        self._read: ParseCache[str, InferenceService | ServiceRejection] = ParseCache(parse_service)
        self._is_known = asyncio.Event()
        around.engine.awaited.append(self._known)
        self.reset()

    def reset(self) -> None:
        """Services and their targets begin from lists."""
        self._services = self.make_informer(INFERENCE_SERVICES, max_objects=_SERVICES_MOST)
        self._targets = {
            kind: self.make_informer(found, max_objects=_TARGETS_MOST, keep=_prune_object)
            for kind, found in _KINDS.items()
        }

    def is_ready(self) -> bool:
        """Also while another leads: the gate is to know whose pods are whose, and nothing is written."""
        return self.is_started

    async def start(self, group: asyncio.TaskGroup) -> None:
        """Read services and what may be their targets."""
        informers = (self._services, *self._targets.values())
        for one in informers:
            group.create_task(one.run())
        for one in informers:
            await one.wait_synced()
        self.queue.add(CLUSTER_KEY)

    def stop(self) -> None:
        """Cancel writes in progress."""
        for kept in self._kept.values():
            if kept.writing is not None:
                kept.writing.cancel()

    async def _known(self) -> None:
        """Until services have been read once; a cluster that serves none of them is not waited for."""
        try:
            async with asyncio.timeout(_SYNC_S):
                await self._is_known.wait()
        except TimeoutError:
            self.log.warning("services=unknown seconds=%g action=place_without", _SYNC_S)

    async def reconcile(self, _: str) -> Result | None:
        """Compare all services with their targets."""
        self.reconcile_services()
        self._is_known.set()
        return Result(_LOOK_S)

    # Looking

    def reconcile_services(self) -> None:
        """Compare all services with their targets, and write what differs."""
        self.looks += 1
        around, at_s = self._around, self.clock.monotonic_s()
        found = {str(one["metadata"]["uid"]): one for one in self._services.objects.values()}
        self._read.retain(found.keys())
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
                told = rejected_status(one, generation, kept.conditions, self.clock.now_ns())
                self._write(kept, found[uid], told, [], at_s)
                continue
            unit = around.engine.gate.units.get(one.unit_name)
            seen = count_replicas(unit)
            told_scale = kept.scaling.reconcile_replicas(one, self._version(one.target), seen, at_s)
            self._publish_overrides(one, unit, kept)
            facts = self._facts(unit, seen, kept, standings.get(kept.workload_id))
            told = build_service_status(one, kept.scaling, facts, kept.conditions, self.clock.now_ns())
            self._write(kept, found[uid], told, told_scale, at_s)

    def _service(self, uid: str, found: Object) -> InferenceService | ServiceRejection:
        read = self._read.get(uid, found)
        assert read is not None, "what cannot be read is a rejection"
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
        """Restore state from the object's own status."""
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
        term = self.term()
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
            self.log.debug("service=%s scaled=no error=%s action=retry", name, error)
        except ClusterError as error:
            self.failures += 1
            kept.refused = str(error)
            self.log.warning("service=%s scaled=no error=%s", name, error)
            await asyncio.sleep(_STATUS_S)
        if status is not None:
            await self._write_status(kept, found, status, name, epoch)

    async def _mark(self, mark: SetDeletionCost, epoch: int) -> None:
        body = {"metadata": {"uid": mark.uid, "annotations": {DELETION_COST: mark.cost}}}
        await self.write(
            lambda: self.cluster.patch(PODS, mark.key.name, body, namespace=mark.key.namespace), epoch=epoch
        )
        self.marked += 1

    async def _set(self, asked: SetReplicas, kept: _Kept, name: str, epoch: int) -> None:
        target = asked.target
        body = {"metadata": {"resourceVersion": asked.version}, "spec": {"replicas": asked.replicas}}
        written = await self.write(
            lambda: self.cluster.patch(
                _KINDS[target.kind], target.name, body, namespace=target.namespace, subresource="scale"
            ),
            epoch=epoch,
        )
        kept.scaling.on_written(asked.replicas, str(written["metadata"]["resourceVersion"]), self.clock.monotonic_s())
        self.scaled += 1
        self.log.info("service=%s target=%s replicas=%d", name, target.name, asked.replicas)

    async def _write_status(self, kept: _Kept, found: Object, status: dict[str, Any], name: str, epoch: int) -> None:
        metadata = found["metadata"]
        body = {"metadata": {"uid": metadata["uid"]}, "status": status}
        try:
            await self.write(
                lambda: self.cluster.patch(
                    INFERENCE_SERVICES, metadata["name"], body, namespace=metadata["namespace"], subresource="status"
                ),
                epoch=epoch,
            )
        except ClusterError as error:
            self.failures += 1
            self.log.warning("service=%s status=no error=%s", name, error)
        else:
            self.statuses += 1
            kept.told = status
        kept.told_s = self.clock.monotonic_s()


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
