"""Jobs of real processes that return to the queue: on request, by a drain, and since a GPU was lost under them."""

import json
import os
import subprocess
import sys
from functools import partial

import pytest
from tests.e2e.preemption_test import CLIENT, TRAINING
from tests.e2e.processes import Cluster, fleet_of

from eelgrid_protos.messages import Mobility, ProcessSpec, ResourceRequest, SubmitWorkloadRequest, WorkloadSpec

ROOT = ("--allow-root",) if os.geteuid() == 0 else ()
NODE = {"name": "box", "cpu_milli": 64_000, "memory_bytes": 2**36, "gpus": [{"product": "a10", "count": 2}]}
# Fails as soon as it is told to, in its first attempt; then it succeeds.
FAILS = 'test $EELGRID_ATTEMPT = 1 || exit 0; while ! test -e "$0"; do sleep 0.05; done; exit 1'


@pytest.fixture
def cluster(tmp_path):
    with Cluster(tmp_path) as found:
        yield found


def begin(cluster, *arguments, nodes=(NODE,)):
    """Starts a controller, and an agent that runs processes of each node; returns how to inject a fault."""
    cluster.controller(*arguments)
    cluster.set_policy(sample_interval_s=0.5, send_interval_s=0.5)
    faults = {}
    for node in nodes:
        folder = cluster.folder / node["name"]
        folder.mkdir()
        faults[node["name"]] = folder / "faults"
        faults[node["name"]].write_text("")
        fleet = fleet_of(folder / "fleet.json", [node])
        options = ("--faults", str(faults[node["name"]]), "--run-processes", *ROOT, "--state", str(folder / "agent"))
        cluster.agent(fleet, *options)
    cluster.until_ready(len(nodes))

    def inject(fault, key, **more):
        (at,) = get(cluster, key)["placements"]
        with faults[at["node_name"]].open("a") as out:
            out.write(json.dumps({"fault": fault, "gpu": at["gpu_indexes"][0], **more}) + "\n")

    return inject


def run(cluster, key, *argv, gpus=1, models=()):
    spec = WorkloadSpec(
        name=key,
        request=ResourceRequest(gpu_count=gpus, gpu_milli=1000, gpu_models=models),
        mobility=Mobility.FIXED,
        process=ProcessSpec(argv=argv, working_directory=str(cluster.folder), grace_s=30.0),
    )
    cluster.operators.submit_workload(SubmitWorkloadRequest(spec=spec, workload_id=key), timeout=10.0)


def get(cluster, key):
    return json.loads(cluster.eelctl("get", key, "-o", "json").stdout)


def until_attempt(cluster, key, attempt, within_s=60.0):
    def begun():
        found = get(cluster, key)
        return found["attempt"] == attempt and any(one["state"] == "running" for one in found.get("attempts", ()))

    cluster.until(begun, what=f"attempt {attempt} of {key} runs", within_s=within_s)


def until_told(cluster, event, inject):
    """Injects a fault until the controller has heard of it: what is announced before the agent listens is lost."""

    def is_told():
        inject()
        return f"event={event}" in cluster.children[0].text()

    cluster.until(is_told, what=f"the controller hears of {event}", within_s=60.0)


def test_a_training_program_is_requeued_by_hand_and_loses_no_step(cluster):
    begin(cluster)
    trace, finish = cluster.folder / "trace", cluster.folder / "finish"
    run(cluster, "train", sys.executable, "-I", "-c", TRAINING, str(CLIENT), str(trace), str(finish))
    for attempt in (1, 2):
        steps = len(trace.read_text().splitlines()) if trace.exists() else 0
        cluster.until(
            lambda steps=steps: trace.exists() and len(trace.read_text().splitlines()) > steps + 3, what="steps"
        )
        until_attempt(cluster, "train", attempt)
        said = cluster.eelctl("requeue", "train", "--reason", "new data").stdout
        assert said == "train: stopping, then it waits again\n"
    until_attempt(cluster, "train", 3)
    finish.touch()
    cluster.until(lambda: get(cluster, "train")["phase"] == "succeeded", what="it ends")
    rows = [tuple(map(int, line.split())) for line in trace.read_text().splitlines()]
    assert [step for step, _ in rows] == list(range(1, len(rows) + 1))
    assert {attempt for _, attempt in rows} == {1, 2, 3}
    found = get(cluster, "train")
    assert (found["failures"], found["preemptions"], found["node_faults"]) == (0, 0, 0)
    late = cluster.eelctl("requeue", "train", code=5)
    assert "run it again with eelctl rerun train" in late.stderr
    assert "RequeueWorkload" in cluster.eelctl("audit").stdout


def test_a_process_that_hangs_on_a_lost_gpu_is_stopped_and_runs_on_another(cluster):
    inject = begin(cluster, "--lost-gpu-grace", "1")
    run(cluster, "hangs", "sleep", "600")
    until_attempt(cluster, "hangs", 1)
    (before,) = get(cluster, "hangs")["placements"]
    inject("lose", "hangs")
    until_attempt(cluster, "hangs", 2)
    (after,) = get(cluster, "hangs")["placements"]
    assert after["gpu_indexes"] != before["gpu_indexes"]
    assert get(cluster, "hangs")["failures"] == 0


@pytest.mark.parametrize(("fault", "event"), [({"fault": "lose"}, "gpu_lost"), ({"fault": "xid", "code": 79}, "xid")])
def test_a_process_that_fails_since_its_gpu_did_runs_again(cluster, fault, event):
    inject = begin(cluster)
    told = cluster.folder / "fail"
    run(cluster, "job", "sh", "-c", FAILS, str(told))
    until_attempt(cluster, "job", 1)
    until_told(cluster, event, lambda: inject(key="job", **fault))
    told.touch()
    cluster.until(lambda: get(cluster, "job")["phase"] == "succeeded", what="its second attempt succeeds")
    found = get(cluster, "job")
    assert (found["attempt"], found["node_faults"], found["failures"]) == (2, 1, 0)


def test_a_process_that_fails_since_its_fabric_is_not_ready_runs_on_another_gpu(cluster):
    """Eight GPUs of an NVSwitch system, on one of which CUDA would fail with error 802; the agent looks every 5 s."""
    inject = begin(cluster, nodes=({**NODE, "gpus": [{"product": "h100-sxm5-80gb", "count": 8}]},))
    told = cluster.folder / "fail"
    run(cluster, "job", "sh", "-c", FAILS, str(told))
    until_attempt(cluster, "job", 1)
    (before,) = get(cluster, "job")["placements"]
    inject("fabric", "job", state=2)
    cluster.until(lambda: "NVSwitch fabric" in cluster.eelctl("gpus", "-o", "json").stdout, what="it is cordoned")
    told.touch()
    cluster.until(lambda: get(cluster, "job")["phase"] == "succeeded", what="its second attempt succeeds")
    found = get(cluster, "job")
    assert (found["attempt"], found["node_faults"], found["failures"]) == (2, 1, 0)
    assert found["placements"] == [] or found["placements"][0]["gpu_indexes"] != before["gpu_indexes"]
    inject_lines = cluster.folder / "box" / "faults"
    with inject_lines.open("a") as out:
        out.write(json.dumps({"fault": "fabric", "gpu": before["gpu_indexes"][0], "state": 3}) + "\n")
    cluster.until(
        lambda: "NVSwitch fabric" not in cluster.eelctl("gpus", "-o", "json").stdout, what="it takes work again"
    )


def test_a_node_on_which_nothing_starts_is_closed(cluster):
    """Jobs of a name of their own fail at once on one node, and run on the other: nothing is known yet, so that it takes nineteen."""
    other = {"name": "other", "cpu_milli": 64_000, "memory_bytes": 2**36, "gpus": [{"product": "t4", "count": 1}]}
    begin(cluster, nodes=(NODE, other))
    for number in range(19):
        run(cluster, f"fails-{number}", "false", models=("A10",))
        cluster.until(lambda n=number: get(cluster, f"fails-{n}")["phase"] == "failed", what="it fails")
        assert number == 18 or not is_cordoned(cluster, "box"), number
    cluster.until(lambda: is_cordoned(cluster, "box"), what="the node is closed")
    said = cluster.eelctl("describe", "node", "box").stdout
    assert "by eelgrid" in said
    assert "quarantine: 19 different jobs in a row failed here within 60 s of their start" in said
    assert "warning   box: It takes no new work: cordoned by eelgrid: quarantine" in cluster.eelctl("overview").stdout
    assert not is_cordoned(cluster, "other")
    run(cluster, "late", "true", models=("A10",))
    assert "eelctl uncordon box" in cluster.eelctl("explain", "late").stdout
    cluster.eelctl("uncordon", "box")
    cluster.until(lambda: get(cluster, "late")["phase"] == "succeeded", what="what waited has run")


def is_cordoned(cluster, name):
    return "quarantine" in cluster.eelctl("describe", "node", name).stdout


def test_a_process_that_fails_by_itself_fails(cluster):
    inject = begin(cluster)
    told = cluster.folder / "fail"
    run(cluster, "job", "sh", "-c", FAILS, str(told))
    until_attempt(cluster, "job", 1)
    # An error of its own, which XID 31 is.
    until_told(cluster, "xid", lambda: inject("xid", "job", code=31))
    told.touch()
    cluster.until(lambda: get(cluster, "job")["phase"] == "failed", what="it has failed")
    assert get(cluster, "job")["node_faults"] == 0


def test_a_drain_with_a_grace_requeues_processes(cluster):
    begin(cluster, nodes=[NODE, NODE | {"name": "other"}])
    run(cluster, "job", "sleep", "600", gpus=2)
    until_attempt(cluster, "job", 1)
    (before,) = get(cluster, "job")["placements"]
    dry = cluster.eelctl("drain", before["node_name"], "--dry-run", "--grace", "1s").stdout
    assert "job returns to the queue after the grace: it runs a process" in dry
    done = cluster.eelctl("drain", before["node_name"], "--grace", "1s", "--yes", "--reason", "kernel").stdout
    assert f"{before['node_name']}: drained" in done
    until_attempt(cluster, "job", 2)
    (after,) = get(cluster, "job")["placements"]
    assert after["node_name"] != before["node_name"]


@pytest.mark.parametrize("how", ["requeue", "lose"])
def test_an_attached_run_goes_on_with_the_next_attempt(cluster, how):
    inject = begin(cluster)
    told = cluster.folder / "fail"
    script = f"echo attempt $EELGRID_ATTEMPT; {FAILS.replace('$0', str(told))}"
    command = [sys.executable, *cluster.eelctl_command("run", "--gpus", 1, "--", "sh", "-c", script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as attached:
        assert attached.stdout.readline() == "attempt 1\n"
        if how == "requeue":
            cluster.eelctl("requeue", "w-1")
        else:
            until_told(cluster, "gpu_lost", lambda: inject("lose", "w-1"))
            told.touch()
        assert attached.stdout.readline() == "attempt 2\n"
        assert attached.wait(60) == 0


def test_a_job_that_must_not_run_again_ends_with_its_gpu(cluster):
    inject = begin(cluster, "--lost-gpu-grace", "1")
    cluster.eelctl("run", "-d", "--no-requeue", "--gpus", 1, "--", "sleep", "600")
    until_attempt(cluster, "w-1", 1)
    assert "--no-requeue" in cluster.eelctl("requeue", "w-1", code=5).stderr
    inject("lose", "w-1")
    cluster.until(lambda: get(cluster, "w-1")["phase"] == "cancelled", what="it ends")
    assert "its GPU on node box was lost" in get(cluster, "w-1")["reason"]
    assert (
        "leave one of them out"
        in cluster.eelctl("run", "-d", "--no-requeue", "--retries", 1, "--", "true", code=125).stderr
    )


def stamps(path):
    """Of each attempt, when its first and last lines were written."""
    rows = [line.split() for line in path.read_text().splitlines()]
    found = {}
    for attempt, at_s in rows:
        first_s, _ = found.get(attempt, (float(at_s), 0.0))
        found[attempt] = first_s, float(at_s)
    return found


def test_jobs_of_a_node_that_is_silent_run_elsewhere_and_never_twice_at_once(cluster):
    """Its agent is killed, and its job runs on, until that ends by itself since no controller is heard."""
    cluster.controller("--away-grace", "1")
    cluster.set_policy(sample_interval_s=0.5, send_interval_s=0.5)
    agents, begins = {}, {}
    for name in ("n1", "n2"):
        folder = cluster.folder / name
        folder.mkdir()
        fleet = fleet_of(folder / "fleet.json", [NODE | {"name": name}])
        options = ("--run-processes", *ROOT, "--state", str(folder / "agent"), "--fence-after", "5")
        begins[name] = partial(cluster.agent, fleet, *options)
        agents[name] = begins[name]()
    cluster.until_ready(2)
    trace = cluster.folder / "trace"
    loop = 'while true; do echo "$EELGRID_ATTEMPT $(date +%s.%N)" >> "$0"; sleep 0.1; done'
    run(cluster, "job", "sh", "-c", loop, str(trace))
    until_attempt(cluster, "job", 1)
    (before,) = get(cluster, "job")["placements"]
    agents[before["node_name"]].kill()
    cluster.until(lambda: "lost, fences jobs after 5 s" in cluster.eelctl("nodes").stdout, what="its node is lost")
    until_attempt(cluster, "job", 2, within_s=120.0)
    (after,) = get(cluster, "job")["placements"]
    assert after["node_name"] != before["node_name"]
    assert get(cluster, "job")["node_faults"] == 1
    cluster.until(lambda: "2" in stamps(trace), what="the second attempt writes")
    assert stamps(trace)["1"][1] < stamps(trace)["2"][0]
    # The node comes back, and takes nothing away.
    begins[before["node_name"]]()
    cluster.until_ready(2)
    lines = len(trace.read_text().splitlines())
    cluster.until(lambda: len(trace.read_text().splitlines()) > lines + 3, what="the second attempt goes on")
    assert get(cluster, "job")["attempt"] == 2
    assert set(stamps(trace)) == {"1", "2"}
