"""What the kubelet gave, told: after each allocation and each change, to every controller that the agent meets."""

import asyncio

import pytest
from tests.fakes.kubelet import FakeKubelet
from tests.unit.enforcement_test import Bench

from eelgrid_agent.kubelet.device_plugins import NodeDevices, choose_devices
from eelgrid_agent.kubelet.pod_resources import (
    AllocationReporter,
    PodResourcesClient,
    PodResourcesLimits,
    build_held_devices,
)
from eelgrid_protos.kubelet_api import ContainerDevices, PreferredAllocationRequest
from eelgrid_protos.messages import ComputeInstance, ConnectRequest, Gpu, GpuInstance, HeldDevices, PodDevices, Welcome

SLICE = GpuInstance(
    id=3, profile_id=19, profile="1g.10gb", start=0, size=1, compute_instances=(ComputeInstance(id=0, uuid="MIG-a"),)
)
GPUS = (
    Gpu(uuid="GPU-0", index=0, product="H100", model="H100"),
    Gpu(uuid="GPU-1", index=1, product="H100", model="H100", mig_enabled=True, gpu_instances=(SLICE,)),
)


def container(pod, *ids, name="main", resource="nvidia.com/gpu"):
    return ContainerDevices(namespace="ml", pod=pod, container=name, devices=tuple((resource, one) for one in ids))


def test_a_pod_is_reported_with_all_its_containers_by_the_drivers_ids():
    containers = [
        container("b", "MIG-a", resource="nvidia.com/mig-1g.10gb"),
        container("a", "GPU-0::1"),
        container("a", "GPU-0::2", name="side"),
        container("c", "nic-0", resource="rdma/nic"),
    ]
    assert build_held_devices(containers, GPUS, steers=True) == HeldDevices(
        steers=True,
        pods=(
            PodDevices(namespace="ml", pod="a", device_uuids=("GPU-0",)),
            PodDevices(namespace="ml", pod="b", device_uuids=("MIG-a",)),
        ),
    )


def test_only_changes_are_reported_and_what_follows_an_allocation():
    told = []
    telling = AllocationReporter(gpus=lambda: GPUS, tell=told.append, steers=True)
    telling.on_containers([])
    telling.on_containers([])
    assert len(told) == 1
    telling.on_containers([container("a", "GPU-0")])
    telling.on_containers([container("a", "GPU-0")])
    assert len(told) == 2
    # Another pod of the same name may have the same device again.
    telling.on_allocated()
    telling.on_containers([container("a", "GPU-0")])
    telling.on_containers([container("a", "GPU-0")])
    assert len(told) == 3


def test_a_controller_is_informed_at_once_and_the_next_one_again():
    node = Bench().node
    while node.next_message() is not None:
        pass
    held = HeldDevices(steers=True, pods=(PodDevices(namespace="ml", pod="a", device_uuids=("GPU-0",)),))
    node.report_held_devices(held)
    assert node.next_message() == ConnectRequest(message=held)
    assert held not in [message.message for message in iter(node.next_message, None)]
    node.on_disconnected()
    node.on_welcome(Welcome(acknowledged_sequence=0, cadence=node.cadence))
    assert held in [message.message for message in iter(node.next_message, None)]


def test_what_is_free_is_held_by_nobody_whatever_was_said_before():
    """A pod ended a moment ago, and PodResources was asked before that."""
    node = NodeDevices(index_of={"a": 0, "b": 1}, wanted=(frozenset("a"),), held=frozenset("a"))
    assert choose_devices(PreferredAllocationRequest(available=("b", "a"), must=(), size=1), node) == ("a",)


@pytest.fixture
def kubelet():
    return FakeKubelet()


async def test_after_an_allocation_the_kubelet_is_asked_soon_and_a_few_times(kubelet, tmp_path):
    socket = tmp_path / "k.sock"
    limits = PodResourcesLimits(interval_s=3600.0, hurry_s=0.01, hurries=3)
    client = PodResourcesClient(socket, clock_s=lambda: 0.0, limits=limits)
    heard = []
    client.heard = heard.append
    async with kubelet.serving(socket):
        task = asyncio.create_task(client.run())
        async with asyncio.timeout(10.0):
            await kubelet.called(1)
            kubelet.hold("ml", "a", "main", "nvidia.com/gpu", "GPU-0")
            client.refresh_soon()
            await kubelet.called(4)
            while len(heard) < 4:  # noqa: ASYNC110  # the answers are on their way
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert kubelet.calls == 4
        task.cancel()
        await asyncio.wait({task})
    assert heard[0] == ()
    assert [one.pod for one in heard[-1]] == ["a"]
