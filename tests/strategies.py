"""Hypothesis strategies for every message, made from the rules in its type hints.

Rules about several fields are not in the hints: a drawn workload, request or promise that breaks one is put right
rather than thrown away, since almost every draw would be, and none of those left would hold a promise.
"""

from dataclasses import replace
from functools import cache
from typing import Any

from hypothesis import strategies as st

from eelgrid_protos.messages import (
    LatencyMetric,
    LatencyObjective,
    MetricsServer,
    MetricsSource,
    ResourceRequest,
    ServicePromise,
    TrainingPromise,
    WorkloadKind,
    WorkloadSpec,
)
from eelgrid_protos.quantities import Many, Range, Text
from eelgrid_protos.schema import ValueShape, fields_of, list_violations

_ITEMS_MOST = 3
_INNER, _OUTER = "abcdefghijklmnopqrstuvwxyz0123456789._/-", "abcdefghijklmnopqrstuvwxyz0123456789"


def _identifiers() -> st.SearchStrategy[str]:
    """As of `[a-z0-9]([a-z0-9._/-]{0,20}[a-z0-9])?`, which from_regex draws ten times as slowly."""

    def close(inner: str, first: str, last: str | None) -> str:
        return first if last is None else f"{first}{inner}{last}"

    outer = st.sampled_from(_OUTER)
    return st.builds(close, st.text(_INNER, max_size=20), outer, st.none() | outer)


def _scalar(shape: ValueShape) -> st.SearchStrategy[Any]:
    rule = shape.rule
    if shape.kind == "bool":
        return st.booleans()
    if shape.kind == "str":
        if isinstance(rule, Text) and rule.required and rule.pattern is not None:
            return _identifiers()
        least = 1 if isinstance(rule, Text) and rule.required else 0
        return st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]), min_size=least, max_size=20)
    low, high = (rule.low, rule.high) if isinstance(rule, Range) else (0.0, 1.0)
    if shape.kind == "int":
        return st.integers(int(low), int(high))
    return st.floats(low, high, allow_nan=False).map(lambda value: value + 0.0)


def _value(shape: ValueShape) -> st.SearchStrategy[Any]:
    most = min(_ITEMS_MOST, shape.rule.most) if isinstance(shape.rule, Many) else _ITEMS_MOST
    match shape.kind:
        case "enum":
            return st.sampled_from(shape.type)
        case "message":
            return message(shape.type)
        case "choice":
            return st.one_of([message(choice) for choice in shape.choices])
        case "many":
            return st.lists(_value(shape.item), max_size=most).map(tuple)
        case "bytes":
            return st.binary(max_size=20)
        case "mapping":
            return st.dictionaries(st.text("abc", min_size=1, max_size=3), _value(shape.item), max_size=2)
        case _:
            return _scalar(shape)


@cache
def message(cls: Any) -> st.SearchStrategy[Any]:
    """Messages of a class that obey every rule."""
    parts = {}
    for field in fields_of(cls):
        value = _value(field.shape)
        parts[field.name] = st.none() | value if field.optional else value
    return st.builds(cls, **parts).map(_put_right).filter(lambda made: next(list_violations(made), None) is None)


def _put_right(made: Any) -> Any:
    """The nearest message that obeys the rules about several fields."""
    match made:
        case ResourceRequest(gpu_count=0):
            asks_nothing = made.cpu_milli == made.memory_bytes == 0
            return replace(made, gpu_milli=0, gpu_models=(), cpu_milli=1 if asks_nothing else made.cpu_milli)
        case ResourceRequest():
            return replace(made, gpu_milli=1000 if made.gpu_count > 1 else made.gpu_milli or 1)
        case MetricsSource():
            return replace(
                made,
                server=made.server or MetricsServer.GENERIC,
                url=made.url.translate({ord("{"): None, ord("}"): None}) or "http://{node}:8000/metrics",
                work_counter=made.work_counter or "tokens_total",
            )
        case LatencyObjective():
            return replace(made, metric=made.metric or LatencyMetric.RESPONSE)
        case ServicePromise():
            return _put_service_right(made)
        case TrainingPromise():
            return _put_training_right(made)
        case WorkloadSpec():
            return _put_workload_right(made)
        case _:
            return made


def _put_service_right(made: ServicePromise) -> ServicePromise:
    objectives = made.objectives[:1] or (LatencyObjective(metric=LatencyMetric.RESPONSE, latency_s=1.0),)
    if objectives[0].metric is LatencyMetric.FIRST_TOKEN:
        objectives += (replace(objectives[0], metric=LatencyMetric.INTER_TOKEN),)
    slices = made.slices and objectives[0].metric is LatencyMetric.RESPONSE
    least, most = sorted((made.replicas_least, made.replicas_most))
    return replace(
        made,
        objectives=objectives,
        output_tokens=made.output_tokens or 1.0,
        slices=slices,
        replicas_least=1 if slices else least,
        replicas_most=most,
    )


def _put_training_right(made: TrainingPromise) -> TrainingPromise:
    by_deadline = made.slowdown_most is None and made.energy_weight is None
    least, most = sorted((made.replicas_least, made.replicas_most))
    return replace(
        made,
        energy_weight=made.energy_weight if made.slowdown_most is None else None,
        deadline_ns=max(1, made.deadline_ns) if by_deadline else 0,
        work=(made.work or 1.0) if by_deadline else 0.0,
        replicas_least=least,
        replicas_most=most if least else 0,
        profile=made.profile or "p",
    )


def _put_workload_right(made: WorkloadSpec) -> WorkloadSpec:
    request, replicas = made.request, made.replicas
    if made.service is not None:
        if made.service.slices:
            request = _put_right(replace(request, gpu_count=1))
        replicas = min(max(replicas, made.service.replicas_least), made.service.replicas_most)
        return replace(made, kind=WorkloadKind.INFERENCE_SERVICE, request=request, replicas=replicas, training=None)
    if made.training is not None:
        if made.training.is_elastic:
            replicas = min(max(replicas, made.training.replicas_least), made.training.replicas_most)
        request = replace(request, gpu_count=request.gpu_count or 1, gpu_milli=1000)
        return replace(made, kind=WorkloadKind.TRAINING_JOB, request=request, replicas=replicas)
    return replace(made, kind=made.kind or WorkloadKind.BATCH_JOB)
