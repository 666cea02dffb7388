"""The MIG service: an answer every time, adoption, leases, and what a boot, a driver and a reset take."""

import pytest
from bench.fault_world import CrashPoints, MemoryJournal
from bench.mig_device import MigDevice
from bench.naive_partitioner import State
from bench.node_crashes import spelled
from tests.mig_rig import FOUR, G3, G4, H100, ONE, THREE, applied, refused

from eelgrid_agent.devices.port import DriverUnavailable
from eelgrid_agent.enforce.mig.host import make_boot_key
from eelgrid_agent.enforce.mig.journal import MIG_JOURNAL
from eelgrid_agent.enforce.mig.mig_service import MigService
from eelgrid_agent.state_files import StateFile, StateUnwritable
from eelgrid_protos.messages import ApplyStatus, NodeEventKind


class Machine:
    """One GPU on which these stand, and the MIG service of its agent."""

    def __init__(self, *instances, mig_enabled=True, journal=None):
        self.device = MigDevice(H100, CrashPoints(), mig_enabled=mig_enabled)
        self.journal = journal or MemoryJournal(lambda _: None)
        self.boot = "boot-1/7"
        for instance in instances:
            self.device.stand(*instance)
        self.start()

    def start(self):
        self.service = MigService(
            self.device,
            self.device,
            self.journal,
            boot_id=lambda: self.boot,
            sleep=self.device.sleep,
            monotonic_s=lambda: self.device.now_s,
            wall_ns=lambda: 1,
        )

    def asked(self, *instances):
        return spelled(H100, "GPU-0", State(True, frozenset(instances)))

    def standing(self):
        return {(h.profile.id, h.start) for h in self.device.held.values()}

    def generations(self):
        gpus = self.service.stamp_gpus(self.device.gpus())
        return {c.uuid: c.generation for gpu in gpus for i in gpu.gpu_instances for c in i.compute_instances}

    def kinds(self):
        return [event.kind for event in self.service.drain_events()]


def test_what_is_found_at_start_is_adopted_told_with_a_generation_and_may_be_changed():
    machine = Machine(ONE, THREE)
    assert machine.service.recover() == ()
    assert machine.generations() == {"MIG-7-0": 1, "MIG-2-0": 1}
    assert applied(machine.service.apply_layout(machine.asked(FOUR)))
    assert machine.standing() == {(G4, 0)}
    assert machine.kinds() == [NodeEventKind.LAYOUT_CHANGED]


def test_an_agent_that_may_only_observe_counts_generations_and_changes_nothing():
    machine = Machine()
    machine.service.apply_layout(machine.asked(THREE))
    machine.device.remove(2)
    machine.device.stand(*ONE)
    machine.device.hook.names.clear()
    machine.start()
    machine.service.observe()
    assert machine.device.hook.names == []
    assert machine.generations() == {"MIG-7-0": 1}
    assert machine.standing() == {(ONE[0], 0)}


@pytest.mark.parametrize("boot", ["boot-2/1", "boot-1/8"], ids=["reboot", "driver loaded anew"])
def test_after_a_boot_or_a_driver_load_the_layout_is_made_again_under_another_generation(boot):
    machine = Machine()
    machine.service.apply_layout(machine.asked(THREE))
    machine.service.hold_devices({"MIG-2-0"})
    machine.device.reset()
    machine.boot = boot
    assert [applied(result) for result in machine.service.check_layouts()] == [True]
    assert machine.standing() == {(G3, 4)}
    assert machine.generations() == {"MIG-2-0": 2}
    assert NodeEventKind.SETTING_RESTORED in machine.kinds()
    # The lease was on the instance of before.
    assert applied(machine.service.apply_layout(machine.asked(FOUR)))


def test_a_reset_within_a_boot_makes_every_lease_stale_even_where_the_like_stands():
    machine = Machine()
    machine.service.apply_layout(machine.asked(THREE))
    machine.service.hold_devices({"MIG-2-0"})
    assert refused(machine.service.apply_layout(machine.asked(FOUR)), "busy")
    machine.device.reset()
    machine.device.stand(*THREE)
    assert machine.service.on_device_reset("GPU-0")
    assert machine.service.check_layouts() == ()
    assert machine.generations() == {"MIG-2-0": 2}
    assert applied(machine.service.apply_layout(machine.asked(FOUR)))


def test_a_reset_that_could_not_be_written_down_is_not_forgotten():
    machine = Machine()
    machine.service.apply_layout(machine.asked(THREE))

    def full(_):
        raise StateUnwritable("no space left; make room")

    machine.journal.hook = full
    machine.device.reset()
    assert not machine.service.on_device_reset("GPU-0")
    assert machine.service.check_layouts() == ()
    machine.kinds()
    machine.journal.hook = lambda _: None
    assert [applied(result) for result in machine.service.check_layouts()] == [True]
    # Nobody changed anything behind the agent's back: no repair is counted.
    assert NodeEventKind.SETTING_DRIFT not in machine.kinds()
    assert machine.service.executor.record("GPU-0").repairs == 0


def test_a_lease_holds_over_a_restart_and_one_that_cannot_be_written_down_is_none():
    machine = Machine(THREE)
    machine.service.recover()
    assert machine.service.hold_devices({"MIG-2-0"})
    machine.start()
    machine.service.recover()
    assert refused(machine.service.apply_layout(machine.asked(FOUR)), "busy")
    assert machine.service.hold_devices(())

    def full(_):
        raise StateUnwritable("no space left; make room")

    machine.journal.hook = full
    assert not machine.service.hold_devices({"MIG-2-0"})
    assert not machine.service.hold_devices({"MIG-2-0"})
    # Told once.
    assert machine.kinds() == [NodeEventKind.ENFORCEMENT_SUSPENDED]


def test_a_journal_that_is_none_stops_every_change_is_reported_once_and_raises_nowhere(tmp_path):
    path = tmp_path / "mig.json"
    path.write_text("{")
    machine = Machine(ONE, journal=StateFile(path, MIG_JOURNAL))
    assert machine.service.recover() == ()
    machine.service.check_layouts()
    machine.service.observe()
    assert not machine.service.hold_devices({"MIG-7-0"})
    assert not machine.service.release_device("GPU-0")
    (event,) = machine.service.drain_events()
    assert event.kind is NodeEventKind.ENFORCEMENT_SUSPENDED
    assert "mig.json" in event.detail
    result = machine.service.apply_layout(machine.asked(THREE))
    assert (result.status, result.rule) == (ApplyStatus.FAILED, "journal")
    assert machine.generations() == {"MIG-7-0": 0}
    assert machine.standing() == {(ONE[0], 0)}
    # A restart adopts what stands.
    machine.start()
    assert machine.service.recover() == ()
    assert applied(machine.service.apply_layout(machine.asked(THREE)))


def test_without_a_driver_nothing_is_done_and_nothing_raised():
    machine = Machine(ONE)

    def gone():
        raise DriverUnavailable("no driver; load it")

    listed = machine.device.gpus
    machine.device.gpus = gone
    assert machine.service.recover() == machine.service.check_layouts() == ()
    result = machine.service.apply_layout(machine.asked(THREE))
    assert (result.status, result.rule) == (ApplyStatus.FAILED, "device")
    assert not machine.service.hold_devices({"MIG-7-0"})
    machine.device.gpus = listed
    assert machine.service.check_layouts() == ()
    assert machine.generations() == {"MIG-7-0": 1}


def test_what_is_released_is_left_as_it_stands():
    machine = Machine()
    machine.service.apply_layout(machine.asked(THREE))
    assert machine.service.release_device("GPU-0")
    machine.device.remove(2)
    assert machine.service.check_layouts() == ()
    assert machine.standing() == set()


def test_since_when_instances_stand_is_a_boot_and_a_driver_load_and_never_nothing():
    assert len({make_boot_key("a", "1"), make_boot_key("a", "2"), make_boot_key("b", "1"), make_boot_key("", "")}) == 4
    assert make_boot_key("", "")
