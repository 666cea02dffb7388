"""Both plugins at a real kubelet: taken, asked, and pods that live through another layout of their own GPU.

The GPUs are simulated behind the real NVML binding; the control plane, the scheduler and the
kubelet are real, with a container runtime that runs nothing and writes down what it was told.
"""

import asyncio
from contextlib import asynccontextmanager, suppress

import pytest
from tests.dra_rig import dra_node, one_thread
from tests.kubelet_rig import CLAIMS

from eelgrid_agent.kubelet.device_plugins import (
    DevicePlugins,
    NodeDevices,
    PluginTimes,
    allocate_by_cdi,
    build_offers,
    gpu_index_by_device,
)
from eelgrid_agent.kubelet.dra_driver import SLICES_PATH, DraDriver, DraTimes, DriverThreads, ResourceSlicePublisher
from eelgrid_agent.kubelet.resource_slices import DRA_DRIVER
from eelgrid_protos.messages import GpuLayout, WantedInstance

DOMAIN = "eelgrid.io"
# Two kinds of node in one: a claim's GPU first, then one for the device plugin.
GPUS = [{"product": "h100-sxm5-80gb"}, {"product": "a100-sxm4-40gb", "mig": ["3g@4", "1g@0"]}]


@pytest.fixture
def node(tmp_path, real):
    with dra_node(tmp_path, GPUS, real.node) as node:
        yield node
        real.sweep()


@asynccontextmanager
async def running(*work):
    tasks = [asyncio.create_task(one) for one in work]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task


@asynccontextmanager
async def driver(real, node):
    reading, writing = real.client(), real.client()
    publisher = ResourceSlicePublisher(writing, real.node)
    real.prepare_claims()
    with one_thread() as devices, one_thread() as claims, one_thread() as slices:
        plugin = DraDriver(
            real.folder,
            node.readying,
            publisher,
            look=lambda: node.slices,
            read=lambda namespace, name: reading.get(
                f"/apis/resource.k8s.io/v1/namespaces/{namespace}/resourceclaims/{name}"
            ),
            threads=DriverThreads(devices, claims, slices),
            times=DraTimes(look_s=0.2, publish_s=5.0),
        )
        try:
            async with running(plugin.run()):
                await real.until(lambda: plugin.is_registered and not plugin.problem)
                yield plugin
            publisher.withdraw_slices()
        finally:
            reading.close()
            writing.close()


@asynccontextmanager
async def offered(real, node):
    plugins = DevicePlugins(
        real.folder / "device-plugins",
        offers=lambda: build_offers(node.gpus()[1:], DOMAIN),
        node=lambda: NodeDevices(index_of=gpu_index_by_device(node.gpus())),
        give=allocate_by_cdi,
        times=PluginTimes(look_s=0.2),
    )
    async with running(plugins.run()):
        # What the API server says may be left from before.
        await real.gives(node.uuid(1, 0), node.uuid(1, 4))
        yield plugins


async def allocated(real, pod, device):
    """A pod with a claim on this device, and when it runs."""
    real.pod(pod, claim="one")
    real.allocate(await real.until(lambda: real.claim_of(pod)), device)
    await real.until(lambda: real.phase(pod) == "Running")


async def ended(real, *pods):
    for pod in pods:
        real.delete(pod)
    for pod in pods:
        await real.until(lambda pod=pod: real.phase(pod) == "gone")


async def test_claims_are_made_ready_on_a_gpu_that_is_cut_while_pods_run(real, node):
    async with driver(real, node):
        slices = real.api.get(SLICES_PATH, fieldSelector=f"spec.driver={DRA_DRIVER},spec.nodeName={real.node}")["items"]
        assert len(slices) == len(node.slices())
        await allocated(real, "claim-1", "gpu-0-1g-4")
        assert node.standing(0) == [("1g.10gb", 4)]
        first, before = node.uuid(0, 4), real.starts("claim-1")
        cdi = f"nvidia.com/gpu={first}"
        assert cdi in str((await real.until(lambda: real.created("claim-1")))["cdi"])
        # The same GPU is cut further and again, while the first pod runs.
        await allocated(real, "claim-2", "gpu-0-3g-0")
        assert node.standing(0) == [("1g.10gb", 4), ("3g.40gb", 0)]
        held = await real.held()
        for pod, device in (("claim-1", "gpu-0-1g-4"), ("claim-2", "gpu-0-3g-0")):
            (one,) = held[pod].claimed
            assert (one.driver, one.pool, one.device) == (DRA_DRIVER, real.node, device)
        await ended(real, "claim-2")
        await real.until(lambda: node.standing(0) == [("1g.10gb", 4)])
        assert (real.phase("claim-1"), real.starts("claim-1"), node.uuid(0, 4)) == ("Running", before, first)
        await ended(real, "claim-1")
        await real.until(lambda: node.standing(0) == [])
        await real.until(lambda: not real.api.get(CLAIMS)["items"])  # a controller of the cluster deletes it


async def test_kube_scheduler_gives_none_of_our_devices_away_by_itself(real, node):
    async with driver(real, node):
        real.pod("wild", claim="one")
        assert "cannot allocate all claims" in await real.until(lambda: real.scheduled("wild"))
        # Whoever is the allocator may, at any time after.
        real.allocate(real.claim_of("wild"), "gpu-0-2g-0")
        await real.until(lambda: real.phase("wild") == "Running")
        await ended(real, "wild")
        await real.until(lambda: node.standing(0) == [])


async def test_a_claim_that_cannot_be_had_waits_and_is_made_ready_when_it_can(real, node):
    async with driver(real, node) as plugin:
        await allocated(real, "holder", "gpu-0-1g-4")
        real.pod("late", claim="one")
        # The API server compares no two claims.
        real.allocate(await real.until(lambda: real.claim_of("late")), "gpu-0-2g-4")
        await real.until(lambda: plugin.refused_total)
        assert real.phase("late") == "Pending"
        assert real.phase("holder") == "Running"
        await ended(real, "holder")
        await real.until(lambda: real.phase("late") == "Running", within_s=120.0)
        assert node.standing(0) == [("2g.20gb", 4)]
        await ended(real, "late")


async def test_an_agent_that_starts_again_finds_its_pods_running(real, node):
    async with driver(real, node):
        await allocated(real, "lasting", "gpu-0-1g-4")
        before = real.starts("lasting")
    node.start()
    async with driver(real, node):
        await allocated(real, "newer", "gpu-0-1g-5")
        assert (real.phase("lasting"), real.starts("lasting")) == ("Running", before)
        await ended(real, "lasting", "newer")
        await real.until(lambda: node.standing(0) == [])


async def test_slices_of_the_device_plugin_survive_another_layout(real, node):
    small, middle, large = (f"{DOMAIN}/mig-{name}" for name in ("1g.5gb", "2g.10gb", "3g.20gb"))
    async with offered(real, node) as plugins:
        await real.until(lambda: real.allocatable().get(small) == "1" and real.allocatable().get(large) == "1")
        real.pod("slice", resource=small)
        await real.until(lambda: real.phase("slice") == "Running")
        before, uuid = real.starts("slice"), node.uuid(1, 0)
        assert dict((await real.held())["slice"].devices) == {small: uuid}
        assert f"nvidia.com/gpu={uuid}" in str((await real.until(lambda: real.created("slice")))["cdi"])
        # The 3g that nobody uses becomes two 2g beside the slice in use.
        gpu = node.gpus()[1]
        places = (("1g.5gb", 0), ("2g.10gb", 2), ("2g.10gb", 4))
        wanted = tuple(WantedInstance(profile=profile, start=start) for profile, start in places)
        result = await asyncio.to_thread(
            node.layouts.apply_layout, GpuLayout(gpu_uuid=gpu.uuid, mig_enabled=True, instances=wanted)
        )
        assert result.detail.startswith("read back")
        await real.until(lambda: real.allocatable().get(middle) == "2" and real.allocatable().get(large) == "0")
        assert (real.phase("slice"), real.starts("slice")) == ("Running", before)
        real.pod("next", resource=middle)
        await real.until(lambda: real.phase("next") == "Running")
        held = await real.held()
        assert dict(held["slice"].devices) == {small: uuid}
        assert dict(held["next"].devices)[middle] in {node.uuid(1, 2), node.uuid(1, 4)}
        assert plugins.plugins[small].given_total == 1
        await ended(real, "slice", "next")


async def test_both_plugins_live_at_one_kubelet_on_gpus_of_their_own(real, node):
    async with driver(real, node), offered(real, node):
        small = f"{DOMAIN}/mig-1g.5gb"
        await real.until(lambda: real.allocatable().get(small) == "1")
        real.pod("by-plugin", resource=small)
        await allocated(real, "by-claim", "gpu-0-7g-0")
        await real.until(lambda: real.phase("by-plugin") == "Running")
        held = await real.held()
        assert dict(held["by-plugin"].devices) == {small: node.uuid(1, 0)}
        assert [one.device for one in held["by-claim"].claimed] == ["gpu-0-7g-0"]
        await ended(real, "by-plugin", "by-claim")


async def test_a_kubelet_that_starts_again_takes_both_again_and_pods_run_on(real, node):
    async with driver(real, node) as plugin, offered(real, node):
        small = f"{DOMAIN}/mig-1g.5gb"
        await real.until(lambda: real.allocatable().get(small) == "1")
        real.pod("by-plugin", resource=small)
        await allocated(real, "by-claim", "gpu-0-1g-6")
        await real.until(lambda: real.phase("by-plugin") == "Running")
        before = [real.starts(pod) for pod in ("by-plugin", "by-claim")]
        if not await asyncio.to_thread(real.restart_kubelet):
            pytest.skip("nobody says how this kubelet is started")
        await real.gives(node.uuid(1, 0), node.uuid(1, 4))
        await allocated(real, "after", "gpu-0-1g-5")
        assert [real.starts(pod) for pod in ("by-plugin", "by-claim")] == before
        assert {real.phase(pod) for pod in ("by-plugin", "by-claim")} == {"Running"}
        assert node.standing(0) == [("1g.10gb", 5), ("1g.10gb", 6)]
        assert not plugin.problem
        await ended(real, "by-plugin", "by-claim", "after")
        await real.until(lambda: node.standing(0) == [])
