"""Parses Eelgrid's annotations: numbers with units, lists, durations, dates.

Unreadable values raise AnnotationUnreadable with the annotation's name and a working example. Which annotations
may be combined is decided in pods/intent.py.
"""

import re
from collections.abc import Mapping
from datetime import datetime
from difflib import get_close_matches
from typing import NoReturn

from eelgrid_controller.engines.kubernetes.model import well_known
from eelgrid_controller.engines.kubernetes.model.quantities import AnnotationUnreadable
from eelgrid_protos.catalogue import find_exact_model
from eelgrid_protos.messages import (
    GpuPreference,
    LatencyMetric,
    LatencyObjective,
    MetricsServer,
    MetricsSource,
    ModelData,
    WorkloadKind,
)

# What becomes of a pod whose annotations are wrong: it waits, or the default scheduler has it.
ON_ERROR_VALUES = ("wait", "schedule")
_KNOWN = frozenset(value for name, value in vars(well_known).items() if name.startswith("ANNOTATION_"))
_KNOWN_NAMES = sorted(key.partition("/")[2] for key in _KNOWN)
_NUMBER = r"[0-9]{1,18}(?:\.[0-9]{1,18})?"
_PLAIN = re.compile(rf"({_NUMBER})")
_RATE = re.compile(rf"({_NUMBER})\s*(|/s|Hz|/min)")
_PERCENT = re.compile(rf"({_NUMBER})\s*(%?)")
_DURATION = re.compile(rf"(?:({_NUMBER})h)?(?:({_NUMBER})m)?(?:({_NUMBER})s)?(?:({_NUMBER})ms)?(?:({_NUMBER})us)?")
_DURATION_UNITS_S = (3600.0, 60.0, 1.0, 1e-3, 1e-6)
_OBJECTIVE = re.compile(rf"p({_NUMBER})\s+([a-z_-]+)\s+([0-9.a-z]+)")
_INTEGER = re.compile(r"-?[0-9]{1,9}")
_METRICS_NAMES = {"latency": "latency_histogram", "model": "model", "waiting": "waiting_gauge", "work": "work_counter"}
_COUNTS = re.compile(r"([0-9]{1,5})(?:\s*-\s*([0-9]{1,5}))?")
_COUNTED_MOST = 4096
_MIG_PROFILE = re.compile(r"[1-9]g\.[0-9]{1,4}gb(?:\.me)?(?:\.all)?")
_ITEMS_MOST = 64


def check_names(annotations: Mapping[str, str]) -> None:
    """Raise for an annotation of ours that is all but spelled like one that is known: a wish that nobody would hear."""
    for key in annotations:
        if key.startswith(f"{well_known.DOMAIN}/") and key not in _KNOWN:
            near = get_close_matches(key.partition("/")[2], _KNOWN_NAMES, n=1, cutoff=0.8)
            if near:
                _fail(key, "is not known", f"is {well_known.DOMAIN}/{near[0]} meant?")


def user_of(annotations: Mapping[str, str], labels: Mapping[str, str]) -> str:
    """The user who is charged for a pod, by its annotation or else its label; empty without both."""
    return annotations.get(well_known.ANNOTATION_USER) or labels.get(well_known.ANNOTATION_USER, "")


def parse_kind(annotations: Mapping[str, str]) -> WorkloadKind | None:
    """Parse the workload's kind; None where the annotation is missing."""
    key = well_known.ANNOTATION_KIND
    text = annotations.get(key)
    if text is None:
        return None
    kinds = {one.name.lower().replace("_", "-"): one for one in WorkloadKind if one}
    if text not in kinds:
        _fail(key, f"is {text!r}", f"write one of {', '.join(kinds)}")
    return kinds[text]


def schedules_on_error(annotations: Mapping[str, str]) -> bool:
    """Whether the pod goes to the default scheduler if something about it is wrong."""
    key = well_known.ANNOTATION_ON_ERROR
    text = annotations.get(key, ON_ERROR_VALUES[0])
    if text not in ON_ERROR_VALUES:
        _fail(key, f"is {text!r}", f"write one of {', '.join(ON_ERROR_VALUES)}")
    return text == "schedule"


def parse_preemptible(annotations: Mapping[str, str]) -> bool | None:
    """Whether the pod may be stopped to make room for others; None where its people say nothing."""
    key = well_known.ANNOTATION_PREEMPTIBLE
    text = annotations.get(key)
    if text is None:
        return None
    if text not in ("true", "false"):
        _fail(key, f"is {text!r}", "write true or false")
    return text == "true"


def parse_number(annotations: Mapping[str, str], key: str) -> float | None:
    """A plain number that is not negative."""
    text = annotations.get(key)
    return None if text is None else float(_match(_PLAIN, key, text, "write a number, such as 250")[1])


def parse_rate_hz(annotations: Mapping[str, str]) -> float | None:
    """Requests a second: `12.5`, `12.5/s`, `12.5Hz` or `750/min`."""
    key = well_known.ANNOTATION_RATE
    text = annotations.get(key)
    if text is None:
        return None
    found = _match(_RATE, key, text, "write requests a second, such as 12.5 or 750/min")
    return float(found[1]) / (60.0 if found[2] == "/min" else 1.0)


def parse_fraction(annotations: Mapping[str, str], key: str) -> float | None:
    """A share: `5%` or `0.05`; a bare number above 1 is refused, since it may be either."""
    text = annotations.get(key)
    if text is None:
        return None
    found = _match(_PERCENT, key, text, "write such as 5% or 0.05")
    value = float(found[1])
    if not found[2] and value > 1.0:
        _fail(key, f"is {text!r}", f"write {text}% if per cent are meant")
    return value / 100.0 if found[2] else value


def parse_duration_s(annotations: Mapping[str, str], key: str) -> float | None:
    """Parse a duration such as `90s`, `1h30m` or `500ms`, in seconds."""
    text = annotations.get(key)
    return None if text is None else _duration_s(key, text, text)


def parse_deadline_ns(annotations: Mapping[str, str], created_s: float | None) -> int | None:
    """When the work has to be done, in ns since 1970: a time with its zone, or a duration after the pod was made."""
    key = well_known.ANNOTATION_DEADLINE
    text = annotations.get(key)
    if text is None:
        return None
    if text[:1].isdigit() and text[-1:] in ("h", "m", "s"):
        if created_s is None:
            _fail(key, f"is {text!r}, and it is not known when the pod was made", "write such as 2026-11-23T08:00:00Z")
        return round((created_s + _duration_s(key, text, text)) * 1e9)
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        _fail(key, f"is {text!r}", "write such as 2026-11-23T08:00:00Z, or 6h after the pod was made")
    if found.tzinfo is None:
        _fail(key, f"is {text!r}, in no time zone", f"write {text}Z if UTC is meant")
    return round(found.timestamp() * 1e9)


def parse_priority(annotations: Mapping[str, str]) -> int | None:
    """A whole number; higher goes first."""
    key = well_known.ANNOTATION_PRIORITY
    text = annotations.get(key)
    return None if text is None else int(_match(_INTEGER, key, text, "write a whole number, such as 100")[0])


def parse_gpu_models(annotations: Mapping[str, str]) -> tuple[str, ...]:
    """Models that will do, by the catalogue's names where they are whole names of it.

    What is short for several is for the core to resolve, which knows the nodes.
    """
    return _parse_models(annotations, well_known.ANNOTATION_GPU_MODELS)


def _parse_models(annotations: Mapping[str, str], key: str) -> tuple[str, ...]:
    text = annotations.get(key)
    if text is None:
        return ()
    models = _items(key, text, "write such as H100-80GB-HBM3, A100-SXM4-80GB")
    return tuple(dict.fromkeys(find_exact_model(model) or well_known.plain_product(model) for model in models))


def parse_gpu_preference(annotations: Mapping[str, str]) -> GpuPreference | None:
    """Models that are preferred to others, and the modelled watts that this is worth; None where nothing is said."""
    models = _parse_models(annotations, well_known.ANNOTATION_PREFERRED_GPU_MODELS)
    key, without = well_known.ANNOTATION_PREFERRED_GPU_WORTH, well_known.ANNOTATION_PREFERRED_GPU_MODELS
    worth_w = _parse_worth(annotations, key, "" if models else without)
    return GpuPreference(models=models, worth_w=worth_w) if models else None


def parse_model_data(annotations: Mapping[str, str]) -> ModelData | None:
    """Model data that a pod loads, and the modelled watts that a node with it is worth; None where nothing is said."""
    key, worth = well_known.ANNOTATION_MODEL_DATA, well_known.ANNOTATION_MODEL_DATA_WORTH
    text = annotations.get(key)
    names = () if text is None else tuple(dict.fromkeys(_items(key, text, "write such as meta-llama/Llama-3.1-8B")))
    worth_w = _parse_worth(annotations, worth, "" if names else key)
    return ModelData(data_names=names, worth_w=worth_w) if names else None


def _parse_worth(annotations: Mapping[str, str], key: str, without: str) -> float | None:
    """Watts that a preference is worth; None where nothing is said. Fails if the annotation of what is preferred is missing."""
    text = annotations.get(key)
    if text is None:
        return None
    if without:
        _fail(key, "is set without what is worth that", f"set {without} too")
    return float(_match(_PLAIN, key, text, "write watts, such as 50")[0])


def parse_counts(annotations: Mapping[str, str], key: str) -> tuple[int, ...]:
    """How many will do, rising: `1-8`, or `1, 2, 4`; empty where nothing is said."""
    text = annotations.get(key)
    if text is None:
        return ()
    found: set[int] = set()
    for item in _items(key, text, "write such as 1-8, or 1, 2, 4"):
        one = _match(_COUNTS, key, item, "write such as 1-8, or 1, 2, 4")
        least, most = int(one[1]), int(one[2] or one[1])
        if not 1 <= least <= most <= _COUNTED_MOST:
            _fail(key, f"is {text[:80]!r}", f"write counts from 1 to {_COUNTED_MOST}, the least first")
        found.update(range(least, most + 1))
    return tuple(sorted(found))


def parse_mig_profiles(annotations: Mapping[str, str]) -> tuple[str, ...]:
    """Slices that will do, as resources name them: `1g.10gb, 2g.20gb`."""
    key = well_known.ANNOTATION_SLICES
    text = annotations.get(key)
    if text is None:
        return ()
    example = "write such as 1g.10gb, 2g.20gb"
    return tuple(dict.fromkeys(_match(_MIG_PROFILE, key, item, example)[0] for item in _items(key, text, example)))


def parse_choice(annotations: Mapping[str, str], key: str, known: tuple[str, ...]) -> str:
    """Parse an annotation that takes one of these words; empty where it is missing."""
    text = annotations.get(key)
    if text is not None and text not in known:
        _fail(key, f"is {text[:80]!r}", f"write one of {', '.join(known)}")
    return text or ""


def parse_objectives(annotations: Mapping[str, str]) -> tuple[LatencyObjective, ...]:
    """Latencies to keep: `p95 response 200ms`, or `p95 first_token 1s, p95 inter_token 50ms`."""
    key = well_known.ANNOTATION_OBJECTIVE
    text = annotations.get(key)
    if text is None:
        return ()
    example = "write such as p95 response 200ms, or p95 first_token 1s, p95 inter_token 50ms"
    metrics_of = {one.name.lower(): one for one in LatencyMetric if one}
    found = []
    for item in _items(key, text, example):
        one = _match(_OBJECTIVE, key, item, example)
        metric = metrics_of.get(one[2].replace("-", "_"))
        if metric is None:
            _fail(key, f"names {one[2]!r}", f"use one of {', '.join(metrics_of)}")
        latency_s = _duration_s(key, one[3], item)
        found.append(LatencyObjective(metric=metric, latency_s=latency_s, quantile=float(one[1]) / 100.0))
    return tuple(found)


def parse_metrics_source(annotations: Mapping[str, str]) -> MetricsSource | None:
    """Where the engine's own metrics are: its name, a URL, and names of series as key=value.

    `vllm http://{pod_ip}:8000/metrics`, `generic http://{pod_ip}:9090/metrics work=steps_total`.
    """
    key = well_known.ANNOTATION_METRICS
    text = annotations.get(key)
    if text is None:
        return None
    example = "write such as vllm http://{pod_ip}:8000/metrics"
    words = text.split()
    servers = {one.name.lower().replace("_", "-"): one for one in MetricsServer if one}
    if len(words) < 2 or words[0].lower().replace("_", "-") not in servers:
        _fail(key, f"is {text[:80]!r}", f"{example}; engines are {', '.join(servers)}")
    series = {}
    for word in words[2:]:
        name, equals, value = word.partition("=")
        if name not in _METRICS_NAMES or not equals or not value:
            _fail(key, f"holds {word!r}", f"write {', '.join(f'{one}=NAME' for one in _METRICS_NAMES)} behind the URL")
        series[_METRICS_NAMES[name]] = value
    return MetricsSource(server=servers[words[0].lower().replace("_", "-")], url=words[1], **series)


def _items(key: str, text: str, remedy: str) -> list[str]:
    items = [item.strip() for item in text.split(",")]
    if len(items) > _ITEMS_MOST or not all(items):
        _fail(key, f"is {text[:80]!r}", remedy)
    return items


def _duration_s(key: str, text: str, shown: str) -> float:
    found = _DURATION.fullmatch(text)
    if not text or found is None:
        _fail(key, f"is {shown!r}", "write a duration such as 50ms, 90s or 1h30m")
    return sum(float(part) * unit for part, unit in zip(found.groups(), _DURATION_UNITS_S, strict=True) if part)


def _match(shape: re.Pattern[str], key: str, text: str, remedy: str) -> re.Match[str]:
    found = shape.fullmatch(text.strip())
    if found is None:
        _fail(key, f"is {text[:80]!r}", remedy)
    return found


def _fail(key: str, problem: str, remedy: str) -> NoReturn:
    raise AnnotationUnreadable(key, problem, remedy)
