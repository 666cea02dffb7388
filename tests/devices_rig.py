"""A whole controller at an API server, and one node's agent and kubelet: who gets which device, and what is said of it.

The kubelet here gives what a test wants, the plan or not, as a device plugin's kubelet may; it
gives no device twice. What it gave is told over the agent's real stream.
"""

import asyncio
import contextlib
import random

import yaml

from eelgrid_agent.kubelet.device_plugins import NodeDevices, choose_devices, planned_device_sets
from eelgrid_controller.engines.kubernetes.api.port import NODES, PODS
from eelgrid_controller.runtime.config import KubernetesConfig
from eelgrid_protos.kubelet_api import PreferredAllocationRequest
from eelgrid_protos.messages import HeldDevices, NodePlan, PodDevices
from tests.builders.server import run_controller
from tests.waiting import wait_until

GPU = "nvidia.com/gpu"
ABILITIES = frozenset({"devices", "slices"})


def kubeconfig_of(access, path):
    """The access as a file, as a controller outside a cluster is given it."""
    cluster = {"server": access.server}
    if access.authority_pem:
        authority = path.with_suffix(".pem")
        authority.write_bytes(access.authority_pem)
        cluster["certificate-authority"] = str(authority)
    found = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "it",
        "clusters": [{"name": "it", "cluster": cluster}],
        "users": [{"name": "it", "user": {"token": access.token}}],
        "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it", "namespace": "default"}}],
    }
    path.write_text(yaml.safe_dump(found))
    return str(path)


@contextlib.asynccontextmanager
async def controlled(folder, access, **options):
    """A controller that leads at this API server."""
    config = KubernetesConfig(
        kubeconfig=kubeconfig_of(access, folder / "kubeconfig"),
        namespace="default",
        lease_s=2.0,
        abilities=ABILITIES,
        **options,
    )
    async with run_controller(folder / "data", kubernetes=config, plan_interval_s=0.0) as rig:
        await wait_until(lambda: rig.controller.placing.elector.term() is not None, within_s=20.0)
        yield rig


def planned(rig, node="n1"):
    """The devices of each pod of a node by the core's ledger: by workload and replica."""
    record = rig.controller.loop.core.state.nodes[node]
    return {key: frozenset(one.gpu_uuids) for key, one in record.assignments.items() if one.gpu_uuids}


def part(rig, name):
    """An ability of a controller."""
    return rig.controller.placing._parts[name]


class Station:
    """The agent and the kubelet of one node; `obeys` says whether this pod gets what the plan wants."""

    def __init__(self, rig, fake, inventory, *, obeys=lambda pod: True, slices=None, seed=0):
        self.rig, self.fake, self.inventory = rig, fake, inventory
        self.node = inventory.node_name
        self.obeys = obeys
        self.slices = slices or {}  # (GPU index, size) by uuid, by resource
        self.rng = random.Random(seed)
        self.held = {}  # by uid: (name, devices)
        self.plan = None
        self.unseen_most = 0  # pods that were bound at once and not told of
        self._tasks = []

    async def __aenter__(self):
        self.agent = await self.rig.join(self.inventory)
        await self.agent.say(HeldDevices(steers=True))
        self._tasks = [asyncio.create_task(self._hear()), asyncio.create_task(self._admit())]
        return self

    async def __aexit__(self, *reason):
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _hear(self):
        while True:
            self.plan = await self.agent.hear(NodePlan, within_s=600.0)

    def _bound(self):
        """Pods on the node that hold devices or are to, by uid; in the order in which they were bound."""
        found = {}
        kind = self.fake.api.catalogue.find(PODS.group, PODS.version, PODS.plural)
        for record in self.fake.store.of(kind).values():
            pod = record.object
            is_over = pod["status"].get("phase") in {"Succeeded", "Failed"}
            if pod["spec"].get("nodeName") == self.node and not is_over:
                found[pod["metadata"]["uid"]] = pod
        return found

    async def _admit(self):
        while True:
            await asyncio.sleep(0.02)
            bound = self._bound()
            gone = [uid for uid in self.held if uid not in bound]
            for uid in gone:
                del self.held[uid]
            new = [uid for uid in bound if uid not in self.held]
            self.unseen_most = max(self.unseen_most, len(new))
            for uid in new:
                self._give(bound[uid])
            if gone or new:
                await self.say()

    def _give(self, pod):
        ((resource, count),) = [
            (name, int(text))
            for name, text in pod["spec"]["containers"][0]["resources"]["requests"].items()
            if name.startswith("nvidia.com/")
        ]
        taken = frozenset().union(*(devices for _, devices in self.held.values())) if self.held else frozenset()
        gpus = {gpu.uuid: gpu.index for gpu in self.inventory.gpus if not gpu.mig_enabled}
        offered = gpus if resource == GPU else {uuid: index for uuid, (index, _) in self.slices[resource].items()}
        free = [one for one in offered if one not in taken]
        assert len(free) >= count, f"{resource}: {len(free)} free of {count}"
        self.rng.shuffle(free)
        given = free[:count]
        if self.obeys(pod):
            places = {uuid: place for some in self.slices.values() for uuid, place in some.items()}
            look = NodeDevices(
                index_of=gpus | {uuid: index for uuid, (index, _) in places.items()},
                wanted=() if self.plan is None else planned_device_sets(self.plan.assignments),
                held=taken,
                slices={uuid: size for uuid, (_, size) in places.items()},
            )
            given = choose_devices(PreferredAllocationRequest(available=tuple(free), must=(), size=count), look)
        self.held[pod["metadata"]["uid"]] = pod["metadata"]["name"], frozenset(given)

    async def say(self):
        """What the kubelet says now."""
        pods = tuple(
            PodDevices(namespace="default", pod=name, device_uuids=tuple(sorted(devices)))
            for name, devices in sorted(self.held.values())
        )
        await self.agent.say(HeldDevices(steers=True, pods=pods))

    def agrees(self):
        """Whether the ledger says of each pod what the kubelet does."""
        given = {(f"pod-{uid}", 0): devices for uid, (_, devices) in self.held.items()}
        return planned(self.rig, self.node) == given

    async def node_object(self, cluster, body):
        """The node as the API server knows it."""
        await cluster.create(NODES, body)
