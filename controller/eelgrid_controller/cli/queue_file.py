"""Queue files: the YAML by which queues are declared, and how queues differ from those in force.

Amounts are written as people write them (`16` GPUs, `2TiB`, `500m` CPUs, `20kW`); a file declares all queues, so that one that is
left out is removed. Spending limits of a queue are those of `eelctl policy set --spend`: the file is another place to write
them, and a queue without the field keeps those it has.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from eelgrid_controller.cli.connection import RequestRefused, read_yaml_file
from eelgrid_controller.cli.policy import parse_spending_limit
from eelgrid_controller.formatting import (
    format_age,
    format_cpu,
    format_gpu,
    format_memory,
    format_watts,
    parse_cpu_milli,
    parse_duration_s,
    parse_gpu_milli,
    parse_memory_bytes,
)
from eelgrid_controller.state.spending import SpendingKey, format_limit, spending_key
from eelgrid_protos.errors import InvalidMessage, Violation
from eelgrid_protos.messages import (
    POWER_RESOURCE,
    SPENDING_LIMITS_MOST,
    Policy,
    PriorityClass,
    Queue,
    QueuePreemption,
    QueueQuota,
    SpendingLimit,
    SpendingScope,
)
from eelgrid_protos.plain_messages import from_plain
from eelgrid_protos.quantities import parse_watts

_BYTES_MOST = 8 << 20
_LIMITS = {"nominal": "nominal", "borrow": "borrowing_limit", "lend": "lending_limit", "max": "usage_limit"}
_QUEUE_FIELDS = ("name", "parent", "weight", "quota", "spending", "users", "namespaces", "preemption")
_NEVER = "never"
# The words of the fields of `preemption`; never, and of victims jobs, is what is not set.
_PREEMPTION_WORDS: Mapping[str, Mapping[str, str]] = {
    "within": {_NEVER: "unspecified", "lower_priority": "lower_priority"},
    "reclaim": {_NEVER: "unspecified", "nominal": "nominal", "fair_share": "fair_share", "past_use": "past_use"},
    "victims": {"jobs": "unspecified", "none": "none", "all": "all"},
}
# Durations by their names in a file.
_PREEMPTION_TIMES = {"min_runtime": "min_runtime_s", "horizon": "horizon_s", "delay": "delay_s"}
_POLICY_TIMES = (
    ("half_life", "queue_half_life_s"),
    ("age_limit", "queue_age_limit_s"),
    ("capacity_hold", "capacity_hold_s"),
)
_FILE_FIELDS = (*(key for key, _ in _POLICY_TIMES), "queues", "priority_classes")
_CLASS_FIELDS = ("name", "priority", "preempts")


def format_amount_of(resource: str, amount: int) -> str:
    """Formats an amount of a resource as a queue file has it."""
    if resource == "memory":
        return format_memory(amount)
    if resource == POWER_RESOURCE:
        return format_watts(amount)
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
        if resource == POWER_RESOURCE:
            return round(1000.0 * parse_watts(str(value)))
        return _parse_count(str(value), parse_cpu_milli if resource == "cpu" else parse_gpu_milli)
    except ValueError as error:
        raise RequestRefused(f"{place}: {error}", "write gpu: 16, cpu: 200, memory: 2TiB or power: 20kW") from None


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
    fields = dict(_mapping(value, place, (*_PREEMPTION_WORDS, *_PREEMPTION_TIMES)))
    found: dict[str, Any] = {
        field: _duration(fields.pop(key), f"{place}.{key}") for key, field in _PREEMPTION_TIMES.items() if key in fields
    }
    for key, word in fields.items():
        words = _PREEMPTION_WORDS[key]
        if not isinstance(word, str) or word not in words:
            raise RequestRefused(f"{place}.{key}: is {word!r}", f"write one of {', '.join(words)}")
        found[key] = words[word]
    return found


def _queue(value: Any, place: str) -> dict[str, Any]:
    fields = dict(_mapping(value, place, _QUEUE_FIELDS))
    quotas = fields.pop("quota", {})
    fields.pop("spending", None)
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


def _read_spending(rows: Sequence[Any], place: str) -> dict[str, tuple[SpendingLimit, ...]]:
    """Reads the spending limits of the queues that declare any, by queue."""
    parents = {row.get("parent") for row in rows}
    found: dict[str, tuple[SpendingLimit, ...]] = {}
    for index, row in enumerate(rows):
        if "spending" not in row:
            continue
        name, where = str(row["name"]), f"{place}: queues[{index}].spending"
        texts = row["spending"]
        if not isinstance(texts, list):
            raise RequestRefused(
                f"{where}: is no list", "write ['kwh=100 per day', 'gpu-hours=2000 per month, observe']"
            )
        if texts and name in parents:
            raise RequestRefused(
                f"{where}: queue {name} has queues below it and holds no work", "set the limits of the queues below it"
            )
        limits: dict[SpendingKey, SpendingLimit] = {}
        for text in texts:
            try:
                limit, is_kept = parse_spending_limit(f"queue={name} {text}")
            except click.BadParameter as error:
                raise RequestRefused(f"{where}: {error.message}", f"write {text!r} as kwh=100 per day") from None
            if not is_kept or spending_key(limit) in limits:
                raise RequestRefused(f"{where}: {text!r} removes or repeats a limit", "leave it out")
            limits[spending_key(limit)] = limit
        found[name] = tuple(limits.values())
    return found


def apply_queue_file(before: Policy, declared: Mapping[str, Any]) -> Policy:
    """Returns the policy with what a queue file declares; see `read_queue_file`."""
    fields = dict(declared)
    spending: Mapping[str, tuple[SpendingLimit, ...]] = fields.pop("spending", {})
    kept = [one for one in before.spending if one.scope is not SpendingScope.QUEUE or one.name not in spending]
    limits = (*kept, *(limit for limits in spending.values() for limit in limits))
    if len(limits) > SPENDING_LIMITS_MOST:
        raise RequestRefused(
            f"the file makes {len(limits)} spending limits; at most {SPENDING_LIMITS_MOST} are allowed",
            "declare fewer, or take others away with eelctl policy set --spend",
        )
    same = {spending_key(one): one for one in limits} == {spending_key(one): one for one in before.spending}
    return replace(before, **fields, spending=before.spending if same else limits)


def _duration(value: Any, place: str) -> float:
    try:
        return float(parse_duration_s(str(value)))
    except ValueError as error:
        raise RequestRefused(f"{place}: {error}", "write 7d, 24h or 30m") from None


def read_queue_file(path: Path) -> dict[str, Any]:
    """Reads the fields of a policy that a queue file sets; raises RequestRefused with the field.

    `spending` has the limits by queue, of the queues that declare some; `apply_queue_file` joins them with the others.
    """
    plain = read_yaml_file(path, _BYTES_MOST)
    fields = _mapping(plain, str(path), _FILE_FIELDS)
    if not isinstance(fields.get("queues"), list):
        raise RequestRefused(f"{path}: has no list `queues`", "write queues: [{name: research, quota: {gpu: 16}}, ...]")
    queues = [_queue(row, f"{path}: queues[{index}]") for index, row in enumerate(fields["queues"])]
    found: dict[str, Any] = {}
    for key, field in _POLICY_TIMES:
        if key in fields:
            found[field] = _duration(fields[key], f"{path}: {key}")
    if "priority_classes" in fields:
        found["priority_classes"] = _priority_classes(fields["priority_classes"], f"{path}: priority_classes")
    try:
        read: Policy = from_plain(Policy, {"queues": queues, **found})
    except InvalidMessage as error:
        violations = tuple(Violation(one.field, one.problem, one.remedy) for one in error.violations)
        raise RequestRefused(f"{path}: {error.message}", "correct the file", violations) from None
    spending = _read_spending(fields["queues"], str(path))
    return {
        "queues": read.queues,
        **{field: getattr(read, field) for field in found},
        **({"spending": spending} if spending else {}),
    }


def _describe_quota(quota: QueueQuota) -> str:
    limits = [("borrow", quota.borrowing_limit), ("lend", quota.lending_limit), ("max", quota.usage_limit)]
    more = "".join(f" {name} {format_amount_of(quota.resource, limit)}" for name, limit in limits if limit is not None)
    return format_amount_of(quota.resource, quota.nominal) + more


def _preemption_settings(rules: QueuePreemption) -> Iterator[tuple[str, str]]:
    for key, words in _PREEMPTION_WORDS.items():
        value = getattr(rules, key).name.lower()
        yield f"preemption {key}", next(word for word, meant in words.items() if meant == value)
    yield "preemption minimum run time", format_age(rules.min_runtime_s)
    if rules.horizon_s:
        yield "preemption horizon", format_age(rules.horizon_s)
    if rules.delay_s:
        yield "preemption delay", format_age(rules.delay_s)


def _settings(queue: Queue, spending: Sequence[SpendingLimit]) -> Iterator[tuple[str, str]]:
    yield "parent", queue.parent or "none"
    yield "weight", f"{queue.weight:g}"
    for quota in queue.quotas:
        yield quota.resource, _describe_quota(quota)
    if queue.preemption is not None:
        yield from _preemption_settings(queue.preemption)
    for limit in spending:
        if limit.scope is SpendingScope.QUEUE and limit.name == queue.name:
            yield f"spending per {limit.period.name.lower()}, {limit.quantity.name.lower()}", format_limit(limit)
    if queue.users:
        yield "users", ", ".join(queue.users)
    if queue.namespaces:
        yield "namespaces", ", ".join(queue.namespaces)


def _describe_class(one: PriorityClass | None) -> str:
    return "none" if one is None else f"{one.priority}{', preempts never' if one.never_preempts else ''}"


def _describe_time(value_s: float | None) -> str:
    return "default" if value_s is None else format_age(value_s)


def queue_changes(before: Policy, after: Policy) -> Iterator[str]:
    """Yields a line for each setting of a queue that differs."""
    old, new = (
        {queue.name: dict(_settings(queue, policy.spending)) for queue in policy.queues} for policy in (before, after)
    )
    for name, field in (
        ("half-life", "queue_half_life_s"),
        ("age limit", "queue_age_limit_s"),
        ("capacity hold", "capacity_hold_s"),
    ):
        value, wanted = getattr(before, field), getattr(after, field)
        if value != wanted:
            yield f"queues {name}: {_describe_time(value)} -> {_describe_time(wanted)}"
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
