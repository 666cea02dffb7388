"""A node of simulated GPUs behind the real NVML binding, with its layouts, its claims and an API server.

Shared by what tests the DRA driver; nothing here is mocked but the driver's library.
"""

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from eelgrid_agent.enforce.mig.host import open_mig_host
from eelgrid_agent.enforce.mig.journal import MIG_JOURNAL
from eelgrid_agent.enforce.mig.mig_service import MigService
from eelgrid_agent.kubelet.claim_preparation import ClaimJournal, ClaimPreparer, LayoutDevices
from eelgrid_agent.kubelet.resource_slices import DRA_DRIVER, build_resource_slices
from eelgrid_agent.state_files import StateFile
from eelgrid_protos.catalogue.loader import load_catalogue
from eelgrid_protos.kubelet_api import ClaimReference

NODE = "gpu-7"
GPUS = [{"product": "h100-sxm5-80gb"}, {"product": "a100-sxm4-40gb", "mig": ["3g@4", "1g@0"]}, {"product": "t4"}]


def claim(uid, *devices, name=None, node=NODE, **changes):
    """A ResourceClaim with these of our devices allocated."""
    results = [
        {"request": f"r{number}", "driver": DRA_DRIVER, "pool": node, "device": device}
        for number, device in enumerate(devices)
    ]
    status = {"allocation": {"devices": {"results": results}}} if devices else {}
    return {"metadata": {"name": name or uid, "namespace": "team", "uid": uid}, "status": status, **changes}


def asked(uid, name=None):
    return ClaimReference(namespace="team", name=name or uid, uid=uid)


class DraNode:
    """What outlives an agent: devices and state directory; `start` is a new agent on it."""

    def __init__(self, folder, site):
        self.folder, self.site, self.name = folder, site, site.name
        self.cannot_change = ""
        self.cdi = None
        self.changes = 0
        self.start()

    def start(self):
        site = self.site
        self.layouts = MigService(
            site.device,
            site.control,
            StateFile(self.folder / "mig.json", MIG_JOURNAL),
            boot_id=lambda: site.boot_id,
            sleep=time.sleep,
            monotonic_s=time.monotonic,
            wall_ns=time.time_ns,
        )
        self.layouts.recover()
        self.devices = LayoutDevices(site.device, site.control, self.layouts)
        self.readying = ClaimPreparer(
            self.name,
            self.devices,
            ClaimJournal(self.folder / "claims.json"),
            load_catalogue(),
            cannot_change=self.cannot_change,
            cdi=self.cdi,
            changed=self._changed,
        )
        self.readying.restore_leases()

    def _changed(self):
        self.changes += 1

    def gpus(self):
        return self.site.device.gpus()

    def standing(self, index):
        return sorted((one.profile, one.start) for one in self.gpus()[index].gpu_instances)

    def uuid(self, index, start):
        (instance,) = [one for one in self.gpus()[index].gpu_instances if one.start == start]
        return instance.compute_instances[0].uuid

    def ready(self, uid, *devices):
        return self.readying.prepare_claim(asked(uid), claim(uid, *devices))

    def undo(self, uid):
        self.readying.unprepare_claim(asked(uid))

    def slices(self, generation=1, owner=""):
        return build_resource_slices(
            self.name,
            self.gpus(),
            load_catalogue(),
            conditions={},
            is_changeable=not self.cannot_change,
            generation=generation,
            owner_uid=owner,
        )


@contextmanager
def dra_node(folder, gpus=GPUS, name=NODE):
    fleet = folder / "fleet.json"
    node = {"name": name, "cpu_milli": 1000, "memory_bytes": 1, "gpus": gpus}
    fleet.write_text(json.dumps({"nodes": [node]}))
    with open_mig_host(simulate=fleet, node="", seed=1, state=None) as site:
        yield DraNode(folder, site)


@contextmanager
def one_thread():
    """What `on` gives of a driver's thread."""
    with ThreadPoolExecutor(1) as pool:
        yield lambda work: asyncio.wrap_future(pool.submit(work))
