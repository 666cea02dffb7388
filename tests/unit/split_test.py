"""One interval's joules in shares, in the cases that operators meet."""

from dataclasses import replace

import pytest

from eelgrid_agent.attribution.owner import UNALLOCATED, UNATTRIBUTED, Owner, OwnerKind
from eelgrid_agent.attribution.shares import Confidence, Method, Part
from eelgrid_agent.attribution.split import Claim, Glance, Holder, Idle, Slice, split

SECOND = 1_000_000_000
A = Owner(kind=OwnerKind.POD, namespace="n", pod="a", container="c")
B = Owner(kind=OwnerKind.POD, namespace="n", pod="b", container="c")
IDLE = Idle(bare_w=60.0, context_w=40.0, confidence=Confidence.HIGH)
# Ten seconds at 500 W: 600 J bare, 400 J of contexts, 4 kJ of work.
ENERGY_MJ = 5_000_000


def glance(**fields):
    return Glance(**{"monotonic_ns": 0, **fields})


def over_ten_seconds(before, now=None, energy_mj=ENERGY_MJ, idle=IDLE):
    now = replace(before if now is None else now, monotonic_ns=10 * SECOND)
    found = {}
    for share in split(energy_mj, (before, now), idle):
        key = (share.owner, share.part)
        found[key] = found.get(key, 0) + share.energy_mj
    return found


def methods(before, now=None, part=Part.ACTIVE):
    now = replace(before if now is None else now, monotonic_ns=10 * SECOND)
    return {
        share.owner: (share.method, share.confidence)
        for share in split(ENERGY_MJ, (before, now), IDLE)
        if share.part is part
    }


def test_one_holder_is_charged_all_of_it_in_three_parts():
    look = glance(holders=(Holder(owner=A, pid=1),), claims=(Claim(owner=A),), utilization=1.0)
    assert over_ten_seconds(look) == {
        (A, Part.BARE_IDLE): 600_000,
        (A, Part.CONTEXT_IDLE): 400_000,
        (A, Part.ACTIVE): 4_000_000,
    }
    assert methods(look) == {A: (Method.EXCLUSIVE, Confidence.HIGH)}


def test_without_an_allocation_bare_idle_is_the_nodes():
    look = glance(holders=(Holder(owner=A, pid=1),), utilization=1.0)
    assert over_ten_seconds(look) == {
        (UNALLOCATED, Part.BARE_IDLE): 600_000,
        (A, Part.CONTEXT_IDLE): 400_000,
        (A, Part.ACTIVE): 4_000_000,
    }


def test_a_held_device_that_nobody_uses_is_its_holders():
    look = glance(claims=(Claim(owner=A),), utilization=0.0)
    # All of it is idle power, whatever was learnt: nothing was open.
    assert over_ten_seconds(look, energy_mj=700_000) == {(A, Part.BARE_IDLE): 700_000}


def test_what_works_with_nobody_seen_is_named_only_where_one_holder_has_it_all():
    busy = glance(utilization=0.9)
    assert over_ten_seconds(busy)[UNATTRIBUTED, Part.ACTIVE] == 4_400_000
    held = glance(utilization=0.9, claims=(Claim(owner=A),))
    assert over_ten_seconds(held)[A, Part.ACTIVE] == 4_400_000
    assert methods(held)[A] == (Method.EXCLUSIVE, Confidence.MEDIUM)


def test_time_slicing_goes_by_sm_ratio():
    look = glance(
        holders=(Holder(owner=A, pid=1, sm_ratio=0.6), Holder(owner=B, pid=2, sm_ratio=0.2)),
        claims=(Claim(owner=A), Claim(owner=B)),
    )
    found = over_ten_seconds(look)
    assert (found[A, Part.ACTIVE], found[B, Part.ACTIVE]) == (3_000_000, 1_000_000)
    # A context costs the same whatever it does, and so does a share of the board.
    assert found[A, Part.CONTEXT_IDLE] == found[B, Part.CONTEXT_IDLE] == 200_000
    assert found[A, Part.BARE_IDLE] == found[B, Part.BARE_IDLE] == 300_000
    assert methods(look)[A] == (Method.PROCESS_SM, Confidence.MEDIUM)


def test_a_process_without_a_sample_was_idle_where_another_has_one():
    look = glance(holders=(Holder(owner=A, pid=1, sm_ratio=0.6), Holder(owner=B, pid=2)))
    assert (B, Part.ACTIVE) not in over_ten_seconds(look)
    assert methods(look)[A] == (Method.PROCESS_SM, Confidence.LOW)


def test_without_ratios_sharers_are_equal():
    look = glance(holders=(Holder(owner=A, pid=1), Holder(owner=B, pid=2), Holder(owner=B, pid=3)))
    found = over_ten_seconds(look)
    assert found[B, Part.ACTIVE] == pytest.approx(2 * found[A, Part.ACTIVE], abs=2)
    assert methods(look)[A] == (Method.EQUAL_SHARE, Confidence.LOW)


def test_under_mps_ratios_are_not_believed_and_the_server_is_charged_nothing_active():
    server = Owner(kind=OwnerKind.UNIT, unit="mps.service")
    look = glance(
        holders=(
            Holder(owner=server, pid=9, sm_ratio=0.8, mps_server=True),
            Holder(owner=A, pid=1, sm_ratio=0.7), Holder(owner=B, pid=2, sm_ratio=0.1),
        )
    )  # fmt: skip
    found = over_ten_seconds(look)
    assert found[A, Part.ACTIVE] == found[B, Part.ACTIVE] == 2_000_000
    assert (server, Part.ACTIVE) not in found
    assert methods(look)[A] == (Method.EQUAL_SHARE, Confidence.LOW)


def test_replicas_of_a_shared_device_weigh_its_bare_idle():
    look = glance(claims=(Claim(owner=A, shares=3), Claim(owner=B)), utilization=0.0)
    found = over_ten_seconds(look, energy_mj=600_000)
    assert (found[A, Part.BARE_IDLE], found[B, Part.BARE_IDLE]) == (450_000, 150_000)


THREE_AND_ONE = (
    Slice(gpu_instance_id=2, sm_fraction=3 / 7, activity=0.5),
    Slice(gpu_instance_id=9, sm_fraction=1 / 7, activity=0.5),
)
ON_BOTH = (Holder(owner=A, pid=1, gpu_instance_id=2), Holder(owner=B, pid=2, gpu_instance_id=9))
BOTH_HELD = (Claim(owner=A, gpu_instance_id=2), Claim(owner=B, gpu_instance_id=9))


def test_mig_goes_by_slice_times_activity_and_a_small_slice_is_small():
    look = glance(slices=THREE_AND_ONE, holders=ON_BOTH, claims=BOTH_HELD)
    found = over_ten_seconds(look)
    assert (found[A, Part.ACTIVE], found[B, Part.ACTIVE]) == (3_000_000, 1_000_000)
    assert methods(look)[A] == (Method.MIG_ACTIVITY, Confidence.MEDIUM)
    # The three slices that nobody holds are the node's.
    assert found[UNALLOCATED, Part.BARE_IDLE] == pytest.approx(600_000 * 3 / 7, abs=1)
    assert found[A, Part.BARE_IDLE] == pytest.approx(600_000 * 3 / 7, abs=1)


def test_without_activity_a_slice_weighs_its_size():
    slices = (THREE_AND_ONE[0], replace(THREE_AND_ONE[1], activity=None))
    look = glance(slices=slices, holders=ON_BOTH)
    assert over_ten_seconds(look)[A, Part.ACTIVE] == 3_000_000
    assert methods(look)[B] == (Method.MIG_SLICE, Confidence.LOW)


def test_an_idle_slice_is_charged_no_activity_and_a_reserved_one_its_part_of_the_board():
    slices = (THREE_AND_ONE[0], replace(THREE_AND_ONE[1], activity=0.0))
    look = glance(slices=slices, holders=ON_BOTH[:1], claims=BOTH_HELD)
    found = over_ten_seconds(look)
    assert (B, Part.ACTIVE) not in found
    assert (B, Part.CONTEXT_IDLE) not in found
    assert found[B, Part.BARE_IDLE] == pytest.approx(600_000 / 7, abs=1)


def test_processes_that_cannot_be_placed_are_only_counted():
    holders = (replace(ON_BOTH[0], gpu_instance_id=None), replace(ON_BOTH[1], gpu_instance_id=None))
    assert methods(glance(slices=THREE_AND_ONE, holders=holders))[A] == (Method.EQUAL_SHARE, Confidence.LOW)


def test_who_died_before_the_second_look_is_charged_half_a_presence():
    before = glance(holders=(Holder(owner=A, pid=1), Holder(owner=B, pid=2)))
    now = glance(holders=(Holder(owner=A, pid=1),))
    found = over_ten_seconds(before, now)
    assert found[A, Part.ACTIVE] == pytest.approx(2 * found[B, Part.ACTIVE], abs=2)
    alone = over_ten_seconds(glance(holders=(Holder(owner=B, pid=2),)), glance(holders=()))
    assert alone[B, Part.ACTIVE] == 4_200_000
    assert alone[B, Part.CONTEXT_IDLE] == 200_000


def test_where_processes_are_not_told_allocations_stand_in():
    look = glance(holders=None, claims=(Claim(owner=A), Claim(owner=B)))
    found = over_ten_seconds(look)
    assert found[A, Part.ACTIVE] == found[B, Part.ACTIVE] == 2_200_000
    assert methods(look)[A] == (Method.EQUAL_SHARE, Confidence.LOW)


def test_a_long_gap_lowers_confidence():
    look = glance(holders=(Holder(owner=A, pid=1),))
    (share,) = [
        share
        for share in split(10**9, (look, replace(look, monotonic_ns=3600 * SECOND)), IDLE)
        if share.part is Part.ACTIVE
    ]
    assert (share.method, share.confidence) == (Method.EXCLUSIVE, Confidence.MEDIUM)


def test_processes_of_one_owner_are_alone_together_and_told_apart_by_ratio():
    first, second = replace(A, pid=1), replace(A, pid=2)
    look = glance(holders=(Holder(owner=first, pid=1, sm_ratio=0.3), Holder(owner=second, pid=2, sm_ratio=0.1)))
    found = over_ten_seconds(look)
    assert (found[first, Part.ACTIVE], found[second, Part.ACTIVE]) == (3_000_000, 1_000_000)
    assert found[first, Part.CONTEXT_IDLE] == found[second, Part.CONTEXT_IDLE] == 200_000
    assert methods(look) == dict.fromkeys((first, second), (Method.EXCLUSIVE, Confidence.HIGH))
    assert methods(look, part=Part.CONTEXT_IDLE)[first] == (Method.EXCLUSIVE, Confidence.HIGH)


def test_an_owner_who_is_only_inferred_is_trusted_less():
    look = glance(holders=(Holder(owner=A, pid=1, inferred=True),))
    assert methods(look) == {A: (Method.EXCLUSIVE, Confidence.MEDIUM)}
    assert methods(look, part=Part.CONTEXT_IDLE) == {A: (Method.EXCLUSIVE, Confidence.MEDIUM)}


def test_looks_weigh_by_the_time_between_them():
    """One second of A's and nine of B's, in one interval."""
    alone = [glance(monotonic_ns=at_s * SECOND, holders=(Holder(owner=one, pid=1),), claims=(Claim(owner=one),))
             for at_s, one in ((0, A), (1, A), (1, B), (10, B))]  # fmt: skip
    found = {}
    for share in split(ENERGY_MJ, alone, IDLE):
        found[share.owner, share.part] = found.get((share.owner, share.part), 0) + share.energy_mj
    assert (found[A, Part.BARE_IDLE], found[B, Part.BARE_IDLE]) == (60_000, 540_000)
    assert (found[A, Part.CONTEXT_IDLE], found[B, Part.CONTEXT_IDLE]) == (40_000, 360_000)
    assert (found[A, Part.ACTIVE], found[B, Part.ACTIVE]) == (400_000, 3_600_000)


def test_less_energy_than_idle_power_is_bare_idle_first():
    look = glance(holders=(Holder(owner=A, pid=1),), claims=(Claim(owner=A),))
    assert over_ten_seconds(look, energy_mj=500_000) == {(A, Part.BARE_IDLE): 500_000}
    found = over_ten_seconds(look, energy_mj=700_000)
    assert found == {(A, Part.BARE_IDLE): 600_000, (A, Part.CONTEXT_IDLE): 100_000}
    assert over_ten_seconds(look, energy_mj=0) == {}
