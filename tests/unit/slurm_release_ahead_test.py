"""Which jobs are released ahead of capacity: by the ends that are expected, and as the core itself would start them."""

from dataclasses import replace

import pytest

from eelgrid_controller.core.core import Core
from eelgrid_controller.engines.slurm.answers import GresCount, SlurmJob, SlurmNode
from eelgrid_controller.engines.slurm.marks import name_workload
from eelgrid_controller.engines.slurm.release_ahead import EndingKind, expect_ends, judge_ahead, plan_releases
from eelgrid_controller.engines.slurm.steering import SteeringSettings, build_inventory, build_request, list_traits
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.engine_reports import ExternalUsage
from eelgrid_protos import catalogue
from eelgrid_protos.messages import Workload, WorkloadPhase

NODES = tuple(
    SlurmNode(
        name=name, cpus=16, memory_bytes=2**36, gpus=(GresCount("a100", 2),), partitions=frozenset({"main"})
    )
    for name in ("n0", "n1")
)  # fmt: skip
WAITING = SlurmJob(
    job_id="1", user="alice", partition="main", admin_comment="eelgrid:held", is_held=True, cpus=1, memory_bytes=2**30,
    gpus=(GresCount("a100", 1),),
)  # fmt: skip


def make_world(running, waiting):
    """A core with so many jobs, and what Slurm says of them: two nodes of two GPUs each."""
    core, jobs = Core(ClusterState(), catalogue.load_catalogue()), list[SlurmJob]()
    for node in NODES:
        core.register_node(build_inventory(node), now_ns=1)
        core.update_external_usage(node.name, ExternalUsage(traits=list_traits(node)), now_ns=1)
    for number in range(1, running + waiting + 1):
        job = replace(WAITING, job_id=str(number))
        found = core.submit(build_request(job, SteeringSettings()), now_ns=1 + number).result
        assert (found.phase is WorkloadPhase.PLACED) == (number <= running), "four GPUs hold four jobs"
        if found.placements:
            name = found.placements[0].node_name
            mark = f"eelgrid:placed:{name}"
            job = replace(
                job, admin_comment=mark, is_held=False, state="RUNNING", nodes=(name,), required_nodes=(name,)
            )
        jobs.append(job)
    return core, jobs


def end(job, node, ended_s, **changes):
    mark = f"eelgrid:placed:{node}"
    return replace(
        job, admin_comment=mark, is_held=False, state="COMPLETED", nodes=(node,), start_s=90, end_s=ended_s, **changes
    )


def release(job, node):
    return replace(job, admin_comment=f"eelgrid:placed:{node}", is_held=False, required_nodes=(node,))


def expect(jobs, **changes):
    workloads = {name_workload(job): build_workload(job) for job in jobs}
    return expect_ends(jobs, workloads, **changes)


def build_workload(job):
    request = build_request(job, SteeringSettings())
    return Workload(workload_id=request.workload_id, spec=request.spec, phase=WorkloadPhase.SUCCEEDED)


def kind_of(node):
    (kind,) = expect([end(WAITING, node, 100)], now_s=100.0, horizon_s=1.0)
    return kind


def plan(core, jobs, ends, **changes):
    ahead = judge_ahead(jobs, core.state.workloads, ends)
    return [(one.job.job_id, one.nodes) for one in plan_releases(core, jobs, ahead, now_ns=10**9, **changes)]


@pytest.mark.parametrize(
    ("ended_s", "expected"),
    [
        ([98, 98, 99, 99, 100, 100], 4),  # two a second
        ([80] * 15 + [90], 10),  # five a second, and then the jobs ran out
        ([80, 83, 86, 89, 92, 95], 1),
        ([80], 1),
        ([60] * 50, None),
        ([200], None),  # a clock that was set back
    ],
)
def test_ends_are_expected_to_go_on_as_they_came(ended_s, expected):
    jobs = [end(replace(WAITING, job_id=str(n)), "n0", at) for n, at in enumerate(ended_s, 1)]
    found = expect(jobs, now_s=100.9, horizon_s=2.0)
    assert list(found.values()) == ([] if expected is None else [expected])


def test_ends_count_by_node_and_kind_and_of_steered_jobs_that_ran():
    second, third = replace(WAITING, job_id="2"), replace(WAITING, job_id="3", user="bob")
    jobs = [end(WAITING, "n0", 100), end(second, "n1", 100), end(third, "n1", 100)]
    found = expect(jobs, now_s=100.0, horizon_s=2.0)
    assert sorted((kind.node_name, kind.shape[0], count) for kind, count in found.items()) == [
        ("n0", "alice", 1),
        ("n1", "alice", 1),
        ("n1", "bob", 1),
    ]
    others = [
        replace(jobs[0], admin_comment=""),
        replace(jobs[0], state="CANCELLED"),
        replace(jobs[0], start_s=0),
        replace(jobs[0], start_s=39),
        replace(jobs[0], nodes=("n0", "n1")),
        replace(jobs[0], state="RUNNING"),
    ]
    for job in others:
        assert expect([job], now_s=100.0, horizon_s=2.0) == {}
    # What the core does not know is nothing of ours.
    assert expect_ends(jobs, {}, now_s=100.0, horizon_s=2.0) == {}


def test_the_jobs_that_the_core_would_start_next_are_released_where_others_end():
    core, jobs = make_world(4, 5)
    by_node = {job.job_id: job.nodes for job in jobs[:4]}
    # n1's only: the two that end there make room for the next two, and so on in turn.
    assert plan(core, jobs, {kind_of("n1"): 3}) == [("5", ("n1",)), ("6", ("n1",)), ("7", ("n1",))]
    assert sorted(by_node.values()) == [("n0",), ("n0",), ("n1",), ("n1",)]


def test_nothing_is_released_where_no_end_is_expected_or_jobs_of_another_kind_run():
    core, jobs = make_world(4, 2)
    assert plan(core, jobs, {}) == []
    core, jobs = make_world(4, 2)
    assert plan(core, jobs, {EndingKind("n0", ("bob",)): 2}) == []


def test_the_core_s_own_rules_say_who_is_next():
    core, jobs = make_world(4, 3)
    core.hold("slurm-5", now_ns=100)
    assert plan(core, jobs, {kind_of("n0"): 1}) == [("6", ("n0",))]
    # The first in the queue needs both GPUs of a node: one that ends does not make its room, and it is not passed by.
    core, jobs = make_world(4, 0)
    large = replace(WAITING, job_id="8", gpus=(GresCount("a100", 2),))
    core.submit(build_request(large, SteeringSettings()), now_ns=100)
    assert plan(core, [*jobs, large], {kind_of("n0"): 1}) == []
    core, jobs = make_world(4, 0)
    core.submit(build_request(large, SteeringSettings()), now_ns=100)
    assert plan(core, [*jobs, large], {kind_of("n0"): 2}) == [("8", ("n0",))]


def test_jobs_that_were_released_already_count_and_more_than_twice_what_is_expected_are_held_again():
    core, jobs = make_world(4, 6)
    jobs[4:7] = [release(job, "n0") for job in jobs[4:7]]
    ahead = judge_ahead(jobs, core.state.workloads, {kind_of("n0"): 1})
    assert (sorted(ahead.waiting), ahead.ends) == (["slurm-5", "slurm-6", "slurm-7"], {})
    assert [job.job_id for job in ahead.surplus] == ["7"]
    # Nothing ends any more: all are held again.
    assert [job.job_id for job in judge_ahead(jobs, core.state.workloads, {}).surplus] == ["5", "6", "7"]
    assert plan(core, jobs, {kind_of("n0"): 4}) == [("8", ("n0",))]


def test_while_a_job_is_to_make_room_nothing_is_released_ahead():
    core, jobs = make_world(4, 2)
    jobs[4] = release(jobs[4], "n0")
    key = name_workload(jobs[0])
    workloads = {**core.state.workloads, key: replace(core.state.workloads[key], preempted_for="w-1")}
    ahead = judge_ahead(jobs, workloads, {kind_of("n0"): 4})
    assert (ahead.ends, [job.job_id for job in ahead.surplus]) == ({}, ["5"])


def test_a_placed_job_that_waits_in_slurm_was_not_released_ahead():
    core, jobs = make_world(4, 1)
    jobs[0] = replace(jobs[0], state="PENDING", nodes=())
    ahead = judge_ahead(jobs, core.state.workloads, {})
    assert (ahead.waiting, ahead.surplus) == ({}, ())
