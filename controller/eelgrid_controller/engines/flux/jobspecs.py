"""Jobspecs of Flux: what a job asks for, and the constraints on where it may go, as values.

Owns the syntax of jobspec and constraints, and which ranks match a constraint. Must not know who holds what.

Theory. A constraint is evaluated as an algebra of sets of ranks: each operator becomes one operation on the ranks that
match its values, so a tree costs its size times that of a set, however many jobs ask. A jobspec is a user's input:
whatever cannot be honoured raises FluxUnreadable and is denied with that reason, never scheduled as something else. Where
counts are ranges, the least is taken, which every form of them allows.

Sources: flux-framework/rfc 14 and 25 (jobspec), 31 (constraints), 45 (ranges).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eelgrid_controller.engines.flux.resource_sets import (
    FluxUnreadable,
    ResourceSet,
    parse_hostlist,
    parse_json,
    read_number,
    select_ids,
)

_COUNT_MOST = 1_000_000
_DEPTH_MOST = 32
_VALUES_MOST = 4_096
_CHILDREN = {"": ("node", "slot"), "node": ("slot",), "slot": ("core", "gpu")}
# "2", "2-4", "2+", and with a step.
_RANGE = re.compile(r"\[?([1-9][0-9]{0,6})(?:[+,-].*)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequest:
    """What a job asks for: `slots` of each node, or where `nodes` is 0 of all; `duration_s` is 0 where none is stated."""

    nodes: int = 0
    slots: int = 1
    cores: int = 1
    gpus: int = 0
    is_exclusive: bool = False
    duration_s: float = 0.0
    queue: str = ""
    name: str = ""
    constraint: Mapping[str, Any] | None = None

    @property
    def slot_count(self) -> int:
        """The slots of all its nodes."""
        return self.slots * max(1, self.nodes)

    @property
    def replicas(self) -> int:
        """How many parts are placed one by one: nodes, or else slots."""
        return self.nodes or self.slots

    @property
    def shape(self) -> tuple[int, int]:
        """Returns the cores and GPUs of one part."""
        times = self.slots if self.nodes else 1
        return self.cores * times, self.gpus * times


def parse_jobspec(value: Any) -> JobRequest:
    """Parses a jobspec; raises FluxUnreadable with the field and the reason."""
    found = parse_json(value, "jobspec")
    system = parse_json(
        parse_json(found.get("attributes") or {}, "attributes").get("system") or {}, "attributes.system"
    )
    counts: dict[str, int] = {}
    is_exclusive = _read_vertices(found.get("resources"), "", counts)
    if "slot" not in counts or "core" not in counts:
        raise FluxUnreadable("resources name no slot with cores")
    job = parse_json(system.get("job") or {}, "attributes.system.job")
    constraint = system.get("constraints")
    if constraint is not None:
        constraint = parse_json(constraint, "constraints")
        match_ranks(constraint, ResourceSet(ranks={}))
    nodes, slots = counts.get("node", 0), counts["slot"]
    if is_exclusive and not nodes:
        # Each slot is alone on its node.
        nodes, slots = slots, 1
    return JobRequest(
        nodes=nodes,
        slots=slots,
        cores=counts["core"],
        gpus=counts.get("gpu", 0),
        is_exclusive=is_exclusive,
        duration_s=float(read_number(system, "duration")),
        queue=_read_word(system, "queue"),
        name=_read_word(job, "name"),
        constraint=constraint or None,
    )


def _read_word(found: Mapping[str, Any], name: str) -> str:
    value = found.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise FluxUnreadable(f"{name} has {str(value)[:40]!r} where text is expected")
    return value


def _read_vertices(value: Any, above: str, counts: dict[str, int]) -> bool:
    """Reads the vertices below one into counts by type; returns whether nodes are asked for alone."""
    if not isinstance(value, list) or not value or (above != "slot" and len(value) > 1):
        raise FluxUnreadable(f"resources has no list of one vertex below {above or 'itself'}")
    is_exclusive = False
    for one in value:
        vertex = parse_json(one, "resources")
        kind = vertex.get("type")
        if kind not in _CHILDREN[above]:
            expected = " or ".join(_CHILDREN[above])
            raise FluxUnreadable(f"resources ask for {str(kind)[:40]!r} where Eelgrid places {expected}")
        if kind in counts:
            raise FluxUnreadable(f"resources ask for {kind} twice")
        counts[kind] = _read_count(vertex.get("count", 1), kind)
        is_exclusive |= vertex.get("exclusive") is True
        if kind in _CHILDREN:
            is_exclusive |= _read_vertices(vertex.get("with"), kind, counts)
    return is_exclusive


def _read_count(value: Any, kind: str) -> int:
    if isinstance(value, Mapping):
        value = value.get("min")
    if isinstance(value, str) and (matched := _RANGE.fullmatch(value)) is not None:
        value = int(matched[1])
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _COUNT_MOST:
        raise FluxUnreadable(f"the count of {kind} is {str(value)[:40]!r}; give 1 to {_COUNT_MOST}")
    return value


def match_ranks(constraint: Any, pool: ResourceSet) -> frozenset[int]:
    """Returns the ranks of a pool that match a constraint; raises FluxUnreadable for one that is none."""
    return _match(constraint, pool, frozenset(pool.ranks), 0)


def _match(constraint: Any, pool: ResourceSet, everything: frozenset[int], depth: int) -> frozenset[int]:
    if depth > _DEPTH_MOST:
        raise FluxUnreadable(f"constraints are nested more than {_DEPTH_MOST} deep")
    matched = everything
    for operator, values in parse_json(constraint, "constraints").items():
        if not isinstance(values, list) or len(values) > _VALUES_MOST:
            raise FluxUnreadable(f"constraints.{operator[:40]} has no list, or too long a one")
        matched &= _apply_operator(operator, values, pool, everything, depth)
    return matched


def _apply_operator(
    operator: str, values: list[Any], pool: ResourceSet, everything: frozenset[int], depth: int
) -> frozenset[int]:
    match operator:
        case "properties":
            return _match_properties(values, pool, everything)
        case "hostlist":
            hosts = frozenset(parse_hostlist(values, "constraints.hostlist"))
            return frozenset(rank for rank, one in pool.ranks.items() if one.hostname in hosts)
        case "ranks":
            return frozenset().union(*(select_ids(one, everything, "constraints.ranks") for one in values))
        case "and" | "not":
            both = everything.intersection(*(_match(one, pool, everything, depth + 1) for one in values))
            return both if operator == "and" else everything - both
        case "or":
            # An empty `or` matches everything.
            either = frozenset().union(*(_match(one, pool, everything, depth + 1) for one in values))
            return either if values else everything
        case _:
            raise FluxUnreadable(
                f"constraints use {operator[:40]!r}; Eelgrid knows properties, hostlist, ranks, and, or, not"
            )


def _match_properties(values: list[Any], pool: ResourceSet, everything: frozenset[int]) -> frozenset[int]:
    matched = everything
    for value in values:
        if not isinstance(value, str) or not value.removeprefix("^"):
            raise FluxUnreadable(f"constraints.properties has {str(value)[:40]!r} where a name is expected")
        having = pool.properties.get(value.removeprefix("^"), frozenset())
        matched = matched - having if value.startswith("^") else matched & having
    return matched


def list_plain_properties(constraint: Mapping[str, Any] | None) -> tuple[str, ...] | None:
    """Returns the properties that a constraint requires if it does nothing else; None if it does."""
    if constraint is None:
        return ()
    names = constraint.get("properties")
    if set(constraint) - {"properties"} or names is None or any(name.startswith("^") for name in names):
        return None
    return tuple(names)


def find_infeasibility(request: JobRequest, pool: ResourceSet) -> str:
    """Returns why a job could never run, even with nothing else and all ranks up; empty if it could."""
    matched = pool.select_ranks(pool.ranks if request.constraint is None else match_ranks(request.constraint, pool))
    if not matched.ranks:
        return "no rank matches the constraints"
    cores, gpus = request.shape
    fitting = [
        min(len(one.cores) // cores, len(one.gpus) // gpus if gpus else len(one.cores))
        for one in matched.ranks.values()
    ]
    if request.nodes:
        if request.is_exclusive:
            # They are placed as nodes of one size.
            room = max((len(alike) for alike in group_whole_nodes(request, matched).values()), default=0)
        else:
            room = sum(one > 0 for one in fitting)
        return (
            ""
            if room >= request.nodes
            else f"it needs {request.nodes} nodes of {cores} cores and {gpus} GPUs; {room} fit"
        )
    room = sum(fitting)
    return (
        "" if room >= request.slots else f"it needs {request.slots} slots of {cores} cores and {gpus} GPUs; {room} fit"
    )


def group_whole_nodes(request: JobRequest, pool: ResourceSet) -> dict[tuple[int, int], frozenset[int]]:
    """Groups the ranks that could hold a part of an exclusive job by their size in cores and GPUs."""
    cores, gpus = request.shape
    groups: dict[tuple[int, int], set[int]] = {}
    for rank, one in pool.ranks.items():
        if len(one.cores) >= cores and len(one.gpus) >= gpus:
            groups.setdefault((len(one.cores), len(one.gpus)), set()).add(rank)
    return {size: frozenset(ranks) for size, ranks in sorted(groups.items())}
