"""Attribution conserves: whatever comes and goes, the parts of a device's energy are the device's energy."""

import math
import os

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders.agent import build_energy_share, build_pod_owner, build_slurm_owner

from eelgrid_agent.devices.port import GpuProcess, InstanceReadings, Missing, ProcessKind
from eelgrid_agent.energy.accounts import (
    EnergyAccounts,
    EnergyUse,
    ShareConfidence,
    ShareMethod,
    UsageOwner,
    UsageOwnerKind,
    apportion_total,
)
from eelgrid_agent.energy.allocations import AllocationSource, DeviceAllocation, DeviceReference
from eelgrid_agent.energy.attributor import AttributionInput, Attributor, DeviceInput
from eelgrid_agent.energy.process_owners import ProcessOwner
from eelgrid_agent.energy.split import (
    ContextHolder,
    DeviceClaim,
    DeviceObservation,
    IdlePower,
    SliceActivity,
    split_energy,
)
from eelgrid_protos.catalogue.loader import load_catalogue
from eelgrid_protos.messages import AbsenceReason, ComputeInstance, Gpu, GpuInstance, Reading

SECOND = 1_000_000_000
# The long proof asks for thousands.
SEQUENCES = int(os.environ.get("EELGRID_ATTRIBUTION_SEQUENCES", "100"))
NO = Missing(AbsenceReason.NOT_SAMPLED)
PODS = [build_pod_owner(f"p{index}") for index in range(4)]
UID = "2c48913c-b29f-11e7-9350-02096814779{}"
OWNERS = [
    *PODS,
    UsageOwner(kind=UsageOwnerKind.POD, pod_uid=UID.format(0), container_id="ab" * 32),
    build_slurm_owner("1", step="0"),
    UsageOwner(kind=UsageOwnerKind.USER, user="1000", unit="session-1.scope"),
    UsageOwner(kind=UsageOwnerKind.PROCESS),
]

ratio = st.floats(0.0, 1.0)
weight = st.one_of(st.just(0.0), st.floats(0.0, 1e6), st.floats(1e-300, 1e-9))


@given(st.integers(0, 10**18), st.lists(weight, min_size=1, max_size=50).filter(lambda weights: sum(weights) > 0.0))
def test_apportioned_parts_add_up_and_are_within_one_of_their_due(total, weights):
    parts = apportion_total(total, weights)
    assert sum(parts) == total
    assert min(parts) >= 0
    most = max(weights)
    whole = math.fsum(each / most for each in weights)
    for part, each in zip(parts, weights, strict=True):
        # The due part, up to the unit that weights are taken in.
        assert abs(part - total * (each / most / whole)) <= 1 + total * len(weights) * 2.0**-39


def holders(instances):
    return st.lists(
        st.builds(
            ContextHolder,
            owner=st.sampled_from(OWNERS),
            pid=st.integers(1, 6),
            gpu_instance_id=st.sampled_from(instances),
            sm_ratio=st.none() | ratio,
            mps_server=st.sampled_from([False, False, False, True]),
            portion=st.sampled_from([1.0, 1.0, 0.5, 0.1]),
        ),
        max_size=5,
    ).map(tuple)


def claims(instances):
    return st.lists(
        st.builds(
            DeviceClaim,
            owner=st.sampled_from(OWNERS),
            gpu_instance_id=st.sampled_from([None, *instances]),
            shares=st.integers(1, 1000),
        ),
        max_size=4,
    ).map(tuple)


@st.composite
def glances(draw):
    now_ns = 0
    found = []
    for _ in range(draw(st.integers(2, 5))):
        now_ns += draw(st.integers(0, 100)) * SECOND
        instances = draw(st.sampled_from([(None,), (), (1,), (3, 4), (1, 5, 6), (7, 8, 9, 10, 11, 12, 13)]))
        slices = tuple(
            SliceActivity(gpu_instance_id=one, sm_fraction=draw(ratio), activity=draw(st.none() | ratio))
            for one in instances
        )
        ids = [*instances, 99, None]
        found.append(
            DeviceObservation(
                monotonic_ns=now_ns,
                slices=slices,
                holders=draw(st.none() | holders(ids)),
                claims=draw(claims(ids)),
                utilization=draw(st.none() | ratio),
            )
        )
    return tuple(found)


idles = st.builds(
    IdlePower,
    bare_w=st.floats(0.0, 300.0),
    context_w=st.floats(0.0, 100.0),
    confidence=st.sampled_from(ShareConfidence),
)


@settings(deadline=None, max_examples=SEQUENCES)
@given(st.integers(0, 10**12), glances(), idles)
def test_a_split_adds_up_and_knows_everyone_it_charges(energy_mj, looks, idle):
    shares = split_energy(energy_mj, looks, idle)
    assert sum(share.energy_mj for share in shares) == energy_mj
    assert all(share.energy_mj > 0 for share in shares)
    known = {one.owner for look in looks for one in (*look.claims, *(look.holders or ()))}
    for share in shares:
        assert share.owner in known or share.owner.kind in (UsageOwnerKind.UNALLOCATED, UsageOwnerKind.UNATTRIBUTED)
        assert (share.owner.kind is UsageOwnerKind.UNATTRIBUTED) == (share.method is ShareMethod.UNATTRIBUTED)
    # Idle power is never more than what was learnt, but where nothing at all was at work.
    elapsed_s = (looks[-1].monotonic_ns - looks[0].monotonic_ns) / 1e9
    contexts = any(look.holders for look in looks)
    bare_mj = sum(share.energy_mj for share in shares if share.part is EnergyUse.BARE_IDLE)
    context_mj = sum(share.energy_mj for share in shares if share.part is EnergyUse.CONTEXT_IDLE)
    assert context_mj <= 1000.0 * idle.context_w * elapsed_s + 1
    if contexts:
        assert bare_mj <= 1000.0 * idle.bare_w * elapsed_s + 1
    else:
        assert context_mj == 0


# Whole sequences through the facade: one device of each kind of trouble.
LAYOUTS = {
    "off": (),
    "halves": ((1, 9, 0, 4), (2, 9, 4, 4)),
    "mixed": ((1, 9, 0, 4), (5, 14, 4, 2), (13, 19, 6, 1)),
    "sevens": tuple((7 + index, 19, index, 1) for index in range(7)),
    "empty": (),
}

step = st.fixed_dictionaries(
    {
        "wait_s": st.sampled_from([0, 1, 5, 5, 5, 15, 120, 4000]),
        "power_w": st.floats(0.0, 1000.0),
        "energy": st.sampled_from(["there", "there", "there", "missing", "reset", "implausible"]),
        "layout": st.sampled_from(list(LAYOUTS)),
        "users": st.none() | st.lists(st.tuples(st.integers(0, len(OWNERS) - 1), st.integers(0, 14)), max_size=5),
        "hidden": st.sets(st.integers(0, len(OWNERS) - 1)),
        "held": st.none() | st.lists(st.tuples(st.integers(0, 3), st.integers(0, 14)), max_size=4),
        "activity": st.none() | ratio,
        "present": st.sampled_from([True, True, True, False]),
    }
)


def device_look(one, total_j):
    layout = LAYOUTS[one["layout"]]
    instances = tuple(
        GpuInstance(
            id=number,
            profile_id=profile,
            profile="x",
            start=start,
            size=size,
            compute_instances=(ComputeInstance(id=0, uuid=f"MIG-{number}"),),
        )
        for number, profile, start, size in layout
    )
    gpu = Gpu(
        uuid="GPU-0",
        index=0,
        product="NVIDIA H100 80GB HBM3",
        model="H100",
        catalogue_key="h100-sxm5-80gb",
        mig_capable=True,
        mig_enabled=one["layout"] != "off",
        gpu_instances=instances,
    )
    readings = tuple(
        InstanceReadings(
            gpu_instance_id=instance.id,
            values={Reading.SM_ACTIVITY_RATIO: NO if one["activity"] is None else one["activity"]},
        )
        for instance in instances
    )
    processes = None
    if one["users"] is not None:
        processes = tuple(
            GpuProcess(
                pid=100 + owner,
                kind=ProcessKind.COMPUTE,
                gpu_instance_id=place if instances else None,
                sm_ratio=None if instances else one["activity"],
            )
            for owner, place in one["users"]
        )
    return DeviceInput(
        gpu=gpu,
        energy_j=total_j,
        utilization=None if instances else one["activity"],
        instances=readings,
        processes=processes,
    )


@settings(deadline=None, max_examples=SEQUENCES)
@given(st.lists(step, min_size=1, max_size=25), st.integers(0, 10**9))
def test_everything_in_the_ledger_is_the_devices_total_at_every_look(steps, start_mj):
    attributor = Attributor(load_catalogue())
    now_ns = 0
    meter_mj, base_mj, known_mj = start_mj, 0, 0
    before = {}
    for one in steps:
        now_ns += one["wait_s"] * SECOND
        meter_mj += round(1000.0 * one["power_w"] * one["wait_s"])
        if one["energy"] == "reset":
            # The sampler forgot the device and counts from zero; what lies between is in no total.
            meter_mj = round(500.0 * one["power_w"])
        total_j = {"missing": None, "implausible": math.nan}.get(one["energy"], meter_mj / 1000.0)
        if one["present"] and total_j is not None and not math.isnan(total_j):
            if meter_mj < known_mj:
                base_mj += known_mj
            known_mj = meter_mj
        allocations = None
        if one["held"] is not None:
            allocations = tuple(
                DeviceAllocation(
                    place=DeviceReference("GPU-0", place or None),
                    owner=PODS[pod],
                    source=AllocationSource.POD_RESOURCES,
                )
                for pod, place in one["held"]
            )
        owners = {100 + index: ProcessOwner(owner) for index, owner in enumerate(OWNERS) if index not in one["hidden"]}
        devices = (device_look(one, total_j),) if one["present"] else ()
        found = attributor.observe(
            AttributionInput(
                monotonic_ns=now_ns, wall_ns=now_ns, devices=devices, owners=owners, allocations=allocations
            )
        )
        kept_mj = sum(found.accounts.values()) + sum(found.nobody.get("GPU-0", {}).values())
        assert kept_mj == attributor.total_mj("GPU-0") == base_mj + known_mj
        for account, energy_mj in found.accounts.items():
            assert energy_mj >= before.get(account, 0)
        before = dict(found.accounts)


churn = st.lists(st.tuples(st.integers(0, 2000), st.integers(1, 50_000)), min_size=1, max_size=40)


@given(st.lists(churn, min_size=1, max_size=8))
def test_the_ledger_keeps_few_of_the_dead_and_loses_nothing(rounds):
    ledger = EnergyAccounts()
    charged = 0
    shown, last = {}, []
    for turn, users in enumerate(rounds):
        shares = [build_energy_share(build_slurm_owner(job), energy_mj) for job, energy_mj in users]
        ledger.drain_ended((share.owner for share in shares), now_ns=turn * SECOND)
        ledger.add("GPU-0", shares)
        charged += sum(share.energy_mj for share in shares)
        rows = ledger.rows()
        assert sum(rows.values()) + ledger.drained_mj.get("GPU-0", 0) == ledger.total_mj("GPU-0") == charged
        # Whoever is charged is shown with it before it can go.
        assert {share.owner for share in shares} <= {account.owner for account in rows}
        # Whoever was shown and is shown again was never shown less, and nobody leaves in the turn after its last charge.
        assert all(energy_mj >= shown.get(account, 0) for account, energy_mj in rows.items())
        assert {share.owner for share in last} <= {account.owner for account in rows}
        shown, last = dict(rows), shares
