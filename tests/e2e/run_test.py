"""Jobs by real processes: a controller, agents that run processes, and eelctl run, logs, wait, jobs and cancel."""

import json
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise

import pytest
from tests.e2e.processes import Cluster, fleet_of

from eelgrid_protos.messages import (
    GetWorkloadRequest,
    Mobility,
    ProcessSpec,
    ResourceRequest,
    SubmitWorkloadRequest,
    WorkloadPhase,
    WorkloadSpec,
)

ROOT = ("--allow-root",) if os.geteuid() == 0 else ()
NODE = {"name": "box", "cpu_milli": 64_000, "memory_bytes": 2**36, "gpus": [{"product": "a10", "count": 8}]}


@pytest.fixture
def cluster(tmp_path):
    with Cluster(tmp_path) as found:
        yield found


def begin_agent(cluster, node=NODE, name="fleet"):
    fleet = fleet_of(cluster.folder / f"{name}.json", [node])
    return cluster.agent(fleet, "--run-processes", *ROOT, "--state", str(cluster.folder / "agent"))


def begin(cluster, *nodes):
    controller = cluster.controller()
    agents = [begin_agent(cluster, node, f"fleet-{n}") for n, node in enumerate(nodes or (NODE,))]
    cluster.until_ready(len(agents))
    return controller, agents


def submit(cluster, *words):
    return cluster.eelctl("run", "-d", *words).stdout.strip()


def submit_directly(cluster, *argv):
    """A job on one GPU, without the second that a run of eelctl takes."""
    spec = WorkloadSpec(
        name="job",
        request=ResourceRequest(gpu_count=1, gpu_milli=1000),
        mobility=Mobility.FIXED,
        process=ProcessSpec(argv=argv, working_directory=str(cluster.folder)),
    )
    return cluster.operators.submit_workload(SubmitWorkloadRequest(spec=spec), timeout=10.0).workload.workload_id


def get(cluster, key):
    return cluster.operators.get_workload(GetWorkloadRequest(workload_id=key), timeout=5.0).workload


def until_running(cluster, key):
    cluster.until(lambda: get(cluster, key).attempts, what=f"{key} runs")


def until_ended(cluster, key):
    cluster.until(lambda: get(cluster, key).phase.is_ended, what=f"{key} ends")
    return get(cluster, key)


def test_run_prints_what_the_process_prints_and_exits_with_its_code(cluster):
    begin(cluster)
    done = cluster.eelctl("run", "--", "sh", "-c", "echo out; echo err >&2; pwd; exit 3", code=3)
    assert done.stdout == f"out\nerr\n{cluster.folder}\n"
    assert done.stderr == "w-1 failed: exited with 3\n"
    assert cluster.eelctl("run", "--", "true").stdout == ""
    assert cluster.eelctl("run", "--", "sh", "-c", "kill -9 $$", code=137).stderr == "w-3 failed: ended by SIGKILL\n"
    done = cluster.eelctl("run", "--", "no-such-program", code=127)
    assert "cannot run 'no-such-program': not found" in done.stderr
    listed = json.loads(cluster.eelctl("jobs", "--all", "-o", "json").stdout)
    assert [one["phase"] for one in listed] == ["failed", "succeeded", "failed", "failed"]
    assert listed[0]["attempts"][0]["exit_code"] == 3
    assert "failed (exited with 3)" in cluster.eelctl("get", "w-1").stdout
    assert "exited with 0" in cluster.eelctl("describe", "workload", "w-2").stdout
    table = cluster.eelctl("workloads", "--all").stdout
    assert "succeeded" in table
    assert cluster.summary().placed == 0


def test_a_job_has_its_gpus_by_uuid_and_one_without_gpus_sees_none(cluster):
    begin(cluster)
    two = cluster.eelctl("run", "--gpus", 2, "--", "printenv", "CUDA_VISIBLE_DEVICES").stdout.strip().split(",")
    assert len(set(two)) == 2
    assert all(uuid.startswith("GPU-") for uuid in two)
    assert cluster.eelctl("run", "--", "sh", "-c", "echo [$CUDA_VISIBLE_DEVICES]").stdout == "[]\n"
    environment = {"MINE": "1", "OTHER": "2", **os.environ}
    done = cluster.eelctl(
        "run", "--env", "MINE", "--env", "X=y z", "--", "sh", "-c", "echo $MINE $OTHER $X", env=environment
    )
    assert done.stdout == "1 y z\n"


def test_a_detached_job_is_waited_for_and_its_output_read_at_any_time(cluster):
    begin(cluster)
    key = submit(cluster, "--name", "count", "--", "sh", "-c", "for n in 1 2 3 4; do echo $n; sleep 0.1; done; exit 5")
    assert key == "w-1"
    assert cluster.eelctl("logs", "-f", "count").stdout == "1\n2\n3\n4\n"
    assert cluster.eelctl("wait", key, code=5).stderr == "w-1 failed: exited with 5\n"
    assert cluster.eelctl("logs", "--tail", 2, "last").stdout == "3\n4\n"
    assert cluster.eelctl("logs", "nothing", code=4).stdout == ""


def test_cancel_stops_the_whole_tree_and_frees_the_gpus_only_then(cluster):
    begin(cluster)
    script = (
        "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    )
    held = submit(cluster, "--gpus", 8, "--grace", "1s", "--", sys.executable, "-I", "-S", "-c", script)
    following = submit(cluster, "--gpus", 8, "--", "true")
    cluster.until(lambda: "up" in cluster.eelctl("logs", held).stdout, what="it prints")
    assert cluster.eelctl("cancel", held).stdout == f"{held}: stopping\n"
    assert get(cluster, following).phase is WorkloadPhase.PENDING
    ended = until_ended(cluster, held)
    assert (ended.phase, ended.attempts[0].signal) == (WorkloadPhase.CANCELLED, signal.SIGKILL)
    assert until_ended(cluster, following).phase is WorkloadPhase.SUCCEEDED
    waiting = submit(cluster, "--gpus", 8, "--", "sleep", 600)
    queued = submit(cluster, "--gpus", 8, "--", "sh", "-c", f"touch {cluster.folder}/ran")
    assert cluster.eelctl("cancel", queued, waiting, "--yes").stdout == f"{queued}: cancelled\n{waiting}: stopping\n"
    until_ended(cluster, waiting)
    assert not (cluster.folder / "ran").exists()


def test_a_time_limit_ends_a_job(cluster):
    begin(cluster)
    done = cluster.eelctl("run", "--time", "1s", "--", "sleep", 600, code=143)
    assert done.stderr == "w-1 failed: ended by SIGTERM: time limit of 1 s\n"


def test_ctrl_c_cancels_a_job_where_nobody_can_be_asked(cluster):
    begin(cluster)
    command = [sys.executable, *cluster.eelctl_command("run", "--", "sh", "-c", "echo up; sleep 600")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as attached:
        assert attached.stdout.readline() == "up\n"
        attached.send_signal(signal.SIGINT)
        assert attached.wait(30) == 143
        assert "cancelling w-1" in attached.stderr.read()
    assert get(cluster, "w-1").phase is WorkloadPhase.CANCELLED


def test_one_failing_replica_of_a_gang_on_two_nodes_ends_the_others(cluster):
    small = [dict(NODE, name=name, gpus=[{"product": "a10", "count": 1}]) for name in ("n1", "n2")]
    begin(cluster, *small)
    key = submit(
        cluster, "--gpus", 1, "--replicas", 2, "--",
        "sh", "-c", "echo $EELGRID_REPLICA of $EELGRID_REPLICAS; test $EELGRID_REPLICA = 0 && sleep 600; sleep 0.5; exit 4",
    )  # fmt: skip
    ended = until_ended(cluster, key)
    assert (ended.phase, ended.exit_code) == (WorkloadPhase.FAILED, 4)
    assert ended.reason == "replica 1: exited with 4"
    assert {place.node_name for place in ended.placements} == {"n1", "n2"}
    assert [one.reason for one in ended.attempts] == ["stopped", ""]
    assert cluster.eelctl("logs", "--replica", 1, key).stdout == "1 of 2\n"


def test_a_cluster_without_an_agent_that_runs_processes_says_so_and_starts_the_job_on_one_that_joins(cluster):
    cluster.controller()
    cluster.agent(fleet_of(cluster.folder / "fleet.json", [dict(NODE, name="other")]))
    cluster.until_ready(1)
    key = submit(cluster, "--gpus", 1, "--", "true")
    assert get(cluster, key).reason == "processes: no agent of a node that would do runs processes"
    begin_agent(cluster, name="box")
    assert [place.node_name for place in until_ended(cluster, key).placements] == ["box"]


# Each job takes one lock file for its GPU: a second holder of a GPU is a failure of the job.
HOLD = (
    "import os, sys, time\n"
    "gpu = os.environ['CUDA_VISIBLE_DEVICES']; n = sys.argv[1]\n"
    "held = os.path.join('locks', gpu)\n"
    "os.close(os.open(held, os.O_CREAT | os.O_EXCL))\n"
    "os.close(os.open(os.path.join('starts', n), os.O_CREAT | os.O_EXCL))\n"
    "time.sleep(0.05)\n"
    "os.unlink(held)\n"
    "sys.exit(int(n) % 7)\n"
)


def test_two_hundred_jobs_on_eight_gpus_survive_killed_agents_and_controllers_each_started_once(cluster):
    controller, (agent,) = begin(cluster)
    for name in ("locks", "starts"):
        (cluster.folder / name).mkdir()
    count = 200
    keys = []
    for n in range(count):
        keys.append(submit_directly(cluster, sys.executable, "-I", "-S", "-c", HOLD, str(n)))
        if n == 60:
            agent.kill()
            agent = begin_agent(cluster)
        if n == 120:
            controller.kill()
            controller = cluster.controller()
    agent.kill()
    begin_agent(cluster)

    def ended():
        return cluster.summary().pending + cluster.summary().placed == 0

    cluster.until(ended, within_s=120.0, what="all jobs end")
    found = [get(cluster, key) for key in keys]
    assert [one.exit_code for one in found] == [n % 7 for n in range(count)]
    assert len(list((cluster.folder / "starts").iterdir())) == count
    assert [one.attempt for one in found] == [1] * count
    assert list((cluster.folder / "locks").iterdir()) == []
    for gpu in {one.placements[0].gpu_uuids[0] for one in found}:
        spans = sorted(
            (one.attempts[0].started_ns, one.attempts[0].ended_ns)
            for one in found
            if one.placements[0].gpu_uuids[0] == gpu
        )
        assert all(first[1] <= second[0] for first, second in pairwise(spans))


def test_a_job_that_runs_while_the_agent_is_away_is_adopted_and_its_end_reported(cluster):
    _, (agent,) = begin(cluster)
    key = submit(cluster, "--", "sh", "-c", "echo begun; sleep 2; echo done; exit 6")
    until_running(cluster, key)
    agent.kill()
    time.sleep(0.2)
    begin_agent(cluster)
    assert until_ended(cluster, key).exit_code == 6
    assert cluster.eelctl("logs", key).stdout == "begun\ndone\n"


def test_what_keeps_jobs_from_starting_holds_over_a_restart_and_lets_each_start_at_its_turn(cluster):
    controller, _ = begin(cluster)
    held = submit(cluster, "--hold", "--", "echo", "held")
    first = submit(cluster, "--hold", "--", "sh", "-c", "exit 3")
    needs = submit(cluster, "--after", first, "--", "true")
    behind = submit(cluster, "--after", needs, "--", "true")
    cleanup = submit(cluster, "--after-not-ok", f"{first},{needs}", "--", "true")
    early = submit(cluster, "--begin", "+1h", "--", "true")
    flaky = f"test -e {cluster.folder}/tried && exit 0; touch {cluster.folder}/tried; exit 7"
    retried = submit(cluster, "--retries", 1, "--", "sh", "-c", flaky)
    cluster.until(lambda: get(cluster, retried).failures, what="it failed once")
    assert get(cluster, retried).reason == "retry: attempt 1 failed: exited with 7"
    ghost = cluster.eelctl("run", "--after", "ghost", "--", "true", code=125)
    assert "ghost" in ghost.stderr
    controller.kill()
    cluster.controller()
    cluster.until_ready(1)
    assert get(cluster, held).reason == f"held: by {get(cluster, held).spec.user}"
    assert get(cluster, early).reason.startswith("begin_time: not before")
    assert "eelctl release" in cluster.eelctl("explain", held).stdout
    assert cluster.eelctl("release", first).stdout.startswith(f"{first}: released; ")
    assert until_ended(cluster, cleanup).phase is WorkloadPhase.SUCCEEDED
    assert get(cluster, first).phase is WorkloadPhase.FAILED
    for key, why in ((needs, f"{first} failed"), (behind, f"{needs} was cancelled")):
        assert get(cluster, key).phase is WorkloadPhase.CANCELLED
        assert get(cluster, key).reason == f"dependency_failed: {why}, and this starts only if it succeeds"
    done = until_ended(cluster, retried)
    assert (done.phase, done.attempt, done.failures) == (WorkloadPhase.SUCCEEDED, 2, 1)
    again = cluster.eelctl("rerun", retried).stdout.strip()
    assert until_ended(cluster, again).phase is WorkloadPhase.SUCCEEDED
    assert "only pending work is held" in cluster.eelctl("hold", again, code=5).stderr
    assert get(cluster, held).phase is WorkloadPhase.PENDING
    cluster.eelctl("release", held)
    assert until_ended(cluster, held).phase is WorkloadPhase.SUCCEEDED
    assert cluster.eelctl("hold", early).stdout.startswith(f"{early}: held: by ")
