"""The DRA driver of a real node, put together from its flags, its inventory, its layouts and the API server.

Owns the wiring. Decides nothing.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from eelgrid_agent.config import AgentConfig
from eelgrid_agent.device import Control, Device
from eelgrid_agent.kubelet.api_server import ApiServer, address_of
from eelgrid_agent.kubelet.cdi import CdiFolder
from eelgrid_agent.kubelet.claim_journal import ClaimJournal
from eelgrid_agent.kubelet.conditions import Conditions
from eelgrid_agent.kubelet.dra import DraPlugin, Threads
from eelgrid_agent.kubelet.publishing import Draw, Publisher
from eelgrid_agent.kubelet.readying import Readying
from eelgrid_agent.kubelet.slices import slices_of
from eelgrid_agent.loop import DriverThread
from eelgrid_agent.mig.keeper import LayoutKeeper
from eelgrid_agent.mig.runner import Look
from eelgrid_agent.node import Node
from eelgrid_protos.catalogue import MigGeometry
from eelgrid_protos.catalogue import load as load_catalogue
from eelgrid_protos.messages import ApplyResult, Gpu, GpuLayout

__all__ = ["CLAIMS_FILE", "LayoutDevices", "dra_plugin", "on"]

CLAIMS_FILE = "claims.json"


class LayoutDevices:
    """The devices behind the keeper of layouts."""

    def __init__(self, device: Device, control: Control, layouts: LayoutKeeper) -> None:
        self._device = device
        self._control = control
        self._layouts = layouts

    def gpus(self) -> Sequence[Gpu]:
        """All devices as they stand."""
        return self._device.gpus()

    def look(self, uuid: str) -> Look:
        """One device, and what of it may not be touched."""
        return self._layouts.executor.look(uuid)

    def geometry(self, uuid: str) -> MigGeometry:
        """How the driver lets it be cut."""
        return self._control.mig_geometry(uuid)

    def apply(self, layout: GpuLayout) -> ApplyResult:
        """Brings a device to a layout and keeps it there."""
        return self._layouts.apply(layout)

    def lease(self, uuids: Collection[str]) -> bool:
        """Claims hold these from now on, and nothing else."""
        return self._layouts.lease(uuids)


def on(thread: DriverThread) -> Callable[[Callable[[], Any]], Awaitable[Any]]:
    """Runs functions on a thread, in order."""
    return lambda work: asyncio.wrap_future(thread.call(work))


def dra_plugin(
    config: AgentConfig, node: Node, device: Device, control: Control, layouts: LayoutKeeper, *,
    slow_driver: DriverThread, directory: Path | None, cannot_change: str,
) -> DraPlugin:  # fmt: skip
    """Raises Unreachable where nothing says where the API server is, and SocketPathTooLong.

    `directory` is where claims are remembered; without one, and where something forbids it, nothing is changed.
    """
    address = address_of(config.api_server, config.api_credentials, os.environ)
    catalogue, conditions = load_catalogue(), Conditions()
    name = config.kubernetes_node or node.inventory.node_name

    def changed() -> None:
        # What befell is told from the event loop's next look; here only what stands is read anew.
        node.survey_due = True

    readying = Readying(
        name, LayoutDevices(device, control, layouts),
        ClaimJournal(None if directory is None else directory / CLAIMS_FILE), catalogue, cannot_change=cannot_change,
        cdi=None if config.cdi_folder is None else CdiFolder(config.cdi_folder), changed=changed,
    )  # fmt: skip
    reading = ApiServer(address, sleep=time.sleep)

    def read(namespace: str, claim: str) -> Mapping[str, Any]:
        return reading.get(f"/apis/resource.k8s.io/v1/namespaces/{namespace}/resourceclaims/{claim}")

    def look() -> Draw:
        found = conditions.observe(dict(node.quick), time.monotonic())
        gpus = node.inventory.gpus

        def draw(generation: int, owner_uid: str) -> Sequence[dict[str, Any]]:
            return slices_of(
                name, gpus, catalogue, conditions=found, is_changeable=not cannot_change, generation=generation,
                owner_uid=owner_uid,
            )  # fmt: skip

        return draw

    return DraPlugin(
        config.kubelet_folder, readying, Publisher(ApiServer(address, sleep=time.sleep), name), read=read, look=look,
        is_recovered=lambda: layouts.is_recovered,
        threads=Threads(devices=on(slow_driver), claims=on(DriverThread()), slices=on(DriverThread())),
    )  # fmt: skip
