"""A first start: work is placed while kernels are compiled, and goes on when machine code takes over."""

import os
import shutil

import psutil
import pytest
from tests.e2e import processes
from tests.e2e.processes import Cluster, fleet_of, metric

from eelgrid_kernels import compilation
from eelgrid_kernels.warmup import warm_kernels
from eelgrid_protos.messages import (
    Mobility,
    ProcessSpec,
    ResourceRequest,
    SubmitWorkloadRequest,
    WorkloadPhase,
    WorkloadSpec,
)

ROOT = ("--allow-root",) if os.geteuid() == 0 else ()

NODE = {"name": "n", "cpu_milli": 32_000, "memory_bytes": 2**36, "gpus": [{"product": "h100-sxm5-80gb", "count": 8}]}


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """Programs from nothing, with a cache that is not marked complete: the compiler runs as on a new machine, and is sooner done."""
    warm_kernels()
    folder = compilation._FOLDER
    assert folder is not None
    unmarked = shutil.ignore_patterns("complete-*")
    shutil.copytree(folder, tmp_path / "cache" / folder.name, ignore=unmarked)
    monkeypatch.setitem(processes._ENVIRONMENT, "NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    with Cluster(tmp_path, cold=True) as cluster:
        yield cluster


def hold_compiler(cluster, controller):
    """Stops the compiler of a controller that has just begun; returns it."""

    def find():
        children = psutil.Process(controller.process.pid).children()
        return next((one for one in children if "eelgrid_kernels" in " ".join(one.cmdline())), None)

    cluster.until(find, within_s=processes.START_S, what="the compiler runs")
    compiler = find()
    compiler.suspend()
    cluster.until(lambda: controller.said("serving listen="), within_s=processes.START_S, what="the controller serves")
    cluster.answers()
    return compiler


def submit(cluster, name, *argv):
    spec = WorkloadSpec(
        name=name,
        request=ResourceRequest(gpu_count=1, gpu_milli=1000),
        mobility=Mobility.FIXED,
        process=ProcessSpec(argv=argv, working_directory=str(cluster.folder)) if argv else None,
    )
    request = SubmitWorkloadRequest(spec=spec, workload_id=name)
    return cluster.operators.submit_workload(request, timeout=30.0).workload


def test_work_is_placed_before_kernels_are_compiled_and_runs_on_by_machine_code(cluster, tmp_path):
    controller = cluster.begin_controller()
    compiler = hold_compiler(cluster, controller)
    fleet = fleet_of(tmp_path / "fleet.json", [NODE])
    cluster.agent(fleet, "--run-processes", *ROOT, "--state", str(tmp_path / "agent"))
    cluster.until_ready(1)
    marks = tmp_path / "marks"
    command = ("/bin/sh", "-c", f"echo $$ >> {marks}; exec sleep 600")
    assert submit(cluster, "first", *command).phase is WorkloadPhase.PLACED
    cluster.until(marks.exists, within_s=processes.START_S, what="the job runs")
    assert metric(cluster.metrics, "eelgrid_kernels_interpreted") == 1
    assert not controller.said("kernels=warm")
    compiler.resume()
    cluster.until(lambda: controller.said("kernels=warm"), within_s=processes.KERNELS_S, what="machine code decides")
    assert metric(cluster.metrics, "eelgrid_kernels_interpreted") == 0
    assert submit(cluster, "second", *command).phase is WorkloadPhase.PLACED
    cluster.until(lambda: len(marks.read_text().split()) == 2, within_s=processes.START_S, what="both jobs run")
    assert all(psutil.pid_exists(int(number)) for number in marks.read_text().split()), "each was started once"
    summary = cluster.summary()
    assert (summary.placed, summary.pending) == (2, 0)
    assert controller.stop() == 0


def test_a_controller_that_is_killed_before_kernels_are_compiled_has_what_it_acknowledged(cluster):
    controller = cluster.begin_controller()
    compiler = hold_compiler(cluster, controller)
    for name in ("one", "two"):
        assert submit(cluster, name).phase is WorkloadPhase.PENDING
    controller.kill()
    compiler.kill()
    again = cluster.controller()
    assert cluster.summary().pending == 2
    assert again.stop() == 0


def test_a_stop_while_kernels_are_compiled_takes_the_compiler_along(cluster):
    controller = cluster.begin_controller()
    compiler = hold_compiler(cluster, controller)
    assert controller.stop() == 0
    assert not psutil.pid_exists(compiler.pid)
