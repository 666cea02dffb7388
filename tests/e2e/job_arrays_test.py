"""Job arrays by real processes: submitted with eelctl, seen, changed and waited for as one, and safe when daemons are killed."""

import json
import sys

import pytest
from tests.e2e.processes import Cluster
from tests.e2e.run_test import begin, begin_agent, get, submit, until_ended

from eelgrid_protos.messages import (
    JobArrayRequest,
    ListWorkloadsRequest,
    Mobility,
    ProcessSpec,
    ResourceRequest,
    SubmitWorkloadRequest,
    WorkloadPhase,
    WorkloadSpec,
)


@pytest.fixture
def cluster(tmp_path):
    with Cluster(tmp_path) as found:
        yield found


def list_elements(cluster, array_id):
    request = ListWorkloadsRequest(array_id=array_id, page_size=1000)
    return cluster.operators.list_workloads(request, timeout=10.0).workloads


def count_files(cluster, name):
    return len(list((cluster.folder / name).iterdir()))


def test_a_sweep_runs_each_combination_and_exits_with_the_worst_code(cluster):
    begin(cluster)
    script = "echo $1 $EELGRID_PARAM_SEED $EELGRID_ARRAY_ID $EELGRID_ARRAY_INDEX $EELGRID_ARRAY_COUNT; exit $EELGRID_PARAM_CODE"
    words = ("--param", "lr=0.1,0.01", "--param", "seed=7-8", "--param", "code=0", "--array", "%2")
    command = ("--", "sh", "-c", script, "x", "{lr}")
    shown = cluster.eelctl("run", "--dry-run", *words, "--", "train", "--lr", "{lr}")
    assert shown.stdout.splitlines()[2] == "_2  lr=0.01 seed=7 code=0  train --lr 0.01"
    assert "nothing was submitted" in shown.stderr
    done = cluster.eelctl("run", *words, *command)
    assert done.stdout == ""
    assert "eelctl jobs --array w-1" in done.stderr
    outputs = [cluster.eelctl("logs", f"w-1_{n}").stdout for n in range(4)]
    assert outputs == ["0.1 7 w-1 0 4\n", "0.1 8 w-1 1 4\n", "0.01 7 w-1 2 4\n", "0.01 8 w-1 3 4\n"]
    failed = cluster.eelctl("run", "--param", "code=0,3,5", *command, code=5)
    assert failed.stderr.endswith("w-2 failed: 2 of 3 elements, such as w-2_2\n")
    assert cluster.eelctl("wait", "w-2", code=5).stderr == "w-2 failed: 2 of 3 elements, such as w-2_2\n"
    assert "w-1 is an array; name an element of it" in cluster.eelctl("logs", "w-1", code=5).stderr
    again = cluster.eelctl("rerun", "--failed", "w-2").stdout.strip()
    assert until_ended(cluster, again).array.failed == 2
    assert [one.workload_id for one in list_elements(cluster, again)] == [f"{again}_1", f"{again}_2"]
    listed = json.loads(cluster.eelctl("jobs", "--all", "-o", "json").stdout)
    assert [(one["workload_id"], one["array"]["size"]) for one in listed] == [("w-1", 4), ("w-2", 3), (again, 2)]
    assert "3 elements: 1 succeeded, 2 failed" in cluster.eelctl("jobs", "--all").stdout
    assert len(json.loads(cluster.eelctl("jobs", "--all", "--elements", "-o", "json").stdout)) == 9
    assert len(json.loads(cluster.eelctl("jobs", "--array", "w-1", "-o", "json").stdout)) == 4


def test_an_array_is_held_released_waited_for_by_others_and_cancelled_as_one(cluster):
    begin(cluster)
    stage = cluster.folder / "stage"
    stage.mkdir()
    first = submit(cluster, "--hold", "--array", "0-3%2", "--", "sh", "-c", f"touch {stage}/$EELGRID_ARRAY_INDEX")
    each = submit(
        cluster, "--array", "0-3", "--after-each", first, "--", "sh", "-c", f"rm {stage}/$EELGRID_ARRAY_INDEX"
    )
    last = submit(cluster, "--after", f"{first},{each}", "--", "true")
    assert cluster.eelctl("hold", first).stdout.startswith(f"{first}: held: by ")
    assert "10001 elements" in cluster.eelctl("run", "--array", "0-10000", "--", "true", code=2).stderr
    assert (
        "after[0].each" in cluster.eelctl("run", "--array", "0-4", "--after-each", first, "--", "true", code=125).stderr
    )
    assert cluster.eelctl("release", first).stdout.startswith(f"{first}: released; ")
    assert cluster.eelctl("wait", first, each, last).stderr == ""
    assert not list(stage.iterdir())
    long = submit(cluster, "--name", "long", "--array", "1-50%3", "--", "sleep", "600")
    cluster.until(lambda: sum(bool(one.attempts) for one in list_elements(cluster, long)) == 3, what="three run")
    shown = cluster.eelctl("get", "long").stdout
    assert "array      50 elements: 3 placed, 47 pending, 3 at once" in shown
    assert "runs as many elements at once" in cluster.eelctl("explain", f"{long}_50").stdout
    cluster.eelctl("cancel", f"{long}_1")
    cluster.until(lambda: get(cluster, f"{long}_4").attempts, what="the next runs")
    assert cluster.eelctl("cancel", long).stdout == f"{long}: stopping\n"
    assert until_ended(cluster, long).array.cancelled == 50
    cluster.eelctl("wait", long, code=143)


# Fails if another of its index runs or ran; the number of those that run at once is the number of files.
HOLD = (
    "import os, sys, time\n"
    "n = os.environ['EELGRID_ARRAY_INDEX']\n"
    "held = os.path.join('running', n)\n"
    "os.close(os.open(held, os.O_CREAT | os.O_EXCL))\n"
    "assert len(os.listdir('running')) <= 6\n"
    "os.close(os.open(os.path.join('starts', n), os.O_CREAT | os.O_EXCL))\n"
    "time.sleep(0.05)\n"
    "os.unlink(held)\n"
    "sys.exit(int(n) % 7)\n"
)


def test_each_element_runs_exactly_once_and_no_more_at_once_than_allowed_though_daemons_are_killed(cluster):
    controller, (agent,) = begin(cluster)
    for name in ("running", "starts"):
        (cluster.folder / name).mkdir()
    count = 150
    spec = WorkloadSpec(
        name="sweep",
        request=ResourceRequest(gpu_count=1, gpu_milli=1000),
        mobility=Mobility.FIXED,
        process=ProcessSpec(argv=(sys.executable, "-I", "-S", "-c", HOLD), working_directory=str(cluster.folder)),
    )
    array = JobArrayRequest(indexes=f"0-{count - 1}%6")
    request = SubmitWorkloadRequest(spec=spec, workload_id="sweep", array=array)
    cluster.operators.submit_workload(request, timeout=10.0)
    for started in (20, 60, 100):
        cluster.until(lambda most=started: count_files(cluster, "starts") >= most, what="some started")
        controller.kill()
        controller = cluster.controller()
        if started == 60:
            agent.kill()
            agent = begin_agent(cluster)
        # The caller who got no answer asks again.
        cluster.until_ready(1)
        assert cluster.operators.submit_workload(request, timeout=10.0).workload.array.size == count
    whole = until_ended(cluster, "sweep")
    found = list_elements(cluster, "sweep")
    assert [one.workload_id for one in found] == [f"sweep_{n}" for n in range(count)]
    assert [one.exit_code for one in found] == [n % 7 for n in range(count)]
    assert [one.attempt for one in found] == [1] * count
    assert (whole.phase, whole.exit_code) == (WorkloadPhase.FAILED, 6)
    assert count_files(cluster, "starts") == count
    assert count_files(cluster, "running") == 0
