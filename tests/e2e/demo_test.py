"""The demo for real, in small: separate processes, a report, and nothing left behind."""

import json
import signal
import subprocess
import sys
import time

import psutil
import pytest

pytestmark = pytest.mark.usefixtures("compiled_kernels")

SMALL = ("--nodes", "40", "--tasks", "200", "--trace", "generated", "--no-gpu", "--out", "demo")
PROMISED = {
    "trace",
    "nodes",
    "gpus",
    "tasks",
    "placed",
    "pending",
    "pending_reasons",
    "refused",
    "refused_reasons",
    "allocated_gpu_share",
    "modelled_power_w",
    "modelled_power_per_allocated_gpu_w",
    "measured_power_w",
    "measured_power_per_allocated_gpu_w",
    "decision_p50_s",
    "decision_p99_s",
    "submit_p50_s",
    "submit_p99_s",
    "agents",
    "samples_received",
    "samples_lost",
    "total_s",
    "processes",
}


@pytest.fixture
def start(tmp_path):
    """Starts the demo in a pipe; it and its children end with the test."""
    demos = []

    def begin(*arguments):
        command = [sys.executable, "-m", "eelgrid_controller.demo", *SMALL, *arguments]
        demos.append(
            psutil.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=tmp_path,
            ),
        )
        return demos[-1]

    yield begin
    for demo in demos:
        if demo.poll() is None:
            for process in (*demo.children(recursive=True), demo):
                process.kill()
        demo.communicate(timeout=10)


def finish(demo, timeout=120):
    return demo.communicate(timeout=timeout)


def children_of(demo, module, deadline_s=60.0):
    """The demo's children that run a module, once there are any."""
    until = time.monotonic() + deadline_s
    while time.monotonic() < until and demo.poll() is None:
        # By the whole argument: a child that has not begun its program yet shows the demo's own.
        found = [child for child in demo.children() if module in child.cmdline()]
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError(f"no child runs {module}: {demo.communicate(timeout=10)}")


def test_to_the_end(start, tmp_path):
    demo = start()
    (controller,) = children_of(demo, "eelgrid_controller")
    (fleet,) = children_of(demo, "eelgrid_agent")
    out, err = finish(demo)
    assert demo.returncode == 0, out + err
    summary = json.loads((tmp_path / "demo" / "summary.json").read_text())
    assert set(summary) >= PROMISED
    assert (summary["nodes"], summary["agents"], summary["tasks"]) == (40, 40, 200)
    assert summary["trace"] == "generated from the published marginals"
    assert summary["placed"] + summary["pending"] == 200
    assert summary["refused"] == len(summary["refused_reasons"]) == 0
    assert sum(summary["pending_reasons"].values()) == summary["pending"]
    assert 0 < summary["decision_p50_s"] <= summary["decision_p99_s"]
    assert 0 < summary["submit_p50_s"] <= summary["submit_p99_s"]
    assert 0 < summary["allocated_gpu_share"] <= 1
    assert summary["samples_received"] > 0
    assert summary["samples_lost"] == 0
    assert summary["measured_gpus"] == summary["gpus"]
    assert summary["modelled_power_w"] > summary["measured_power_w"] > 0
    assert [process["name"] for process in summary["processes"]] == ["controller", "fleet"]
    assert all(process["cpu_s"] > 0 for process in summary["processes"])
    assert (tmp_path / "demo" / "demo.svg").read_text().startswith("<svg")
    assert "\x1b" not in out
    assert "Result" in out
    assert not controller.is_running()
    assert not fleet.is_running()


@pytest.mark.parametrize(("number", "act"), [(signal.SIGINT, "placing"), (signal.SIGTERM, "waiting for 40 nodes")])
def test_an_interrupt_midway_ends_the_children(start, number, act):
    demo = start("--keep")
    family = children_of(demo, "eelgrid_controller") + children_of(demo, "eelgrid_agent")
    assert any(line.startswith(act) for line in demo.stdout), "it never came so far"
    demo.send_signal(number)
    out, err = finish(demo)
    assert demo.returncode == 130, out + err
    assert "Traceback" not in err
    assert [child for child in family if child.is_running()] == []


def test_a_child_that_dies_is_reported_with_its_last_words(start):
    demo = start()
    (controller,) = children_of(demo, "eelgrid_controller")
    (fleet,) = children_of(demo, "eelgrid_agent")
    fleet.send_signal(signal.SIGKILL)
    out, err = finish(demo)
    assert demo.returncode == 1, out + err
    assert "fleet ended with signal 9" in err
    assert "fleet.log" in err
    assert "Traceback" not in err
    assert not controller.is_running()


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (("--trace", "nowhere"), 1, "holds both files"),
        (("--out", "/proc/none"), 1, "choose another folder"),
        (("--nodes", "0"), 2, "not in the range"),
    ],
)
def test_what_cannot_begin_says_why(start, arguments, code, complaint):
    demo = start(*arguments)
    out, err = finish(demo)
    assert demo.returncode == code, out + err
    assert complaint in err
    assert "Traceback" not in err
