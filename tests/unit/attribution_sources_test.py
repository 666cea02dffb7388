"""Everything that attribution is made of, gathered into one look: a real socket, a tree like /proc, a prolog's folder."""

from tests.fakes.kubelet import FakeKubelet

from eelgrid_agent.devices.extended_readings import ExtendedReadings
from eelgrid_agent.devices.port import GpuProcess, InstanceReadings, Missing, ProcessKind
from eelgrid_agent.energy.allocations import AllocationSource
from eelgrid_agent.energy.attributor import Attributor
from eelgrid_agent.energy.metering import DeviceEnergies
from eelgrid_agent.energy.node_energy import AttributionSources
from eelgrid_agent.energy.process_owners import ContainerNameIndex, ProcessOwnerResolver
from eelgrid_agent.energy.shares import UsageOwner, UsageOwnerKind
from eelgrid_agent.kubelet.pod_resources import PodResourcesClient
from eelgrid_protos.catalogue.loader import load_catalogue
from eelgrid_protos.messages import AbsenceReason, Assignment, Gpu, GpuInstance, Reading

SECOND = 1_000_000_000
NO = Missing(AbsenceReason.NOT_SUPPORTED)
UID = "2c48913c-b29f-11e7-9350-020968147796"
ID = "ab" * 32
MIG = Gpu(
    uuid="GPU-1",
    index=1,
    product="NVIDIA H100 80GB HBM3",
    model="H100",
    catalogue_key="h100-sxm5-80gb",
    mig_capable=True,
    mig_enabled=True,
    gpu_instances=(
        GpuInstance(id=1, profile_id=9, profile="3g.40gb", start=0, size=4),
        GpuInstance(id=9, profile_id=19, profile="1g.10gb", start=4, size=1),
    ),
)
WHOLE = Gpu(uuid="GPU-0", index=0, product="NVIDIA L40S", model="L40S", catalogue_key="l40s")


def energies(at_s, totals, utilization=0.9):
    used = {} if utilization is None else dict.fromkeys(totals, utilization)
    return DeviceEnergies(monotonic_ns=at_s * SECOND, wall_ns=at_s * SECOND, total_j=totals, utilization=used)


def gathered(sources, gpus, seen, look, **more):
    return sources.gather(gpus, seen, look, sources.read(gpus, look, now_ns=seen.monotonic_ns), **more)


def slow(**processes):
    activity = (
        InstanceReadings(gpu_instance_id=1, values={Reading.SM_ACTIVITY_RATIO: 0.25}),
        InstanceReadings(
            gpu_instance_id=9, values={Reading.SM_ACTIVITY_RATIO: NO, Reading.GRAPHICS_ACTIVITY_RATIO: 0.5}
        ),
    )
    found = {uuid.replace("_", "-"): one for uuid, one in processes.items()}
    return ExtendedReadings(monotonic_ns=0, wall_ns=0, processes=found, instances={"GPU-1": activity})


def process(pid, instance=None):
    return GpuProcess(pid=pid, kind=ProcessKind.COMPUTE, gpu_instance_id=instance)


def in_proc(root, pid, cgroup):
    folder = root / str(pid)
    folder.mkdir(parents=True)
    (folder / "cgroup").write_text(cgroup)
    (folder / "stat").write_text(f"{pid} (python) " + " ".join(["S", *["0"] * 18, "77"]))


async def test_a_node_of_kubernetes_end_to_end(tmp_path):
    kubelet = FakeKubelet()
    kubelet.hold("research", "train-0", "main", "nvidia.com/gpu", "GPU-0")
    kubelet.hold("serving", "llm-0", "model", "nvidia.com/mig-3g.40gb", "MIG-GPU-1/1/0")
    logs = tmp_path / "containers"
    logs.mkdir()
    (logs / f"train-0_research_main-{ID}.log").touch()
    in_proc(
        tmp_path / "proc", 10, f"0::/kubepods.slice/kubepods-pod{UID.replace('-', '_')}.slice/cri-containerd-{ID}.scope"
    )
    book = ProcessOwnerResolver(tmp_path / "proc", names=ContainerNameIndex(logs).find_container)
    socket = tmp_path / "kubelet.sock"
    async with kubelet.serving(socket):
        client = PodResourcesClient(socket, clock_s=lambda: 0.0)
        assert await client.refresh()
        await client.close()
    sources = AttributionSources(book, kubelet=client)
    attributor = Attributor(load_catalogue())
    look = slow(GPU_0=(process(10),), GPU_1=(process(11, 1), process(12, 9)))
    attributor.observe(gathered(sources, (WHOLE, MIG), energies(0, {"GPU-0": 0.0, "GPU-1": 0.0}), look))
    found = attributor.observe(gathered(sources, (WHOLE, MIG), energies(10, {"GPU-0": 3000.0, "GPU-1": 4000.0}), look))
    train = UsageOwner(kind=UsageOwnerKind.POD, namespace="research", pod="train-0", container="main")
    by_owner = {}
    for account, energy_mj in found.accounts.items():
        by_owner[account.owner] = by_owner.get(account.owner, 0) + energy_mj
    # The whole device is the pod's, idle power and all.
    assert by_owner[train] == 3_000_000
    # Of the other device, the slices go by SM share (60 and 16 of 132) and by activity; nobody holds the small one.
    active = {share.gpu_instance_id: share.energy_mj for share in found.shares["GPU-1"] if share.part.value == "active"}
    assert abs(active[1] * 16 * 0.5 - active[9] * 60 * 0.25) <= 60
    assert sum(found.nobody["GPU-1"].values()) + sum(by_owner.values()) == 7_000_000


def test_what_no_source_says_is_not_nothing(tmp_path):
    book = ProcessOwnerResolver(tmp_path)
    nothing = gathered(AttributionSources(book), (WHOLE,), energies(0, {}, utilization=None), slow(GPU_0=None))
    assert nothing.allocations is None
    (device,) = nothing.devices
    assert (device.processes, device.utilization, device.estimate, device.energy_j) == (None, None, None, None)
    (tmp_path / "0").write_text("17\n")
    both = gathered(
        AttributionSources(book, slurm_folder=tmp_path),
        (WHOLE,),
        energies(0, {"GPU-0": 1.0}),
        slow(),
        assignments=(Assignment(workload_id="w", replica=0, gpu_uuids=("GPU-0",), gpu_milli=250),),
    )
    assert [(one.owner.kind, one.source, one.shares) for one in both.allocations] == [
        (UsageOwnerKind.SLURM, AllocationSource.SLURM, 1),
        (UsageOwnerKind.WORKLOAD, AllocationSource.PLAN, 250),
    ]
    assert gathered(AttributionSources(book), (WHOLE,), energies(0, {}), slow(), assignments=()).allocations == ()
    # Without a book no process is looked up, whatever this machine runs under its id.
    assert AttributionSources().read_files((WHOLE,), slow(GPU_0=(process(1),)), now_ns=0).owners == {}
