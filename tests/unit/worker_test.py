"""The driver's worker with real processes: hung, killed, stopped, babbling, unending; the others are read on."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.waiting import poll_until
from tests.worker_rig import DEADLINES, LONG_S, Rig, Scene, rigs_in

from eelgrid_agent.devices.port import DeviceEventKind, DeviceInUse, DeviceTimeout, NotSupported, UnknownGpu
from eelgrid_agent.devices.process.remote_device import RemoteDevice
from eelgrid_agent.devices.process.supervisor import DriverProcess, RequestOutcome
from eelgrid_agent.devices.process.watchdog import WatchdogLimits
from eelgrid_protos.messages import Reading


@pytest.fixture
def rig_of(tmp_path):
    with rigs_in(tmp_path) as make:
        yield make


@pytest.fixture(scope="module")
def steady(tmp_path_factory):
    """A child that nobody harms."""
    rig = Rig(tmp_path_factory.mktemp("steady") / "scene", 8)
    yield rig
    assert rig.remote.starts_total == 1
    rig.remote.close()


def test_a_tick_of_eight_devices_is_one_round_trip_and_the_driver_s_time_is_counted(steady):
    rig = steady
    before = {call: count for call, count, *_ in rig.remote.latencies}
    requests = rig.remote._supervisor._main._request
    assert rig.silent() == []
    assert rig.remote._supervisor._main._request == requests + 1
    counts = {call: count for call, count, *_ in rig.remote.latencies}
    assert counts["read"] == before.get("read", 0) + 8
    assert rig.remote.read(rig.uuids[3]).values[Reading.POWER_LIMIT_W] == 700.0
    assert rig.remote.driver_version() == "580.95.05"
    assert (rig.remote.starts_total, rig.remote.hangs_total, rig.remote.hung_gpus) == (1, 0, ())
    with pytest.raises(UnknownGpu, match="GPU-none"):
        rig.remote.read("GPU-none")


def test_a_child_has_one_thread_its_socket_its_board_and_nothing_of_grpc(steady):
    (child,) = steady.remote.children
    status = dict(line.split(":", 1) for line in Path(f"/proc/{child}/status").read_text().splitlines())
    assert status["Threads"].strip() == "1"
    opened = [str(fd.readlink()) for fd in Path(f"/proc/{child}/fd").iterdir() if int(fd.name) > 2]
    assert sum(target.startswith("socket:") for target in opened) == 1
    assert all(target.startswith(("socket:", "/memfd:eelgrid-board")) for target in opened)
    loaded = Path(f"/proc/{child}/maps").read_text()
    assert "/grpc/" not in loaded
    assert "/google/" not in loaded
    assert int(status["VmRSS"].split()[0]) < 40_000, "kB, with the simulation"


def test_a_device_that_hangs_for_ever_is_alone_in_it_and_comes_back_through_a_probe(rig_of):
    rig = rig_of(3)
    before = rig.remote.gpus()
    energy_j = rig.remote.read(rig.uuids[2]).energy_counter_j
    rig.hang(1)
    began_s = time.monotonic()
    assert rig.silent() == [1], "in the very look in which it hung"
    assert rig.remote.hung_gpus == (rig.uuids[1],)
    assert rig.remote.starts_total == 2
    quick_s = time.monotonic()
    assert rig.silent() == [1]
    assert time.monotonic() - quick_s < 0.5 < quick_s - began_s, "it is asked no more"
    assert rig.remote.read(rig.uuids[2]).energy_counter_j >= energy_j
    assert rig.remote.gpus() == before, "it stays listed"
    with pytest.raises(DeviceTimeout, match="probe"):
        rig.remote.processes(rig.uuids[1])
    poll_until(lambda: rig.silent() == [1] and rig.remote.hangs_total >= 2)
    assert rig.silent() == [1], "the probe hung too"
    rig.say()
    poll_until(lambda: rig.silent() == [])
    assert rig.remote.hung_gpus == ()
    assert rig.remote.gpus() == before


def test_a_device_that_hangs_in_a_listing_is_found_there(rig_of):
    rig = rig_of(3)
    rig.hang(0)
    before = [gpu.uuid for gpu in rig.remote.gpus()]
    assert before == rig.uuids
    assert rig.remote.hung_gpus == (rig.uuids[0],)
    assert rig.silent() == [0]


def test_a_child_that_is_killed_is_replaced_within_the_call(rig_of):
    rig = rig_of()
    (child,) = rig.remote.children
    os.kill(child, signal.SIGKILL)
    assert rig.silent() == []
    assert rig.remote.children != (child,)
    assert (rig.remote.hung_gpus, rig.remote.starts_total) == ((), 2)


def test_a_device_whose_call_kills_the_child_is_set_apart(rig_of):
    rig = rig_of(3)
    rig.hang(1, stall="abort")
    assert rig.silent() == [1]
    assert rig.remote.hung_gpus == (rig.uuids[1],)


def test_a_child_that_is_stopped_is_replaced_and_no_device_is_blamed(rig_of):
    rig = rig_of()
    (child,) = rig.remote.children
    os.kill(child, signal.SIGSTOP)
    assert rig.silent() == []
    assert rig.remote.hung_gpus == ()
    assert not Path(f"/proc/{child}").exists()


def test_a_child_that_babbles_is_replaced(rig_of):
    rig = rig_of()
    rig.hang(0, stall="babble")
    rig.silent()
    assert rig.remote.hangs_total == 1
    rig.scene.say()
    poll_until(lambda: rig.silent() == [])


def test_a_child_that_is_sent_nonsense_ends(tmp_path):
    Scene(tmp_path / "scene", 1)
    for junk in (b"\xff" * 64, b"\x02\x00\x00\x00{}", b'\x0b\x00\x00\x00[1,["gpus"]]'):
        child = DriverProcess("simulated", str(tmp_path / "scene"), (), DEADLINES)
        child.send_request([("gpus",)])
        assert child.wait_reply(time.monotonic() + LONG_S).outcome is RequestOutcome.DONE
        child._socket.sendall(junk)
        poll_until(child.has_ended)
        assert child._process.returncode == 3
        child.send_request([("gpus",)])
        assert child.wait_reply(time.monotonic() + 1.0).outcome is RequestOutcome.DIED
        assert child.kill()


def test_a_slow_device_is_late_for_one_look_and_nothing_is_killed(rig_of):
    rig = rig_of(2)
    rig.hang(1, stall=0.1)
    assert rig.silent(0.05) == [1], "what was answered in time is not lost"
    assert rig.silent(5.0) == [1], "the driver itself says that it timed out"
    assert (rig.remote.starts_total, rig.remote.hangs_total) == (1, 0)


def test_a_child_ends_with_its_parent(tmp_path):
    Scene(tmp_path / "scene", 1)
    code = (
        "import sys, time\nfrom eelgrid_agent.devices.process.remote_device import RemoteDevice\n"
        "remote = RemoteDevice('simulated', sys.argv[1])\nremote.gpus()\n"
        "print(remote.children[0], flush=True)\ntime.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "scene")], stdout=subprocess.PIPE, text=True)
    with parent:
        child = int(parent.stdout.readline())
        assert Path(f"/proc/{child}").exists()
        parent.kill()
    poll_until(
        lambda: not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text().split()[2],
    )


def test_the_terminal_s_interrupt_is_not_the_child_s_and_sigterm_ends_it(rig_of):
    rig = rig_of(1)
    (child,) = rig.remote.children
    os.kill(child, signal.SIGINT)
    assert rig.silent() == []
    assert rig.remote.children == (child,)
    os.kill(child, signal.SIGTERM)
    poll_until(lambda: "Z" in Path(f"/proc/{child}/stat").read_text().split()[2])
    assert rig.silent() == []


def test_children_that_cannot_be_ended_are_left_behind_and_bounded(rig_of):
    limits = WatchdogLimits(
        probe_first_s=60.0, probe_most_s=60.0, restart_first_s=0.0, left_behind_most=2, left_behind_for_probes=1
    )
    rig = rig_of(3, limits=limits, kill=lambda pid, number: None)
    first = rig.remote.children
    rig.hang(0)
    assert rig.silent() == [0]
    second = rig.remote.children
    assert rig.remote.unkillable_count == 1
    with pytest.raises(DeviceInUse, match=str(first[0])):
        rig.remote.release_sessions()
    rig.hang(0, 1)
    assert rig.silent(5.0) == [0, 1] or rig.remote.unkillable_count == 2
    assert rig.remote.unkillable_count == 2
    with pytest.raises(DeviceTimeout, match="reboot the node"):
        rig.remote.topology()
    rig.scene.say()
    for pid in first + second:
        os.kill(pid, signal.SIGKILL)
    poll_until(lambda: rig.silent() == [])
    assert rig.remote.unkillable_count == 0


def test_a_driver_that_never_opens_is_started_ever_later(tmp_path):
    Scene(tmp_path / "scene", 1, opening="abort")
    remote = RemoteDevice(
        "simulated", str(tmp_path / "scene"), deadlines=DEADLINES, limits=WatchdogLimits(restart_first_s=30.0)
    )
    try:
        # A caller that comes while the first start is tried is told so; all later ones, when the next start is.
        deadline_s = time.monotonic() + 25.0
        told = ""
        while "started again in" not in told:
            assert time.monotonic() < deadline_s, told
            with pytest.raises(DeviceTimeout) as refused:
                remote.gpus()
            told = str(refused.value)
        assert remote.starts_total == 2
        began_s = time.monotonic()
        for _ in range(50):
            assert isinstance(remote.call_batch([("gpus",)])[0], DeviceTimeout)
        assert remote.starts_total == 2
        assert time.monotonic() - began_s < 0.5
    finally:
        remote.close()


def test_a_flood_of_callers_is_answered_in_turn(steady):
    rig = steady
    with ThreadPoolExecutor(8) as pool:
        looks = list(pool.map(lambda number: rig.remote.read(rig.uuids[number % 2]), range(400)))
    assert all(look.values[Reading.POWER_LIMIT_W] == 700.0 for look in looks)


def test_release_lets_the_session_go_and_the_next_call_opens_it_again(steady):
    steady.remote.release_sessions()
    assert steady.silent() == []


def test_an_order_that_the_simulation_does_not_know_is_refused(steady):
    with pytest.raises(NotSupported, match="scene"):
        steady.remote.order_simulation("dance")


def test_a_slow_look_is_one_round_trip_and_leaves_out_what_hangs(rig_of):
    rig = rig_of(2)
    rig.hang(1)
    rig.silent()
    look = rig.remote.read_extended(rig.uuids)
    assert rig.uuids[1] not in look.gpus
    assert [event.kind for event in look.events] == [DeviceEventKind.HUNG]
