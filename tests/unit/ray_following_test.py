"""Following decides what the core is told of a Ray cluster from one look: each rule with nodes, jobs and holdings as values."""

from dataclasses import replace

import pytest

from eelgrid_controller.engines.node_reports import CorrectDevices, RegisterNode, RemoveNode, ReportUsage
from eelgrid_controller.engines.ray.answers import GpuSlot, RayHolding, RayJob, RayLook, RayNode
from eelgrid_controller.engines.ray.following import (
    AdoptRayJob,
    EndRayWork,
    Following,
    FollowingSettings,
    StopRayJob,
    build_job_request,
    name_ray_job,
)
from eelgrid_controller.state.engine_reports import ExternalUsage
from eelgrid_protos.messages import Placement, ResourceRequest, Workload, WorkloadKind, WorkloadPhase, WorkloadSpec
from eelgrid_protos.ray_names import NODE_TRAIT, OF_CLIENT, ORIGIN
from eelgrid_protos.schema import check_message

NODES = tuple(
    RayNode(
        node_id=f"id-{name}", name=name, cpus=16, memory_bytes=2**36, gpus=4, gpu_model="A100", labels={"rack": "r1"}
    )
    for name in ("n0", "n1")
)
JOB = RayJob(
    job_id="02000000",
    submission_id="raysubmit_A",
    entrypoint="python /srv/train.py --lr 1",
    status="RUNNING",
    start_s=7,
)
ACTOR = RayHolding(node_id="id-n0", holder="a1", job_id="02000000", cpus=1.0, gpus=1.0, slots=(GpuSlot(2, 1.0),))
GPUS = {name: {index: f"{name}/gpu-{index}" for index in range(4)} for name in ("n0", "n1")}
KEY = "ray-raysubmit_A"


def build_workload(key=KEY, *places, phase=None, job=JOB, client=False, gpus=1, cpu_milli=0, milli=1000):
    """A workload of a job, or of the client library, on these pairs of a node and indexes."""
    spec = build_job_request(job, key, max(1, len(places)), FollowingSettings()).spec
    if client:
        request = ResourceRequest(gpu_count=gpus, gpu_milli=milli, cpu_milli=cpu_milli)
        spec = WorkloadSpec(name="c", kind=WorkloadKind.BATCH_JOB, request=request, labels={ORIGIN: OF_CLIENT})
    placements = tuple(
        Placement(
            replica=at, node_name=name, gpu_indexes=indexes, gpu_uuids=tuple(f"{name}/gpu-{one}" for one in indexes)
        )
        for at, (name, indexes) in enumerate(places)
    )
    phase = phase or (WorkloadPhase.PLACED if places else WorkloadPhase.PENDING)
    return Workload(workload_id=key, spec=spec, phase=phase, submitted_ns=1, placements=placements)


def decide(*holdings, jobs=(JOB,), workloads=(), following=None, expected=(), now_s=100.0):
    """What is to be done, without what is reported of nodes."""
    found = decide_all(*holdings, jobs=jobs, workloads=workloads, following=following, expected=expected, now_s=now_s)
    return [one for one in found if not isinstance(one, ReportUsage)]


def decide_all(
    *holdings, jobs=(JOB,), workloads=(), following=None, expected=(), now_s=100.0, nodes=NODES, agents=None
):
    look = RayLook(nodes=nodes, jobs=jobs, holdings=holdings, expected=frozenset(expected))
    known = {one.workload_id: one for one in workloads}
    agents = frozenset(("n0", "n1")) if agents is None else frozenset(agents)
    return (following or Following()).decide(look, known, has_agent=agents, gpus=GPUS, now_s=now_s)


def usage(*holdings, workloads=(), following=None):
    found = decide_all(*holdings, workloads=workloads, following=following)
    return {one.node_name: one.others for one in found if isinstance(one, ReportUsage)}


def test_a_job_is_adopted_on_the_gpus_that_it_has_to_itself():
    second = replace(ACTOR, holder="a2", node_id="id-n1", slots=(GpuSlot(0, 0.5),), gpus=0.5)
    (found,) = decide(ACTOR, second)
    assert isinstance(found, AdoptRayJob)
    assert [(one.node_name, one.gpu_indexes, one.is_exact) for one in found.adoption.standing] == [
        ("n0", (2,), True),
        ("n1", (0,), True),
    ]
    spec = found.request.spec
    assert (found.request.workload_id, spec.name, spec.replicas) == (KEY, "train.py", 2)
    assert spec.labels == {"ray/origin": "job", "ray/job": "02000000", "ray/submission": "raysubmit_A"}
    held = build_workload(KEY, ("n0", (2,)), ("n1", (0,)))
    assert decide(ACTOR, second, workloads=[held]) == []


def test_a_job_that_grows_and_shrinks_keeps_its_workload():
    before = build_workload(KEY, ("n0", (1,)), ("n0", (2,)))
    third = replace(ACTOR, holder="a3", slots=(GpuSlot(3, 1.0),))
    (found,) = decide(ACTOR, third, workloads=[before])
    assert (found.adoption.first, found.adoption.released) == (2, (0,))
    assert [one.gpu_indexes for one in found.adoption.standing] == [(3,)]


def test_a_gpu_that_two_jobs_share_stays_with_the_first_and_is_external_if_neither_has_it():
    half = replace(ACTOR, gpus=0.5, slots=(GpuSlot(2, 0.5),))
    other = replace(half, holder="b", job_id="03000000")
    jobs = (JOB, replace(JOB, job_id="03000000", submission_id="raysubmit_B"))
    assert decide(half, other, jobs=jobs) == []
    found = usage(half, other)["n0"]
    assert (found.gpu_count, found.gpu_indexes) == (1, (2,))
    held = build_workload(KEY, ("n0", (2,)))
    assert usage(half, other, workloads=[held])["n0"].gpu_count == 0


def test_gpus_that_are_not_known_yet_are_counted_and_known_ones_are_not_counted_twice():
    unknown = replace(ACTOR, slots=())
    assert (usage(unknown)["n0"].gpu_count, usage(unknown)["n0"].gpu_indexes) == (1, ())
    halves = [replace(ACTOR, holder=name, slots=(), gpus=0.5) for name in ("a", "b")]
    assert usage(*halves)["n0"].gpu_count == 2
    assert usage(ACTOR)["n0"].gpu_indexes == (2,)
    found = usage(ACTOR, workloads=[build_workload(KEY, ("n0", (2,)))])["n0"]
    assert (found.gpu_count, found.cpu_milli) == (0, 1000)


def test_statistics_that_fail_to_come_once_change_nothing():
    following, held = Following(), [build_workload(KEY, ("n0", (2,)))]
    decide(ACTOR, workloads=held, following=following)
    assert decide(replace(ACTOR, slots=()), workloads=held, following=following) == []
    assert usage(replace(ACTOR, slots=()), workloads=held, following=Following())["n0"].gpu_count == 1


def test_a_job_between_two_tasks_keeps_one_place_for_a_while_and_then_ends():
    following, held = Following(), [build_workload(KEY, ("n0", (1,)), ("n0", (2,)))]
    (found,) = decide(workloads=held, following=following, now_s=100.0)
    assert found.adoption.released == (1,)
    assert decide(workloads=[build_workload(KEY, ("n0", (1,)))], following=following, now_s=129.0) == []
    (ended,) = decide(workloads=[build_workload(KEY, ("n0", (1,)))], following=following, now_s=131.0)
    assert ended == EndRayWork(KEY, "holds no GPU in Ray any more")


def test_a_job_that_was_stopped_or_forgotten_and_a_driver_of_somebody_are_over_at_once():
    held = [build_workload(KEY, ("n0", (2,)))]
    assert decide(jobs=(replace(JOB, status="STOPPED"),), workloads=held) == [EndRayWork(KEY, "stopped in Ray")]
    assert decide(jobs=(), workloads=held) == [EndRayWork(KEY, "the job is no more in Ray")]
    driver = replace(JOB, submission_id="", status="SUCCEEDED")
    held = [build_workload("ray-02000000-7", ("n0", (2,)), job=driver)]
    assert decide(jobs=(driver,), workloads=held) == [EndRayWork("ray-02000000-7", "succeeded in Ray")]


@pytest.mark.parametrize(
    ("status", "code", "end"),
    [
        ("SUCCEEDED", 0, (0, 0, "")),
        ("SUCCEEDED", None, (0, 0, "")),
        ("FAILED", 3, (3, 0, "")),
        ("FAILED", -9, (None, 9, "")),
        ("FAILED", None, (None, 0, "failed in Ray")),
        ("FAILED", 0, (None, 0, "failed in Ray")),
    ],
)
def test_a_submitted_job_ends_in_the_core_as_it_ended_in_ray(status, code, end):
    held = [build_workload(KEY, ("n0", (2,)), ("n0", (3,)))]
    (found,) = decide(jobs=(replace(JOB, status=status, exit_code=code, end_s=60),), workloads=held)
    assert (found.status.exit_code, found.status.signal, found.status.reason) == end
    assert (found.status.workload_id, found.status.replica) == (KEY, 0)
    assert (found.status.started_ns, found.status.ended_ns) == (7 * 10**9, 60 * 10**9)
    # What its actors hold is held until they are gone.
    held = [build_workload(KEY, ("n0", (2,)))]
    assert decide(ACTOR, jobs=(replace(JOB, status=status, exit_code=code),), workloads=held) == []


def test_a_job_that_was_ended_by_the_engine_but_goes_on_is_another_workload():
    ended = replace(build_workload(KEY, phase=WorkloadPhase.CANCELLED), reason="holds no GPU in Ray any more")
    assert name_ray_job(JOB, {KEY: ended}) == f"{KEY}.1"
    (found,) = decide(ACTOR, workloads=[ended])
    assert found.request.workload_id == f"{KEY}.1"
    assert decide(ACTOR, workloads=[ended, build_workload(f"{KEY}.1", ("n0", (2,)))]) == []


def test_a_submitted_job_whose_workload_somebody_cancelled_is_stopped_and_no_other_workload():
    cancelled = build_workload(KEY, phase=WorkloadPhase.CANCELLED)
    assert decide(ACTOR, workloads=[cancelled]) == [StopRayJob("raysubmit_A", KEY)]
    assert usage(ACTOR, workloads=[cancelled])["n0"].gpu_indexes == (2,)
    assert decide(ACTOR, jobs=(replace(JOB, status="STOPPED"),), workloads=[cancelled]) == []
    before = replace(cancelled, reason="holds no GPU in Ray any more")
    later = build_workload(f"{KEY}.1", phase=WorkloadPhase.CANCELLED)
    assert decide(ACTOR, workloads=[before, later]) == [StopRayJob("raysubmit_A", f"{KEY}.1")]


@pytest.mark.parametrize("other", ["train.b", "train b", "train-b-", "train/b", "é", "x" * 101])
def test_a_job_whose_submission_looks_like_another_is_no_part_of_it(other):
    """Who submits a job chooses its id."""
    mine, others = replace(JOB, submission_id="train-b"), replace(JOB, job_id="03000000", submission_id=other)
    cancelled = build_workload("ray-train-b", ("n0", (2,)), phase=WorkloadPhase.CANCELLED, job=mine)
    stops = [one for one in decide(jobs=(mine, others), workloads=[cancelled]) if isinstance(one, StopRayJob)]
    assert [one.submission_id for one in stops] == ["train-b"]
    driver = RayJob(job_id="04000000", start_s=7)
    longer = replace(JOB, submission_id="x" * 102)
    as_driver = replace(JOB, submission_id="04000000-7")
    names = [name_ray_job(one, {}) for one in (mine, others, driver, longer, as_driver)]
    assert len(set(names)) == 5
    for name in names:
        check_message(replace(build_job_request(JOB, name, 1, FollowingSettings()), workload_id=f"{name}.9999"))


def test_a_driver_that_somebody_started_cannot_be_stopped_and_is_another_workload():
    driver = replace(JOB, submission_id="")
    cancelled = build_workload("ray-02000000-7", phase=WorkloadPhase.CANCELLED)
    (found,) = decide(ACTOR, jobs=(driver,), workloads=[cancelled])
    assert found.request.workload_id == "ray-02000000-7.1"


def test_drivers_of_two_clusters_with_one_number_are_two_jobs():
    driver = replace(JOB, submission_id="")
    assert name_ray_job(driver, {}) != name_ray_job(replace(driver, start_s=8), {})


def test_what_a_client_reserved_counts_as_its_workload_up_to_what_was_granted():
    mine = build_workload("w", ("n0", (0, 1)), client=True, gpus=2, cpu_milli=2000)
    group = RayHolding(node_id="id-n0", holder="g", job_id="02000000", workload_id="w", cpus=2.0, gpus=2.0)
    assert (usage(group, workloads=[mine])["n0"].gpu_count, usage(group, workloads=[mine])["n0"].cpu_milli) == (0, 0)
    greedy = replace(group, gpus=3.0, cpus=5.0)
    found = usage(greedy, workloads=[mine])["n0"]
    assert (found.gpu_count, found.cpu_milli) == (1, 3000)
    # A name that is not its own, elsewhere or of nobody, frees nothing.
    assert usage(replace(group, node_id="id-n1"), workloads=[mine])["n1"].gpu_count == 2
    assert usage(replace(group, workload_id="x"), workloads=[mine])["n0"].gpu_count == 2


def test_gpus_that_ray_chose_otherwise_than_planned_are_corrected():
    mine = build_workload("w", ("n0", (0,)), ("n0", (1,)), client=True)
    group = RayHolding(node_id="id-n0", holder="g", workload_id="w", gpus=2.0, slots=(GpuSlot(1, 1.0), GpuSlot(3, 1.0)))
    (found,) = decide(group, workloads=[mine])
    assert found == CorrectDevices("n0", {("w", 0): ("n0/gpu-1",), ("w", 1): ("n0/gpu-3",)})
    assert decide(replace(group, slots=(GpuSlot(1, 1.0),)), workloads=[mine]) == []


def test_shares_of_gpus_are_corrected_by_how_much_is_held_of_each():
    mine = build_workload("w", ("n0", (0,)), ("n0", (0,)), ("n0", (1,)), client=True, milli=333)
    group = RayHolding(node_id="id-n0", holder="g", workload_id="w", gpus=0.999, slots=(GpuSlot(3, 0.999),))
    (found,) = decide(group, workloads=[mine])
    assert found.held == {("w", replica): ("n0/gpu-3",) for replica in range(3)}
    # One of them is not known yet.
    assert decide(replace(group, slots=(GpuSlot(3, 0.666),)), workloads=[mine]) == []
    as_planned = replace(group, slots=(GpuSlot(0, 0.666), GpuSlot(1, 0.333)))
    assert decide(as_planned, workloads=[mine]) == []


def test_what_a_client_forgot_to_release_ends_after_a_while_and_not_while_its_group_waits():
    following, mine = Following(), [build_workload("w", ("n0", (0,)), client=True)]
    assert decide(workloads=mine, following=following, now_s=0.0) == []
    assert decide(workloads=mine, following=following, expected=("w",), now_s=40.0) == []
    assert decide(workloads=mine, following=following, now_s=41.0) == []
    assert decide(workloads=mine, following=following, now_s=72.0) == [EndRayWork("w", "nothing in Ray holds it")]


def test_nodes_are_registered_once_reported_with_traits_and_removed_when_they_are_gone():
    following = Following()
    found = decide_all(following=following, agents=())
    assert [one.inventory.node_name for one in found if isinstance(one, RegisterNode)] == ["n0", "n1"]
    inventory = next(one.inventory for one in found if isinstance(one, RegisterNode))
    assert (inventory.cpu_milli, len(inventory.gpus), inventory.gpus[0].model) == (16_000, 4, "A100")
    (report, _) = [one.others for one in found if isinstance(one, ReportUsage)]
    assert report.traits == (NODE_TRAIT, "ray/label/rack=r1")
    assert decide_all(following=following, agents=()) == []
    assert decide_all(following=following, agents=(), nodes=NODES[:1]) == [RemoveNode("n1")]
    following.reports.forget("n0")
    assert len(decide_all(following=following, agents=(), nodes=NODES[:1])) == 2


def test_a_node_with_an_agent_that_never_was_rays_is_open_for_what_agents_run():
    following = Following()
    found = decide_all(following=following, agents=("n0", "n1", "box"))
    (report,) = [one.others for one in found if isinstance(one, ReportUsage) and one.node_name == "box"]
    assert report == ExternalUsage()
    # One whose raylet has left stays closed.
    found = decide_all(following=following, agents=("n0", "n1", "box"), nodes=NODES[1:])
    assert [(one.node_name, bool(one.others.closed)) for one in found] == [("n0", True)]
    assert decide_all(following=following, agents=("n0", "n1", "box"), nodes=NODES[1:]) == []


def test_a_node_that_is_drained_is_closed_and_one_with_an_agent_closes_when_its_raylet_leaves():
    following = Following()
    drained = (replace(NODES[0], is_draining=True), NODES[1])
    found = [one for one in decide_all(following=following, nodes=drained) if isinstance(one, ReportUsage)]
    assert [one.others.closed for one in found] == ["Ray: the node is drained", ""]


@pytest.mark.parametrize(
    ("entrypoint", "name"),
    [
        ("python -m train", "train"),
        ("uv run python3.11 serve.py", "serve.py"),
        ("A=1 python x.py", "x.py"),
        ("python", "ray-job"),
        ("", "ray-job"),
    ],
)
def test_a_job_is_named_by_its_metadata_or_its_program(entrypoint, name):
    assert build_job_request(replace(JOB, entrypoint=entrypoint), "k", 1, FollowingSettings()).spec.name == name
    named = replace(JOB, metadata={"name": "mine", "user": "alice"})
    spec = build_job_request(named, "k", 1, FollowingSettings()).spec
    assert (spec.name, spec.user) == ("mine", "alice")


@pytest.mark.parametrize("known", [(), (GpuSlot(2, 1.0),)], ids=["none", "one of two"])
def test_a_gpu_stays_held_while_statistics_have_not_told_which_a_job_has_as_after_a_restart(known):
    held = build_workload(KEY, ("n0", (1,)), ("n0", (2,)))
    two = replace(ACTOR, gpus=2.0, slots=known)
    assert decide(two, workloads=[held], now_s=0.0) == []
    # Told, and it has another one.
    (found,) = decide(replace(ACTOR, gpus=2.0, slots=(GpuSlot(2, 1.0), GpuSlot(3, 1.0))), workloads=[held])
    assert (found.adoption.released, found.adoption.standing[0].gpu_indexes) == ((0,), (3,))
