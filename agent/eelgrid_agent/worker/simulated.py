"""Simulated devices in a child: a scene file says which there are and what is wrong with them.

The scene is a JSON file, so that a fault outlives the child that it killed. A
child reads it when it starts, and again at the order "scene". A hung device
stalls as the scene says: "ever" blocks every signal that can be blocked, as
the kernel does for a process in an uninterruptible call; "abort" ends the
process, as a driver's fault does; "babble" writes to the connection, as a
library that prints to the wrong descriptor does; a number is seconds.

    {"products": ["h100-sxm5-80gb", ...], "hung": [2], "stall": "ever", "load": 0.5, "began_ns": 0,
     "opening": "abort", "state": "FILE", "mute": "create_gpu_instance"}

With "opening" the driver stalls so before any device is there. With "state" the
MIG layout outlives the child too. A "mute" call takes hold and then stalls, so
that its answer is lost.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from itertools import chain, repeat
from pathlib import Path
from typing import Any

from eelgrid_agent.device import NotSupported
from eelgrid_agent.nvml import NvmlDevice
from eelgrid_agent.nvml.control import NvmlControl
from eelgrid_agent.simulation import GpuLoad, GpuSpec, NodeSpec, SimulatedNode
from eelgrid_agent.simulation.library import install
from eelgrid_agent.simulation.state_file import keep, resume
from eelgrid_agent.worker.factories import Visit

__all__ = ["SceneDevice"]


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


class SceneDevice:
    """The NVML adapter over a simulated node, and the order that reads the scene again."""

    def __init__(self, path: Path, visit: Visit) -> None:
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
            node_name="scene", cpu_milli=1000, memory_bytes=2**30,
            gpus=tuple(GpuSpec(product=product) for product in scene["products"]),
        )  # fmt: skip
        self.node = SimulatedNode(spec, monotonic_ns=monotonic_ns, seed=1, stall=self._stall)
        self._state = Path(scene["state"]) if "state" in scene else None
        if self._state is not None and self._state.exists():
            resume(self.node, self._state)
        install(self.node)
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
            keep(self.node, self._state)
        if name == self.mute:
            self._stall()

    def _apply(self, scene: dict[str, Any]) -> None:
        self._stall.kind = scene.get("stall", "ever")
        self.mute = scene.get("mute", "")
        hung = set(scene.get("hung", ()))
        for index, gpu in enumerate(self.node.devices):
            uuid = gpu.identity.uuid
            if index in hung:
                self.node.faults.hang(uuid)
            else:
                self.node.faults.restore(uuid)
                self.node.set_load(uuid, GpuLoad(utilization_ratio=scene.get("load", 0.0)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.nvml, name)


class _SceneControl:
    """The control, which remembers what it did and may not live to tell it."""

    def __init__(self, control: NvmlControl, scene: SceneDevice) -> None:
        self._control = control
        self._scene = scene

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._control, name)

        def told(*arguments: Any, **options: Any) -> Any:
            answer = call(*arguments, **options)
            self._scene.changed(name)
            return answer

        return told
