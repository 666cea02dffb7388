"""Preemption by real processes: a training program is stopped again and again, and repeats no step."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.e2e.processes import Cluster, fleet_of

from eelgrid_protos.messages import (
    CheckpointCostSource,
    GetPolicyRequest,
    GetWorkloadRequest,
    Mobility,
    ProcessSpec,
    ResourceRequest,
    SubmitWorkloadRequest,
    WorkloadKind,
    WorkloadPhase,
    WorkloadSpec,
)

ROOT = ("--allow-root",) if os.geteuid() == 0 else ()
NODE = {"name": "box", "cpu_milli": 64_000, "memory_bytes": 2**36, "gpus": [{"product": "a10", "count": 2}]}
QUEUES = """
queues:
  - {name: root}
  - {name: urgent, parent: root, quota: {gpu: 2}, preemption: {reclaim: nominal}}
  - {name: research, parent: root, quota: {gpu: 0}, preemption: {victims: jobs, min_runtime: 0s}}
"""
CLIENT = Path(__file__).resolve().parents[2] / "client" / "eelgrid" / "checkpoint.py"
# Each step is written down when it is done; a step that is done twice was lost.
TRAINING = """
import importlib.util, os, sys, time
spec = importlib.util.spec_from_file_location('checkpoint', sys.argv[1])
checkpoint = importlib.util.module_from_spec(spec); spec.loader.exec_module(checkpoint)
path = checkpoint.latest(); step = int(path.read_text()) if path else 0
with checkpoint.on_preempt() as stop, open(sys.argv[2], 'a') as trace:
    while not stop and not os.path.exists(sys.argv[3]):
        step += 1
        print(step, checkpoint.attempt(), file=trace, flush=True)
        time.sleep(0.01)
    checkpoint.save(lambda path: path.write_text(str(step)))
"""


@pytest.fixture
def cluster(tmp_path):
    with Cluster(tmp_path) as found:
        yield found


def submit(cluster, key, queue, gpus, *argv):
    spec = WorkloadSpec(
        name=key,
        request=ResourceRequest(gpu_count=gpus, gpu_milli=1000),
        mobility=Mobility.FIXED,
        queue=queue,
        process=ProcessSpec(argv=argv, working_directory=str(cluster.folder), grace_s=30.0),
    )
    cluster.operators.submit_workload(SubmitWorkloadRequest(spec=spec, workload_id=key), timeout=10.0)


def get(cluster, key):
    return cluster.operators.get_workload(GetWorkloadRequest(workload_id=key), timeout=5.0).workload


def begin(cluster):
    """Starts a controller, an agent that runs processes, and the queues; returns the controller and what was printed."""
    controller = cluster.controller()
    fleet = fleet_of(cluster.folder / "fleet.json", [NODE])
    cluster.agent(fleet, "--run-processes", *ROOT, "--state", str(cluster.folder / "agent"))
    cluster.until_ready(1)
    (cluster.folder / "queues.yaml").write_text(QUEUES)
    return controller, cluster.eelctl("queue", "apply", "-f", cluster.folder / "queues.yaml", "--yes").stdout


def test_a_training_program_is_preempted_several_times_and_loses_no_step(cluster):
    controller, applied = begin(cluster)
    assert "preemption reclaim nominal" in applied
    assert cluster.operators.get_policy(GetPolicyRequest(), timeout=5.0).policy.queues[1].preemption.reclaim
    finish = cluster.folder / "finish"
    traces = {key: cluster.folder / f"{key}.trace" for key in ("t1", "t2")}
    for key, trace in traces.items():
        submit(cluster, key, "research", 1, sys.executable, "-I", "-c", TRAINING, str(CLIENT), str(trace), str(finish))

    def until_trained(key):
        before = len(traces[key].read_text().splitlines()) if traces[key].exists() else 0
        cluster.until(
            lambda: traces[key].exists() and len(traces[key].read_text().splitlines()) > before + 3,
            what=f"{key} makes steps",
        )

    for n in range(3):
        for key in traces:
            until_trained(key)
        submit(cluster, f"u{n}", "urgent", 2 - n % 2, "sleep", "0.2")
        if n == 1:
            # A controller that is killed in between goes on.
            controller.kill()
            controller = cluster.controller()
        cluster.until(
            lambda n=n: get(cluster, f"u{n}").phase is WorkloadPhase.SUCCEEDED, what=f"u{n} runs", within_s=60.0
        )
    for key in traces:
        until_trained(key)
    advice = get(cluster, "t1").checkpoint_advice
    # By what this run has reported yet.
    assert advice.queue == "research"
    assert advice.cost_source in (CheckpointCostSource.EARLIER_RUNS, CheckpointCostSource.THIS_RUN)
    assert 0.0 < advice.cost_s < advice.interval_s < advice.mean_between_s < 86_400.0
    assert advice.queue_interruptions > 4.9
    assert "Checkpoint every" in cluster.eelctl("explain", "t1").stdout
    assert "checkpoint every" in cluster.eelctl("get", "t1").stdout
    finish.touch()
    for key, trace in traces.items():
        cluster.until(lambda key=key: get(cluster, key).phase.is_ended, what=f"{key} ends")
        found = get(cluster, key)
        assert found.phase is WorkloadPhase.SUCCEEDED
        rows = [tuple(map(int, line.split())) for line in trace.read_text().splitlines()]
        assert [step for step, _ in rows] == list(range(1, len(rows) + 1))
        assert max(attempt for _, attempt in rows) == found.attempt
        assert found.attempt == found.preemptions + 1
    assert sum(get(cluster, key).preemptions for key in traces) >= 5


def test_an_attached_run_goes_on_after_a_preemption_and_prints_what_both_attempts_print(cluster):
    begin(cluster)
    script = "echo attempt $EELGRID_ATTEMPT; test $EELGRID_ATTEMPT = 2 || sleep 600; exit 3"
    command = [
        sys.executable,
        *cluster.eelctl_command("run", "--gpus", 2, "--queue", "research", "--", "sh", "-c", script),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as attached:
        assert attached.stdout.readline() == "attempt 1\n"
        submit(cluster, "u", "urgent", 1, "true")
        assert attached.stdout.readline() == "attempt 2\n"
        assert attached.wait(60) == 3
    assert get(cluster, "w-1").preemptions == 1


def test_a_service_that_is_scaled_up_gets_the_gpu_of_a_training_program_once_that_has_saved(cluster):
    controller, _ = begin(cluster)
    service = WorkloadSpec(
        name="chat",
        kind=WorkloadKind.INFERENCE_SERVICE,
        request=ResourceRequest(gpu_count=1, gpu_milli=1000),
        queue="urgent",
    )
    cluster.operators.submit_workload(SubmitWorkloadRequest(spec=service, workload_id="chat"), timeout=10.0)
    trace, finish, hold = (cluster.folder / name for name in ("trace", "finish", "hold"))
    # It takes its time to save, so that what happens meanwhile is seen.
    slow = TRAINING.replace(
        "    checkpoint.save", "    while not os.path.exists(sys.argv[4]): time.sleep(0.01)\n    checkpoint.save"
    )
    paths = map(str, (CLIENT, trace, finish, hold))
    submit(cluster, "train", "research", 1, sys.executable, "-I", "-c", slow, *paths)
    cluster.until(lambda: trace.exists() and trace.read_text().count("\n") > 3, what="it makes steps")
    scaled = cluster.eelctl("scale", "chat", "2")
    assert "1 of 2 replicas have room now; eelctl explain chat says whether others make room" in scaled.stderr
    assert "It preempts 1 workload (train)" in cluster.eelctl("explain", "chat").stdout
    controller.kill()
    cluster.controller()
    assert len(get(cluster, "chat").placements) == 1
    hold.touch()
    cluster.until(lambda: len(get(cluster, "chat").placements) == 2, what="the service has the GPU", within_s=60.0)
    assert get(cluster, "train").phase is WorkloadPhase.PENDING
    cluster.eelctl("scale", "chat", "1")
    cluster.until(lambda: get(cluster, "train").attempts, what="training goes on", within_s=60.0)
    finish.touch()
    cluster.until(lambda: get(cluster, "train").phase is WorkloadPhase.SUCCEEDED, what="training ends", within_s=60.0)
    steps = [int(line.split()[0]) for line in trace.read_text().splitlines()]
    assert steps == list(range(1, len(steps) + 1))
