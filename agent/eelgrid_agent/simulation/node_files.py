"""The files of simulated nodes: faults that the agent injects, state that outlives a program, scenes of driver processes.

The fault file injects faults into simulated devices while the agent runs, one JSON object per line.

    {"fault": "lose", "gpu": 0}
    {"fault": "xid", "gpu": 2, "code": 79, "node": "node-3"}
    {"fault": "slow_calls", "seconds": 2}

Append a line to inject a fault; it takes effect once the line ends with a newline. `gpu` is the device's place in the
fleet file. `node` may be left out where the agent simulates one node. FAULTS lists the names and fields; what each does
is defined by `FaultInjector`. A fault is undone by another one: restore, reset, release, or the same with another
value.

The node state file keeps MIG mode, instances and processes of a simulated node between two programs: a real device
keeps its layout while programs come and go, a simulated one dies with its program. It is plain JSON for people to read
and edit: put a process on an instance, let another program hold a device, take rights away, or complete a pending mode
change.

    {"schema": 1, "node": "n", "rights": "root", "gpus": [{
       "product": "a100-sxm4-40gb", "mig": true, "pending": true,
       "instances": [{"profile": "3g", "start": 4, "compute": [[2, 0], [1, 2]]}],
       "processes": [{"pid": 4711, "instance": 2, "compute": 0}], "clients": ["dcgm"]}]}

`compute` lists the slices and the first slice of each compute instance; `rights` is root, mig_config, mig_monitor or
read_only, and may be left out. Power, clocks and counters start afresh in each program.

The scene file says what the simulated driver in a driver process has, and which of its devices hang.
"""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any, NamedTuple

from eelgrid_agent.devices.nvml.control import NvmlControl
from eelgrid_agent.devices.nvml.device import NvmlDevice
from eelgrid_agent.devices.port import NotSupported, VisitCallback
from eelgrid_agent.simulation.gpu import LoadBehavior, SimGpu
from eelgrid_agent.simulation.mig import DriverRefused
from eelgrid_agent.simulation.node import SimulatedNode
from eelgrid_agent.simulation.nvml_library import install_library
from eelgrid_agent.simulation.spec import GpuLoad, GpuSpec, NodeSpec, SpecError
from eelgrid_agent.state_files import replace_file
from eelgrid_protos.messages import AccessLevel

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


_SCHEMA = 1
_STATE_BYTES_MOST = 4 * 1024 * 1024
# People read and edit the file.
_MODE = 0o644
_RIGHTS = {level.name.lower(): level for level in AccessLevel if level is not AccessLevel.UNSPECIFIED}


class NodeStateFileError(ValueError):
    """The file does not describe this node; the message names the file and what to do."""


def drop_layouts(spec: NodeSpec) -> NodeSpec:
    """Returns the node with MIG off everywhere, as `load_node_state` expects it."""
    return replace(spec, gpus=tuple(replace(gpu, mig=None) for gpu in spec.gpus))


def save_node_state(node: SimulatedNode, path: Path) -> None:
    """Replaces the file as a whole; raises NodeStateFileError."""
    document = {
        "schema": _SCHEMA,
        "node": node.spec.node_name,
        "rights": node.operations.rights.name.lower(),
        "gpus": [_gpu_out(gpu) for gpu in node.devices],
    }
    try:
        replace_file(path, (json.dumps(document, indent=1) + "\n").encode(), mode=_MODE)
    except OSError as error:
        raise NodeStateFileError(f"{path}: cannot be written ({error.strerror}); make it writable") from None


def load_node_state(node: SimulatedNode, path: Path) -> None:
    """Brings a node with MIG off to the state in the file; raises NodeStateFileError."""
    try:
        with path.open("rb") as file:
            content = file.read(_STATE_BYTES_MOST + 1)
    except OSError as error:
        raise NodeStateFileError(f"{path}: cannot be read ({error.strerror}); make it readable") from None
    try:
        problem = (
            f"has more than {_STATE_BYTES_MOST} bytes"
            if len(content) > _STATE_BYTES_MOST
            else _restore_node(node, json.loads(content))
        )
    except (ValueError, TypeError, LookupError, DriverRefused, RecursionError) as error:
        problem = f"does not describe this node ({error})"
    if problem:
        raise NodeStateFileError(f"{path}: {problem}; correct it, or remove it to start again from the fleet file")


def _restore_node(node: SimulatedNode, document: dict[str, Any]) -> str:
    """Brings the node there; returns what is wrong with the document, or nothing."""
    if document["schema"] != _SCHEMA:
        return f"does not have schema {_SCHEMA}"
    if document["node"] != node.spec.node_name or len(document["gpus"]) != len(node.devices):
        return f"is of another node than {node.spec.node_name}"
    rights = str(document.get("rights", "root"))
    if rights not in _RIGHTS:
        return f"has unknown rights {rights!r}; choose one of {', '.join(_RIGHTS)}"
    node.faults.set_rights(_RIGHTS[rights])
    for gpu, fields in zip(node.devices, document["gpus"], strict=True):
        if fields["product"] != gpu.product.key:
            return f"GPU {gpu.identity.index} is not a {gpu.product.key} in it"
        _gpu_in(gpu, fields)
    return ""


def _gpu_out(gpu: SimGpu) -> dict[str, Any]:
    mig = gpu.mig
    return {
        "product": gpu.product.key,
        "mig": mig.enabled,
        "pending": mig.pending,
        "instances": [
            {
                "profile": instance.profile.key,
                "start": instance.start,
                "compute": [
                    [child.profile.compute_slices, child.start] for _, child in sorted(instance.compute.items())
                ],
            }
            for _, instance in sorted(mig.instances.items())
        ],
        "processes": [
            {"pid": pid, "instance": instance, "compute": compute} for pid, (instance, compute) in mig.holds.items()
        ],
        "clients": sorted(mig.clients),
    }


def _gpu_in(gpu: SimGpu, fields: dict[str, Any]) -> None:
    mig = gpu.mig
    if fields["mig"]:
        mig.apply_layout(())
    if fields["pending"] != fields["mig"]:
        mig.set_mode(enabled=fields["pending"])
    for row in fields["instances"]:
        profile = None if mig.geometry is None else mig.geometry.profile(row["profile"])
        if profile is None:
            raise ValueError(f"{gpu.product.key} has no profile {row['profile']!r}")
        instance = mig.create_instance(profile.id, row["start"])
        by_slices = {ci.compute_slices: ci.id for ci in profile.compute_instances}
        for slices, start in row["compute"]:
            mig.create_compute(instance.id, by_slices[slices], start)
    for row in fields["processes"]:
        mig.holds[int(row["pid"])] = (row["instance"], row["compute"])
    mig.clients.update(map(str, fields.get("clients", ())))


class _Stall:
    """What a call to a hung device does."""

    def __init__(self) -> None:
        self.kind: str | float = "ever"

    def __call__(self) -> None:
        if self.kind == "abort":
            os.abort()
        if self.kind == "babble":
            os.write(int(sys.argv[3]), b"\xff" * 64)
            return
        if self.kind != "ever":
            time.sleep(float(self.kind))
            return
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while True:
            time.sleep(3600.0)


class SimulatedChildDevice:
    """The NVML adapter over a simulated node, and the order that reads the scene again."""

    def __init__(self, path: Path, visit: VisitCallback) -> None:
        self._path = path
        self._stall = _Stall()
        self.mute = ""
        scene = json.loads(path.read_text())
        if "opening" in scene:
            self._stall.kind = scene["opening"]
            self._stall()
        # The devices began before this process did, so their counters do not start over with it.
        began = scene.get("began_ns")
        first = () if began is None else (int(began),)
        moments = chain(first, repeat(None))
        monotonic_ns: Callable[[], int] = lambda: next(moments) or time.monotonic_ns()  # noqa: E731
        spec = NodeSpec(
            node_name="scene",
            cpu_milli=1000,
            memory_bytes=2**30,
            gpus=tuple(GpuSpec(product=product) for product in scene["products"]),
        )
        self.node = SimulatedNode(spec, monotonic_ns=monotonic_ns, seed=1, stall=self._stall)
        self._state = Path(scene["state"]) if "state" in scene else None
        if self._state is not None and self._state.exists():
            load_node_state(self.node, self._state)
        install_library(self.node)
        self.nvml = NvmlDevice(visit=visit)
        self._apply(scene)

    def order(self, name: str) -> None:
        """Reads the scene again."""
        if name != "scene":
            raise NotSupported(f"a simulated device knows no order {name!r}; order a scene")
        self._apply(json.loads(self._path.read_text()))

    def control(self) -> Any:
        """The NVML control over the same devices."""
        return _SceneControl(NvmlControl(self.nvml), self)

    def changed(self, name: str) -> None:
        """A call of the control took hold."""
        if self._state is not None:
            save_node_state(self.node, self._state)
        if name == self.mute:
            self._stall()

    def _apply(self, scene: dict[str, Any]) -> None:
        self._stall.kind = scene.get("stall", "ever")
        self.mute = scene.get("mute", "")
        hung = set(scene.get("hung", ()))
        for index, gpu in enumerate(self.node.devices):
            uuid = gpu.identity.uuid
            if index in hung:
                self.node.faults.hang_gpu(uuid)
            else:
                self.node.faults.restore_gpu(uuid)
                self.node.set_load(uuid, GpuLoad(utilization_ratio=scene.get("load", 0.0)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.nvml, name)


class _SceneControl:
    """The control, which remembers what it did and may not live to tell it."""

    def __init__(self, control: NvmlControl, scene: SimulatedChildDevice) -> None:
        self._control = control
        self._scene = scene

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._control, name)

        def told(*arguments: Any, **options: Any) -> Any:
            answer = call(*arguments, **options)
            self._scene.changed(name)
            return answer

        return told
