"""The table of leases against a slow twin that marks every memory slice of every GPU, in any order of what engines ask."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from eelgrid_agent.enforce.lease_table import (
    LEASE_JOURNAL,
    LEASES_MOST,
    DeviceLeased,
    LeaseDevice,
    LeaseHolder,
    LeasesFull,
    LeaseTable,
)

SLICES = 8
# Starts and sizes as MIG has them, and one that overlaps most others.
PLACES = [(0, 0), (0, 1), (1, 1), (2, 1), (6, 1), (0, 2), (2, 2), (4, 2), (0, 4), (4, 4), (0, 8)]


@st.composite
def devices(draw):
    gpu, (start, size) = draw(st.sampled_from("ab")), draw(st.sampled_from(PLACES))
    if size == 0:
        return LeaseDevice(gpu_uuid=gpu, uuid=draw(st.sampled_from(["", gpu])))
    # Two compute instances of one GPU instance, or one that is to be made.
    part = draw(st.sampled_from(["", "x", "y"]))
    return LeaseDevice(gpu_uuid=gpu, uuid=part and f"{gpu}{start}-{size}{part}", start=start, size=size)


holders = st.builds(LeaseHolder, st.sampled_from(["slurm", "local", "kubernetes"]), st.sampled_from("12"))


class Twin:
    """Knows for each memory slice who is on it, by which device; thinks of nothing at once."""

    def __init__(self):
        self.held = []

    def slices(self, device):
        places = range(SLICES) if device.size == 0 else range(device.start, device.start + device.size)
        return {(device.gpu_uuid, number) for number in places}

    def conflict(self, holder, device, *, is_shared):
        for other, theirs, theirs_shared in self.held:
            if other == holder or not self.slices(theirs) & self.slices(device):
                continue
            is_one_instance = theirs.size and (theirs.start, theirs.size) == (device.start, device.size)
            if is_one_instance and theirs.uuid and device.uuid and theirs.uuid != device.uuid:
                continue
            if is_shared and theirs_shared and other.engine == holder.engine:
                continue
            return True
        return False

    def take(self, holder, device, *, is_shared):
        span = (device.gpu_uuid, device.start, device.size)
        for one in list(self.held):
            is_span = one[0] == holder and (one[1].gpu_uuid, one[1].start, one[1].size) == span
            # A whole GPU is itself, with or without a name; what was to be made is what is there now.
            if is_span and (one[1].uuid in ("", device.uuid) or device.size == 0):
                self.held.remove(one)
        self.held.append((holder, device, is_shared))


class Leases(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.table, self.twin = LeaseTable(), Twin()

    @rule(holder=holders, wanted=st.lists(devices(), min_size=1, max_size=3), is_shared=st.booleans())
    def take(self, holder, wanted, is_shared):
        refused = any(self.twin.conflict(holder, one, is_shared=is_shared) for one in wanted)
        if refused:
            with pytest.raises(DeviceLeased, match="wait until that ends, or") as conflict:
                self.table.take(holder, wanted, since_ns=5, is_shared=is_shared)
            assert conflict.value.held.holder != holder
            return
        self.table = self.table.take(holder, wanted, since_ns=5, is_shared=is_shared)
        for device in dict.fromkeys(wanted):
            self.twin.take(holder, device, is_shared=is_shared)

    @rule(holder=holders, data=st.data())
    def release(self, holder, data):
        own = [one[1] for one in self.twin.held if one[0] == holder]
        only = data.draw(st.none() if not own else st.one_of(st.none(), st.lists(st.sampled_from(own), max_size=2)))
        self.table = self.table.release(holder, only)
        gone = own if only is None else only
        self.twin.held = [one for one in self.twin.held if not (one[0] == holder and one[1] in gone)]

    @rule(data=st.data())
    def reclaim(self, data):
        serials = [lease.serial for lease in self.table.leases]
        gone = data.draw(st.lists(st.sampled_from(serials), max_size=2)) if serials else []
        ended = [lease for lease in self.table.leases if lease.serial in gone]
        self.table = self.table.reclaim(gone)
        for lease in ended:
            self.twin.held.remove((lease.holder, lease.device, lease.is_shared))

    @rule()
    def crash(self):
        """What is written is what is read."""
        self.table = LEASE_JOURNAL.from_bytes(LEASE_JOURNAL.to_bytes(self.table))

    @invariant()
    def both_know_the_same_leases(self):
        mine = sorted((lease.holder, str(lease.device), lease.is_shared) for lease in self.table.leases)
        assert mine == sorted((holder, str(device), shared) for holder, device, shared in self.twin.held)

    @invariant()
    def no_slice_is_in_two_hands(self):
        for lease in self.table.leases:
            other = self.table.find_conflict(lease.device, lease.holder, is_shared=lease.is_shared)
            assert other is None, (lease, other)

    @invariant()
    def serials_are_new(self):
        serials = [lease.serial for lease in self.table.leases]
        assert len(set(serials)) == len(serials)
        assert max(serials, default=0) <= self.table.serial


TestLeases = Leases.TestCase


@given(devices(), devices())
def test_overlap_is_mutual(one, other):
    assert one.overlaps(other) == other.overlaps(one)


def test_who_asks_again_keeps_his_time_and_outlives_what_was_found_of_the_first():
    holder, device = LeaseHolder("slurm", "7"), LeaseDevice(gpu_uuid="a", uuid="a")
    first = LeaseTable().take(holder, [device], since_ns=10)
    again = first.take(holder, [device], since_ns=20)
    assert [lease.since_ns for lease in again.leases] == [10]
    assert again.reclaim([first.leases[0].serial]) == again
    assert again.reclaim([again.leases[0].serial]).leases == ()


def test_a_slice_that_was_to_be_made_is_the_one_that_is_there():
    holder = LeaseHolder("kubernetes", "claim d/c 1")
    planned = LeaseDevice(gpu_uuid="a", start=0, size=4)
    made = LeaseDevice(gpu_uuid="a", uuid="MIG-1", start=0, size=4)
    table = LeaseTable().take(holder, [planned], since_ns=1)
    assert table.list_protected("a") == frozenset()
    table = table.take(holder, [made], since_ns=2)
    assert [(lease.device, lease.since_ns) for lease in table.leases] == [(made, 1)]
    assert table.list_protected("a") == {"MIG-1"}


def test_the_table_is_bounded_and_a_foreign_file_is_refused():
    holder = LeaseHolder("ray", "x")
    many = [LeaseDevice(gpu_uuid=f"g{number}", uuid=f"g{number}") for number in range(LEASES_MOST)]
    table = LeaseTable().take(holder, many, since_ns=0)
    with pytest.raises(LeasesFull, match="release those whose owners have ended"):
        table.take(holder, [LeaseDevice(gpu_uuid="more", uuid="more")], since_ns=0)
    document = json.loads(LEASE_JOURNAL.to_bytes(table))
    for bad in ({"serial": -1}, {"since_ns": True}, {"boot_id": 5}, {"unknown": 1}):
        broken = {**document, "leases": [{**document["leases"][0], **bad}]}
        with pytest.raises(ValueError, match=r".+"):
            LEASE_JOURNAL.from_bytes(json.dumps(broken).encode())
    assert LEASE_JOURNAL.from_bytes(LEASE_JOURNAL.to_bytes(table)) == table
