"""Queue files: the YAML by which queues are declared, and how queues differ from those in force.

Amounts are written as people write them (`16` GPUs, `2TiB`, `500m` CPUs, `20kW`); a file declares all queues, so that one that is
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
    format_watts,
    parse_cpu_milli,
    parse_duration_s,
    parse_gpu_milli,
    parse_memory_bytes,
)
from eelgrid_protos.errors import InvalidMessage, Violation
from eelgrid_protos.messages import POWER_RESOURCE, Policy, Queue, QueueQuota
from eelgrid_protos.plain_messages import from_plain
from eelgrid_protos.quantities import parse_watts

_BYTES_MOST = 8 << 20
_LIMITS = {"nominal": "nominal", "borrow": "borrowing_limit", "lend": "lending_limit", "max": "usage_limit"}
_QUEUE_FIELDS = ("name", "parent", "weight", "quota", "users", "namespaces")
_FILE_FIELDS = ("half_life", "age_limit", "queues")


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


def _queue(value: Any, place: str) -> dict[str, Any]:
    fields = dict(_mapping(value, place, _QUEUE_FIELDS))
    quotas = fields.pop("quota", {})
    if not isinstance(quotas, dict):
        raise RequestRefused(f"{place}.quota: is not a mapping", "write {gpu: 16, memory: 2TiB}")
    return {
        **fields,
        "quotas": [_quota(str(name), quota, f"{place}.quota.{name}") for name, quota in quotas.items()],
    }


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


def _settings(queue: Queue) -> Iterator[tuple[str, str]]:
    yield "parent", queue.parent or "none"
    yield "weight", f"{queue.weight:g}"
    for quota in queue.quotas:
        yield quota.resource, _describe_quota(quota)
    if queue.users:
        yield "users", ", ".join(queue.users)
    if queue.namespaces:
        yield "namespaces", ", ".join(queue.namespaces)


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
