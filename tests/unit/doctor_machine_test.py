"""Every finding of eelctl doctor about a machine, and the looks that they come from."""

import os
import socket
import time
from pathlib import Path

import pytest

from eelgrid_controller.cli import doctor_machine as checks
from eelgrid_controller.cli import doctor_machine as reading
from eelgrid_controller.cli.doctor_machine import (
    DaemonPort,
    DriverAnswer,
    Finding,
    FindingStatus,
    FolderState,
    KubeletSockets,
    PortState,
    ProcessRights,
    exit_code,
    join_names,
    report_failure,
    report_ok,
    report_skipped,
    report_warning,
)

OK, WARN, FAIL, SKIPPED = FindingStatus.OK, FindingStatus.WARN, FindingStatus.FAIL, FindingStatus.SKIPPED
GIB = 1024**3


def test_only_a_failure_fails():
    fine = [report_ok("a", "x"), report_warning("b", "x", "y"), report_skipped("c", "x", "y")]
    assert exit_code(fine) == 0
    assert exit_code([*fine, report_failure("d", "x", "y")]) == 1
    assert join_names("abcde") == "a, b, c and 2 more"
    assert report_failure("d", "two\n  lines", "z").what == "two lines"


@pytest.mark.parametrize(("status", "remedy"), [(OK, "do"), (FAIL, ""), (WARN, ""), (SKIPPED, "")])
def test_what_is_not_ok_says_what_to_do(status, remedy):
    with pytest.raises(AssertionError):
        Finding("check", status, "what", remedy)


@pytest.mark.parametrize(
    ("version", "status"), [((3, 10, 9), FAIL), ((3, 11, 0), OK), ((3, 13, 5), OK), ((3, 14, 0), FAIL)]
)
def test_python(version, status):
    assert checks.check_python(version).status is status


LINES = (
    "grpcio<2,>=1.76",
    "psutil>=6; extra == 'agent'",
    'numpy>=1.26 ; extra == "controller"',
    "attrs; extra == 'agent'",
)


def test_requirements_of_an_extra_are_its_own_and_everybodys():
    assert checks.parse_requirements(LINES, "agent") == {"grpcio": (1, 76), "psutil": (6,), "attrs": ()}
    assert checks.parse_requirements(LINES, "controller") == {"grpcio": (1, 76), "numpy": (1, 26)}


@pytest.mark.parametrize(
    ("extra", "present", "status", "said"),
    [
        ("agent", {"grpcio": "1.76.0", "psutil": "7.0", "attrs": "1"}, OK, "3 packages"),
        ("agent", {"grpcio": "1.76.0", "psutil": None, "attrs": "1"}, WARN, "lacks psutil"),
        ("agent", {"grpcio": "1.9.0", "psutil": "7.0", "attrs": "1"}, FAIL, "too old: grpcio 1.9.0"),
        ("controller", {"grpcio": "1.80", "numpy": None}, FAIL, "lacks numpy"),
    ],
)
def test_packages(extra, present, status, said):
    found = checks.check_packages(extra, checks.parse_requirements(LINES, extra), present)
    assert (found.status, found.what) == (status, said)


def test_packages_of_a_folder_are_not_known():
    assert checks.check_packages("agent", {}, {}).status is SKIPPED


@pytest.mark.parametrize(
    ("answer", "on_bus", "status", "said"),
    [
        (DriverAnswer("", version="580.1", devices=2, took_s=0.1), 2, OK, "2 GPUs, driver 580.1"),
        (DriverAnswer("", version="580.1", devices=2, took_s=0.1), None, OK, "2 GPUs"),
        (DriverAnswer("", version="580.1", devices=1, took_s=0.1), 2, FAIL, "but 2 on the bus"),
        (DriverAnswer("", version="580.1", devices=2, took_s=4.0), 2, WARN, "answered in 4.0 s"),
        (DriverAnswer("hung", took_s=10.0), 8, FAIL, "did not answer in 10 s"),
        (DriverAnswer("hung", took_s=10.0), None, FAIL, "did not answer in 10 s"),
        (DriverAnswer("binding"), 1, FAIL, "nvidia-ml-py is missing"),
        (DriverAnswer("binding"), 0, SKIPPED, "nvidia-ml-py is missing"),
        (DriverAnswer("library", detail="Library Not Found"), 1, FAIL, "1 NVIDIA GPU on the bus"),
        (DriverAnswer("library", detail="Library Not Found"), 0, SKIPPED, "no NVIDIA GPU"),
        (DriverAnswer("driver", detail="Driver Not Loaded"), 1, FAIL, "Driver Not Loaded"),
        (DriverAnswer("error", detail="Unknown Error"), 0, FAIL, "Unknown Error"),
    ],
)
def test_nvml(answer, on_bus, status, said):
    found = checks.check_nvml(answer, on_bus)
    assert found.status is status
    assert said in found.what


@pytest.mark.parametrize(
    ("version", "status"), [("", SKIPPED), ("418.67", FAIL), ("470.82.01", WARN), ("525.60.13", OK), ("610.1", OK)]
)
def test_driver(version, status):
    assert checks.check_driver(version).status is status


@pytest.mark.parametrize(
    ("found", "statuses"),
    [
        (ProcessRights(True, True, True, True), [OK, OK]),
        (ProcessRights(True, True, None, None), [OK, SKIPPED]),
        (ProcessRights(False, False, True, True), [WARN, OK]),
        (ProcessRights(False, False, False, True), [WARN, WARN]),
        (ProcessRights(False, False, False, False), [WARN, WARN]),
        (ProcessRights(True, True, True, True, ("/proc/a",)), [OK, OK, FAIL]),
    ],
)
def test_rights(found, statuses):
    findings = checks.check_rights(found)
    assert [one.status for one in findings] == statuses
    if found.missing_nodes:
        assert "nvidia-modprobe -f /proc/a" in findings[-1].remedy


@pytest.mark.parametrize(
    ("exists", "writable", "here", "status"),
    [
        (True, True, True, OK),
        (False, True, True, OK),
        (False, True, False, SKIPPED),
        (True, False, False, WARN),
        (True, False, True, FAIL),
    ],
)
def test_a_folder(exists, writable, here, status):
    assert checks.check_folder("data", FolderState("/d", exists, writable), "--data", here=here).status is status


@pytest.mark.parametrize(("free", "status"), [(10**8, FAIL), (GIB, WARN), (9 * GIB, OK), (None, SKIPPED)])
def test_disk_room(free, status):
    assert checks.check_disk_room("disk", FolderState("/d", True, True, free, 100 * GIB)).status is status


@pytest.mark.parametrize(("synchronised", "status"), [(True, OK), (False, WARN), (None, SKIPPED)])
def test_the_clock_by_itself(synchronised, status):
    assert checks.check_clock_synchronised(synchronised).status is status


@pytest.mark.parametrize(
    ("ahead_s", "within_s", "status", "said"),
    [
        (0.3, 0.1, OK, "within 0.3 s"),
        (-3.0, 0.5, WARN, "3 s behind"),
        (3.0, 2.0, OK, "within 3.0 s"),
        (90.0, 1.0, FAIL, "90 s ahead of"),
    ],
)
def test_clocks_that_differ(ahead_s, within_s, status, said):
    found = checks.check_clocks_agree("controller's", ahead_s, within_s)
    assert found.status is status
    assert said in found.what


def test_ports():
    states = {state: DaemonPort(f"h:{i}", "p", "--listen", state) for i, state in enumerate(PortState)}
    assert [one.status for one in checks.check_ports(states.values())] == [FAIL, WARN, OK]
    (well,) = checks.check_ports((states[PortState.FREE], states[PortState.OURS]))
    assert well.what == "h:0 free (p), h:1 answers (p)"
    assert checks.check_ports(()) == ()


@pytest.mark.parametrize(
    ("found", "status"),
    [
        (KubeletSockets(False, {}), SKIPPED),
        (KubeletSockets(True, {"/a": True, "/b": True}), OK),
        (KubeletSockets(True, {"/a": None, "/b": True}), WARN),
        (KubeletSockets(True, {"/a": None, "/b": False}), FAIL),
    ],
)
def test_kubelet(found, status):
    assert checks.check_kubelet(found).status is status


def test_a_driver_that_hangs_is_left_behind(monkeypatch):
    monkeypatch.setattr(reading, "_STARTING_S", 0.0)
    begin_s = time.monotonic()
    answer = reading.query_driver(0.2, "import time; time.sleep(60)")
    assert answer.problem == "hung"
    assert time.monotonic() - begin_s < 30.0


def test_what_the_child_says_is_its_last_line():
    said = """print("noise"); print('{"problem": "", "version": "580.1", "devices": 3, "took_s": 0.5}')"""
    assert reading.query_driver(30.0, said) == DriverAnswer("", version="580.1", devices=3, took_s=0.5)
    assert reading.query_driver(30.0, "raise SystemExit(3)").problem == "error"
    assert reading.query_driver(30.0).problem in {"", "library", "driver", "error"}


def test_gpus_on_the_bus(tmp_path):
    for name, vendor, kind in (("a", "0x10de", "0x030200"), ("b", "0x10de", "0x040300"), ("c", "0x8086", "0x030000")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(vendor + "\n")
        (tmp_path / name / "class").write_text(kind + "\n")
    assert reading.count_bus_gpus(tmp_path) == 1
    assert reading.count_bus_gpus(tmp_path / "none") is None


def test_rights_are_read_from_the_kernels_files(tmp_path):
    proc, dev = tmp_path / "proc", tmp_path / "dev"
    capabilities = proc / "driver/nvidia/capabilities"
    (proc / "self").mkdir(parents=True)
    (proc / "self/status").write_text("Name:\tx\nCapEff:\t0000000000200000\n")
    assert reading.read_rights(proc, dev) == ProcessRights(os.geteuid() == 0, True, None, None)
    for minor, place in ((3, "gpu0/mig/gi1"), (4, "gpu0/mig/gi1/ci0")):
        (capabilities / place).mkdir(parents=True)
        (capabilities / place / "access").write_text(f"DeviceFileMinor: {minor}\nDeviceFileMode: 292\n")
    (capabilities / "mig").mkdir()
    (capabilities / "mig/monitor").write_text("")
    (dev / "nvidia-caps").mkdir(parents=True)
    (dev / "nvidia-caps/nvidia-cap3").write_text("")
    found = reading.read_rights(proc, dev)
    assert found.missing_nodes == (str(capabilities / "gpu0/mig/gi1/ci0/access"),)
    assert (found.may_configure, found.may_monitor) == (False, True)


def test_the_state_folder_is_the_agents_own():
    assert str(reading.find_state_folder({"STATE_DIRECTORY": "/s:/t"}, is_root=True)) == "/s"
    assert str(reading.find_state_folder({}, is_root=True)) == "/var/lib/eelgrid"
    assert str(reading.find_state_folder({"HOME": "/h"}, is_root=False)) == "/h/.local/state/eelgrid"


def test_a_folder_is_asked_and_not_made(tmp_path):
    found = reading.read_folder(tmp_path / "a" / "b")
    assert (found.exists, found.writable) == (False, True)
    assert found.free_bytes
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    assert not reading.read_folder(tmp_path / "file" / "b").writable


def test_ports_and_sockets(short_path):
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        address = f"127.0.0.1:{held.getsockname()[1]}"
        assert reading.port_is_free(address) is False
    assert reading.port_is_free("127.0.0.1:0") is True
    (short_path / "pod-resources").mkdir()
    path = short_path / "pod-resources/kubelet.sock"
    with socket.socket(socket.AF_UNIX) as held:
        held.bind(str(path))
        assert reading.read_kubelet_sockets(short_path).answers[str(path)] is False
        held.listen()
        answers = reading.read_kubelet_sockets(short_path).answers
    assert list(answers.values()) == [True, None]
    assert not reading.read_kubelet_sockets(short_path / "none").folder_exists


@pytest.mark.parametrize(("said", "found"), [("yes", True), ("no", False), ("what", None)])
def test_timedatectl(tmp_path, said, found):
    program = tmp_path / "timedatectl"
    program.write_text(f"#!/bin/sh\necho {said}\n")
    program.chmod(0o755)
    assert reading.read_clock_synchronised(str(program))[0] is found
    assert reading.read_clock_synchronised(str(tmp_path / "none")) == (None, f"{tmp_path / 'none'} is not installed")


@pytest.mark.parametrize(
    ("cgroup", "is_root", "status", "said"),
    [
        (Path("/sys/fs/cgroup/user"), False, FindingStatus.OK, "below /sys/fs/cgroup/user"),
        (None, False, FindingStatus.SKIPPED, "counted, not limited"),
        (Path("/sys/fs/cgroup/user"), True, FindingStatus.SKIPPED, "root runs no jobs"),
    ],
)
def test_how_jobs_would_be_limited(cgroup, is_root, status, said):
    finding = checks.check_processes(cgroup, is_root=is_root)
    assert finding.status is status
    assert said in finding.what


def test_limits_that_a_delegated_cgroup_lacks_are_named(tmp_path):
    (tmp_path / "cgroup.controllers").write_text("cpuset memory pids\n")
    finding = checks.check_processes(tmp_path, reading.read_cgroup_controllers(tmp_path), is_root=False)
    assert finding.status is WARN
    assert "no limits of cpu" in finding.what
    assert reading.read_cgroup_controllers(None) == ()


def test_a_cgroup_is_delegated_where_this_process_may_make_others(tmp_path):
    own = tmp_path / "own"
    own.write_text("12:memory:/x\n0::/user/box\n")
    assert reading.find_own_cgroup(tmp_path, own) is None
    folder = tmp_path / "user" / "box"
    folder.mkdir(parents=True)
    for name in ("cgroup.kill", "cgroup.procs"):
        (folder / name).touch()
    assert reading.find_own_cgroup(tmp_path, own) == folder
    own.write_text("0::/\n")
    assert reading.find_own_cgroup(tmp_path, own) is None
