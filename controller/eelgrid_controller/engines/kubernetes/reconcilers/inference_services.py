"""InferenceServices: the number of replicas of a service's target, its status, and the reconciler that writes both.

Whoever changed the number last prevails: an external change is kept for EXTERNAL_HOLD_S, twice as long each time up
to an hour; otherwise the target follows the core's places. Pods to be removed get the lowest deletion cost first. A
target at 0 is off; during a rollout nothing is written. `status.desiredReplicas` outlives the process.

Sources: kubernetes pkg/controller/controller_utils.go, ActivePodsWithRanks; KEP 2255.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from eelgrid_controller.engines.kubernetes.api.errors import (
    ClusterError,
    Conflict,
    ObjectNotFound,
    RetryLimits,
    StaleTerm,
)
from eelgrid_controller.engines.kubernetes.api.port import (
    DEPLOYMENTS,
    INFERENCE_SERVICES,
    PODS,
    STATEFUL_SETS,
    Object,
    ObjectKey,
)
from eelgrid_controller.engines.kubernetes.model.inference_service import (
    LATENCY_METRICS,
    WHOLE_GPU,
    InferenceService,
    ScaleTarget,
    ServiceMode,
    ServiceRejection,
    metrics_url,
    parse_service,
)
from eelgrid_controller.engines.kubernetes.model.pod_group import PodKey
from eelgrid_controller.engines.kubernetes.model.quantities import format_time
from eelgrid_controller.engines.kubernetes.model.status_reporting import ConditionSet
from eelgrid_controller.engines.kubernetes.model.well_known import DELETION_COST
from eelgrid_controller.engines.kubernetes.pods.placement_unit import PlacementUnit
from eelgrid_controller.engines.kubernetes.reconcilers.gate_engine import ReconcilerContext
from eelgrid_controller.engines.kubernetes.reconcilers.reconciler import CLUSTER_KEY, ParseCache, Reconciler, Result
from eelgrid_controller.placement.power import PriorPowerModel
from eelgrid_controller.state.engine_reports import ReplicaBounds
from eelgrid_protos import catalogue
from eelgrid_protos.messages import LatencyMetric, ServiceStatus

EXTERNAL_HOLD_S = 300.0
_HOLD_MOST_S = 3600.0
_QUIET_S = 6 * 3600.0  # without a word of others, after which they are new again
LOWEST_DELETION_COST = "-2147483647"


class SetDeletionCost(NamedTuple):
    """Set or take away what deleting a pod costs."""

    key: PodKey
    uid: str
    cost: str | None


class SetReplicas(NamedTuple):
    """Give the target a number of replicas, if it still is what was looked at."""

    target: ScaleTarget
    version: str
    replicas: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaCounts:
    """The pods of a service and their places at one moment."""

    places: int = 0  # that the core has; 0 while it has none
    lasting: int = 0  # of these, not for a rollover alone
    vacant: int = 0  # of these, without a pod
    pods: int = 0  # that are there and stay
    placed: int = 0  # of these, with a place
    serving: int = 0  # of these, ready
    waiting: int = 0  # behind our gate without a place
    beside: int = 0  # that run without a place
    let_go: tuple[tuple[PodKey, str, str], ...] = ()  # whose place was taken: name, uid, cost now
    cheap: tuple[tuple[PodKey, str], ...] = ()  # with a place, and marked as if they had none


def count_replicas(unit: PlacementUnit | None) -> ReplicaCounts:
    """What a unit's pods and places are now."""
    if unit is None or unit.elastic is None:
        return ReplicaCounts()
    elastic, present = unit.elastic, unit.present_members
    held = set(unit.slots.values())
    let_go = sorted(
        (one.sight.key, one.uid, one.sight.pod.annotations.get(DELETION_COST, ""))
        for one in present
        if one.uid in elastic.let_go and one.uid not in held
    )
    without = [one for one in present if one.uid not in held and one.uid not in elastic.let_go]
    return ReplicaCounts(
        places=len(unit.places),
        lasting=elastic.permanent_places(len(unit.places)),
        vacant=sum(replica not in unit.slots for replica in unit.places),
        pods=len(present),
        placed=sum(one.uid in held for one in present),
        serving=sum(one.sight.pod.is_ready for one in present),
        waiting=sum(one.is_waiting for one in without),
        beside=sum(not one.is_waiting for one in without),
        let_go=tuple(let_go),
        cheap=tuple(
            sorted(
                (one.sight.key, one.uid)
                for one in present
                if one.uid in held and one.sight.pod.annotations.get(DELETION_COST) == LOWEST_DELETION_COST
            )
        ),
    )


@dataclass(slots=True)
class ScaleSubresourceWriter:
    """One service's number of replicas."""

    agreed: int | None = None  # what the target had when last looked at, or was given
    advice: str = ""  # why the steering is not heard now
    advice_reason: str = ""
    others: int | None = None  # the number that others gave last
    others_s: float = 0.0
    hold_s: float = EXTERNAL_HOLD_S
    _until_s: float = 0.0
    _span_s: float = 0.0
    _tried: frozenset[int] = frozenset()  # asked for of the target as it last was, whatever became of it
    _version: str = ""  # of that target
    _times: int = 0
    _written: tuple[int, str] | None = field(default=None)
    _written_s: float = 0.0

    def reconcile_replicas(
        self, service: InferenceService, version: str, seen: ReplicaCounts, at_s: float
    ) -> list[SetDeletionCost | SetReplicas]:
        """What is to be written now; `version` is that of the target."""
        self.advice = self.advice_reason = ""
        wanted = service.wanted
        if wanted is None:
            return self._aside("TargetMissing", f"{service.target} is not there")
        if service.mode is not ServiceMode.ENFORCE:
            self.agreed = None
            return self._aside("ModeRecommend", "its mode is Recommend: nothing is changed")
        if not self._is_fresh(version, wanted, at_s):
            return []
        if self.agreed is None:
            self.agreed = wanted
        told: list[SetDeletionCost | SetReplicas] = [SetDeletionCost(key, uid, None) for key, uid in seen.cheap]
        tried = self._tried
        if version != self._version:
            # What was asked of the older target has come about by now, or never will: it was refused.
            self._tried, self._version = frozenset(), version
        if wanted != self.agreed and wanted in tried:
            self.agreed = wanted  # our own write, of which no answer came
        elif wanted != self.agreed:
            self._on_foreign_scale(wanted, at_s)
        if wanted == 0:
            return self._aside("ScaledToZero", f"{service.target} was scaled to 0 by somebody, and is left so")
        bounded = min(max(wanted, service.least), service.most)
        if at_s < self._until_s:
            self._aside(
                "ScaledByOthers",
                f"somebody else set {self.others} replicas; the number is left to them for {self._span_s / 60.0:.0f} min",
            )
        elif seen.pods > wanted or seen.lasting != seen.places:
            self._aside("RollingOver", f"{service.target} is rolled over: {seen.pods} pods of {wanted}")
        else:
            placeless = seen.waiting + seen.beside + max(0, wanted - seen.pods)
            bounded = seen.lasting + max(0, placeless - seen.vacant)
            bounded = min(max(bounded, service.least), service.most)
        if bounded == wanted:
            return told
        marks = [
            SetDeletionCost(key, uid, LOWEST_DELETION_COST)
            for key, uid, cost in seen.let_go[: max(0, wanted - bounded)]
            if cost != LOWEST_DELETION_COST
        ]
        # First who goes, then how many.
        if marks:
            return [*told, *marks]
        self._tried |= {bounded}
        return [*told, SetReplicas(service.target, version, bounded)]

    def on_written(self, replicas: int, version: str, at_s: float) -> None:
        """The target has this number since this version."""
        self.agreed, self._written, self._written_s = replicas, (replicas, version), at_s

    def _aside(self, reason: str, text: str) -> list[SetDeletionCost | SetReplicas]:
        self.advice_reason, self.advice = reason, text
        return []

    def _on_foreign_scale(self, wanted: int, at_s: float) -> None:
        """The number of replicas was changed from outside."""
        if at_s - self.others_s > _QUIET_S:
            self._times = 0
        self.agreed, self.others, self.others_s, self._tried = wanted, wanted, at_s, frozenset()
        self._span_s = min(_HOLD_MOST_S, self.hold_s * 2.0**self._times)
        self._until_s = at_s + self._span_s
        self._times = min(self._times + 1, 10)

    def _is_fresh(self, version: str, wanted: int, at_s: float) -> bool:
        """Whether the target is not older than what we wrote."""
        if self._written is None:
            return True
        replicas, written = self._written
        if version.isdigit() and written.isdigit():
            is_fresh = int(version) >= int(written)
        else:
            is_fresh = wanted == replicas or at_s - self._written_s > 10.0
        if is_fresh:
            self._written = None
        return is_fresh


SERVICE_CONDITIONS = ("Accepted", "Placed", "PromiseKept", "ScalingActive", "ScaledByOthers")
_COUNTED = ("replicas", "desiredReplicas", "slice", "gpuModel", "powerWatts")
_FIELDS = (*_COUNTED, "latency")
_EXPLANATION_MOST = 2_000
_SPELLED = {metric: word for word, metric in LATENCY_METRICS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceFacts:
    """What is known of a service at one moment."""

    seen: ReplicaCounts = field(default_factory=ReplicaCounts)
    is_begun: bool = False  # the core knows of it
    waits: str = ""  # what its first waiting pod was told
    gpu_models: tuple[str, ...] = ()  # of each GPU in its places
    power_w: float | None = None  # of these GPUs with full work, by the model
    standing: ServiceStatus | None = None  # how the steering sees its promise
    refused: str = ""  # why the target was not scaled


def rejected_status(
    unfit: ServiceRejection, generation: int, before: ConditionSet, at_ns: int
) -> tuple[dict[str, Any], ConditionSet]:
    """The status of an object that is not obeyed."""
    kept = before.retain(("Accepted",))
    now = kept.with_condition("Accepted", False, unfit.reason, str(unfit), generation=generation, at_ns=at_ns)
    status: dict[str, Any] = dict.fromkeys(_FIELDS)
    status |= {"observedGeneration": generation, "explanation": str(unfit), "conditions": now.to_json()}
    return status, now


def build_service_status(
    service: InferenceService, scaling: ScaleSubresourceWriter, facts: ServiceFacts, before: ConditionSet, at_ns: int
) -> tuple[dict[str, Any], ConditionSet]:
    """The status, with None for what is not known; and its conditions, for the next time."""
    now, seen = before.retain(SERVICE_CONDITIONS), facts.seen
    for kind, (status, reason, message) in {
        "Accepted": (True, "Read", f"{service.target} is served by {service.mode}"),
        "Placed": _placed(service, seen, facts),
        "PromiseKept": _kept(service, facts),
        "ScalingActive": _active(scaling, facts),
        "ScaledByOthers": _others(service, scaling),
    }.items():
        now = now.with_condition(kind, status, reason, message, generation=service.generation, at_ns=at_ns)
    model = Counter(facts.gpu_models).most_common(1)
    told: dict[str, Any] = {
        "observedGeneration": service.generation,
        "replicas": seen.pods,
        "desiredReplicas": desired_replicas(service, scaling, facts),
        "slice": WHOLE_GPU if seen.places else None,
        "gpuModel": model[0][0][:63] if model else None,
        "powerWatts": None if facts.power_w is None else round(facts.power_w),
        "latency": _latency(service, facts, at_ns) or None,
        "explanation": _explanation(service, seen, scaling, facts)[:_EXPLANATION_MOST],
        "conditions": now.to_json(),
    }
    return told, now


def desired_replicas(service: InferenceService, scaling: ScaleSubresourceWriter, facts: ServiceFacts) -> int | None:
    """In mode Enforce what was agreed on the target, in mode Recommend what the steering would have."""
    if service.mode is ServiceMode.ENFORCE and scaling.agreed is not None:
        return scaling.agreed
    standing = facts.standing
    if standing is None or standing.phase == "unsteered":
        return service.wanted
    return min(max(standing.replicas_wanted, service.least), service.most)


def _placed(service: InferenceService, seen: ReplicaCounts, facts: ServiceFacts) -> tuple[bool | None, str, str]:
    if service.wanted is None:
        return False, "TargetMissing", f"{service.target} is not there; make it, or correct spec.targetRef"
    if seen.waiting:
        text = facts.waits or f"{seen.waiting} pods wait for a place"
        return False, "WaitsForRoom", text
    if seen.beside:
        return False, "StandsApart", f"{seen.beside} pods run where the core has no room for them; they are not steered"
    if seen.placed < service.wanted:
        return (
            False,
            "PodsMissing",
            f"{seen.placed} of {service.wanted} pods are there; look at the events of its target",
        )
    return True, "AllPlaced", f"each of {seen.placed} pods has its place"


def _kept(service: InferenceService, facts: ServiceFacts) -> tuple[bool | None, str, str]:
    standing = facts.standing
    if not facts.is_begun or standing is None:
        return None, "NotPlaced", "no replica is placed yet"
    if standing.phase == "unsteered":
        return None, "NotSteered", standing.reason
    if service.pages is None:
        return None, "NoMetrics", "spec.metrics does not say where replicas tell their latency"
    if service.promise.load_target is not None:
        return None, "NothingPromised", "its replicas follow the load; no latency is promised"
    if standing.live_s is None:
        return None, "NothingMeasured", standing.reason or "no page of metrics has been read yet"
    bound = standing.objective_s
    text = f"{format_duration(standing.live_s)} where {format_duration(bound)} are promised"
    return (True, "Kept", text) if standing.live_s <= bound else (False, "Broken", text)


def _active(scaling: ScaleSubresourceWriter, facts: ServiceFacts) -> tuple[bool | None, str, str]:
    if facts.refused:
        return False, "TargetRefused", facts.refused
    if scaling.advice:
        return False, scaling.advice_reason, scaling.advice
    standing = facts.standing
    if standing is None or standing.phase == "unsteered":
        return (
            False,
            "NotSteered",
            "nothing is known yet that it could be steered by" if standing is None else standing.reason,
        )
    if standing.is_advice:
        return False, "PoolObserved", "its nodes' pools are only observed; eelctl policy set --pool-mode NAME=enforce"
    return True, "Steered", "replicas follow the load"


def _others(service: InferenceService, scaling: ScaleSubresourceWriter) -> tuple[bool | None, str, str]:
    if scaling.advice_reason == "ScaledByOthers":
        return (
            True,
            "NumberOfOthers",
            f"somebody else set {scaling.others} replicas of {service.target}; they are heard",
        )
    return False, "NobodyElse", "nobody else has set the number lately"


def _latency(service: InferenceService, facts: ServiceFacts, at_ns: int) -> list[dict[str, Any]]:
    standing, found = facts.standing, []
    watched = next((one for one in service.promise.objectives if one.metric is not LatencyMetric.FIRST_TOKEN), None)
    for objective in service.promise.objectives:
        told: dict[str, Any] = {"metric": _SPELLED[objective.metric], "percentile": round(objective.quantile * 100.0)}
        if standing is not None and objective is watched:
            if standing.live_s is not None:
                told |= {
                    "measured": format_duration(standing.live_s),
                    "measuredTime": format_time(at_ns // 1_000_000_000),
                }
            if standing.modelled_s is not None:
                told["modelled"] = format_duration(standing.modelled_s)
        found.append(told)
    return found


def _explanation(
    service: InferenceService, seen: ReplicaCounts, scaling: ScaleSubresourceWriter, facts: ServiceFacts
) -> str:
    parts = []
    if service.wanted is None:
        parts.append(f"{service.target} is not there")
    standing = facts.standing
    if standing is not None and standing.reason:
        parts.append(standing.reason)
    elif not facts.is_begun:
        parts.append(facts.waits or "no pod has come yet")
    if facts.refused:
        parts.append(f"not scaled: {facts.refused}")
    elif scaling.advice:
        parts.append(scaling.advice)
    if seen.let_go:
        parts.append(f"{len(seen.let_go)} pods are to go: the core needs fewer")
    parts.append("slices are not chosen in this mode: each replica has whole GPUs")
    return "; ".join(parts)


def format_duration(seconds: float) -> str:
    """A duration with two digits: `43ms`, `1.2s`, `120us`."""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if seconds * factor >= 1.0 or unit == "us":
            value = seconds * factor
            return f"{value:.1f}{unit}" if value < 10.0 else f"{value:.0f}{unit}"
    return "0s"


def is_same_status(one: Mapping[str, Any], other: Mapping[str, Any], *, is_rough: bool = False) -> bool:
    """Whether two statuses differ in nothing but the time of a measurement; roughly, in nothing but its words either."""
    return _shown(one, is_rough=is_rough) == _shown(other, is_rough=is_rough)


def _shown(status: Mapping[str, Any], *, is_rough: bool) -> dict[str, Any]:
    found = {key: value for key, value in status.items() if value is not None}
    if is_rough:
        conditions: Iterable[Mapping[str, Any]] = found.get("conditions") or ()
        kept = {key: found[key] for key in (*_COUNTED, "observedGeneration") if key in found}
        return kept | {"conditions": [(one.get("type"), one.get("status"), one.get("reason")) for one in conditions]}
    latency: Iterable[Mapping[str, Any]] = found.get("latency") or ()
    bare = [{key: value for key, value in one.items() if key != "measuredTime"} for one in latency]
    return found | {"latency": bare}


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
