"""One interval's joules in shares, in the cases that operators meet."""

from dataclasses import replace

import pytest
from tests.builders.agent import build_pod_owner

from eelgrid_agent.energy.accounts import (
    UNALLOCATED,
    UNATTRIBUTED,
    EnergyUse,
    ShareConfidence,
    ShareMethod,
    UsageOwner,
    UsageOwnerKind,
)
from eelgrid_agent.energy.split import (
    ContextHolder,
    DeviceClaim,
    DeviceObservation,
    IdlePower,
    SliceActivity,
    split_energy,
)

SECOND = 1_000_000_000
A = build_pod_owner("a")
B = build_pod_owner("b")
IDLE = IdlePower(bare_w=60.0, context_w=40.0, confidence=ShareConfidence.HIGH)
# Ten seconds at 500 W: 600 J bare, 400 J of contexts, 4 kJ of work.
ENERGY_MJ = 5_000_000


def glance(**fields):
    return DeviceObservation(**{"monotonic_ns": 0, **fields})


def over_ten_seconds(before, now=None, energy_mj=ENERGY_MJ, idle=IDLE):
    now = replace(before if now is None else now, monotonic_ns=10 * SECOND)
    found = {}
    for share in split_energy(energy_mj, (before, now), idle):
        key = (share.owner, share.part)
        found[key] = found.get(key, 0) + share.energy_mj
    return found


def methods(before, now=None, part=EnergyUse.ACTIVE):
    now = replace(before if now is None else now, monotonic_ns=10 * SECOND)
    return {
        share.owner: (share.method, share.confidence)
        for share in split_energy(ENERGY_MJ, (before, now), IDLE)
        if share.part is part
    }


def test_one_holder_is_charged_all_of_it_in_three_parts():
    look = glance(holders=(ContextHolder(owner=A, pid=1),), claims=(DeviceClaim(owner=A),), utilization=1.0)
    assert over_ten_seconds(look) == {
        (A, EnergyUse.BARE_IDLE): 600_000,
        (A, EnergyUse.CONTEXT_IDLE): 400_000,
        (A, EnergyUse.ACTIVE): 4_000_000,
    }
    assert methods(look) == {A: (ShareMethod.EXCLUSIVE, ShareConfidence.HIGH)}


def test_without_an_allocation_bare_idle_is_the_nodes():
    look = glance(holders=(ContextHolder(owner=A, pid=1),), utilization=1.0)
    assert over_ten_seconds(look) == {
        (UNALLOCATED, EnergyUse.BARE_IDLE): 600_000,
        (A, EnergyUse.CONTEXT_IDLE): 400_000,
        (A, EnergyUse.ACTIVE): 4_000_000,
    }


def test_a_held_device_that_nobody_uses_is_its_holders():
    look = glance(claims=(DeviceClaim(owner=A),), utilization=0.0)
    # All of it is idle power, whatever was learnt: nothing was open.
    assert over_ten_seconds(look, energy_mj=700_000) == {(A, EnergyUse.BARE_IDLE): 700_000}


def test_what_works_with_nobody_seen_is_named_only_where_one_holder_has_it_all():
    busy = glance(utilization=0.9)
    assert over_ten_seconds(busy)[UNATTRIBUTED, EnergyUse.ACTIVE] == 4_400_000
    held = glance(utilization=0.9, claims=(DeviceClaim(owner=A),))
    assert over_ten_seconds(held)[A, EnergyUse.ACTIVE] == 4_400_000
    assert methods(held)[A] == (ShareMethod.EXCLUSIVE, ShareConfidence.MEDIUM)


def test_time_slicing_goes_by_sm_ratio():
    look = glance(
        holders=(ContextHolder(owner=A, pid=1, sm_ratio=0.6), ContextHolder(owner=B, pid=2, sm_ratio=0.2)),
        claims=(DeviceClaim(owner=A), DeviceClaim(owner=B)),
    )
    found = over_ten_seconds(look)
    assert (found[A, EnergyUse.ACTIVE], found[B, EnergyUse.ACTIVE]) == (3_000_000, 1_000_000)
    # A context costs the same whatever it does, and so does a share of the board.
    assert found[A, EnergyUse.CONTEXT_IDLE] == found[B, EnergyUse.CONTEXT_IDLE] == 200_000
    assert found[A, EnergyUse.BARE_IDLE] == found[B, EnergyUse.BARE_IDLE] == 300_000
    assert methods(look)[A] == (ShareMethod.PROCESS_SM, ShareConfidence.MEDIUM)


def test_a_process_without_a_sample_was_idle_where_another_has_one():
    look = glance(holders=(ContextHolder(owner=A, pid=1, sm_ratio=0.6), ContextHolder(owner=B, pid=2)))
    assert (B, EnergyUse.ACTIVE) not in over_ten_seconds(look)
    assert methods(look)[A] == (ShareMethod.PROCESS_SM, ShareConfidence.LOW)


def test_without_ratios_sharers_are_equal():
    look = glance(holders=(ContextHolder(owner=A, pid=1), ContextHolder(owner=B, pid=2), ContextHolder(owner=B, pid=3)))
    found = over_ten_seconds(look)
    assert found[B, EnergyUse.ACTIVE] == pytest.approx(2 * found[A, EnergyUse.ACTIVE], abs=2)
    assert methods(look)[A] == (ShareMethod.EQUAL_SHARE, ShareConfidence.LOW)


def test_under_mps_ratios_are_not_believed_and_the_server_is_charged_nothing_active():
    server = UsageOwner(kind=UsageOwnerKind.UNIT, unit="mps.service")
    look = glance(
        holders=(
            ContextHolder(owner=server, pid=9, sm_ratio=0.8, mps_server=True),
            ContextHolder(owner=A, pid=1, sm_ratio=0.7),
            ContextHolder(owner=B, pid=2, sm_ratio=0.1),
        )
    )
    found = over_ten_seconds(look)
    assert found[A, EnergyUse.ACTIVE] == found[B, EnergyUse.ACTIVE] == 2_000_000
    assert (server, EnergyUse.ACTIVE) not in found
    assert methods(look)[A] == (ShareMethod.EQUAL_SHARE, ShareConfidence.LOW)


def test_clients_of_mps_are_weighed_by_the_shares_that_they_are_held_to():
    server = UsageOwner(kind=UsageOwnerKind.UNIT, unit="mps.service")
    holders = (
        ContextHolder(owner=server, pid=9, mps_server=True),
        ContextHolder(owner=A, pid=1),
        ContextHolder(owner=A, pid=3),
        ContextHolder(owner=B, pid=2),
    )
    found = over_ten_seconds(
        glance(holders=holders, claims=(DeviceClaim(owner=A, shares=750), DeviceClaim(owner=B, shares=250)))
    )
    assert found[A, EnergyUse.ACTIVE] == pytest.approx(3 * found[B, EnergyUse.ACTIVE], abs=3)
    # Of whom no share is known, every context counts the same.
    found = over_ten_seconds(glance(holders=holders, claims=(DeviceClaim(owner=A, shares=750),)))
    assert found[A, EnergyUse.ACTIVE] == pytest.approx(2 * found[B, EnergyUse.ACTIVE], abs=3)


def test_replicas_of_a_shared_device_weigh_its_bare_idle():
    look = glance(claims=(DeviceClaim(owner=A, shares=3), DeviceClaim(owner=B)), utilization=0.0)
    found = over_ten_seconds(look, energy_mj=600_000)
    assert (found[A, EnergyUse.BARE_IDLE], found[B, EnergyUse.BARE_IDLE]) == (450_000, 150_000)


THREE_AND_ONE = (
    SliceActivity(gpu_instance_id=2, sm_fraction=3 / 7, activity=0.5),
    SliceActivity(gpu_instance_id=9, sm_fraction=1 / 7, activity=0.5),
)
ON_BOTH = (ContextHolder(owner=A, pid=1, gpu_instance_id=2), ContextHolder(owner=B, pid=2, gpu_instance_id=9))
BOTH_HELD = (DeviceClaim(owner=A, gpu_instance_id=2), DeviceClaim(owner=B, gpu_instance_id=9))


def test_mig_goes_by_slice_times_activity_and_a_small_slice_is_small():
    look = glance(slices=THREE_AND_ONE, holders=ON_BOTH, claims=BOTH_HELD)
    found = over_ten_seconds(look)
    assert (found[A, EnergyUse.ACTIVE], found[B, EnergyUse.ACTIVE]) == (3_000_000, 1_000_000)
    assert methods(look)[A] == (ShareMethod.MIG_ACTIVITY, ShareConfidence.MEDIUM)
    # The three slices that nobody holds are the node's.
    assert found[UNALLOCATED, EnergyUse.BARE_IDLE] == pytest.approx(600_000 * 3 / 7, abs=1)
    assert found[A, EnergyUse.BARE_IDLE] == pytest.approx(600_000 * 3 / 7, abs=1)


def test_without_activity_a_slice_weighs_its_size():
    slices = (THREE_AND_ONE[0], replace(THREE_AND_ONE[1], activity=None))
    look = glance(slices=slices, holders=ON_BOTH)
    assert over_ten_seconds(look)[A, EnergyUse.ACTIVE] == 3_000_000
    assert methods(look)[B] == (ShareMethod.MIG_SLICE, ShareConfidence.LOW)


def test_an_idle_slice_is_charged_no_activity_and_a_reserved_one_its_part_of_the_board():
    slices = (THREE_AND_ONE[0], replace(THREE_AND_ONE[1], activity=0.0))
    look = glance(slices=slices, holders=ON_BOTH[:1], claims=BOTH_HELD)
    found = over_ten_seconds(look)
    assert (B, EnergyUse.ACTIVE) not in found
    assert (B, EnergyUse.CONTEXT_IDLE) not in found
    assert found[B, EnergyUse.BARE_IDLE] == pytest.approx(600_000 / 7, abs=1)


def test_processes_that_cannot_be_placed_are_only_counted():
    holders = (replace(ON_BOTH[0], gpu_instance_id=None), replace(ON_BOTH[1], gpu_instance_id=None))
    assert methods(glance(slices=THREE_AND_ONE, holders=holders))[A] == (ShareMethod.EQUAL_SHARE, ShareConfidence.LOW)


def test_who_died_before_the_second_look_is_charged_half_a_presence():
    before = glance(holders=(ContextHolder(owner=A, pid=1), ContextHolder(owner=B, pid=2)))
    now = glance(holders=(ContextHolder(owner=A, pid=1),))
    found = over_ten_seconds(before, now)
    assert found[A, EnergyUse.ACTIVE] == pytest.approx(2 * found[B, EnergyUse.ACTIVE], abs=2)
    alone = over_ten_seconds(glance(holders=(ContextHolder(owner=B, pid=2),)), glance(holders=()))
    assert alone[B, EnergyUse.ACTIVE] == 4_200_000
    assert alone[B, EnergyUse.CONTEXT_IDLE] == 200_000


def test_where_processes_are_not_told_allocations_stand_in():
    look = glance(holders=None, claims=(DeviceClaim(owner=A), DeviceClaim(owner=B)))
    found = over_ten_seconds(look)
    assert found[A, EnergyUse.ACTIVE] == found[B, EnergyUse.ACTIVE] == 2_200_000
    assert methods(look)[A] == (ShareMethod.EQUAL_SHARE, ShareConfidence.LOW)


def test_a_long_gap_lowers_confidence():
    look = glance(holders=(ContextHolder(owner=A, pid=1),))
    (share,) = [
        share
        for share in split_energy(10**9, (look, replace(look, monotonic_ns=3600 * SECOND)), IDLE)
        if share.part is EnergyUse.ACTIVE
    ]
    assert (share.method, share.confidence) == (ShareMethod.EXCLUSIVE, ShareConfidence.MEDIUM)


def test_processes_of_one_owner_are_alone_together_and_told_apart_by_ratio():
    first, second = replace(A, pid=1), replace(A, pid=2)
    look = glance(
        holders=(ContextHolder(owner=first, pid=1, sm_ratio=0.3), ContextHolder(owner=second, pid=2, sm_ratio=0.1))
    )
    found = over_ten_seconds(look)
    assert (found[first, EnergyUse.ACTIVE], found[second, EnergyUse.ACTIVE]) == (3_000_000, 1_000_000)
    assert found[first, EnergyUse.CONTEXT_IDLE] == found[second, EnergyUse.CONTEXT_IDLE] == 200_000
    assert methods(look) == dict.fromkeys((first, second), (ShareMethod.EXCLUSIVE, ShareConfidence.HIGH))
    assert methods(look, part=EnergyUse.CONTEXT_IDLE)[first] == (ShareMethod.EXCLUSIVE, ShareConfidence.HIGH)


def test_an_owner_who_is_only_inferred_is_trusted_less():
    look = glance(holders=(ContextHolder(owner=A, pid=1, inferred=True),))
    assert methods(look) == {A: (ShareMethod.EXCLUSIVE, ShareConfidence.MEDIUM)}
    assert methods(look, part=EnergyUse.CONTEXT_IDLE) == {A: (ShareMethod.EXCLUSIVE, ShareConfidence.MEDIUM)}


def test_looks_weigh_by_the_time_between_them():
    """One second of A's and nine of B's, in one interval."""
    alone = [
        glance(monotonic_ns=at_s * SECOND, holders=(ContextHolder(owner=one, pid=1),), claims=(DeviceClaim(owner=one),))
        for at_s, one in ((0, A), (1, A), (1, B), (10, B))
    ]
    found = {}
    for share in split_energy(ENERGY_MJ, alone, IDLE):
        found[share.owner, share.part] = found.get((share.owner, share.part), 0) + share.energy_mj
    assert (found[A, EnergyUse.BARE_IDLE], found[B, EnergyUse.BARE_IDLE]) == (60_000, 540_000)
    assert (found[A, EnergyUse.CONTEXT_IDLE], found[B, EnergyUse.CONTEXT_IDLE]) == (40_000, 360_000)
    assert (found[A, EnergyUse.ACTIVE], found[B, EnergyUse.ACTIVE]) == (400_000, 3_600_000)


def test_less_energy_than_idle_power_is_bare_idle_first():
    look = glance(holders=(ContextHolder(owner=A, pid=1),), claims=(DeviceClaim(owner=A),))
    assert over_ten_seconds(look, energy_mj=500_000) == {(A, EnergyUse.BARE_IDLE): 500_000}
    found = over_ten_seconds(look, energy_mj=700_000)
    assert found == {(A, EnergyUse.BARE_IDLE): 600_000, (A, EnergyUse.CONTEXT_IDLE): 100_000}
    assert over_ten_seconds(look, energy_mj=0) == {}
