"""Device plugin, closed end to end at a real kubelet: what it gave is what the controller's ledger says, whatever it gave.

The control plane, the scheduler and the kubelet are real, and so are the agent's plugin, its
reading of PodResources and the whole controller; the GPUs are simulated behind the real NVML binding.
"""

import asyncio
import random
import time
from contextlib import asynccontextmanager, suppress

import pytest
from tests.devices_rig import controlled, part, planned
from tests.dra_rig import dra_node
from tests.state_invariants import check_invariants
from tests.waiting import wait_until

from eelgrid_agent.kubelet.device_plugins import (
    DevicePlugins,
    NodeDevices,
    PluginTimes,
    allocate_by_cdi,
    build_offers,
    gpu_index_by_device,
    memory_slices_by_device,
    planned_device_sets,
)
from eelgrid_agent.kubelet.pod_resources import AllocationReporter, PodResourcesClient, PodResourcesLimits
from eelgrid_controller.engines.kubernetes.model.well_known import GATE
from eelgrid_protos.messages import GpuLayout, HeldDevices, Inventory, NodePlan, WantedInstance

DOMAIN = "nvidia.com"
GPU = f"{DOMAIN}/gpu"
GPUS = [{"product": "h100-sxm5-80gb"}] * 4 + [{"product": "a100-sxm4-40gb", "mig": ["3g@4", "1g@0"]}]


@pytest.fixture
def node(tmp_path, real):
    with dra_node(tmp_path, GPUS, real.node) as node:
        yield node
        real.sweep()


class Agent:
    """What an agent does for the device plugin, with the parts of the real one, over its real stream."""

    def __init__(self, real, node, stream, *, steers=True, obeys=True):
        self.real, self.node, self.stream = real, node, stream
        self.obeys, self.steers = obeys, steers
        self.is_mute = False
        self.generation = 1
        self.plan = None
        self.told = 0
        limits = PodResourcesLimits(interval_s=2.0, hurry_s=0.3)
        self.kubelet = PodResourcesClient(
            real.folder / "pod-resources" / "kubelet.sock", clock_s=time.monotonic, limits=limits
        )
        self.telling = AllocationReporter(gpus=lambda: tuple(node.gpus()), tell=self._tell, steers=steers)
        self.kubelet.heard = self._heard
        self.plugins = DevicePlugins(
            real.folder / "device-plugins",
            offers=lambda: build_offers(node.gpus(), DOMAIN),
            node=self._look,
            give=self._give,
            times=PluginTimes(look_s=0.2),
        )

    def inventory(self):
        return Inventory(
            node_name=self.real.node,
            cpu_milli=8000,
            memory_bytes=64 * 2**30,
            generation=self.generation,
            gpus=tuple(self.node.gpus()),
            agent_version="1",
        )

    async def relaid(self, gpu, places):
        """The GPU is cut anew, and the controller hears of it."""
        wanted = tuple(WantedInstance(profile=profile, start=start) for profile, start in places)
        layout = GpuLayout(gpu_uuid=gpu.uuid, mig_enabled=True, instances=wanted)
        result = await asyncio.to_thread(self.node.layouts.apply_layout, layout)
        assert result.detail.startswith("read back")
        self.generation += 1
        await self.stream.say(self.inventory())

    def _look(self):
        held = self.kubelet.containers or ()
        wanted = planned_device_sets(self.plan.assignments) if self.plan is not None and self.obeys else ()
        gpus = self.node.gpus()
        if not self.obeys:
            # The farthest from what anybody would choose.
            gpus = list(reversed(gpus))
        return NodeDevices(
            index_of={uuid: index if self.obeys else 99 - index for uuid, index in gpu_index_by_device(gpus).items()},
            wanted=wanted,
            held=frozenset(one for some in held for _, one in some.devices),
            slices=memory_slices_by_device(gpus),
        )

    def _give(self, ids):
        self.telling.on_allocated()
        self.kubelet.refresh_soon()
        return allocate_by_cdi(ids)

    def _heard(self, containers):
        if not self.is_mute:
            self.telling.on_containers(containers)

    def _tell(self, held: HeldDevices):
        self.told += 1
        self.stream._out.put_nowait(held)

    async def hear(self):
        while True:
            self.plan = await self.stream.hear(NodePlan, within_s=3600.0)


@asynccontextmanager
async def closed_loop(real, node, tmp_path, **ways):
    """A controller that leads, and the agent of the kubelet's node."""
    async with controlled(tmp_path, real.access()) as rig:
        stream = await rig.join(Agent(real, node, None).inventory())
        agent = Agent(real, node, stream, **ways)
        work = [asyncio.create_task(one) for one in (agent.hear(), agent.plugins.run(), agent.kubelet.run())]
        try:
            # What the API server says may be left from before; a pod that comes too early is refused for good.
            await real.gives(*(gpu.uuid for gpu in node.gpus()[:4]), node.uuid(4, 0), node.uuid(4, 4))
            await real.until(lambda: real.allocatable().get(GPU) == "4")
            yield rig, agent
        finally:
            for task in work:
                task.cancel()
            for task in work:
                with suppress(asyncio.CancelledError):
                    await task


async def given(real):
    """What the kubelet gave of whole GPUs, by pod."""
    return {
        pod: frozenset(uuid for name, uuid in one.devices if name == GPU)
        for pod, one in (await real.held()).items()
        if any(name == GPU for name, _ in one.devices)
    }


def booked(rig, real):
    """The same by the controller's ledger."""
    units = rig.controller.placing.engine.gate.units
    found = {}
    for (workload_id, replica), devices in planned(rig, real.node).items():
        unit = units[workload_id]
        found[unit.members[unit.slots[replica]].sight.key.name] = devices
    return found


async def agreed(rig, real, within_s=40.0):
    """Waits until PodResources and the ledger say the same; what they say."""
    async with asyncio.timeout(within_s):
        while True:
            with suppress(KeyError):  # a pod of the ledger that is not seen yet
                held, ledger = await given(real), booked(rig, real)
                if held == ledger:
                    return held
            await asyncio.sleep(0.1)


async def test_two_pods_that_got_each_others_devices_are_swapped_in_the_ledger(real, node, tmp_path):
    # As beside another's plugin: both go at once, and nothing is heard until both run.
    async with closed_loop(real, node, tmp_path, steers=False, obeys=False) as (rig, agent):
        agent.is_mute = True
        for name in ("one", "two"):
            real.pod(name, resource=GPU, count=2, gates=[GATE])
        for name in ("one", "two"):
            await real.until(lambda name=name: real.phase(name) == "Running")
        before, held = booked(rig, real), await given(real)
        assert sorted(map(len, before.values())) == [2, 2]
        agent.is_mute = False
        assert await agreed(rig, real) == held
        check_invariants(rig.controller.loop.core.state)
        if before != held:
            await wait_until(lambda: part(rig, "devices").corrected == 2)
        # The limits of a plan follow the device, not the wish.
        (workload,) = [
            key for key, _ in planned(rig, real.node) if booked(rig, real)["one"] == planned(rig, real.node)[key, 0]
        ]
        await rig.controller.loop.set_limit(workload, 400.0)
        plan = await rig.controller.loop.read(lambda core: core.node_plan(real.node))
        assert {one.gpu_uuid for one in plan.gpu_settings if one.power_limit_w == 400.0} == held["one"]


async def test_the_ledger_is_what_podresources_says_after_pods_came_and_went(real, node, tmp_path):
    rng = random.Random(11)
    async with closed_loop(real, node, tmp_path, obeys=False) as (rig, _):
        alive = []
        for step in range(24):
            if alive and (len(alive) == 4 or rng.random() < 0.4):
                real.delete(alive.pop(rng.randrange(len(alive))))
            else:
                name = f"p{step}"
                real.pod(name, resource=GPU, count=rng.choice((1, 1, 2)), gates=[GATE])
                alive.append(name)
            await asyncio.sleep(rng.choice((0.0, 0.3, 1.0)))
            if step % 8 == 7:
                await agreed(rig, real)
        held = await agreed(rig, real)
        assert len(frozenset().union(*held.values())) == sum(map(len, held.values()))
        assert part(rig, "devices").corrected > 0
        assert part(rig, "devices").wrong == 0
        gone = [name for name in alive if real.phase(name) not in ("Running", "Pending")]
        assert not gone, f"lost: {gone}"


async def test_a_plugin_that_steers_gives_what_was_planned(real, node, tmp_path):
    async with closed_loop(real, node, tmp_path) as (rig, _):
        for number in range(4):
            real.pod(f"q{number}", resource=GPU, gates=[GATE])
        for number in range(4):
            await real.until(lambda number=number: real.phase(f"q{number}") == "Running")
        await agreed(rig, real)
        flights = rig.controller.placing.engine.gate.flights
        await wait_until(lambda: flights.landed == 4)
        assert flights.overdue == 0


async def test_slices_are_placed_and_a_gpu_is_cut_again_while_they_run(real, node, tmp_path):
    small, middle = (f"{DOMAIN}/mig-{name}" for name in ("1g.5gb", "2g.10gb"))
    async with closed_loop(real, node, tmp_path) as (rig, agent):
        await real.until(lambda: real.allocatable().get(small) == "1")
        real.pod("small-one", resource=small, gates=[GATE])
        await real.until(lambda: real.phase("small-one") == "Running")
        before, uuid = real.starts("small-one"), node.uuid(4, 0)
        assert dict((await real.held())["small-one"].devices) == {small: uuid}
        real.pod("middle-one", resource=middle, gates=[GATE])
        await agent.relaid(node.gpus()[4], (("1g.5gb", 0), ("2g.10gb", 2), ("2g.10gb", 4)))
        await real.until(lambda: real.phase("middle-one") == "Running")
        assert (real.phase("small-one"), real.starts("small-one")) == ("Running", before)
        held = await real.held()
        assert dict(held["small-one"].devices) == {small: uuid}
        # Of two on the GPU in use, the first, as planned.
        assert dict(held["middle-one"].devices) == {middle: node.uuid(4, 2)}
        await wait_until(lambda: len(part(rig, "slices").machine.flights) == 0, within_s=20.0)
