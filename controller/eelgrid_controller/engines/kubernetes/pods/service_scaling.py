"""The number of replicas of a service's target, and the status of its InferenceService.

Whoever changed the number last prevails: an external change is kept for EXTERNAL_HOLD_S, twice as long each time up
to an hour; otherwise the target follows the core's places. Pods to be removed get the lowest deletion cost first. A
target at 0 is off; during a rollout nothing is written. `status.desiredReplicas` outlives the process.

Sources: kubernetes pkg/controller/controller_utils.go, ActivePodsWithRanks; KEP 2255.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from eelgrid_controller.engines.kubernetes.model.inference_service import (
    WHOLE_GPU,
    InferenceService,
    ScaleTarget,
    ServiceMode,
    ServiceRejection,
)
from eelgrid_controller.engines.kubernetes.model.pod_group import PodKey
from eelgrid_controller.engines.kubernetes.model.quantities import format_time
from eelgrid_controller.engines.kubernetes.model.status_reporting import ConditionSet
from eelgrid_controller.engines.kubernetes.model.well_known import DELETION_COST
from eelgrid_controller.engines.kubernetes.pods.placement_unit import PlacementUnit
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
_WORDS = {
    "Response": LatencyMetric.RESPONSE,
    "FirstToken": LatencyMetric.FIRST_TOKEN,
    "InterToken": LatencyMetric.INTER_TOKEN,
}
_SPELLED = {metric: word for word, metric in _WORDS.items()}


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
        told: dict[str, Any] = {
            "metric": _SPELLED[objective.metric],
            "percentile": round(objective.quantile * 100.0),
        }
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
