"""The fleet file: which nodes to simulate, as JSON or TOML.

    {"nodes": [{"name": "node-{index}", "count": 3, "cpu_milli": 96000, "memory_bytes": 412316860416,
                "pool": "a", "labels": {"owner": "x"}, "topology": "zone-a/spine-2/rack-7", "driver_version": "580.95.05",
                "hurry": 60,
                "gpus": [{"product": "openb-g2", "model": "G2", "count": 8},
                         {"product": "a100-sxm4-40gb", "mig": ["3g@4", "1g.5gb@0"], "sensor_gain": 0.954}]}]}

"{index}" in a name stands for 0 to count - 1. `mig` lists profile@start and
turns MIG on even when it is empty. A power sensor reads `sensor_gain` times the
truth plus `sensor_offset_w`. `topology` says where a node stands, outermost first.
`hurry` makes the agent's own waits so many times shorter (how long an anomaly must last, how long a quarantine does and
within which time losses and repairs count), for rehearsals of faults; 1 is as in real life. It owns the format; what a machine can be
is the specification's to say.

FleetFileError               the file is not there, not readable, or breaks a rule
"""

import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from eelgrid_agent.simulation.spec import GpuSpec, MigSlice, NodeSpec, SpecError
from eelgrid_protos.catalogue import Catalogue, load
from eelgrid_protos.messages import GPUS_PER_NODE_MOST

__all__ = ["FleetFileError", "load_fleet"]

# A file is read whole, and a simulated node costs some 10 kB.
_BYTES_MOST = 16 * 1024 * 1024
_NODES_MOST = 20_000


class FleetFileError(ValueError):
    """The file breaks a rule; the message names the file, the field and the remedy."""


def load_fleet(path: Path | str) -> tuple[NodeSpec, ...]:
    """The nodes of the file, in its order; raises FleetFileError."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            content = file.read(_BYTES_MOST + 1)
    except OSError as error:
        raise FleetFileError(f"{path}: cannot be read ({error.strerror}); give a fleet file") from None
    if len(content) > _BYTES_MOST:
        raise FleetFileError(f"{path}: is larger than {_BYTES_MOST} bytes; use `count` for like nodes")
    try:
        text = content.decode("utf-8")
        document: Any = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except (ValueError, RecursionError) as error:
        kind = "TOML" if path.suffix == ".toml" else "JSON"
        raise FleetFileError(f"{path}: is not {kind} ({error}); correct it there") from None
    try:
        return tuple(_nodes(document, load()))
    except SpecError as error:
        raise FleetFileError(f"{path}: {error.field}: {error.problem}") from None


def _nodes(document: Any, catalogue: Catalogue) -> Iterator[NodeSpec]:
    top = _Fields("", document)
    rows = top.take("nodes", list)
    top.finish()
    names: set[str] = set()
    for number, row in enumerate(rows):
        for node in _like_nodes(f"nodes[{number}]", row, catalogue):
            if node.node_name in names:
                problem = f"{node.node_name!r} is there twice; put {{index}} in the name or choose another"
                raise SpecError(f"nodes[{number}].name", problem)
            names.add(node.node_name)
            if len(names) > _NODES_MOST:
                raise SpecError("nodes", f"are more than {_NODES_MOST}; split the fleet over several agents")
            yield node


def _like_nodes(path: str, row: Any, catalogue: Catalogue) -> Iterator[NodeSpec]:
    fields = _Fields(path, row)
    name, count = fields.take("name", str), fields.whole("count", 1, _NODES_MOST, default=1)
    gpus: list[GpuSpec] = []
    for number, gpu in enumerate(fields.take("gpus", list, default=[])):
        gpus += _like_gpus(f"{path}.gpus[{number}]", gpu)
    node = NodeSpec(
        node_name=name,
        cpu_milli=fields.whole("cpu_milli", 0, 10_000_000),
        memory_bytes=fields.whole("memory_bytes", 0, 2**50),
        pool=fields.take("pool", str, default=""),
        labels=fields.texts("labels"),
        gpus=tuple(gpus),
        driver_version=fields.take(
            "driver_version", str, default=NodeSpec.__dataclass_fields__["driver_version"].default
        ),
        hurry=fields.number("hurry", 1.0, 3600.0, default=1.0),
    )
    where = fields.take("topology", str, default="")
    node = replace(node, topology=tuple(where.split("/")) if where else ())
    fields.finish()
    nodes = [replace(node, node_name=name.replace("{index}", str(index))) for index in range(count)]
    try:
        # They differ in their name alone, and the last has the longest.
        nodes[-1].check(catalogue)
    except SpecError as error:
        raise SpecError(f"{path}.{error.field}", error.problem) from None
    yield from nodes


def _like_gpus(path: str, row: Any) -> list[GpuSpec]:
    fields = _Fields(path, row)
    count = fields.whole("count", 1, GPUS_PER_NODE_MOST, default=1)
    layout = fields.take("mig", list, default=None)
    gpu = GpuSpec(
        product=fields.take("product", str),
        model=fields.take("model", str, default=""),
        mig=None if layout is None else tuple(_slice(f"{path}.mig[{n}]", item) for n, item in enumerate(layout)),
        sensor_gain=fields.number("sensor_gain", 0.5, 2.0, default=1.0),
        sensor_offset_w=fields.number("sensor_offset_w", -50.0, 50.0, default=0.0),
    )
    fields.finish()
    return [gpu] * count


def _slice(path: str, item: Any) -> MigSlice:
    profile, _, start = item.rpartition("@") if isinstance(item, str) else ("", "", "")
    if not profile or not (start.isascii() and start.isdigit()):
        raise SpecError(path, f"{item!r} is not profile@start; write for example 3g@4")
    return MigSlice(profile=profile, start=int(start))


class _Fields:
    """An object of the file, taken apart field by field; what is left over is an error."""

    def __init__(self, path: str, value: Any) -> None:
        if not isinstance(value, dict):
            raise SpecError(path or "the file", f"is {_kind(value)}; write an object")
        self._path = path
        self._left = dict(value)

    def _name(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name

    def take(self, name: str, kind: type, default: Any = ...) -> Any:
        value = self._left.pop(name, default)
        if value is ...:
            raise SpecError(self._name(name), "is missing; add it")
        if value is not default and (not isinstance(value, kind) or isinstance(value, bool)):
            raise SpecError(self._name(name), f"is {_kind(value)}; write {_KINDS[kind]}")
        return value

    def whole(self, name: str, low: int, high: int, default: Any = ...) -> int:
        value: int = self.take(name, int, default)
        if not low <= value <= high:
            raise SpecError(self._name(name), f"{value} is not in [{low}, {high}]; correct it")
        return value

    def number(self, name: str, low: float, high: float, *, default: float) -> float:
        value = self._left.pop(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise SpecError(self._name(name), f"is {_kind(value)}; write a number")
        if not low <= value <= high:
            raise SpecError(self._name(name), f"{value} is not in [{low:g}, {high:g}]; correct it")
        return float(value)

    def texts(self, name: str) -> Mapping[str, str]:
        value: dict[str, str] = self.take(name, dict, default={})
        if not all(isinstance(text, str) for text in value.values()):
            raise SpecError(self._name(name), "holds something other than text; put values in quotes")
        return value

    def finish(self) -> None:
        if self._left:
            raise SpecError(self._name(min(self._left)), "is no field; correct the spelling or remove it")


_KINDS = {str: "text", int: "a whole number", list: "a list", dict: "an object", bool: "true or false"}


def _kind(value: Any) -> str:
    return "null" if value is None else _KINDS.get(type(value), f"a {type(value).__name__}")
