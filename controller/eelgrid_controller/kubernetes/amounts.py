"""What a pod holds on its node, as the scheduler counts it.

Owns the sum over containers. Must not know nodes.

Theory. A sidecar is an init container with restartPolicy Always; it stays. So with main
containers M, sidecars S and the other init containers I, for each resource

    held = max(sum M + sum S, max over i in I of (i + sidecars before i)) + overhead

Where the pod itself names CPU or memory, that stands for the sum of its containers. While a
container is resized in place, it holds the most of what is asked, what the kubelet has
granted and what it runs with. All is summed to the nano and rounded up once, at the end.

Source: k8s.io/component-helpers/resource/helpers.go (PodRequests, AggregateContainerRequests).
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from sys import intern
from typing import Any, NamedTuple

from eelgrid_controller.kubernetes.names import RESOURCE_GPU
from eelgrid_controller.kubernetes.quantities import ceiling, nanos_of

__all__ = ["NONE", "Amounts", "amounts_of", "pod_amounts", "uncounted"]

_Sum = dict[str, int]  # nanos by resource


class Amounts(NamedTuple):
    """CPU in thousandths, memory in bytes, and devices by the name of their resource, sorted, none of them 0."""

    cpu_milli: int = 0
    memory_bytes: int = 0
    extended: tuple[tuple[str, int], ...] = ()

    def count(self, resource: str) -> int:
        """How many of an extended resource."""
        return next((count for name, count in self.extended if name == resource), 0)


NONE = Amounts()


def amounts_of(found: Mapping[str, Any], field: str = "resources") -> Amounts:
    """Amounts in a list of resources, such as a node's allocatable; raises QuantityUnreadable."""
    return _rounded(_read(found, field))


def pod_amounts(spec: Mapping[str, Any], status: Mapping[str, Any] | None = None) -> Amounts:
    """What a pod of this spec holds, with a status by which it may be under resize; raises QuantityUnreadable."""
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
    return _rounded(held)


def uncounted(amounts: Amounts) -> tuple[tuple[str, int], ...]:
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
    return _resized(asked, found["resources"], found.get("allocatedResources"), is_infeasible)


def _resized(asked: _Sum, actual: Mapping[str, Any], granted: Mapping[str, Any] | None, is_infeasible: bool) -> _Sum:
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
        now = _resized(dict(level), status["resources"], status.get("allocatedResources"), is_infeasible)
        return {name: now.get(name, 0) for name in level}
    return level


def _read(found: Mapping[str, Any], field: str) -> _Sum:
    return {name: nanos_of(amount, field) for name, amount in found.items()}


def _add(total: _Sum, more: Mapping[str, int]) -> None:
    for name, nanos in more.items():
        total[name] = total.get(name, 0) + nanos


def _raise(least: _Sum, other: Mapping[str, int]) -> None:
    for name, nanos in other.items():
        least[name] = max(least.get(name, 0), nanos)


def _rounded(total: Mapping[str, int]) -> Amounts:
    extended = ((intern(name), ceiling(nanos)) for name, nanos in total.items() if _is_extended(name))
    return _shared(
        ceiling(total.get("cpu", 0) * 1000),
        ceiling(total.get("memory", 0)),
        _sorted(pair for pair in extended if pair[1]),
    )


def _sorted(pairs: Iterable[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(pairs))


def _is_extended(name: str) -> bool:
    """Whether devices are counted under this name: it has a domain, and not Kubernetes' own."""
    return "/" in name and "kubernetes.io/" not in name


@lru_cache(maxsize=8192)
def _shared(cpu_milli: int, memory_bytes: int, extended: tuple[tuple[str, int], ...]) -> Amounts:
    return Amounts(cpu_milli, memory_bytes, extended)
