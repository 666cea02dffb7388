"""eelctl box: one command starts a controller and an agent as this user, and stops them; jobs outlive it."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from tests.e2e.processes import fleet_of
from tests.mps_rig import MpsProgram
from tests.waiting import poll_until

NODE = {"name": "box", "cpu_milli": 8000, "memory_bytes": 2**35, "gpus": [{"product": "a10", "count": 2}]}


class Box:
    """eelctl with the state of a box of its own, and no other controller."""

    def __init__(self, state, folder):
        kept = {key: text for key, text in os.environ.items() if not key.startswith("EELGRID_")}
        self.environment = {**kept, "XDG_STATE_HOME": state}
        self.folder = folder

    def command(self, *words):
        return [sys.executable, "-m", "eelgrid_controller.cli", *map(str, words)]

    def eelctl(self, *words, code=0, env=None):
        done = subprocess.run(
            self.command(*words), env=self.environment | (env or {}), cwd=self.folder, capture_output=True, text=True,
            timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}{done.stderr}"
        assert "Traceback" not in done.stderr
        return done


@pytest.fixture
def box(tmp_path):
    # The path of a socket is short.
    with tempfile.TemporaryDirectory(prefix="box") as state:
        found = Box(state, tmp_path)
        try:
            yield found
        finally:
            found.eelctl("box", "stop", "--cancel")


@pytest.fixture
def flags():
    return ("--allow-root",) if os.geteuid() == 0 else ()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_root_is_refused_unless_it_is_allowed(box):
    assert "root would run every job as root" in box.eelctl("box", "start", code=2).stderr


def test_a_box_starts_once_runs_jobs_on_its_gpus_and_stops_without_its_jobs(box, flags):
    fleet = fleet_of(box.folder / "fleet.json", [NODE])
    assert "does not run" in box.eelctl("box", "status", code=3).stdout
    first = box.eelctl("box", "start", *flags, "--simulate", fleet).stdout
    assert "the box runs\n" in first
    assert "runs already" in box.eelctl("box", "start", *flags).stdout
    folder = f"{box.environment['XDG_STATE_HOME']}/eelgrid/box"
    assert Path(folder).stat().st_mode & 0o077 == 0
    assert box.eelctl("run", "--gpus", 1, "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES").stdout.startswith("GPU-")
    assert "2 GPUs" in box.eelctl("box", "status").stdout

    go = box.folder / "go"
    key = box.eelctl("run", "-d", "--", "sh", "-c", f"until test -e {go}; do sleep 0.1; done; echo done; exit 9").stdout
    poll_until(lambda: "running" in box.eelctl("jobs").stdout, "the job runs")
    assert "1 job goes on" in box.eelctl("box", "stop").stderr
    assert box.eelctl("jobs", code=3).stderr
    go.touch()
    time.sleep(0.5)
    box.eelctl("box", "start", *flags, "--simulate", fleet)
    box.eelctl("wait", key.strip(), code=9)
    assert box.eelctl("logs", "last").stdout == "done\n"


def test_a_box_in_the_foreground_ends_with_ctrl_c_and_its_sockets_serve_nobody_else(box, flags):
    command = box.command("box", "start", "--foreground", *flags)
    with subprocess.Popen(command, env=box.environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "the box runs\n"
            assert box.eelctl("run", "--", "true").stdout == ""
        finally:
            # Also after a failure: whoever leaves this block waits for its end.
            process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    assert "does not run" in box.eelctl("box", "status", code=3).stdout


def test_jobs_of_a_box_with_mps_are_held_to_their_shares_of_one_gpu(box, flags, monkeypatch):
    fleet = fleet_of(box.folder / "fleet.json", [NODE | {"gpus": [{"product": "a10", "count": 1}]}])
    start = ("box", "start", *flags, "--simulate", fleet, "--gpu-sharing", "mps")
    assert "nvidia-cuda-mps-control is not on PATH" in box.eelctl(*start, code=1).stderr
    folder = box.folder / "bin"
    folder.mkdir()
    program = MpsProgram(folder, monkeypatch)
    box.environment["PATH"] = os.environ["PATH"]
    box.eelctl(*start)
    shows = "echo $CUDA_MPS_ACTIVE_THREAD_PERCENTAGE $CUDA_MPS_PINNED_DEVICE_MEM_LIMIT; test -p $CUDA_MPS_PIPE_DIRECTORY/control"
    assert box.eelctl("run", "--gpus", 0.25, "--", "sh", "-c", shows).stdout == "25 0=5757M\n"
    assert box.eelctl("run", "--gpus", 1, "--", "sh", "-c", "env | grep -c CUDA_MPS", code=1).stdout == "0\n"
    poll_until(lambda: program.commands[-1:] == ["quit"], "the daemon has quit")
    assert [line.split()[0] for line in program.commands] == ["start", "quit"]
