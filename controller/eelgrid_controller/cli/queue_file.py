"""Queue files: the YAML by which queues are declared, and how queues differ from those in force.

Amounts are written as people write them (`16` GPUs, `2TiB`, `500m` CPUs); a file declares all queues, so that one that is
left out is removed.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from eelgrid_controller.cli.connection import RequestRefused, read_yaml_file
from eelgrid_controller.formatting import (
    format_age,
    format_cpu,
    format_gpu,
    format_memory,
    parse_cpu_milli,
    parse_duration_s,
    parse_gpu_milli,
    parse_memory_bytes,
)
from eelgrid_protos.errors import InvalidMessage, Violation
from eelgrid_protos.messages import Policy, PriorityClass, Queue, QueuePreemption, QueueQuota
from eelgrid_protos.plain_messages import from_plain

_BYTES_MOST = 8 << 20
_LIMITS = {"nominal": "nominal", "borrow": "borrowing_limit", "lend": "lending_limit", "max": "usage_limit"}
_QUEUE_FIELDS = ("name", "parent", "weight", "quota", "users", "namespaces", "preemption")
_NEVER = "never"
# The words of the fields of `preemption`; never, and of victims jobs, is what is not set.
_PREEMPTION_WORDS: Mapping[str, Mapping[str, str]] = {
    "within": {_NEVER: "unspecified", "lower_priority": "lower_priority"},
    "reclaim": {_NEVER: "unspecified", "nominal": "nominal", "fair_share": "fair_share"},
    "victims": {"jobs": "unspecified", "none": "none", "all": "all"},
}
_MIN_RUNTIME = "min_runtime"
_FILE_FIELDS = ("half_life", "age_limit", "queues", "priority_classes")
_CLASS_FIELDS = ("name", "priority", "preempts")


def format_amount_of(resource: str, amount: int) -> str:
    """Formats an amount of a resource as a queue file has it."""
    if resource == "memory":
        return format_memory(amount)
    return format_cpu(amount) if resource == "cpu" else format_gpu(amount)


def _parse_count(text: str, parse: Callable[[str], int]) -> int:
    """Whole GPUs beyond one are written as numbers, which the parser of shares does not know."""
    try:
        number = float(text)
    except ValueError:
        return parse(text)
    milli = 1000.0 * number
    if number < 0.0 or abs(milli - round(milli)) > 1e-6 or milli > 2**53:
        raise ValueError(f"{text!r} is not a number of thousandths: write for example 16 or 0.5")
    return round(milli)


def _amount(resource: str, value: Any, place: str) -> int:
    try:
        if resource == "memory":
            return parse_memory_bytes(str(value))
        return _parse_count(str(value), parse_cpu_milli if resource == "cpu" else parse_gpu_milli)
    except ValueError as error:
        raise RequestRefused(f"{place}: {error}", "write gpu: 16, cpu: 200 or memory: 2TiB") from None


def _mapping(value: Any, place: str, known: tuple[str, ...]) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise RequestRefused(f"{place}: is not a mapping", f"write its fields: {', '.join(known)}")
    unknown = [str(key) for key in value if key not in known]
    if unknown:
        raise RequestRefused(f"{place}: has no field {unknown[0]!r}", f"use {', '.join(known)}")
    return value


def _quota(resource: str, value: Any, place: str) -> dict[str, Any]:
    fields = _mapping(value, place, tuple(_LIMITS)) if isinstance(value, dict) else {"nominal": value}
    amounts = {_LIMITS[key]: _amount(resource, amount, f"{place}.{key}") for key, amount in fields.items()}
    return {"resource": resource, **amounts}


def _preemption(value: Any, place: str) -> dict[str, Any]:
    fields = dict(_mapping(value, place, (*_PREEMPTION_WORDS, _MIN_RUNTIME)))
    found: dict[str, Any] = {}
    if _MIN_RUNTIME in fields:
        found["min_runtime_s"] = _duration(fields.pop(_MIN_RUNTIME), f"{place}.{_MIN_RUNTIME}")
    for key, word in fields.items():
        words = _PREEMPTION_WORDS[key]
        if not isinstance(word, str) or word not in words:
            raise RequestRefused(f"{place}.{key}: is {word!r}", f"write one of {', '.join(words)}")
        found[key] = words[word]
    return found


def _queue(value: Any, place: str) -> dict[str, Any]:
    fields = dict(_mapping(value, place, _QUEUE_FIELDS))
    quotas = fields.pop("quota", {})
    if not isinstance(quotas, dict):
        raise RequestRefused(f"{place}.quota: is not a mapping", "write {gpu: 16, memory: 2TiB}")
    if "preemption" in fields:
        fields["preemption"] = _preemption(fields["preemption"], f"{place}.preemption")
    return {
        **fields,
        "quotas": [_quota(str(name), quota, f"{place}.quota.{name}") for name, quota in quotas.items()],
    }


def _priority_classes(value: Any, place: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise RequestRefused(f"{place}: is not a list", "write [{name: urgent, priority: 100}, ...]")
    found = []
    for index, row in enumerate(value):
        fields = dict(_mapping(row, f"{place}[{index}]", _CLASS_FIELDS))
        preempts = fields.pop("preempts", "allowed")
        if preempts not in ("allowed", _NEVER):
            raise RequestRefused(f"{place}[{index}].preempts: is {preempts!r}", "write allowed or never")
        found.append({**fields, "never_preempts": preempts == _NEVER})
    return found


def _duration(value: Any, place: str) -> float:
    try:
        return float(parse_duration_s(str(value)))
    except ValueError as error:
        raise RequestRefused(f"{place}: {error}", "write 7d, 24h or 30m") from None


def read_queue_file(path: Path) -> dict[str, Any]:
    """Reads the fields of a policy that a queue file sets; raises RequestRefused with the field."""
    plain = read_yaml_file(path, _BYTES_MOST)
    fields = _mapping(plain, str(path), _FILE_FIELDS)
    if not isinstance(fields.get("queues"), list):
        raise RequestRefused(f"{path}: has no list `queues`", "write queues: [{name: research, quota: {gpu: 16}}, ...]")
    queues = [_queue(row, f"{path}: queues[{index}]") for index, row in enumerate(fields["queues"])]
    found: dict[str, Any] = {}
    for key, field in (("half_life", "queue_half_life_s"), ("age_limit", "queue_age_limit_s")):
        if key in fields:
            found[field] = _duration(fields[key], f"{path}: {key}")
    if "priority_classes" in fields:
        found["priority_classes"] = _priority_classes(fields["priority_classes"], f"{path}: priority_classes")
    try:
        read: Policy = from_plain(Policy, {"queues": queues, **found})
    except InvalidMessage as error:
        violations = tuple(Violation(one.field, one.problem, one.remedy) for one in error.violations)
        raise RequestRefused(f"{path}: {error.message}", "correct the file", violations) from None
    return {"queues": read.queues, **{field: getattr(read, field) for field in found}}


def _describe_quota(quota: QueueQuota) -> str:
    limits = [("borrow", quota.borrowing_limit), ("lend", quota.lending_limit), ("max", quota.usage_limit)]
    more = "".join(f" {name} {format_amount_of(quota.resource, limit)}" for name, limit in limits if limit is not None)
    return format_amount_of(quota.resource, quota.nominal) + more


def _preemption_settings(rules: QueuePreemption) -> Iterator[tuple[str, str]]:
    for key, words in _PREEMPTION_WORDS.items():
        value = getattr(rules, key).name.lower()
        yield f"preemption {key}", next(word for word, meant in words.items() if meant == value)
    yield "preemption minimum run time", format_age(rules.min_runtime_s)


def _settings(queue: Queue) -> Iterator[tuple[str, str]]:
    yield "parent", queue.parent or "none"
    yield "weight", f"{queue.weight:g}"
    for quota in queue.quotas:
        yield quota.resource, _describe_quota(quota)
    if queue.preemption is not None:
        yield from _preemption_settings(queue.preemption)
    if queue.users:
        yield "users", ", ".join(queue.users)
    if queue.namespaces:
        yield "namespaces", ", ".join(queue.namespaces)


def _describe_class(one: PriorityClass | None) -> str:
    return "none" if one is None else f"{one.priority}{', preempts never' if one.never_preempts else ''}"


def queue_changes(before: Policy, after: Policy) -> Iterator[str]:
    """Yields a line for each setting of a queue that differs."""
    old = {queue.name: dict(_settings(queue)) for queue in before.queues}
    new = {queue.name: dict(_settings(queue)) for queue in after.queues}
    for name, value, wanted in (
        ("half-life", before.queue_half_life_s, after.queue_half_life_s),
        ("age limit", before.queue_age_limit_s, after.queue_age_limit_s),
    ):
        if value != wanted:
            yield f"queues {name}: {format_age(value)} -> {format_age(wanted)}"
    classes = [{one.name: one for one in policy.priority_classes} for policy in (before, after)]
    for name in dict.fromkeys((*classes[0], *classes[1])):
        was, will_be = (_describe_class(found.get(name)) for found in classes)
        if was != will_be:
            yield f"priority class {name}: {was} -> {will_be}"
    for name in dict.fromkeys((*old, *new)):
        if name not in new:
            yield f"queue {name}: removed"
        elif name not in old:
            settings = ", ".join(f"{key} {value}" for key, value in new[name].items())
            yield f"queue {name}: new, {settings}"
        else:
            for key in dict.fromkeys((*old[name], *new[name])):
                values = old[name].get(key, "not set"), new[name].get(key, "not set")
                if values[0] != values[1]:
                    yield f"queue {name}: {key} {values[0]} -> {values[1]}"
