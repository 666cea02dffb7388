"""A first start: work is placed while kernels are compiled, and goes on when machine code takes over."""

import os
import shutil
import signal

import psutil
import pytest
from tests.e2e import processes
from tests.e2e.processes import Cluster, fleet_of, metric

from eelgrid_kernels import compilation
from eelgrid_kernels.warmup import warm_kernels

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


def test_work_is_placed_before_kernels_are_compiled_and_runs_on_by_machine_code(cluster, tmp_path):
    controller = cluster.begin_controller()
    compiler = hold_compiler(cluster, controller)
    cluster.agent(fleet_of(tmp_path / "fleet.json", (NODE,)), "--run-processes")
    cluster.until_ready(1)
    marks = tmp_path / "marks"
    command = ("--gpus", "1", "--name", "first", "--", "/bin/sh", "-c", f"echo start >> {marks}; exec sleep 600")
    cluster.eelctl("submit", *command)
    cluster.until(marks.exists, within_s=processes.START_S, what="the job runs")
    assert metric(cluster.metrics, "eelgrid_kernels_interpreted") == 1
    assert not controller.said("kernels=warm")
    compiler.resume()
    cluster.until(lambda: controller.said("kernels=warm"), within_s=processes.KERNELS_S, what="machine code decides")
    cluster.until(
        lambda: metric(cluster.metrics, "eelgrid_kernels_interpreted") == 0, what="the metric says that it does"
    )
    cluster.eelctl("submit", *(("second" if word == "first" else word) for word in command))
    cluster.until(lambda: len(marks.read_text().splitlines()) == 2, within_s=processes.START_S, what="both jobs run")
    summary = cluster.summary()
    assert (summary.placed, summary.pending) == (2, 0)
    assert controller.stop() == 0


def test_a_controller_that_is_killed_before_kernels_are_compiled_has_what_it_acknowledged(cluster, tmp_path):
    controller = cluster.begin_controller()
    compiler = hold_compiler(cluster, controller)
    for name in ("one", "two"):
        cluster.eelctl("submit", "--gpus", "1", "--name", name)
    controller.kill()
    compiler.resume()
    again = cluster.controller()
    assert cluster.summary().pending == 2
    assert again.stop() == 0


def test_a_stop_while_kernels_are_compiled_takes_the_compiler_along(cluster):
    controller = cluster.begin_controller()
    compiler = hold_compiler(cluster, controller)
    assert controller.stop() == 0
    assert not psutil.pid_exists(compiler.pid)
