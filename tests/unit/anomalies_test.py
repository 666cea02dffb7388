"""Where allocation and use disagree: since when, for how long before it is told, and what it wastes."""

import pytest

from eelgrid_agent.attribution.allocation import Allocation, AllocationSource
from eelgrid_agent.attribution.anomalies import Anomaly, AnomalyKind, AnomalyWatch, Subject
from eelgrid_agent.attribution.attributor import AttributionLook, Attributor, DeviceLook
from eelgrid_agent.attribution.device_ids import Place
from eelgrid_agent.attribution.owner import Owner, OwnerKind
from eelgrid_agent.attribution.owners import ProcessOwner
from eelgrid_agent.attribution.shares import Confidence, Method, Part, Share
from eelgrid_agent.attribution.split import Claim, Glance, Holder, Idle, Slice
from eelgrid_agent.device import GpuProcess, ProcessKind
from eelgrid_protos.catalogue import load
from eelgrid_protos.messages import Gpu

SECOND = 1_000_000_000
A = Owner(kind=OwnerKind.POD, namespace="n", pod="a", container="c")
B = Owner(kind=OwnerKind.POD, namespace="n", pod="b", container="c")
NAMELESS = Owner(kind=OwnerKind.POD, pod_uid="2c48913c-b29f-11e7-9350-020968147796")
INTRUDER = Owner(kind=OwnerKind.USER, user="1000", unit="session-1.scope")
IDLE = Idle(bare_w=60.0, context_w=40.0, confidence=Confidence.HIGH)


def watch_for(seconds, *, every_s=10.0, power_w=100.0, known=True, watch=None, start_s=0.0, **fields):
    """One look every ten seconds; each interval of A's costs a joule of every part."""
    watch = watch or AnomalyWatch()
    shares = [
        Share(owner=A, part=part, energy_mj=1000, method=Method.EXCLUSIVE, confidence=Confidence.HIGH) for part in Part
    ]
    for turn in range(round(seconds / every_s) + 1):
        now_ns = round((start_s + turn * every_s) * SECOND)
        watch.observe(
            "GPU-0", Glance(**{"monotonic_ns": now_ns, **fields}), shares=shares, allocations_known=known,
            wall_ns=now_ns, mean_power_w=power_w, busy_w=700.0, idle=IDLE,
        )  # fmt: skip
    return watch


def kinds(watch):
    return {(one.subject.kind, one.subject.owner) for one in watch.lasting()}


HELD = {"claims": (Claim(owner=A),)}
OPEN = {"holders": (Holder(owner=A, pid=1),)}


def test_a_held_device_with_no_process_is_told_after_a_while_with_what_it_wasted():
    fields = {**HELD, "holders": (), "utilization": 0.0}
    assert kinds(watch_for(110, **fields)) == set()
    assert kinds(watch_for(120, **fields)) == {(AnomalyKind.ALLOCATION_WITHOUT_PROCESS, A)}
    found = watch_for(300, **fields).lasting()
    subject = Subject(kind=AnomalyKind.HELD_IDLE, gpu_uuid="GPU-0", owner=A)
    # Thirty intervals after the look that began it, a joule of each part.
    assert Anomaly(subject=subject, since_ns=0, since_wall_ns=0, wasted_mj=90_000) in found
    assert len(found) == 2


def test_an_open_context_that_does_nothing():
    watch = watch_for(300, **HELD, **OPEN, utilization=0.0)
    assert kinds(watch) == {(AnomalyKind.HELD_IDLE, A), (AnomalyKind.IDLE_CONTEXT, A)}
    (idle,) = [one for one in watch.lasting() if one.subject.kind is AnomalyKind.IDLE_CONTEXT]
    assert idle.wasted_mj == 30_000
    # One look at work ends it.
    watch_for(0, watch=watch, start_s=310, **HELD, **OPEN, utilization=0.5)
    assert kinds(watch) == set()


def test_what_nothing_can_tell_neither_begins_nor_ends_an_anomaly():
    slices = (Slice(gpu_instance_id=1, sm_fraction=0.5), Slice(gpu_instance_id=2, sm_fraction=0.5, activity=0.0))
    holders = (Holder(owner=A, pid=1, gpu_instance_id=1), Holder(owner=B, pid=2, gpu_instance_id=2))
    claims = (Claim(owner=A, gpu_instance_id=1), Claim(owner=B, gpu_instance_id=2))
    watch = watch_for(400, slices=slices, holders=holders, claims=claims)
    assert kinds(watch) == {(AnomalyKind.HELD_IDLE, B), (AnomalyKind.IDLE_CONTEXT, B)}
    watch_for(10, watch=watch, start_s=410, slices=(slices[0], Slice(gpu_instance_id=2, sm_fraction=0.5)),
              holders=holders, claims=claims)  # fmt: skip
    assert len(kinds(watch)) == 2


def test_a_process_on_what_nobody_gave_it():
    fields = {"holders": (Holder(owner=A, pid=1), Holder(owner=INTRUDER, pid=2)), "utilization": 0.9}
    assert kinds(watch_for(60, **HELD, **fields)) == {(AnomalyKind.PROCESS_WITHOUT_ALLOCATION, INTRUDER.account())}
    # Without anybody to ask there are no intruders.
    assert kinds(watch_for(60, **HELD, **fields, known=False)) == set()
    # A pod that only its UID names may be the one that holds the device.
    nameless = {"holders": (Holder(owner=NAMELESS, pid=1),), "utilization": 0.9}
    assert kinds(watch_for(600, **HELD, **nameless)) == set()
    assert kinds(watch_for(60, **nameless)) == {(AnomalyKind.PROCESS_WITHOUT_ALLOCATION, NAMELESS)}


def test_another_pod_on_a_held_slice_and_a_step_of_the_job_that_holds_it():
    slices = (Slice(gpu_instance_id=1, sm_fraction=0.5, activity=1.0), Slice(gpu_instance_id=2, sm_fraction=0.5))
    claims = (Claim(owner=A, gpu_instance_id=1),)
    holders = (Holder(owner=A, pid=1, gpu_instance_id=2),)
    found = kinds(watch_for(120, slices=slices, claims=claims, holders=holders))
    assert (AnomalyKind.PROCESS_WITHOUT_ALLOCATION, A) in found
    assert (AnomalyKind.ALLOCATION_WITHOUT_PROCESS, A) in found
    job, step = Owner(kind=OwnerKind.SLURM, job="5"), Owner(kind=OwnerKind.SLURM, job="5", step="0")
    found = kinds(watch_for(120, claims=(Claim(owner=job),), holders=(Holder(owner=step, pid=1),), utilization=0.9))
    assert found == set()


@pytest.mark.parametrize(
    ("utilization", "power_w", "stalled"), [(1.0, 180.0, True), (1.0, 400.0, False), (0.5, 180.0, False)]
)
def test_fully_utilised_at_low_power_is_a_stalled_collective(utilization, power_w, stalled):
    watch = watch_for(120, **HELD, **OPEN, utilization=utilization, power_w=power_w)
    assert kinds(watch) == ({(AnomalyKind.STALLED, A)} if stalled else set())


def test_several_processes_of_one_owner_are_idle_only_together():
    holders = (Holder(owner=A, pid=1, sm_ratio=0.0), Holder(owner=A, pid=2, sm_ratio=0.9))
    assert kinds(watch_for(600, **HELD, holders=holders, utilization=0.9)) == set()
    holders = (Holder(owner=A, pid=1, sm_ratio=0.0), Holder(owner=B, pid=2, sm_ratio=0.9))
    found = kinds(watch_for(600, claims=(Claim(owner=A), Claim(owner=B)), holders=holders, utilization=0.9))
    assert found == {(AnomalyKind.IDLE_CONTEXT, A)}


def test_a_device_that_left_has_none():
    watch = watch_for(300, **HELD, holders=(), utilization=0.0)
    watch.forget(frozenset())
    assert watch.lasting() == ()


@pytest.mark.parametrize(("limit_w", "stalled"), [(250.0, False), (None, True), (700.0, True)])
def test_work_that_a_limit_holds_down_is_no_stall(limit_w, stalled):
    gpu = Gpu(
        uuid="GPU-0", index=0, product="NVIDIA H100 80GB HBM3", model="H100", catalogue_key="h100-sxm5-80gb",
        power_limit_default_w=700.0,
    )  # fmt: skip
    attributor = Attributor(load())
    for turn in range(20):
        device = DeviceLook(
            gpu=gpu, energy_j=turn * 2000.0, utilization=1.0, limit_w=limit_w,
            processes=(GpuProcess(pid=1, kind=ProcessKind.COMPUTE),),
        )  # fmt: skip
        found = attributor.observe(
            AttributionLook(
                monotonic_ns=turn * 10 * SECOND, wall_ns=turn * 10 * SECOND, devices=(device,),
                owners={1: ProcessOwner(A)}, allocations=(),
            )
        )  # fmt: skip
    assert (AnomalyKind.STALLED in {one.subject.kind for one in found.anomalies}) is stalled


def test_the_attributor_tells_of_them():
    gpu = Gpu(uuid="GPU-0", index=0, product="NVIDIA H100 80GB HBM3", model="H100", catalogue_key="h100-sxm5-80gb")
    attributor = Attributor(load())
    held = (Allocation(place=Place("GPU-0"), owner=A, source=AllocationSource.POD_RESOURCES),)
    processes = (GpuProcess(pid=1, kind=ProcessKind.COMPUTE),)
    for turn in range(61):
        device = DeviceLook(gpu=gpu, energy_j=turn * 1000.0, utilization=0.0, processes=processes if turn < 30 else ())
        found = attributor.observe(
            AttributionLook(
                monotonic_ns=turn * 10 * SECOND, wall_ns=turn * 10 * SECOND, devices=(device,),
                owners={1: ProcessOwner(A)}, allocations=held,
            )
        )  # fmt: skip
    told = {one.subject.kind: one for one in found.anomalies}
    assert set(told) == {AnomalyKind.HELD_IDLE, AnomalyKind.ALLOCATION_WITHOUT_PROCESS}
    # Idle all along, without a process since the thirtieth look; a kilojoule each interval.
    assert told[AnomalyKind.HELD_IDLE].wasted_mj == 60_000_000
    assert told[AnomalyKind.ALLOCATION_WITHOUT_PROCESS].since_ns == 300 * SECOND
    assert told[AnomalyKind.ALLOCATION_WITHOUT_PROCESS].wasted_mj == 30_000_000
