"""The kubelet's PodResources: asked over a real socket, kept, and made into allocations of places."""

import asyncio

import grpc
import pytest
from tests.builders.agent import build_slurm_owner
from tests.fakes.kubelet import FakeKubelet

from eelgrid_agent.energy.accounts import UsageOwner, UsageOwnerKind
from eelgrid_agent.energy.allocations import (
    AllocationSource,
    DeviceAllocation,
    DeviceReference,
    find_claimed_device,
    find_device,
    find_mapped_device,
    map_pod_allocations,
    select_innermost,
)
from eelgrid_agent.energy.node_energy import list_jobs, read_slurm_allocations
from eelgrid_agent.kubelet.pod_resources import PodResourcesClient, PodResourcesError, PodResourcesLimits
from eelgrid_protos.errors import MalformedMessage
from eelgrid_protos.kubelet_api import ANSWER_BYTES_MOST, ClaimedDevice, parse_containers
from eelgrid_protos.messages import ComputeInstance, Gpu, GpuInstance
from eelgrid_protos.wire import pod_resources_pb2 as wire

ZERO = "GPU-a4f34abc-7715-3560-dcea-7238b9611a45"
ONE = "GPU-b4f34abc-7715-3560-dcea-7238b9611a45"
MIG = "MIG-c4f34abc-7715-3560-dcea-7238b9611a45"
GPUS = (
    Gpu(uuid=ZERO, index=0, product="NVIDIA H100 80GB HBM3", model="H100"),
    Gpu(
        uuid=ONE,
        index=1,
        product="NVIDIA H100 80GB HBM3",
        model="H100",
        mig_capable=True,
        mig_enabled=True,
        gpu_instances=(
            GpuInstance(id=2, profile_id=9, profile="3g.40gb", start=4, size=4),
            GpuInstance(
                id=9,
                profile_id=19,
                profile="1g.10gb",
                start=2,
                size=1,
                compute_instances=(ComputeInstance(id=0, uuid=MIG),),
            ),
        ),
    ),
)


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def kubelet():
    return FakeKubelet()


@pytest.fixture
def socket(short_path):
    return short_path / "kubelet.sock"


# Device ids.
@pytest.mark.parametrize(
    ("device_id", "place"),
    [
        (ZERO, DeviceReference(ZERO)),
        (f"{ZERO}::3", DeviceReference(ZERO)),
        (MIG, DeviceReference(ONE, 9)),
        (f"{MIG}::7", DeviceReference(ONE, 9)),
        (f"MIG-{ONE}/2/0", DeviceReference(ONE, 2)),
        (f"MIG-{ONE}/5/0", None),
        ("nvidia0", DeviceReference(ZERO)),
        ("nvidia1/gi2", DeviceReference(ONE, 2)),
        ("nvidia0/vgpu3", DeviceReference(ZERO)),
        ("nvidia0/gi2", None),
        ("nvidia7", None),
        ("GPU-ffffffff-7715-3560-dcea-7238b9611a45", None),
        ("mlx5_0", None),
        ("", None),
    ],
)
def test_the_place_of_a_device_id(device_id, place):
    assert find_device(device_id, GPUS) == place


def test_an_instance_without_a_compute_instance_has_no_mig_uuid():
    assert find_device("", (GPUS[1],)) is None


@pytest.mark.parametrize(
    ("device", "place"),
    [
        ("gpu-0", DeviceReference(ZERO)),
        ("gpu-1-mig-9-4-4", DeviceReference(ONE, 2)),
        ("gpu-1-mig-3g40gb-9-4", DeviceReference(ONE, 2)),
        ("gpu-1-mig-1g10gb-me-19-2", DeviceReference(ONE, 9)),
        ("gpu-1-mig-9-0-4", None),
        ("gpu-2", None),
        ("gpu-vfio-0", None),
    ],
)
def test_the_place_of_a_claimed_device(device, place):
    assert find_claimed_device(device, GPUS) == place


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("0", DeviceReference(ZERO)),
        ("1.2", DeviceReference(ONE, 2)),
        ("1.5", None),
        ("9", None),
        (".0", None),
        ("0.swp", None),
    ],
)
def test_the_place_of_a_mapping_file(name, place):
    assert find_mapped_device(name, GPUS) == place


# The client.
async def test_what_containers_hold_is_read_over_one_channel(kubelet, socket):
    kubelet.hold("research", "train-0", "main", "nvidia.com/gpu", ZERO)
    kubelet.hold("research", "share-a", "main", "nvidia.com/gpu.shared", f"{ZERO}::1", f"{ZERO}::2")
    kubelet.hold("serving", "llm-0", "model", "nvidia.com/mig-1g.10gb", MIG)
    kubelet.claim("serving", "dra-0", "model", "gpu.nvidia.com", "gpu-1-mig-9-4-4")
    kubelet.claim("serving", "nic-0", "model", "dra.net", "gpu-0")
    kubelet.hold("kube-system", "device-plugin", "main", "rdma/hca", "mlx5_0")
    async with kubelet.serving(socket):
        client = PodResourcesClient(socket, clock_s=Clock())
        for _ in range(3):
            assert await client.refresh()
        found = map_pod_allocations(client.containers, GPUS)
        assert {(one.owner.namespace, one.owner.pod, one.owner.container, one.place, one.shares) for one in found} == {
            ("research", "train-0", "main", DeviceReference(ZERO), 1),
            ("research", "share-a", "main", DeviceReference(ZERO), 2),
            ("serving", "llm-0", "model", DeviceReference(ONE, 9), 1),
            ("serving", "dra-0", "model", DeviceReference(ONE, 2), 1),
        }
        assert ClaimedDevice(
            claim_namespace="serving", claim="gpu", driver="gpu.nvidia.com", pool="node-1", device="gpu-1-mig-9-4-4"
        ) in [claim for one in client.containers for claim in one.claimed]
        assert len(kubelet.connections) == 1
        assert (client.problem, client.answers_total, client.failures_total) == ("", 3, 0)
        await client.close()


async def test_a_refusal_changes_nothing_until_the_answer_is_old(kubelet, socket):
    clock = Clock()
    kubelet.hold("n", "p", "c", "nvidia.com/gpu", ZERO)
    async with kubelet.serving(socket):
        client = PodResourcesClient(socket, clock_s=clock, limits=PodResourcesLimits(stands_s=90.0))
        assert client.containers is None
        assert await client.refresh()
        kubelet.refusal = grpc.StatusCode.RESOURCE_EXHAUSTED
        clock.now_s = 60.0
        assert not await client.refresh()
        assert "RESOURCE_EXHAUSTED" in client.problem
        assert client.containers
        clock.now_s = 91.0
        # Nothing is known, which is not that nothing is allocated.
        assert client.containers is None
        kubelet.refusal = None
        assert await client.refresh()
        assert client.containers
        await client.close()


async def test_a_kubelet_that_starts_again_is_found_again(kubelet, socket):
    client = PodResourcesClient(socket, clock_s=Clock(), limits=PodResourcesLimits(interval_s=0.05))
    assert not await client.refresh()
    assert "is not a socket" in client.problem
    async with kubelet.serving(socket):
        assert await client.refresh()
    socket.unlink(missing_ok=True)
    assert not await client.refresh()
    async with kubelet.serving(socket):
        for _ in range(50):
            if await client.refresh():
                break
            await asyncio.sleep(0.05)
        assert client.problem == ""
    await client.close()


async def test_it_asks_by_itself_and_less_often_after_failures(kubelet, socket):
    limits = PodResourcesLimits(interval_s=0.02, backoff_most_s=10.0)
    client = PodResourcesClient(socket, clock_s=Clock(), limits=limits)
    async with kubelet.serving(socket):
        task = asyncio.create_task(client.run())
        async with asyncio.timeout(5.0):
            await kubelet.called(4)
            assert (client.answers_total, client.failures_total) == (3, 0)
            kubelet.refusal = grpc.StatusCode.RESOURCE_EXHAUSTED
            answered = kubelet.calls
            await kubelet.called(answered + 4)
        assert client.failures_total >= 3
        # The next failure comes 320 ms after this one; at the pace of answers there would be five more.
        calls = kubelet.calls
        await asyncio.sleep(0.1)
        assert kubelet.calls <= calls + 1
        task.cancel()
        await asyncio.wait({task})
    assert client._channel is None


@pytest.mark.parametrize("raw", [b"\xff\xff\xff", b"x" * (ANSWER_BYTES_MOST + 1)], ids=["no message", "too large"])
async def test_a_wrong_answer_is_a_problem_and_no_crash(kubelet, socket, raw):
    kubelet.raw = raw
    async with kubelet.serving(socket):
        client = PodResourcesClient(socket, clock_s=Clock())
        assert not await client.refresh()
        assert client.problem
        await client.close()


def test_an_answer_beyond_the_bounds_is_refused_as_a_whole():
    answer = wire.ListPodResourcesResponse()
    container = answer.pod_resources.add(name="p", namespace="n").containers.add(name="c")
    container.devices.add(resource_name="r", device_ids=["x" * 600])
    with pytest.raises(MalformedMessage, match="more than 512 characters"):
        parse_containers(answer.SerializeToString())
    container.devices[0].device_ids[:] = ["x"] * 5000
    with pytest.raises(MalformedMessage, match="4096"):
        parse_containers(answer.SerializeToString())


def test_a_newer_kubelet_and_one_that_holds_nothing_are_read():
    answer = wire.ListPodResourcesResponse()
    answer.pod_resources.add(name="p", namespace="n").containers.add(name="c")
    # Field 4 holds the CPUs of a pod, which is not read here.
    assert parse_containers(answer.SerializeToString() + b"\xa2\x06\x03abc") == ()


def test_a_path_that_no_socket_can_have_is_refused(tmp_path):
    with pytest.raises(PodResourcesError, match="mount it nearer"):
        PodResourcesClient(tmp_path / ("x" * 120), clock_s=Clock())


# Prologs.
def test_jobs_by_device(tmp_path):
    (tmp_path / "0").write_text("4711\n\n4712\n4711\n")
    (tmp_path / "1.2").write_text("4713_7\n")
    (tmp_path / "1.9").write_text("")
    (tmp_path / "README").write_text("not a device\n")
    (tmp_path / "8").write_text("4714\n")
    found = read_slurm_allocations(tmp_path, GPUS)
    assert [(one.place, one.owner.job) for one in found] == [
        (DeviceReference(ZERO), "4711"),
        (DeviceReference(ZERO), "4712"),
        (DeviceReference(ONE, 2), "4713_7"),
    ]
    assert read_slurm_allocations(tmp_path / "absent", GPUS) is None


def test_what_is_no_job_is_passed_over():
    assert list_jobs("12\n$(reboot)\n../x\n" + "9" * 100 + "\n13+0\n") == ("12", "13+0")
    assert len(list_jobs("\n".join(map(str, range(10_000))))) == 256


def test_the_innermost_source_speaks_alone():
    def held(owner, source, place):
        return DeviceAllocation(place=place, owner=owner, source=source)

    pod = UsageOwner(kind=UsageOwnerKind.POD, namespace="slinky", pod="slurmd-0", container="slurmd")
    job = build_slurm_owner("5")
    work = UsageOwner(kind=UsageOwnerKind.WORKLOAD, workload="w")
    kept = select_innermost(
        (
            held(work, AllocationSource.PLAN, DeviceReference(ZERO)),
            held(pod, AllocationSource.POD_RESOURCES, DeviceReference(ZERO)),
            held(job, AllocationSource.SLURM, DeviceReference(ZERO)),
            held(work, AllocationSource.PLAN, DeviceReference(ONE)),
            held(pod, AllocationSource.POD_RESOURCES, DeviceReference(ONE, 9)),
        )
    )
    assert [(one.owner, one.place) for one in kept] == [(job, DeviceReference(ZERO)), (pod, DeviceReference(ONE, 9))]
