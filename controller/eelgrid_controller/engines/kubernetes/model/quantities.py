"""Scalars of the Kubernetes API: quantities, timestamps, resource requests, and parse errors.

Quantities are kept to nanos, rounded away from zero and bounded by 2**63 - 1. A pod's requests are summed as
kube-scheduler does: max(sum M + sum S, max over init containers I of (i + sidecars before i)) + overhead, with main
containers M and sidecars S; a container that is resized in place counts with the largest of what is requested,
allocated and actuated. Unreadable fields raise KubernetesUnreadable, or its subclass, with the field's path.

Sources: k8s.io/apimachinery/pkg/api/resource/quantity.go; apis/meta/v1 Time and MicroTime;
k8s.io/component-helpers/resource/helpers.go (PodRequests, AggregateContainerRequests).
"""

import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from sys import intern
from typing import Any, NamedTuple

from eelgrid_controller.engines.kubernetes.model.well_known import RESOURCE_GPU
from eelgrid_controller.errors import ControllerError


class KubernetesUnreadable(ControllerError):
    """A field that has no meaning; `field` is its path, `fault` what is wrong with it."""

    def __init__(self, field: str, problem: str, remedy: str) -> None:
        self.field = field
        self.fault = problem
        super().__init__(f"{field}: {problem}", remedy)


class QuantityUnreadable(KubernetesUnreadable):
    """A text that is no quantity."""


class AnnotationUnreadable(KubernetesUnreadable):
    """An annotation that says nothing that can be kept."""


_MOST = 2**63 - 1
_NANO = 10**9
_SHAPE = re.compile(r"([+-]?)([0-9]*)(?:\.([0-9]*))?(?:[eE]([+-]?[0-9]{1,4})|([numkMGTPE]|[KMGTPE]i)?)")
_DECIMAL = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY = {"Ki": 1, "Mi": 2, "Gi": 3, "Ti": 4, "Pi": 5, "Ei": 6}
# No quantity of an API server is longer; a text of a million digits is no quantity.
_LONGEST = 128


def parse_count(quantity: object, field: str = "quantity") -> int:
    """The whole number of a quantity: bytes, devices, pods; raises QuantityUnreadable."""
    return round_up_nanos(parse_nanos(quantity, field))


def parse_cpu_milli(quantity: object, field: str = "quantity") -> int:
    """Thousandths of a quantity of CPUs; raises QuantityUnreadable."""
    return round_up_nanos(parse_nanos(quantity, field) * 1000)


def format_cpu(cpu_milli: int) -> str:
    """Thousandths of a CPU as Kubernetes writes them: `2`, `2500m`."""
    whole, rest = divmod(cpu_milli, 1000)
    return f"{cpu_milli}m" if rest else str(whole)


def round_up_nanos(nanos: int) -> int:
    """The whole number of these nanos, away from zero."""
    return -(-nanos // _NANO) if nanos >= 0 else nanos // _NANO


def parse_nanos(quantity: object, field: str = "quantity") -> int:
    """Billionths of a quantity, exact as Kubernetes keeps it; raises QuantityUnreadable."""
    return _nanos(str(quantity), field)


@lru_cache(maxsize=4096)
def _nanos(text: str, field: str) -> int:
    found = _SHAPE.fullmatch(text) if len(text) <= _LONGEST else None
    if found is None or not (found[2] or found[3]):
        raise QuantityUnreadable(field, f"{text[:40]!r} is no quantity", "write such as 500m, 2, 1.5, 16Gi or 1e3")
    sign, whole, part, exponent, suffix = found.groups(default="")
    digits, power = int(whole + part or "0"), 9 - len(part)
    if suffix in _BINARY:
        digits *= 1024 ** _BINARY[suffix]
    else:
        power += int(exponent) if exponent else _DECIMAL[suffix]
    # Ceiling: what is finer than a nano rounds away from zero.
    nanos: int = digits * 10**power if power >= 0 else -(digits // -(10**-power))
    return (-1 if sign == "-" else 1) * min(nanos, _MOST * _NANO)


_Sum = dict[str, int]  # nanos by resource


class ResourceAmounts(NamedTuple):
    """CPU in thousandths, memory in bytes, and devices by the name of their resource, sorted, none of them 0."""

    cpu_milli: int = 0
    memory_bytes: int = 0
    extended: tuple[tuple[str, int], ...] = ()

    def count(self, resource: str) -> int:
        """How many of an extended resource."""
        return next((count for name, count in self.extended if name == resource), 0)


NO_AMOUNTS = ResourceAmounts()


def parse_amounts(found: Mapping[str, Any], field: str = "resources") -> ResourceAmounts:
    """Amounts in a list of resources, such as a node's allocatable; raises QuantityUnreadable."""
    return _rounded_amounts(_read(found, field))


def pod_requests(spec: Mapping[str, Any], status: Mapping[str, Any] | None = None) -> ResourceAmounts:
    """Sum what a pod of this spec holds, with its status for a resize in progress; raises QuantityUnreadable."""
    status = status or {}
    conditions = status.get("conditions") or ()
    is_infeasible = any(
        one.get("type") == "PodResizePending" and one.get("reason") == "Infeasible" for one in conditions
    )
    running = {
        one.get("name"): one
        for part in ("containerStatuses", "initContainerStatuses")
        for one in status.get(part) or ()
        if one.get("resources") is not None
    }
    held: _Sum = {}
    for container in spec.get("containers") or ():
        _add(held, _container(container, running, is_infeasible))
    sidecars: _Sum = {}
    starting: _Sum = {}
    for container in spec.get("initContainers") or ():
        is_sidecar = container.get("restartPolicy") == "Always"
        asked = _container(container, running if is_sidecar else {}, is_infeasible)
        if is_sidecar:
            _add(held, asked)
            _add(sidecars, asked)
        else:
            _add(asked, sidecars)
            _raise(starting, asked)
    _raise(held, starting)
    held.update(_pod_level(spec, status, held, is_infeasible=is_infeasible))
    _add(held, _read(spec.get("overhead") or {}, "spec.overhead"))
    return _rounded_amounts(held)


def non_gpu_devices(amounts: ResourceAmounts) -> tuple[tuple[str, int], ...]:
    """The devices among them that Eelgrid does not count itself: all but GPUs."""
    return tuple(pair for pair in amounts.extended if pair[0] != RESOURCE_GPU)


def _container(container: Mapping[str, Any], running: Mapping[Any, Any], is_infeasible: bool) -> _Sum:
    resources = container.get("resources") or {}
    field = "resources.requests"
    # Where only a limit is set, the API server makes it the request; a template has not been there yet.
    asked = _read({**(resources.get("limits") or {}), **(resources.get("requests") or {})}, field)
    found = running.get(container.get("name"))
    if found is None:
        return asked
    return _resized_requests(asked, found["resources"], found.get("allocatedResources"), is_infeasible)


def _resized_requests(
    asked: _Sum, actual: Mapping[str, Any], granted: Mapping[str, Any] | None, is_infeasible: bool
) -> _Sum:
    held = {} if is_infeasible else asked
    _raise(held, _read(actual.get("requests") or {}, "status.resources.requests"))
    _raise(held, _read(granted or {}, "status.allocatedResources"))
    return held


def _pod_level(spec: Mapping[str, Any], status: Mapping[str, Any], held: _Sum, *, is_infeasible: bool) -> _Sum:
    resources = spec.get("resources") or {}
    limits = {name: limit for name, limit in (resources.get("limits") or {}).items() if name not in held}
    named = _read({**limits, **(resources.get("requests") or {})}, "spec.resources.requests")
    level = {name: nanos for name, nanos in named.items() if name in ("cpu", "memory")}
    if level and status.get("resources") is not None:
        now = _resized_requests(dict(level), status["resources"], status.get("allocatedResources"), is_infeasible)
        return {name: now.get(name, 0) for name in level}
    return level


def _read(found: Mapping[str, Any], field: str) -> _Sum:
    return {name: parse_nanos(amount, field) for name, amount in found.items()}


def _add(total: _Sum, more: Mapping[str, int]) -> None:
    for name, nanos in more.items():
        total[name] = total.get(name, 0) + nanos


def _raise(least: _Sum, other: Mapping[str, int]) -> None:
    for name, nanos in other.items():
        least[name] = max(least.get(name, 0), nanos)


def _rounded_amounts(total: Mapping[str, int]) -> ResourceAmounts:
    extended = ((intern(name), round_up_nanos(nanos)) for name, nanos in total.items() if _is_extended(name))
    return _intern_amounts(
        round_up_nanos(total.get("cpu", 0) * 1000),
        round_up_nanos(total.get("memory", 0)),
        _sorted_pairs(pair for pair in extended if pair[1]),
    )


def _sorted_pairs(pairs: Iterable[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(pairs))


def _is_extended(name: str) -> bool:
    """Whether devices are counted under this name: it has a domain, and not Kubernetes' own."""
    return "/" in name and "kubernetes.io/" not in name


@lru_cache(maxsize=8192)
def _intern_amounts(cpu_milli: int, memory_bytes: int, extended: tuple[tuple[str, int], ...]) -> ResourceAmounts:
    return ResourceAmounts(cpu_milli, memory_bytes, extended)


_NANOSECONDS = 1_000_000_000


def format_time(at_s: int) -> str:
    """Seconds since 1970 as a Time: `2026-11-22T07:30:00Z`."""
    return f"{datetime.fromtimestamp(at_s, UTC):%Y-%m-%dT%H:%M:%SZ}".rjust(20, "0")


def parse_time(text: object) -> int | None:
    """Whole seconds since 1970 of such a time; None where it is none."""
    try:
        at = datetime.fromisoformat(text) if isinstance(text, str) else None
        return int(at.timestamp()) if at is not None and at.tzinfo is not None else None
    except (ValueError, OverflowError):
        return None


def format_micro_time(at_ns: int) -> str:
    """Nanoseconds since 1970 as a MicroTime: `2026-11-22T07:30:00.000001Z`."""
    return f"{format_time(at_ns // _NANOSECONDS)[:-1]}.{at_ns % _NANOSECONDS // 1000:06d}Z"
