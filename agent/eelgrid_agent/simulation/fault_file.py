"""The fault file of simulated nodes: injects faults into their devices while the agent runs.

A fault is one JSON object on a line.

    {"fault": "lose", "gpu": 0}
    {"fault": "xid", "gpu": 2, "code": 79, "node": "node-3"}
    {"fault": "slow_calls", "seconds": 2}

Append a line to inject a fault; it takes effect once the line ends with a newline. `gpu` is the device's place in the
fleet file. `node` may be left out where the agent simulates one node. FAULTS lists the names and fields; what each does
is defined by `FaultInjector`. A fault is undone by another one: restore, reset, release, or the same with another
value.
"""

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from eelgrid_agent.simulation.gpu import LoadBehavior
from eelgrid_agent.simulation.mig import DriverRefused
from eelgrid_agent.simulation.node import SimulatedNode
from eelgrid_agent.simulation.spec import SpecError

_LOOK_S = 0.1
_BYTES_MOST = 16 * 1024 * 1024
# A longer pause is a hang, which is a fault of its own.
_SLOW_S_MOST = 60.0


class FaultFileError(ValueError):
    """The file or a line of it; the message names the file, the line, the field and the remedy."""


class _Fault(NamedTuple):
    """Fields beside fault, node and gpu, each with what it must be; `does` takes the node, the UUID and them."""

    fields: Mapping[str, tuple[type, ...]]
    does: Callable[..., object]
    of_gpu: bool = True


_NUMBER = (int, float)
_NONE: Mapping[str, tuple[type, ...]] = {}


def _limit(node: SimulatedNode, uuid: str, watts: float) -> None:
    node.faults.limit_power(uuid, watts)


def _slow(node: SimulatedNode, _uuid: str, seconds: float) -> None:
    if not 0.0 <= seconds <= _SLOW_S_MOST:
        raise SpecError("seconds", f"{seconds:g} is not in [0, {_SLOW_S_MOST:g}]; give 0 to end it")
    node.faults.slow_calls((lambda _call: time.sleep(seconds)) if seconds else None)


def _conduct(node: SimulatedNode, uuid: str, work: str) -> None:
    known = {conduct.value: conduct for conduct in LoadBehavior}
    if work not in known:
        raise SpecError("work", f"{work!r} is not one of {', '.join(known)}; choose one")
    node.faults.set_behavior(uuid, known[work])


FAULTS: Mapping[str, _Fault] = {
    "lose": _Fault(_NONE, lambda node, uuid: node.faults.lose_gpu(uuid)),
    "restore": _Fault(_NONE, lambda node, uuid: node.faults.restore_gpu(uuid)),
    "hang": _Fault(_NONE, lambda node, uuid: node.faults.hang_gpu(uuid)),
    "reset": _Fault(_NONE, lambda node, uuid: node.faults.reset_gpu(uuid)),
    "xid": _Fault({"code": (int,)}, lambda node, uuid, code: node.faults.announce_xid(uuid, code)),
    "limit_power": _Fault({"watts": _NUMBER}, _limit),
    "fail_memory": _Fault({"failed": (bool,)}, lambda node, uuid, failed: node.faults.fail_memory(uuid, failed=failed)),
    "fabric": _Fault({"state": (int,)}, lambda node, uuid, state: node.faults.set_fabric_state(uuid, state)),
    "conduct": _Fault({"work": (str,)}, _conduct),
    "skew": _Fault({"gain": _NUMBER}, lambda node, uuid, gain: node.faults.skew_power_sensor(uuid, gain)),
    "ask_mode": _Fault(
        {"enabled": (bool,)}, lambda node, uuid, enabled: node.faults.request_mode(uuid, enabled=enabled)
    ),
    "hold": _Fault({"pid": (int,)}, lambda node, uuid, pid: node.faults.start_process(uuid, pid)),
    "release": _Fault({"pid": (int,)}, lambda node, uuid, pid: node.faults.end_process(uuid, pid)),
    "slow_calls": _Fault({"seconds": _NUMBER}, _slow, of_gpu=False),
}


class FaultFile:
    """One fault file and the nodes that it applies to; its first content is applied at the start."""

    def __init__(self, path: Path, nodes: Sequence[SimulatedNode]) -> None:
        self._path = path
        self._nodes = {node.spec.node_name: node for node in nodes}
        self._read = self._lines = 0

    async def follow_file(self) -> None:
        """Applies new lines ten times a second, until cancelled; raises FaultFileError."""
        while True:
            self.apply_new_faults()
            await asyncio.sleep(_LOOK_S)

    def apply_new_faults(self) -> int:
        """Applies the lines completed since the call before and returns how many; raises FaultFileError."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._read)
                content = file.read(_BYTES_MOST + 1 - self._read)
        except FileNotFoundError:
            # Nobody wants anything yet.
            return 0
        except OSError as error:
            raise FaultFileError(f"{self._path}: cannot be read ({error.strerror}); make it readable") from None
        if self._read + len(content) > _BYTES_MOST:
            raise FaultFileError(f"{self._path}: is larger than {_BYTES_MOST} bytes; start the agent with a new one")
        whole = content[: content.rfind(b"\n") + 1]
        self._read += len(whole)
        lines = whole.split(b"\n")[:-1]
        for line in lines:
            self._lines += 1
            if line.strip():
                self._do(line)
        return len(lines)

    def _do(self, line: bytes) -> None:
        try:
            fields = json.loads(line)
            if not isinstance(fields, dict):
                raise SpecError("the line", "is not an object; write one such as " + '{"fault": "lose", "gpu": 0}')
            self._carry_out(fields)
        except (ValueError, RecursionError, DriverRefused) as error:
            raise FaultFileError(f"{self._path}: line {self._lines}: {error}") from None

    def _carry_out(self, fields: dict[str, Any]) -> None:
        name = fields.pop("fault", None)
        fault = FAULTS.get(name) if isinstance(name, str) else None
        if fault is None:
            raise SpecError("fault", f"{name!r} is not one of {', '.join(FAULTS)}; choose one")
        node = self._node(fields.pop("node", None))
        uuid = _uuid(node, fields.pop("gpu", None)) if fault.of_gpu else ""
        for field, kinds in fault.fields.items():
            value = fields.get(field)
            if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
                raise SpecError(field, f"is {value!r}; {name} wants {' or '.join(kind.__name__ for kind in kinds)}")
        if strange := fields.keys() - fault.fields.keys():
            raise SpecError(min(strange), f"is not a field of {name}; correct the spelling or remove it")
        fault.does(node, uuid, **fields)

    def _node(self, name: object) -> SimulatedNode:
        if name is None and len(self._nodes) == 1:
            (node,) = self._nodes.values()
            return node
        found = self._nodes.get(name) if isinstance(name, str) else None
        if found is None:
            raise SpecError("node", f"{name!r} is not a node of this agent; name one of its fleet file")
        return found


def _uuid(node: SimulatedNode, place: object) -> str:
    if not isinstance(place, int) or isinstance(place, bool) or not 0 <= place < len(node.devices):
        raise SpecError("gpu", f"{place!r} is not an index of the {len(node.devices)} GPUs of {node.spec.node_name}")
    return node.devices[place].uuid
