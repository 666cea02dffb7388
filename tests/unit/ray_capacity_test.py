"""Nodes of Ray as jobs: which instances a controller's jobs are, what is submitted and cancelled. Needs no Ray."""

import re
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from eelgrid.errors import FailedPreconditionError, InvalidSettingsError, NotFoundError
from eelgrid.ray_capacity import (
    CapacityProblem,
    JobSupply,
    RayCapacity,
    RayInstance,
    build_node_job,
    build_ray_config,
    main,
    parse_settings,
)
from eelgrid_protos.messages import Workload, WorkloadPhase

FILE = {
    "address": "head:6379",
    "queue": "ray",
    "drain_s": 30,
    "nodes": {
        "gpu": {"gpus": 2, "cpus": 8, "most": 3, "labels": {"rack": "r1"}, "options": ["--min-worker-port", "0"]},
        "cpu": {"most": 1, "memory_bytes": 2**30},
    },
}


class Jobs:
    """A controller's jobs, as far as they are asked for."""

    def __init__(self):
        self.found, self.refused = {}, None

    def submit_workload(self, spec, *, workload_id=""):
        if self.refused is not None:
            raise self.refused
        found = Workload(workload_id=workload_id, spec=spec, phase=WorkloadPhase.PENDING, submitted_ns=1)
        return self.found.setdefault(workload_id, found)

    def list_workloads(self, *, phases=(), name_contains=""):
        return [one for one in self.found.values() if one.phase in phases and name_contains in one.spec.name]

    def cancel_workload(self, workload_id):
        if workload_id not in self.found:
            raise NotFoundError(f"no workload {workload_id}", "look again")
        if self.found[workload_id].phase is WorkloadPhase.CANCELLED:
            raise FailedPreconditionError("it has ended", "look again")
        return self.change(workload_id, phase=WorkloadPhase.CANCELLED)

    def change(self, workload_id, **fields):
        self.found[workload_id] = replace(self.found[workload_id], **fields)
        return self.found[workload_id]


@pytest.fixture
def jobs():
    return Jobs()


@pytest.fixture
def capacity(jobs):
    return RayCapacity(JobSupply(jobs, parse_settings(FILE)))


def launch(jobs, capacity):
    """One instance; returns the id of its job."""
    capacity.launch({"gpu": 1}, "request-1")
    (key,) = jobs.found
    return key


def test_what_is_launched_waits_as_the_first_run_of_a_job_and_a_repeated_request_is_no_second_one(jobs, capacity):
    for _ in range(2):
        capacity.launch({"gpu": 2, "cpu": 1}, "a-b")
    assert capacity.list_instances() == [
        RayInstance("ray-gpu-ab-0.1", "gpu", False),
        RayInstance("ray-gpu-ab-1.1", "gpu", False),
        RayInstance("ray-cpu-ab-0.1", "cpu", False),
    ]
    jobs.submit_workload(replace(jobs.found["ray-gpu-ab-0"].spec, labels={}), workload_id="of-others")
    assert len(capacity.list_instances()) == 3


# How a job is that stops and waits again then.
LEAVES = ({"preempted_for": "urgent"}, {"requeuing": True})


@pytest.mark.parametrize("leaves", LEAVES)
def test_a_job_that_makes_room_is_listed_with_the_run_that_ends_and_the_one_that_waits(jobs, capacity, leaves):
    key = launch(jobs, capacity)
    jobs.change(key, phase=WorkloadPhase.PLACED, attempt=1)
    assert capacity.list_instances() == [RayInstance(f"{key}.1", "gpu", True)]
    jobs.change(key, **leaves)
    assert capacity.list_instances() == [RayInstance(f"{key}.1", "gpu", True), RayInstance(f"{key}.2", "gpu", False)]
    jobs.change(key, phase=WorkloadPhase.PENDING)
    assert capacity.list_instances() == [RayInstance(f"{key}.2", "gpu", False)]


@pytest.mark.parametrize("leaves", LEAVES)
def test_clearing_away_a_run_that_ended_leaves_the_job_that_waits_for_the_next(jobs, capacity, leaves):
    key = launch(jobs, capacity)
    jobs.change(key, phase=WorkloadPhase.PLACED, attempt=1, **leaves)
    capacity.terminate([f"{key}.1"], "r")
    jobs.change(key, phase=WorkloadPhase.PENDING)
    capacity.terminate([f"{key}.1", "strange", "gone.1"], "r")
    assert jobs.found[key].phase is WorkloadPhase.PENDING
    capacity.terminate([f"{key}.2"], "r")
    assert jobs.found[key].phase is WorkloadPhase.CANCELLED
    capacity.terminate([f"{key}.2"], "r")
    assert (capacity.list_instances(), capacity.take_problems()) == ([], [])


def test_a_launch_that_is_refused_is_told_once(jobs, capacity):
    jobs.refused = FailedPreconditionError("queue ray has no quota", "raise it")
    capacity.launch({"gpu": 2, "strange": 1}, "r")
    found = capacity.take_problems()
    assert [(one.request_id, one.node_type) for one in found] == [("r", "gpu"), ("r", "gpu"), ("r", "strange")]
    assert "no quota" in found[0].reason
    assert isinstance(found[0], CapacityProblem)
    assert capacity.take_problems() == []


def test_a_job_asks_for_what_its_raylet_has_and_has_the_notice_as_its_grace():
    settings = parse_settings(FILE)
    spec = build_node_job(settings, settings.nodes[0])
    assert (spec.request.cpu_milli, spec.request.gpu_count, spec.queue) == (8000, 2, "ray")
    assert spec.process.grace_s == 30.0
    words = " ".join(spec.process.argv)
    assert "raylet --address head:6379 --node-type gpu --drain-s 30 -- --num-cpus 8 --num-gpus 2" in words
    assert words.endswith("--labels eelgrid.io/capacity=ray,rack=r1 --min-worker-port 0")


def test_rays_configuration_has_each_type_with_its_bounds():
    found = build_ray_config(parse_settings(FILE))
    assert found["available_node_types"]["gpu"]["resources"] == {"CPU": 8, "GPU": 2}
    assert found["available_node_types"]["cpu"]["resources"] == {"CPU": 1, "memory": 2**30}
    assert (found["max_workers"], found["head_node_type"], found["idle_timeout_minutes"]) == (4, "head", 1.0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"nodes": {}}, "nodes is empty"),
        ({"queues": "x"}, "queues is no setting"),
        ({"priority": "high"}, "priority is 'high'"),
        ({"nodes": {"gpu": {"most": "3"}}}, r"nodes.gpu.most is '3'"),
        ({"nodes": {"gpu": {"gpus": 1}}}, r"nodes.gpu.most is missing"),
        ({"nodes": {"gpu": {"most": 1, "least": 2}}}, "least 2 and most 1"),
        ({"nodes": {"head": {"most": 1}}}, "the type of the head"),
        ({"nodes": {"a b": {"most": 1}}}, "is no name"),
        ({"drain_s": 1}, "too short"),
    ],
)
def test_a_setting_that_is_wrong_is_named(change, words):
    with pytest.raises(InvalidSettingsError, match=words):
        parse_settings({**FILE, **change})


def test_the_file_of_the_how_to_page_is_read():
    text = (Path(__file__).parents[2] / "docs/how-to/ray.md").read_text()
    block = re.search(r'```yaml title="capacity.yaml"\n(.*?)```', text, re.DOTALL)
    settings = parse_settings(yaml.safe_load(textwrap.dedent(block[1])))
    assert [(one.name, one.gpus, one.most) for one in settings.nodes] == [("gpu", 1, 4), ("big", 8, 1)]


def test_a_call_without_a_command_says_how(capsys):
    assert main([]) == 2
    assert "autoscale FILE" in capsys.readouterr().err
