"""Where allocation and use disagree: since when, for how long before it is told, and what it wastes."""

from dataclasses import replace

import pytest
from tests.builders.agent import build_energy_share, build_pod_owner, build_slurm_owner

from eelgrid_agent.devices.port import GpuProcess, ProcessKind
from eelgrid_agent.energy.accounts import (
    EnergyUse,
    ShareConfidence,
    UsageOwner,
    UsageOwnerKind,
)
from eelgrid_agent.energy.allocations import AllocationSource, DeviceAllocation, DeviceReference
from eelgrid_agent.energy.anomalies import AnomalyDetector, AnomalySubject, EnergyAnomalyKind, OngoingAnomaly
from eelgrid_agent.energy.attributor import AttributionInput, Attributor, DeviceInput
from eelgrid_agent.energy.process_owners import ProcessOwner
from eelgrid_agent.energy.split import ContextHolder, DeviceClaim, DeviceObservation, IdlePower, SliceActivity
from eelgrid_protos.catalogue.loader import load_catalogue
from eelgrid_protos.messages import Gpu

SECOND = 1_000_000_000
A = build_pod_owner("a")
B = build_pod_owner("b")
NAMELESS = UsageOwner(kind=UsageOwnerKind.POD, pod_uid="2c48913c-b29f-11e7-9350-020968147796")
INTRUDER = UsageOwner(kind=UsageOwnerKind.USER, user="1000", unit="session-1.scope")
IDLE = IdlePower(bare_w=60.0, context_w=40.0, confidence=ShareConfidence.HIGH)


def watch_for(seconds, *, every_s=10.0, power_w=100.0, known=True, watch=None, start_s=0.0, shares=None, **fields):
    """One look every ten seconds; each interval costs `shares`, else A a joule of every part."""
    watch = watch or AnomalyDetector()
    shares = shares or [build_energy_share(A, 1000, part) for part in EnergyUse]
    for turn in range(round(seconds / every_s) + 1):
        now_ns = round((start_s + turn * every_s) * SECOND)
        watch.observe(
            "GPU-0",
            DeviceObservation(**{"monotonic_ns": now_ns, **fields}),
            shares=shares,
            allocations_known=known,
            wall_ns=now_ns,
            mean_power_w=power_w,
            busy_w=700.0,
            idle=IDLE,
        )
    return watch


def kinds(watch):
    return {(one.subject.kind, one.subject.owner) for one in watch.list_anomalies()}


HELD = {"claims": (DeviceClaim(owner=A),)}
OPEN = {"holders": (ContextHolder(owner=A, pid=1),)}


def test_a_held_device_with_no_process_is_reported_after_a_while_with_what_it_wasted():
    fields = {**HELD, "holders": (), "utilization": 0.0}
    assert kinds(watch_for(110, **fields)) == set()
    assert kinds(watch_for(120, **fields)) == {(EnergyAnomalyKind.ALLOCATION_WITHOUT_PROCESS, A)}
    found = watch_for(300, **fields).list_anomalies()
    subject = AnomalySubject(kind=EnergyAnomalyKind.HELD_IDLE, gpu_uuid="GPU-0", owner=A)
    # Thirty intervals after the look that began it, a joule of each part.
    assert OngoingAnomaly(subject=subject, since_ns=0, since_wall_ns=0, wasted_mj=90_000) in found
    assert len(found) == 2


def test_what_the_workers_of_ray_wasted_is_of_the_workload_that_holds_the_device_idle():
    holder = UsageOwner(kind=UsageOwnerKind.WORKLOAD, workload="raylet")
    worker = replace(holder, ray_job="01000000")
    watch = watch_for(
        300,
        claims=(DeviceClaim(owner=holder),),
        holders=(ContextHolder(owner=worker, pid=1),),
        utilization=0.0,
        shares=(
            build_energy_share(holder, 2_000, EnergyUse.BARE_IDLE),
            build_energy_share(worker, 1_000, EnergyUse.CONTEXT_IDLE),
        ),
    )
    wasted = {(one.subject.kind, one.subject.owner): one.wasted_mj for one in watch.list_anomalies()}
    assert wasted == {
        (EnergyAnomalyKind.HELD_IDLE, holder): 90_000,
        (EnergyAnomalyKind.IDLE_CONTEXT, worker): 30_000,
    }


def test_an_open_context_that_does_nothing():
    watch = watch_for(300, **HELD, **OPEN, utilization=0.0)
    assert kinds(watch) == {(EnergyAnomalyKind.HELD_IDLE, A), (EnergyAnomalyKind.IDLE_CONTEXT, A)}
    (idle,) = [one for one in watch.list_anomalies() if one.subject.kind is EnergyAnomalyKind.IDLE_CONTEXT]
    assert idle.wasted_mj == 30_000
    # One look at work ends it.
    watch_for(0, watch=watch, start_s=310, **HELD, **OPEN, utilization=0.5)
    assert kinds(watch) == set()


def test_what_nothing_can_tell_neither_begins_nor_ends_an_anomaly():
    slices = (
        SliceActivity(gpu_instance_id=1, sm_fraction=0.5),
        SliceActivity(gpu_instance_id=2, sm_fraction=0.5, activity=0.0),
    )
    holders = (ContextHolder(owner=A, pid=1, gpu_instance_id=1), ContextHolder(owner=B, pid=2, gpu_instance_id=2))
    claims = (DeviceClaim(owner=A, gpu_instance_id=1), DeviceClaim(owner=B, gpu_instance_id=2))
    watch = watch_for(400, slices=slices, holders=holders, claims=claims)
    assert kinds(watch) == {(EnergyAnomalyKind.HELD_IDLE, B), (EnergyAnomalyKind.IDLE_CONTEXT, B)}
    watch_for(
        10,
        watch=watch,
        start_s=410,
        slices=(slices[0], SliceActivity(gpu_instance_id=2, sm_fraction=0.5)),
        holders=holders,
        claims=claims,
    )
    assert len(kinds(watch)) == 2


def test_a_process_on_what_nobody_gave_it():
    fields = {"holders": (ContextHolder(owner=A, pid=1), ContextHolder(owner=INTRUDER, pid=2)), "utilization": 0.9}
    assert kinds(watch_for(60, **HELD, **fields)) == {
        (EnergyAnomalyKind.PROCESS_WITHOUT_ALLOCATION, INTRUDER.account())
    }
    # Without anybody to ask there are no intruders.
    assert kinds(watch_for(60, **HELD, **fields, known=False)) == set()
    # A pod that only its UID names may be the one that holds the device.
    nameless = {"holders": (ContextHolder(owner=NAMELESS, pid=1),), "utilization": 0.9}
    assert kinds(watch_for(600, **HELD, **nameless)) == set()
    assert kinds(watch_for(60, **nameless)) == {(EnergyAnomalyKind.PROCESS_WITHOUT_ALLOCATION, NAMELESS)}


def test_another_pod_on_a_held_slice_and_a_step_of_the_job_that_holds_it():
    slices = (
        SliceActivity(gpu_instance_id=1, sm_fraction=0.5, activity=1.0),
        SliceActivity(gpu_instance_id=2, sm_fraction=0.5),
    )
    claims = (DeviceClaim(owner=A, gpu_instance_id=1),)
    holders = (ContextHolder(owner=A, pid=1, gpu_instance_id=2),)
    found = kinds(watch_for(120, slices=slices, claims=claims, holders=holders))
    assert (EnergyAnomalyKind.PROCESS_WITHOUT_ALLOCATION, A) in found
    assert (EnergyAnomalyKind.ALLOCATION_WITHOUT_PROCESS, A) in found
    job, step = build_slurm_owner("5"), build_slurm_owner("5", step="0")
    found = kinds(
        watch_for(120, claims=(DeviceClaim(owner=job),), holders=(ContextHolder(owner=step, pid=1),), utilization=0.9)
    )
    assert found == set()


@pytest.mark.parametrize(
    ("utilization", "power_w", "stalled"), [(1.0, 180.0, True), (1.0, 400.0, False), (0.5, 180.0, False)]
)
def test_fully_utilised_at_low_power_is_a_stalled_collective(utilization, power_w, stalled):
    watch = watch_for(120, **HELD, **OPEN, utilization=utilization, power_w=power_w)
    assert kinds(watch) == ({(EnergyAnomalyKind.STALLED, A)} if stalled else set())


def test_several_processes_of_one_owner_are_idle_only_together():
    holders = (ContextHolder(owner=A, pid=1, sm_ratio=0.0), ContextHolder(owner=A, pid=2, sm_ratio=0.9))
    assert kinds(watch_for(600, **HELD, holders=holders, utilization=0.9)) == set()
    holders = (ContextHolder(owner=A, pid=1, sm_ratio=0.0), ContextHolder(owner=B, pid=2, sm_ratio=0.9))
    found = kinds(watch_for(600, claims=(DeviceClaim(owner=A), DeviceClaim(owner=B)), holders=holders, utilization=0.9))
    assert found == {(EnergyAnomalyKind.IDLE_CONTEXT, A)}


def test_a_device_that_left_has_none():
    watch = watch_for(300, **HELD, holders=(), utilization=0.0)
    watch.forget_gpus(frozenset())
    assert watch.list_anomalies() == ()


@pytest.mark.parametrize(("limit_w", "stalled"), [(250.0, False), (None, True), (700.0, True)])
def test_work_that_a_limit_holds_down_is_no_stall(limit_w, stalled):
    gpu = Gpu(
        uuid="GPU-0",
        index=0,
        product="NVIDIA H100 80GB HBM3",
        model="H100",
        catalogue_key="h100-sxm5-80gb",
        power_limit_default_w=700.0,
    )
    attributor = Attributor(load_catalogue())
    for turn in range(20):
        device = DeviceInput(
            gpu=gpu,
            energy_j=turn * 2000.0,
            utilization=1.0,
            limit_w=limit_w,
            processes=(GpuProcess(pid=1, kind=ProcessKind.COMPUTE),),
        )
        found = attributor.observe(
            AttributionInput(
                monotonic_ns=turn * 10 * SECOND,
                wall_ns=turn * 10 * SECOND,
                devices=(device,),
                owners={1: ProcessOwner(A)},
                allocations=(),
            )
        )
    assert (EnergyAnomalyKind.STALLED in {one.subject.kind for one in found.anomalies}) is stalled


def test_the_attributor_reports_them():
    gpu = Gpu(uuid="GPU-0", index=0, product="NVIDIA H100 80GB HBM3", model="H100", catalogue_key="h100-sxm5-80gb")
    attributor = Attributor(load_catalogue())
    held = (DeviceAllocation(place=DeviceReference("GPU-0"), owner=A, source=AllocationSource.POD_RESOURCES),)
    processes = (GpuProcess(pid=1, kind=ProcessKind.COMPUTE),)
    for turn in range(61):
        device = DeviceInput(gpu=gpu, energy_j=turn * 1000.0, utilization=0.0, processes=processes if turn < 30 else ())
        found = attributor.observe(
            AttributionInput(
                monotonic_ns=turn * 10 * SECOND,
                wall_ns=turn * 10 * SECOND,
                devices=(device,),
                owners={1: ProcessOwner(A)},
                allocations=held,
            )
        )
    told = {one.subject.kind: one for one in found.anomalies}
    assert set(told) == {EnergyAnomalyKind.HELD_IDLE, EnergyAnomalyKind.ALLOCATION_WITHOUT_PROCESS}
    # Idle all along, without a process since the thirtieth look; a kilojoule each interval.
    assert told[EnergyAnomalyKind.HELD_IDLE].wasted_mj == 60_000_000
    assert told[EnergyAnomalyKind.ALLOCATION_WITHOUT_PROCESS].since_ns == 300 * SECOND
    assert told[EnergyAnomalyKind.ALLOCATION_WITHOUT_PROCESS].wasted_mj == 30_000_000
