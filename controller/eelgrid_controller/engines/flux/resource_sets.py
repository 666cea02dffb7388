"""Resource sets of Flux: R of version 1 as values, with its idsets and host lists, and job ids as people write them.

Owns the syntax and the algebra of sets of cores and GPUs by rank. Must not know jobs, nor who holds what.

Theory. R is read completely before anything is made of it: a set that names one resource wrongly would let it be held
twice. So whatever is not as RFC 20 has it raises FluxUnreadable with the field; keys that RFC 20 does not know are ignored,
and `scheduling`, which belongs to whoever wrote it, is carried along. Sizes are bounded before they cost anything.

Sources: flux-framework/rfc 19 (job ids), 20 (R), 22 (idsets), 29 (host lists).
"""

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from eelgrid_controller.engines.element_lists import UnreadableAnswer
from eelgrid_controller.engines.host_lists import expand_hosts

# A rank is a 32-bit number, and no node has so many cores; ids beyond are a mistake, and a range of them a bomb.
_ID_MOST = 1 << 22
_IDS_MOST = 1 << 20
_ENTRIES_MOST = 65_536
_PROPERTIES_MOST = 1_024
# Forbidden in the names of properties by RFC 20.
_PROPERTY = re.compile(r"[^!&'\"^`|()\x00-\x1f]{1,200}")
# 64 bits, and `f`.
# Each look names all jobs that wait or run.
_JOB_IDS_KEPT = 65_536
_JOB_ID_LETTERS_MOST = 12
_BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
# Properties that describe the instance and not the hardware; they are in no R of a job.
_INSTANCE_LOCAL = "+"


class FluxUnreadable(ValueError):
    """Something of Flux that is not as its RFCs have it."""


@dataclass(frozen=True, slots=True)
class RankResources:
    """What one rank has, or what is held of it: logical ids."""

    hostname: str
    cores: frozenset[int]
    gpus: frozenset[int] = frozenset()

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left of it."""
        return not self.cores and not self.gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceSet:
    """R: resources by rank; times are seconds since 1970, 0 where there is none."""

    ranks: Mapping[int, RankResources]
    properties: Mapping[str, frozenset[int]] = field(default_factory=dict)
    nslots: int = 0
    starttime: float = 0.0
    expiration: float = 0.0
    # What another scheduler wrote of it; passed on as it is.
    scheduling: Mapping[str, Any] | None = None

    def find_by_host(self) -> dict[str, int]:
        """Returns ranks by host name; of several ranks on one host the first."""
        found: dict[str, int] = {}
        for rank in sorted(self.ranks):
            found.setdefault(self.ranks[rank].hostname, rank)
        return found

    def select_ranks(self, ranks: Iterable[int]) -> "ResourceSet":
        """Returns what it has of these ranks."""
        chosen = frozenset(ranks) & self.ranks.keys()
        return replace(
            self,
            ranks={rank: self.ranks[rank] for rank in sorted(chosen)},
            properties={name: on & chosen for name, on in self.properties.items() if on & chosen},
        )

    def overlaps(self, other: "ResourceSet") -> bool:
        """Whether both have a core or a GPU of one rank."""
        return any(
            one.cores & two.cores or one.gpus & two.gpus
            for rank, one in self.ranks.items()
            if (two := other.ranks.get(rank)) is not None
        )

    def covers(self, other: "ResourceSet") -> bool:
        """Whether it has all cores and GPUs of another."""
        return all(
            (mine := self.ranks.get(rank)) is not None and one.cores <= mine.cores and one.gpus <= mine.gpus
            for rank, one in other.ranks.items()
        )

    def subtract(self, other: "ResourceSet") -> "ResourceSet":
        """Returns what is left without another; ranks of which nothing is left are gone."""
        left = {}
        for rank, one in self.ranks.items():
            two = other.ranks.get(rank)
            rest = one if two is None else replace(one, cores=one.cores - two.cores, gpus=one.gpus - two.gpus)
            if not rest.is_empty:
                left[rank] = rest
        return replace(self, ranks=left).select_ranks(left)

    def count(self) -> tuple[int, int]:
        """Returns how many cores and GPUs it has."""
        return sum(len(one.cores) for one in self.ranks.values()), sum(len(one.gpus) for one in self.ranks.values())


def parse_idset(text: Any, name: str = "idset") -> frozenset[int]:
    """Parses an idset such as 0-3,7 or [0-3,7]; raises FluxUnreadable."""
    found: set[int] = set()
    size = 0
    for ids in _parse_ranges(text, name):
        # Repeated ids cost as much as others.
        size += len(ids)
        if size > _IDS_MOST:
            raise FluxUnreadable(f"{name} has more than {_IDS_MOST} ids")
        found.update(ids)
    return frozenset(found)


def select_ids(text: Any, among: frozenset[int], name: str = "idset") -> frozenset[int]:
    """Returns which ids are in an idset, at a cost of as many for each range, however long; raises FluxUnreadable."""
    found: set[int] = set()
    for ids in _parse_ranges(text, name):
        found.update(among.intersection(ids) if len(ids) < len(among) else (one for one in among if one in ids))
    return frozenset(found)


def _parse_ranges(text: Any, name: str) -> Iterator[range]:
    if not isinstance(text, str) or len(text) > 16 * _IDS_MOST:
        raise FluxUnreadable(f"{name} has {str(text)[:40]!r} where an idset is expected")
    inner = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    for part in inner.split(",") if inner else ():
        matched = re.fullmatch(r"(0|[1-9][0-9]{0,9})(?:-(0|[1-9][0-9]{0,9}))?", part)
        if matched is None:
            raise FluxUnreadable(f"{name} has {part[:40]!r} where an id or a range of ids is expected")
        first, last = int(matched[1]), int(matched[2] or matched[1])
        if not first <= last <= _ID_MOST or last - first >= _IDS_MOST:
            raise FluxUnreadable(f"{name} has {part[:40]!r}, which is no range, or too long a one")
        yield range(first, last + 1)


def format_idset(ids: Iterable[int]) -> str:
    """Formats ids with ranges: 0-3,7."""
    found = []
    # Ids of one run have one difference to their place in the order.
    for _, run in itertools.groupby(enumerate(sorted(ids)), key=lambda item: item[1] - item[0]):
        numbers = [number for _, number in run]
        found.append(str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}")
    return ",".join(found)


def parse_hostlist(entries: Any, name: str = "nodelist") -> tuple[str, ...]:
    """Parses a list of host names and host lists in its order; raises FluxUnreadable."""
    if not isinstance(entries, list) or not all(isinstance(one, str) for one in entries):
        raise FluxUnreadable(f"{name} has {str(entries)[:40]!r} where a list of host names is expected")
    found: list[str] = []
    for one in entries:
        try:
            found += expand_hosts(one)
        except UnreadableAnswer as error:
            raise FluxUnreadable(f"{name} {error}") from None
        if len(found) > _ENTRIES_MOST:
            raise FluxUnreadable(f"{name} names more than {_ENTRIES_MOST} hosts")
    return tuple(found)


def parse_json(value: Any, name: str) -> Mapping[str, Any]:
    """Returns an object of JSON, given as such or as text; raises FluxUnreadable."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise FluxUnreadable(f"{name} is no JSON: {error}") from None
    if not isinstance(value, Mapping):
        raise FluxUnreadable(f"{name} has {str(value)[:40]!r} where an object is expected")
    return value


def read_number(found: Mapping[str, Any], name: str, default: float = 0.0) -> float:
    """Reads a number of at least 0; raises FluxUnreadable."""
    value = found.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 2**64:
        raise FluxUnreadable(f"{name} has {str(value)[:40]!r} where a number of at least 0 is expected")
    return value


def parse_resource_set(value: Any) -> ResourceSet:
    """Parses R of version 1, as an object or as text; raises FluxUnreadable with the field."""
    found = parse_json(value, "R")
    if found.get("version") != 1:
        raise FluxUnreadable(f"R.version is {str(found.get('version'))[:40]!r}; 1 is read here")
    execution = parse_json(found.get("execution"), "R.execution")
    entries = execution.get("R_lite")
    if not isinstance(entries, list) or len(entries) > _ENTRIES_MOST:
        raise FluxUnreadable("R.execution.R_lite is no list, or too long a one")
    held: dict[int, tuple[set[int], set[int]]] = {}
    for entry in entries:
        children = parse_json(parse_json(entry, "R_lite").get("children"), "R_lite.children")
        cores = parse_idset(children.get("core", ""), "children.core")
        gpus = parse_idset(children.get("gpu", ""), "children.gpu")
        for rank in parse_idset(entry.get("rank"), "R_lite.rank"):
            mine = held.setdefault(rank, (set(), set()))
            mine[0].update(cores)
            mine[1].update(gpus)
    order = sorted(held)
    hosts = parse_hostlist(execution.get("nodelist"), "R.execution.nodelist")
    if len(hosts) != len(order):
        raise FluxUnreadable(f"R.execution.nodelist names {len(hosts)} hosts, and R_lite {len(order)} ranks")
    scheduling = found.get("scheduling")
    return ResourceSet(
        ranks={
            rank: RankResources(host, frozenset(held[rank][0]), frozenset(held[rank][1]))
            for rank, host in zip(order, hosts, strict=True)
        },
        properties=_parse_properties(execution.get("properties") or {}, frozenset(order)),
        nslots=int(read_number(execution, "nslots")),
        starttime=float(read_number(execution, "starttime")),
        expiration=float(read_number(execution, "expiration")),
        scheduling=None if scheduling is None else parse_json(scheduling, "R.scheduling"),
    )


def _parse_properties(value: Any, ranks: frozenset[int]) -> dict[str, frozenset[int]]:
    found = parse_json(value, "R.execution.properties")
    if len(found) > _PROPERTIES_MOST:
        raise FluxUnreadable(f"R.execution.properties names {len(found)}; {_PROPERTIES_MOST} are read at the most")
    for name in found:
        if not _PROPERTY.fullmatch(name):
            raise FluxUnreadable(f"R.execution.properties names {name[:64]!r}, which RFC 20 forbids")
    on = {name: parse_idset(text, f"properties.{name}") & ranks for name, text in found.items()}
    return {name: where for name, where in on.items() if where}


def format_resource_set(one: ResourceSet) -> dict[str, Any]:
    """Formats R of version 1; ranks that hold the same ids share an entry."""
    alike: dict[tuple[frozenset[int], frozenset[int]], list[int]] = {}
    for rank in sorted(one.ranks):
        alike.setdefault((one.ranks[rank].cores, one.ranks[rank].gpus), []).append(rank)
    execution: dict[str, Any] = {
        "R_lite": [
            {
                "rank": format_idset(ranks),
                "children": {"core": format_idset(cores)} | ({"gpu": format_idset(gpus)} if gpus else {}),
            }
            for (cores, gpus), ranks in alike.items()
        ],
        "starttime": one.starttime,
        "expiration": one.expiration,
        "nodelist": [one.ranks[rank].hostname for rank in sorted(one.ranks)],
    }
    if one.nslots:
        execution["nslots"] = one.nslots
    if one.properties:
        execution["properties"] = {name: format_idset(where) for name, where in sorted(one.properties.items())}
    return {"version": 1, "execution": execution} | ({"scheduling": dict(one.scheduling)} if one.scheduling else {})


def drop_instance_properties(properties: Mapping[str, frozenset[int]]) -> dict[str, frozenset[int]]:
    """Returns the properties that may stand in the R of a job."""
    return {name: where for name, where in properties.items() if not name.startswith(_INSTANCE_LOCAL)}


def describe_resource_set(formatted: Mapping[str, Any]) -> str:
    """Describes R of version 1, as `format_resource_set` writes it and as Flux does: rank[0-1]/core[0-3],gpu0."""
    parts = []
    for entry in formatted["execution"]["R_lite"]:
        named = [f"{kind}{_bracket(text)}" for kind, text in entry["children"].items() if text]
        parts.append(f"rank{_bracket(entry['rank'])}/{','.join(named)}")
    return " ".join(parts)


def _bracket(text: str) -> str:
    return text if text.isdigit() else f"[{text}]"


@lru_cache(maxsize=_JOB_IDS_KEPT)
def format_job_id(number: int) -> str:
    """Formats a job id in base 58, with `f` before it: what every Flux command reads, in ASCII."""
    digits = "".join(_digits(number)) or _BASE58[0]
    return "f" + digits[::-1]


def parse_job_id(text: str) -> int:
    """Parses a job id as `format_job_id` writes it; raises FluxUnreadable."""
    number = 0
    if not 1 < len(text) <= _JOB_ID_LETTERS_MOST or text[0] != "f" or not set(text[1:]) <= set(_BASE58):
        raise FluxUnreadable(f"{text[:40]!r} is no job id")
    for letter in text[1:]:
        number = 58 * number + _BASE58.index(letter)
    return number


def _digits(number: int) -> Iterator[str]:
    while number:
        number, digit = divmod(number, 58)
        yield _BASE58[digit]
