"""Schedules of two engines on one node: nothing is held twice or leaked, and a node that is wrong is caught by the reader."""

import json

import pytest
from bench.joint_log import JointLog, read_joint_log
from bench.two_engines import open_leases, run_schedule

from eelgrid_agent.enforce.device_leases import DeviceLeases
from eelgrid_agent.enforce.lease_table import LeaseTable
from eelgrid_agent.state_files import MemoryState

SEEDS = range(5000, 5060)


def test_no_slice_is_held_twice_and_none_is_leaked():
    counts = {}
    for seed in SEEDS:
        world, problems = run_schedule(seed)
        assert problems == [], seed
        for what, count in world.counts.items():
            counts[what] = counts.get(what, 0) + count
    # The schedules are worth something: all of this happened.
    for what in ("jobs", "refused", "agent crashes", "answers lost", "boots", "layouts applied", "layouts refused"):
        assert counts[what] > 5, what


class FreeForAll(DeviceLeases):
    """Gives devices whoever has them."""

    def take_devices(self, holder, devices, **more):
        self._table = self._table.release(holder)
        others, self._table = self._table, LeaseTable(adopted_boot=self._table.adopted_boot)
        found = super().take_devices(holder, devices, **more)
        self._table = LeaseTable(
            leases=(*others.leases, *self._table.leases), serial=self._table.serial, adopted_boot=others.adopted_boot
        )
        return found


class Forgetful(DeviceLeases):
    """Trusts that a table of nothing is whole."""

    def __init__(self, disk, **more):
        del disk
        super().__init__(MemoryState(LeaseTable()), **more)
        self.finish_adoption()


class Hoarder(DeviceLeases):
    """Never takes back what an owner left."""

    def reclaim(self, serials):
        del serials
        return 0


class Blind(DeviceLeases):
    """Lets layouts change under what is leased."""

    def list_protected(self, gpu_uuid):
        del gpu_uuid
        return frozenset()


@pytest.mark.parametrize("wrong", [FreeForAll, Forgetful, Hoarder, Blind])
def test_a_node_that_is_wrong_is_caught(wrong):
    def make(disk, world):
        return wrong(disk, boot_id=f"b{world.boots}", wall_ns=lambda: int(world.now_s * 1e9))

    assert any(run_schedule(seed, make)[1] for seed in SEEDS)


def test_a_seed_brings_its_schedule_again():
    assert run_schedule(7)[0].log.lines == run_schedule(7, open_leases)[0].log.lines


def test_the_reader_counts_slices_and_nothing_else():
    log = JointLog()
    log.write("use", engine="slurm", job="1", gpu="a", slices=[0, 4])
    log.write("use", engine="local", job="2", gpu="a", slices=[4, 8])
    log.write("use", engine="local", job="3", gpu="a", slices=[3, 5])
    log.write("leave", engine="slurm", job="1", gpu="a", slices=[0, 4])
    log.write("change", engine="agent", job="layout", gpu="a", slices=[0, 3])
    log.write("quiet", leased=[["local", "3", "a", 3, 5], ["slurm", "1", "a", 0, 1]])
    found = list(read_joint_log(log.lines))
    assert found[0].startswith("line 2: ('local', '3') uses a [3, 5], which [('local', '2'), ('slurm', '1')] use")
    assert "line 5: ('a', 0) is leased to ('slurm', '1'), who does not use it: leaked" in found
    assert any("('local', '2') uses ('a', 7) without a lease" in one for one in found)
    assert all(json.loads(line)["at"] == at for at, line in enumerate(log.lines))
