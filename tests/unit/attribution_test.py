"""Whole sequences of looks: accounts over restarts, names that are found later, owners of whom only the plan knows."""

from dataclasses import replace

import pytest
from tests.builders.agent import build_pod_owner, build_slurm_owner

from eelgrid_agent.devices.port import GpuProcess, ProcessKind
from eelgrid_agent.energy.accounts import ACCOUNTS_MOST, ShareConfidence, ShareMethod, UsageOwner, UsageOwnerKind
from eelgrid_agent.energy.allocations import AllocationSource, DeviceAllocation, DeviceReference
from eelgrid_agent.energy.anomalies import EnergyAnomalyKind
from eelgrid_agent.energy.attributor import AttributionInput, Attributor, DeviceInput
from eelgrid_agent.energy.process_owners import ProcessOwner
from eelgrid_protos.catalogue.loader import load_catalogue
from eelgrid_protos.messages import Gpu

SECOND = 1_000_000_000
A = build_pod_owner("a")
B = build_pod_owner("b")
GPU = Gpu(uuid="GPU-0", index=0, product="NVIDIA H100 80GB HBM3", model="H100", catalogue_key="h100-sxm5-80gb")


def look(at_s, energy_j, pids=(), *, owners=None, held=None, utilization=0.0):
    processes = tuple(GpuProcess(pid=pid, kind=ProcessKind.COMPUTE) for pid in pids)
    allocations = None
    if held is not None:
        allocations = tuple(
            DeviceAllocation(place=DeviceReference("GPU-0"), owner=owner, source=AllocationSource.POD_RESOURCES)
            for owner in held
        )
    device = DeviceInput(gpu=GPU, energy_j=energy_j, utilization=utilization, processes=processes)
    return AttributionInput(
        monotonic_ns=round(at_s * SECOND),
        wall_ns=round(at_s * SECOND),
        devices=(device,),
        owners={pid: ProcessOwner(owner) for pid, owner in (owners or {}).items()},
        allocations=allocations,
    )


def test_a_pods_restart_keeps_its_account_and_the_dead_are_shown_once_more():
    attributor = Attributor(load_catalogue())
    uid = "2c48913c-b29f-11e7-9350-020968147796"
    first = replace(A, pod_uid=uid, container_id="ab" * 32, pid=1)
    second = replace(A, pod_uid=uid, container_id="cd" * 32, pid=2)
    attributor.observe(look(0, 0.0, [1], owners={1: first}, held=[A]))
    attributor.observe(look(10, 5000.0, [1], owners={1: first}, held=[A], utilization=1.0))
    found = attributor.observe(look(20, 10_000.0, [2], owners={2: second}, held=[A], utilization=1.0))
    assert {account.owner for account in found.accounts} == {A}
    assert sum(found.accounts.values()) == 10_000_000
    # Nobody is there any more: it keeps what it was charged, and the node pays from now on.
    for at_s in (30, 40, 50):
        found = attributor.observe(look(at_s, 10_000.0 + 60.0 * (at_s - 20), [], held=[]))
        assert {account.owner for account in found.accounts} == {A}
    assert sum(found.accounts.values()) + sum(found.nobody["GPU-0"].values()) == 11_800_000
    # Long after, its joules are in the remainder of the device.
    found = attributor.observe(look(2000, 12_000.0, [], held=[]))
    found = attributor.observe(look(2010, 12_000.0, [], held=[]))
    assert found.accounts == {}
    assert found.nobody["GPU-0"]["ended"] >= 10_000_000
    assert sum(found.nobody["GPU-0"].values()) == 12_000_000


def test_a_pod_known_by_uid_alone_is_joined_with_the_only_allocation_that_fits():
    attributor = Attributor(load_catalogue())
    nameless = UsageOwner(
        kind=UsageOwnerKind.POD, pod_uid="2c48913c-b29f-11e7-9350-020968147796", container_id="ab" * 32, pid=1
    )
    other = replace(nameless, pod_uid="3c48913c-b29f-11e7-9350-020968147796", container_id="cd" * 32, pid=2)
    attributor.observe(look(0, 0.0, [1], owners={1: nameless}, held=[A]))
    found = attributor.observe(look(10, 5000.0, [1], owners={1: nameless}, held=[A], utilization=1.0))
    assert {account.owner for account in found.accounts} == {A}
    # Two that share a device are not guessed at.
    attributor = Attributor(load_catalogue())
    both = {1: nameless, 2: other}
    attributor.observe(look(0, 0.0, [1, 2], owners=both, held=[A, B]))
    found = attributor.observe(look(10, 5000.0, [1, 2], owners=both, held=[A, B], utilization=1.0))
    assert {account.owner for account in found.accounts} == {A, B, nameless.account(), other.account()}
    assert all(account.owner.labels()["pod"] for account in found.accounts)


def test_what_was_counted_before_the_first_look_has_no_owner():
    found = Attributor(load_catalogue()).observe(look(0, 123.456, [1], owners={1: A}))
    assert found.accounts == {}
    assert found.nobody == {"GPU-0": {"unattributed": 123_456}}


def test_a_process_that_cannot_be_looked_at_is_the_only_holders():
    """An agent without the host's process ids still charges the pod that was given the device."""
    attributor = Attributor(load_catalogue())
    attributor.observe(look(0, 0.0, [1], held=[A]))
    found = attributor.observe(look(10, 5000.0, [1], held=[A], utilization=1.0))
    assert {account.owner for account in found.accounts} == {A}
    assert {(account.method, account.confidence) for account in found.accounts if account.part.value == "active"} == {
        (ShareMethod.EXCLUSIVE, ShareConfidence.MEDIUM)
    }
    for at_s in range(20, 200, 10):
        found = attributor.observe(look(at_s, 500.0 * at_s, [1], held=[A], utilization=1.0))
    assert found.anomalies == ()


def charged_by_workload(found):
    """Millijoules of each part by the name of the workload."""
    charged = {}
    for account, energy_mj in found.accounts.items():
        parts = charged.setdefault(account.owner.workload, {})
        parts[account.part.value] = parts.get(account.part.value, 0) + energy_mj
    return charged


def planned(*shares):
    return tuple(
        DeviceAllocation(
            place=DeviceReference("GPU-0"),
            owner=UsageOwner(kind=UsageOwnerKind.WORKLOAD, workload=name),
            source=AllocationSource.PLAN,
            shares=milli,
        )
        for name, milli in shares
    )


def test_a_process_that_cannot_be_looked_at_is_divided_among_those_who_share_its_device():
    """Nobody knows whose it is, and it is no stranger's: each holder is charged by its shares, and told how sure that is."""
    attributor = Attributor(load_catalogue())
    for at_s in range(0, 200, 10):
        seen = look(at_s, 500.0 * at_s, [1], utilization=1.0)
        found = attributor.observe(replace(seen, allocations=planned(("w-1", 500), ("w-2", 300))))
    charged = charged_by_workload(found)
    assert charged.keys() == {"w-1", "w-2"}, "no joules without a name"
    for part, energy_mj in charged["w-1"].items():
        assert energy_mj * 3 == pytest.approx(charged["w-2"][part] * 5, rel=1e-5), part
    assert sum(found.accounts.values()) == 500_000 * 190
    assert {(one.method, one.confidence) for one in found.accounts if one.part.value != "bare_idle"} == {
        (ShareMethod.EQUAL_SHARE, ShareConfidence.LOW)
    }
    assert found.anomalies == (), "whoever holds a share of the device has a process there"


def test_a_process_that_cannot_be_looked_at_on_a_device_of_two_pods_is_no_intruder():
    attributor = Attributor(load_catalogue())
    for at_s in range(0, 200, 10):
        found = attributor.observe(look(at_s, 500.0 * at_s, [1], held=[A, B], utilization=1.0))
    assert {account.owner for account in found.accounts} == {A, B}
    assert found.anomalies == ()


def test_a_process_that_states_its_workload_keeps_its_own_joules_beside_one_that_cannot_be_looked_at():
    attributor = Attributor(load_catalogue())
    stated = {1: ProcessOwner(UsageOwner(kind=UsageOwnerKind.PROCESS, pid=1), workload="w-1")}
    for at_s, energy_j in ((0, 0.0), (10, 5000.0)):
        seen = look(at_s, energy_j, [1, 2], utilization=1.0)
        found = attributor.observe(replace(seen, owners=stated, allocations=planned(("w-1", 500), ("w-2", 500))))
    charged = charged_by_workload(found)
    # A context each: one is the first workload's, and of the other each has a half.
    assert charged["w-1"]["active"] == pytest.approx(3 * charged["w-2"]["active"], rel=1e-6)
    assert charged.keys() == {"w-1", "w-2"}


def test_a_process_that_cannot_be_looked_at_is_its_ended_workloads_until_its_device_is_allocated_anew():
    attributor = Attributor(load_catalogue())
    for at_s in (0, 10, 20):
        seen = look(at_s, 500.0 * at_s, [1], utilization=1.0)
        # The plan no longer has it in the last look, whose processes were listed before.
        found = attributor.observe(replace(seen, allocations=planned(("w-1", 1000)) if at_s < 20 else ()))
    assert charged_by_workload(found).keys() == {"w-1"}
    # Another process was never the workload's.
    found = attributor.observe(replace(look(30, 15_000.0, [2], utilization=1.0), allocations=()))
    found = attributor.observe(replace(look(40, 20_000.0, [2], utilization=1.0), allocations=()))
    assert charged_by_workload(found).keys() == {"w-1", ""}
    charged = charged_by_workload(found)["w-1"]
    found = attributor.observe(replace(look(50, 25_000.0, [2], utilization=1.0), allocations=planned(("w-2", 1000))))
    found = attributor.observe(replace(look(60, 30_000.0, [2], utilization=1.0), allocations=planned(("w-2", 1000))))
    assert charged_by_workload(found)["w-1"] == charged
    assert charged_by_workload(found)["w-2"]["active"] > 2_000_000


def test_a_process_that_can_be_looked_at_and_has_no_owner_stays_so():
    attributor = Attributor(load_catalogue())
    stranger = {1: UsageOwner(kind=UsageOwnerKind.PROCESS, pid=1)}
    for at_s in range(0, 100, 10):
        found = attributor.observe(look(at_s, 500.0 * at_s, [1], owners=stranger, held=[A], utilization=1.0))
    kinds = {account.owner.kind for account in found.accounts if account.part.value == "active"}
    assert kinds == {UsageOwnerKind.PROCESS}
    assert EnergyAnomalyKind.PROCESS_WITHOUT_ALLOCATION in {one.subject.kind for one in found.anomalies}


def test_a_workload_of_the_plan_is_a_second_name_and_the_first_where_there_is_no_other():
    plan = DeviceAllocation(
        place=DeviceReference("GPU-0"),
        owner=UsageOwner(kind=UsageOwnerKind.WORKLOAD, workload="w"),
        source=AllocationSource.PLAN,
    )
    unit = UsageOwner(kind=UsageOwnerKind.UNIT, unit="train.service", pid=1)
    attributor = Attributor(load_catalogue())
    for at_s, energy_j in ((0, 0.0), (10, 5000.0)):
        seen = look(at_s, energy_j, [1, 2], owners={1: unit}, held=[A], utilization=1.0)
        found = attributor.observe(replace(seen, allocations=(*seen.allocations, plan)))
    labels = {(owner.kind.value, owner.workload) for owner in (account.owner for account in found.accounts)}
    # The pod holds the device by the kubelet's word, the unit uses it, and both are the workload's.
    assert labels == {("pod", "w"), ("unit", "w")}
    attributor = Attributor(load_catalogue())
    for at_s, energy_j in ((0, 0.0), (10, 5000.0)):
        found = attributor.observe(replace(look(at_s, energy_j, [1], utilization=1.0), allocations=(plan,)))
    assert {account.owner for account in found.accounts} == {plan.owner}


def test_jobs_that_share_a_gpu_are_each_charged_by_the_workload_that_their_process_states():
    plan = tuple(
        DeviceAllocation(
            place=DeviceReference("GPU-0"),
            owner=UsageOwner(kind=UsageOwnerKind.WORKLOAD, workload=name),
            source=AllocationSource.PLAN,
            shares=500,
        )
        for name in ("w-1", "w-2")
    )
    stated = {1: "w-1", 2: "w-2", 3: "w-9"}
    owners = {
        pid: ProcessOwner(UsageOwner(kind=UsageOwnerKind.PROCESS, pid=pid), workload=name)
        for pid, name in stated.items()
    }
    attributor = Attributor(load_catalogue())
    for at_s in range(0, 100, 10):
        seen = look(at_s, 300.0 * at_s, [1, 2, 3], utilization=1.0)
        found = attributor.observe(replace(seen, owners=owners, allocations=plan))
    active = {account.owner for account in found.accounts if account.part.value == "active"}
    # The third states a workload that holds nothing here, so it is charged as itself.
    assert active == {plan[0].owner, plan[1].owner, UsageOwner(kind=UsageOwnerKind.PROCESS)}


def test_jobs_of_ray_inside_a_workload_are_charged_apart_and_the_board_is_the_workloads():
    plan = DeviceAllocation(
        place=DeviceReference("GPU-0"),
        owner=UsageOwner(kind=UsageOwnerKind.WORKLOAD, workload="raylet"),
        source=AllocationSource.PLAN,
    )
    # A raylet that is a job of the queue starts its workers: they have its environment, and Ray's for their job.
    owners = {
        pid: ProcessOwner(UsageOwner(kind=UsageOwnerKind.RAY, ray_job=job, pid=pid), workload=stated)
        for pid, job, stated in ((1, "01000000", "raylet"), (2, "02000000", "raylet"), (3, "03000000", "other"))
    }
    attributor = Attributor(load_catalogue())
    for at_s in range(0, 400, 10):
        seen = look(at_s, 300.0 * at_s, [1, 2, 3], utilization=1.0)
        found = attributor.observe(replace(seen, owners=owners, allocations=(plan,)))
    active = {account.owner for account in found.accounts if account.part.value == "active"}
    inside = {replace(plan.owner, ray_job="01000000"), replace(plan.owner, ray_job="02000000")}
    # The third states a workload that holds nothing here: its job of Ray is what is known, and the plan's workload.
    assert active == inside | {UsageOwner(kind=UsageOwnerKind.RAY, ray_job="03000000", workload="raylet")}
    idle = {account.owner for account in found.accounts if account.part.value == "bare_idle"}
    assert idle == {plan.owner}
    # Nobody is counted twice.
    assert sum(found.accounts.values()) + sum(found.nobody["GPU-0"].values()) == 300_000 * 390
    # Who holds the GPU has given it to whatever runs inside.
    assert all(plan.owner.covers(one) for one in inside)
    assert not replace(plan.owner, ray_job="01000000").covers(replace(plan.owner, ray_job="02000000"))
    assert not any(one.subject.owner in inside for one in found.anomalies)


def test_an_owner_that_comes_back_has_a_new_account_only_after_a_showing_without_it():
    attributor = Attributor(load_catalogue())
    before = {}
    for turn, pids in enumerate(([1], [1], [], [], [1], [], [1], [], [], [], [], [1], [1])):
        found = attributor.observe(look(10 * turn, 8.0 * turn, pids, owners={1: A}))
        assert all(energy_mj >= before.get(account, 0) for account, energy_mj in found.accounts.items())
        before = dict(found.accounts)
        assert sum(before.values()) + sum(found.nobody["GPU-0"].values()) == 8000 * turn


def test_owners_for_whom_there_is_no_room_are_other_and_the_sum_still_holds():
    attributor = Attributor(load_catalogue())
    pids = {uuid: range(1000 * number, 1000 * number + 900) for number, uuid in enumerate(("GPU-0", "GPU-1", "GPU-2"))}
    owners = {pid: ProcessOwner(build_slurm_owner(pid, pid=pid)) for ids in pids.values() for pid in ids}
    for turn in range(2):
        devices = tuple(
            DeviceInput(
                gpu=replace(GPU, uuid=uuid),
                energy_j=5000.0 * turn,
                utilization=1.0,
                processes=tuple(GpuProcess(pid=pid, kind=ProcessKind.COMPUTE) for pid in ids),
            )
            for uuid, ids in pids.items()
        )
        now_ns = 10 * turn * SECOND
        found = attributor.observe(
            AttributionInput(monotonic_ns=now_ns, wall_ns=now_ns, devices=devices, owners=owners)
        )
    assert len(found.accounts) == ACCOUNTS_MOST
    # The devices are charged one after the other: the last finds no room.
    assert found.nobody["GPU-2"]["other"] > 3_000_000
    for uuid in pids:
        owned_mj = sum(energy_mj for account, energy_mj in found.accounts.items() if account.gpu_uuid == uuid)
        assert owned_mj + sum(found.nobody[uuid].values()) == 5_000_000
