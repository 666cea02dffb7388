"""What an InferenceService's status says: numbers, conditions with their reasons, and why in a sentence.

Owns the words. Must not know how it is written, nor decide anything; time is an argument.

    Accepted         the object was read and its target is its own
    Placed           every pod that the target asks for has a place and is bound
    PromiseKept      the live quantiles are within the objectives; Unknown where nothing is measured
    ScalingActive    the number of replicas follows the load; False with the reason why it does not
    ScaledByOthers   the target was given its number by somebody else, who is heard

Numbers are rounded as people read them, so that a status changes when something did.

Source: deploy/helm/eelgrid/files/crds/inferenceservices.yaml.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from eelgrid_controller.kubernetes.conditions import Conditions
from eelgrid_controller.kubernetes.serving import WHOLE, Mode, Service, Unfit
from eelgrid_controller.kubernetes.serving_scale import Counted, Scaling
from eelgrid_controller.kubernetes.times import stamp_text
from eelgrid_protos.messages import LatencyMetric, ServiceStatus

__all__ = ["CONDITIONS", "Facts", "status_of", "unfit_status"]

CONDITIONS = ("Accepted", "Placed", "PromiseKept", "ScalingActive", "ScaledByOthers")
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
class Facts:
    """What is known of a service at one moment."""

    seen: Counted = field(default_factory=Counted)
    is_begun: bool = False  # the core knows of it
    waits: str = ""  # what its first waiting pod was told
    gpu_models: tuple[str, ...] = ()  # of each GPU in its places
    power_w: float | None = None  # of these GPUs with full work, by the model
    standing: ServiceStatus | None = None  # how the steering sees its promise
    refused: str = ""  # why the target was not scaled


def unfit_status(unfit: Unfit, generation: int, before: Conditions, at_ns: int) -> tuple[dict[str, Any], Conditions]:
    """The status of an object that is not obeyed."""
    kept = before.only(("Accepted",))
    now = kept.set("Accepted", False, unfit.reason, str(unfit), generation=generation, at_ns=at_ns)
    status: dict[str, Any] = dict.fromkeys(_FIELDS)
    status |= {"observedGeneration": generation, "explanation": str(unfit), "conditions": now.to_json()}
    return status, now


def status_of(
    service: Service, scaling: Scaling, facts: Facts, before: Conditions, at_ns: int
) -> tuple[dict[str, Any], Conditions]:
    """The status, with None for what is not known; and its conditions, for the next time."""
    now, seen = before.only(CONDITIONS), facts.seen
    for kind, (status, reason, message) in {
        "Accepted": (True, "Read", f"{service.target} is served by {service.mode}"),
        "Placed": _placed(service, seen, facts),
        "PromiseKept": _kept(service, facts),
        "ScalingActive": _active(scaling, facts),
        "ScaledByOthers": _others(service, scaling),
    }.items():
        now = now.set(kind, status, reason, message, generation=service.generation, at_ns=at_ns)
    model = Counter(facts.gpu_models).most_common(1)
    told: dict[str, Any] = {
        "observedGeneration": service.generation,
        "replicas": seen.pods,
        "desiredReplicas": desired(service, scaling, facts),
        "slice": WHOLE if seen.places else None,
        "gpuModel": model[0][0][:63] if model else None,
        "powerWatts": None if facts.power_w is None else round(facts.power_w),
        "latency": _latency(service, facts, at_ns) or None,
        "explanation": _explanation(service, seen, scaling, facts)[:_EXPLANATION_MOST],
        "conditions": now.to_json(),
    }
    return told, now


def desired(service: Service, scaling: Scaling, facts: Facts) -> int | None:
    """In mode Enforce what was agreed on the target, in mode Recommend what the steering would have."""
    if service.mode is Mode.ENFORCE and scaling.agreed is not None:
        return scaling.agreed
    standing = facts.standing
    if standing is None or standing.phase == "unsteered":
        return service.wanted
    return min(max(standing.replicas_wanted, service.least), service.most)


def _placed(service: Service, seen: Counted, facts: Facts) -> tuple[bool | None, str, str]:
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


def _kept(service: Service, facts: Facts) -> tuple[bool | None, str, str]:
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
    text = f"{duration(standing.live_s)} where {duration(bound)} are promised"
    return (True, "Kept", text) if standing.live_s <= bound else (False, "Broken", text)


def _active(scaling: Scaling, facts: Facts) -> tuple[bool | None, str, str]:
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


def _others(service: Service, scaling: Scaling) -> tuple[bool | None, str, str]:
    if scaling.advice_reason == "ScaledByOthers":
        return (
            True,
            "NumberOfOthers",
            f"somebody else set {scaling.others} replicas of {service.target}; they are heard",
        )
    return False, "NobodyElse", "nobody else has set the number lately"


def _latency(service: Service, facts: Facts, at_ns: int) -> list[dict[str, Any]]:
    standing, found = facts.standing, []
    watched = next((one for one in service.promise.objectives if one.metric is not LatencyMetric.FIRST_TOKEN), None)
    for objective in service.promise.objectives:
        told: dict[str, Any] = {
            "metric": _SPELLED[objective.metric],
            "percentile": round(objective.quantile * 100.0),
        }
        if standing is not None and objective is watched:
            if standing.live_s is not None:
                told |= {"measured": duration(standing.live_s), "measuredTime": stamp_text(at_ns // 1_000_000_000)}
            if standing.modelled_s is not None:
                told["modelled"] = duration(standing.modelled_s)
        found.append(told)
    return found


def _explanation(service: Service, seen: Counted, scaling: Scaling, facts: Facts) -> str:
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


def duration(seconds: float) -> str:
    """Two digits, as people write times: `43ms`, `1.2s`, `120us`."""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if seconds * factor >= 1.0 or unit == "us":
            value = seconds * factor
            return f"{value:.1f}{unit}" if value < 10.0 else f"{value:.0f}{unit}"
    return "0s"


def same(one: Mapping[str, Any], other: Mapping[str, Any], *, is_rough: bool = False) -> bool:
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
