"""The devices of a driver process that simulates them: a scene file says what there is, and which devices hang."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from itertools import chain, repeat
from pathlib import Path
from typing import Any

from eelgrid_agent.devices.nvml.control import NvmlControl
from eelgrid_agent.devices.nvml.device import NvmlDevice
from eelgrid_agent.devices.port import NotSupported, VisitCallback
from eelgrid_agent.simulation.node import SimulatedNode
from eelgrid_agent.simulation.node_files import load_node_state, save_node_state
from eelgrid_agent.simulation.nvml_library import install_library
from eelgrid_agent.simulation.spec import GpuLoad, GpuSpec, NodeSpec


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
