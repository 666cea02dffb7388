"""Steering decides what is to be done about jobs of Slurm from one look: each rule with jobs as values."""

from dataclasses import replace

import pytest

from eelgrid_controller.engines.node_reports import CorrectDevices, RegisterNode, RemoveNode, ReportUsage
from eelgrid_controller.engines.slurm.answers import GresCount, SlurmJob, SlurmJobs, SlurmNode
from eelgrid_controller.engines.slurm.dependencies import Dependencies, DependencyState
from eelgrid_controller.engines.slurm.job_table import JobTable
from eelgrid_controller.engines.slurm.marks import mark_placement, mark_requeue, shorten_reason
from eelgrid_controller.engines.slurm.steering import (
    WAITING_MOST,
    AdoptJob,
    CancelJob,
    DistinctNodes,
    EndJob,
    LetJobGo,
    PlaceJob,
    RequeueJob,
    Steering,
    SteeringSettings,
    SubmitJob,
    build_request,
    is_refusal,
)
from eelgrid_controller.formatting import describe_attempt
from eelgrid_controller.state.engine_reports import ExternalUsage
from eelgrid_protos.messages import AttemptState, AttemptStatus, Placement, Workload, WorkloadPhase
from eelgrid_protos.schema import list_violations

NODES = tuple(
    SlurmNode(
        name=name, cpus=16, memory_bytes=2**36, gpus=(GresCount("a100", 4),), features=frozenset({"a100"}),
        partitions=frozenset({"main"}), states=frozenset({"IDLE"}),
    )
    for name in ("n0", "n1")
)  # fmt: skip
HELD = SlurmJob(
    job_id="12", name="train", user="alice", partition="main", admin_comment="eelgrid:held", is_held=True, cpus=4,
    memory_bytes=2**30, gpus=(GresCount("a100", 2),), reason="JobHeldUser", submit_s=5,
)  # fmt: skip
PLACED = replace(HELD, admin_comment="eelgrid:placed:n0", is_held=False, required_nodes=("n0",), reason="Priority")
RUNNING = replace(PLACED, state="RUNNING", nodes=("n0",), gpu_indexes={"n0": (0, 1)}, reason="None", start_s=20)
S = 10**9


def build_workload(job, *nodes, phase=WorkloadPhase.PENDING, gpus=("u0", "u1")):
    request = build_request(job, SteeringSettings())
    places = tuple(Placement(replica=at, node_name=name, gpu_uuids=gpus) for at, name in enumerate(nodes))
    begun = AttemptStatus(
        workload_id=request.workload_id, replica=0, attempt=0, state=AttemptState.RUNNING, started_ns=20 * S
    )
    return Workload(
        workload_id=request.workload_id,
        spec=request.spec,
        phase=WorkloadPhase.PLACED if nodes else phase,
        submitted_ns=1,
        placements=places,
        attempts=(begun,) if nodes else (),
    )


def judge_by(jobs):
    """Judges dependencies by these jobs."""
    table = JobTable()
    table.fill(SlurmJobs(jobs=tuple(jobs)))
    return Dependencies(table.find_jobs)


def decide(*jobs, workloads=(), steering=None, nodes=NODES, now_s=100.0, agents=frozenset({"n0", "n1"}), gpus=None):
    """What is to be done, without what is reported of nodes."""
    known = {one.workload_id: one for one in workloads}
    found = (steering or Steering()).decide(
        jobs, nodes, known, has_agent=agents, gpus=gpus or {}, now_s=now_s, dependencies=judge_by(jobs)
    )
    return [one for one in found if not isinstance(one, ReportUsage)]


def reports(*jobs, workloads=()):
    known = {one.workload_id: one for one in workloads}
    found = Steering().decide(
        jobs, NODES, known, has_agent=frozenset({"n0", "n1"}), gpus={}, now_s=1.0, dependencies=judge_by(jobs)
    )
    return {one.node_name: one.others for one in found if isinstance(one, ReportUsage)}


def test_a_held_job_is_submitted_with_what_it_asks_for():
    (found,) = decide(HELD)
    assert isinstance(found, SubmitJob)
    spec = found.request.spec
    assert (found.request.workload_id, spec.name, spec.user, spec.replicas) == ("slurm-12", "train", "alice", 1)
    assert (spec.request.gpu_count, spec.request.cpu_milli, spec.request.memory_bytes) == (2, 4000, 2**30)
    assert spec.required_traits == ("slurm/partition/main", "slurm/gres/a100")


def test_a_job_that_waits_for_slices_is_let_go_once_a_node_with_an_agent_has_them():
    waiting = replace(HELD, gpus=(GresCount("1g.10gb", 1),))
    known, steering = build_workload(waiting), Steering()
    cut = (replace(NODES[0], gpus=(GresCount("1g.10gb", 7),)), NODES[1])
    assert decide(waiting, workloads=[known], steering=steering) == []
    (found,) = decide(waiting, workloads=[known], steering=steering, nodes=cut)
    assert found == LetJobGo("12", "slices of a node with an agent are given by Slurm itself", "")
    # Where a node without an agent has such slices, too, the core places it.
    both = (cut[0], replace(cut[0], name="n1"))
    found = decide(waiting, workloads=[known], nodes=both, agents=frozenset({"n0"}))
    assert [type(one) for one in found] == [RegisterNode]


def test_a_job_that_waits_in_the_core_is_left_alone_and_placed_when_that_places_it():
    assert decide(HELD, workloads=[build_workload(HELD)]) == []
    assert decide(HELD, workloads=[build_workload(HELD, "n1")]) == [PlaceJob(HELD, ("n1",))]


def test_a_node_that_slurm_does_not_have_is_required_of_it_by_nothing():
    assert decide(HELD, workloads=[build_workload(HELD, "elsewhere")]) == []


def test_a_job_without_our_mark_is_nobodys_but_its_usage_counts():
    other = replace(RUNNING, admin_comment="", job_id="13", gpu_indexes={"n0": (3,)})
    assert decide(other, replace(HELD, admin_comment="")) == []
    found = reports(other)
    assert (found["n0"].gpu_count, found["n0"].gpu_indexes, found["n0"].cpu_milli) == (2, (3,), 4000)
    assert found["n1"].gpu_count == 0
    # What the core holds as placed is not counted twice.
    assert reports(RUNNING, workloads=[build_workload(RUNNING, "n0")])["n0"].gpu_count == 0


def test_a_running_job_is_adopted_where_it_runs_whether_or_not_the_core_knew_it():
    (found,) = decide(RUNNING)
    assert isinstance(found, AdoptJob)
    assert [(one.node_name, one.gpu_indexes, one.is_exact) for one in found.adoption.standing] == [("n0", (0, 1), True)]
    # Until then it is external usage, which is given back in the same step, on its very devices.
    assert [one.counted for one in found.adoption.standing] == [replace(reports(RUNNING)["n0"], traits=())]
    assert found.adoption.first == 0
    (moved,) = decide(RUNNING, workloads=[build_workload(RUNNING, "n1")])
    assert isinstance(moved, AdoptJob)
    assert (moved.adoption.first, moved.adoption.released) == (1, (0,))
    assert decide(RUNNING, workloads=[build_workload(RUNNING, "n0")]) == []


def test_a_job_that_somebody_else_released_is_given_up_and_counts_as_external():
    released = replace(RUNNING, admin_comment="eelgrid:held")
    assert decide(released, workloads=[build_workload(RUNNING)]) == [
        EndJob("slurm-12", "runs in Slurm without having been placed")
    ]
    assert reports(RUNNING, workloads=[build_workload(RUNNING, phase=WorkloadPhase.CANCELLED)])["n0"].gpu_count == 2


def test_a_job_that_was_released_ahead_is_adopted_once_it_has_begun_and_when_nobody_saw_it_run():
    known = build_workload(RUNNING)
    steering = Steering(SteeringSettings(patience_s=1.0))
    (running,) = steering.list_begun([RUNNING], {known.workload_id: known})
    (standing,) = running.adoption.standing
    assert (running.adoption.begins_pending, running.adoption.first, running.adoption.released) == (True, 0, ())
    # Its devices may be promised to another for a moment.
    assert (standing.node_name, standing.gpu_indexes, standing.is_exact) == ("n0", (0, 1), False)
    assert standing.counted == ExternalUsage()
    # If it cannot be adopted it is external usage until the next look.
    assert decide(RUNNING, workloads=[known], steering=steering) == []
    (running,) = steering.list_begun([RUNNING], {known.workload_id: known})
    assert running.adoption.standing[0].counted == replace(reports(RUNNING, workloads=[known])["n0"], traits=())
    ended = replace(RUNNING, state="COMPLETED", end_s=21)
    (unseen,) = Steering().list_begun([ended], {known.workload_id: known})
    assert (unseen.adoption.begins_pending, unseen.adoption.standing[0].counted) == (True, ExternalUsage())
    assert decide(ended, workloads=[known], steering=steering, now_s=100.0) == []
    # What can be adopted nowhere does not wait for ever.
    assert decide(ended, workloads=[known], steering=steering, now_s=110.0) == [
        EndJob("slurm-12", "completed in Slurm")
    ]
    # It never began, or was cancelled.
    for state, start_s in (("CANCELLED", 20), ("DEADLINE", 0)):
        gone = replace(ended, state=state, start_s=start_s)
        assert decide(gone, workloads=[known]) == [EndJob("slurm-12", f"{state.lower()} in Slurm")]


def test_a_job_that_was_released_ahead_goes_where_there_is_room_first_and_waits_as_long_as_the_core_has_none():
    steering = Steering(SteeringSettings(patience_s=1.0))
    for now_s in (100.0, 200.0):
        assert decide(PLACED, workloads=[build_workload(PLACED)], steering=steering, now_s=now_s) == []
    assert decide(PLACED, workloads=[build_workload(PLACED, "n0")], steering=steering, now_s=201.0) == []
    assert decide(PLACED, workloads=[build_workload(PLACED, "n1")], steering=steering, now_s=202.0) == [
        PlaceJob(PLACED, ("n1",))
    ]
    # Since it was placed, and not since it was released.
    assert decide(PLACED, workloads=[build_workload(PLACED, "n0")], steering=steering, now_s=209.0) == []
    (gone,) = decide(PLACED, workloads=[build_workload(PLACED, "n0")], steering=steering, now_s=211.0)
    assert isinstance(gone, LetJobGo)


def test_ends_are_listed_of_placed_jobs_that_ran_and_make_room_for_nobody():
    steering, ended = Steering(), replace(RUNNING, state="FAILED", exit_code=3, end_s=60)
    placed = build_workload(RUNNING, "n0")
    (found,) = steering.list_ends([ended], {placed.workload_id: placed})
    assert (found.workload_id, found.exit_code, found.ended_ns) == ("slurm-12", 3, 60 * S)
    for job, known in (
        (RUNNING, placed),
        (replace(ended, state="CANCELLED"), placed),
        (ended, build_workload(RUNNING)),
        (ended, victim(RUNNING, "n0")),
    ):
        assert steering.list_ends([job], {known.workload_id: known}) == []


@pytest.mark.parametrize(
    ("changes", "end"),
    [
        ({"state": "COMPLETED"}, (AttemptState.ENDED, 0, 0, "")),
        ({"state": "FAILED", "exit_code": 3}, (AttemptState.ENDED, 3, 0, "")),
        ({"state": "FAILED", "exit_signal": 11}, (AttemptState.ENDED, None, 11, "")),
        ({"state": "TIMEOUT"}, (AttemptState.ENDED, None, 15, "its time limit was over")),
        ({"state": "TIMEOUT", "exit_code": 1}, (AttemptState.ENDED, 1, 0, "its time limit was over")),
        ({"state": "OUT_OF_MEMORY", "exit_signal": 125}, (AttemptState.ENDED, None, 9, "out of memory")),
        ({"state": "NODE_FAIL"}, (AttemptState.LOST, None, 0, "its node failed")),
        ({"state": "PREEMPTED"}, (AttemptState.ENDED, None, 15, "preempted by Slurm")),
    ],
)
def test_a_job_that_ended_ends_in_the_core_as_it_ended_in_slurm(changes, end):
    job = replace(RUNNING, nodes=(), end_s=60, **changes)
    (found,) = decide(job, workloads=[build_workload(RUNNING, "n0")])
    status = found.status
    assert (status.state, status.exit_code, status.signal, status.reason) == end
    assert (status.workload_id, status.attempt, status.started_ns, status.ended_ns) == ("slurm-12", 0, 20 * S, 60 * S)
    assert list(list_violations(status)) == []
    assert status.is_success == (job.state == "COMPLETED")


def test_a_job_that_slurm_has_forgotten_is_lost_and_no_success():
    (found,) = decide(workloads=[build_workload(RUNNING, "n0")])
    assert (found.status.state, found.status.is_success) == (AttemptState.LOST, False)
    assert describe_attempt(found.status) == "lost: Slurm has forgotten the job, so nobody knows how it ended"
    assert decide(workloads=[build_workload(RUNNING)]) == [
        EndJob("slurm-12", "Slurm has forgotten the job, so nobody knows how it ended")
    ]


def test_a_job_that_was_cancelled_in_slurm_is_cancelled_here():
    gone = replace(RUNNING, state="CANCELLED", nodes=(), exit_signal=15)
    assert decide(gone, workloads=[build_workload(RUNNING, "n0")]) == [EndJob("slurm-12", "cancelled in Slurm")]
    never = replace(PLACED, state="DEADLINE")
    assert decide(never, workloads=[build_workload(RUNNING, "n0")]) == [EndJob("slurm-12", "deadline in Slurm")]


def test_a_placed_job_is_reported_as_begun_once_it_runs_in_slurm():
    known = replace(build_workload(RUNNING, "n0"), attempts=())
    (found,) = decide(RUNNING, workloads=[known])
    assert (found.status.state, found.status.started_ns) == (AttemptState.RUNNING, 20 * S)
    assert decide(RUNNING, workloads=[replace(known, attempts=(found.status,))]) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"state": "COMPLETED", "flags": frozenset({"COMPLETING"})},
        # In 22.05 the flag hides how it ended.
        {"state": "COMPLETING"},
        {"state": "REQUEUED", "nodes": ()},
        {"state": "STAGE_OUT", "nodes": ()},
    ],
)
def test_a_job_that_has_not_ended_for_good_still_holds_its_place(changes):
    assert decide(replace(RUNNING, **changes), workloads=[build_workload(RUNNING, "n0")]) == []


def test_a_restart_is_another_run_and_what_was_said_of_the_first_is_not_of_it():
    again = replace(HELD, restarts=1)
    ended, submitted = decide(again, workloads=[build_workload(HELD, "n0")])
    assert (ended.status.workload_id, ended.status.reason) == ("slurm-12", "Slurm has restarted the job")
    assert submitted.request.workload_id == "slurm-12.1"


def victim(job, *nodes):
    return replace(build_workload(job, *nodes), preempted_for="w-1", stopping_ns=1, reason="preempted: for w-1")


def test_a_job_that_has_to_make_room_is_requeued_waits_under_its_id_and_is_placed_again():
    steering = Steering(SteeringSettings(patience_s=1.0))

    def step(job, known, now_s):
        return decide(job, workloads=[known], steering=steering, now_s=now_s)

    step(PLACED, build_workload(HELD, "n0"), 100.0)
    running = replace(RUNNING, can_requeue=True)
    assert step(running, victim(running, "n0"), 101.0) == [RequeueJob(running, "slurm-12")]
    assert mark_requeue(running) == "eelgrid:requeued/0@1"
    marked = replace(running, admin_comment="eelgrid:requeued/0@1")
    # Marked, and Slurm has not yet ended it: asked again.
    assert step(marked, victim(running, "n0"), 102.0) == [RequeueJob(marked, "slurm-12")]
    assert step(replace(marked, state="COMPLETING"), victim(running, "n0"), 103.0) == []
    waits = replace(
        marked, state="PENDING", nodes=(), is_held=True, restarts=1, required_nodes=("n0",), eligible_s=999, start_s=0
    )
    (found,) = step(waits, victim(running, "n0"), 104.0)
    status = found.status
    assert (status.workload_id, status.is_over, status.is_success, status.started_ns) == (
        "slurm-12",
        True,
        False,
        20 * S,
    )
    assert describe_attempt(status) == "ended by SIGTERM: requeued in Slurm, restart 1"
    assert list(list_violations(status)) == []
    assert step(waits, build_workload(HELD), 105.0) == []
    # Its own wait in Slurm is ended when it is placed, and the nodes that it has are ours and not its user's.
    (place,) = step(waits, build_workload(HELD, "n1"), 106.0)
    assert (place, mark_placement(place.job, place.nodes)) == (PlaceJob(waits, ("n1",)), "eelgrid:placed:n1/0@1")
    again = replace(waits, admin_comment="eelgrid:placed:n1/0@1", is_held=False, required_nodes=("n1",))
    assert step(again, build_workload(HELD, "n1"), 107.0) == []
    assert step(replace(again, state="RUNNING", nodes=("n1",)), build_workload(HELD, "n1"), 108.0) == []
    # A later restart is one of Slurm's own, and another run.
    other = replace(again, state="RUNNING", nodes=("n1",), restarts=2)
    assert {
        one.request.workload_id for one in step(other, build_workload(HELD, "n1"), 109.0) if isinstance(one, AdoptJob)
    } == {"slurm-12.2"}


def test_a_placed_job_that_has_not_begun_makes_room_without_a_restart():
    assert decide(PLACED, workloads=[victim(HELD, "n0")]) == [RequeueJob(PLACED, "slurm-12")]
    assert mark_requeue(PLACED) == "eelgrid:requeued/0@0"
    held = replace(PLACED, admin_comment="eelgrid:requeued/0@0", is_held=True)
    (found,) = decide(held, workloads=[victim(HELD, "n0")])
    assert found.status.is_over
    (place,) = decide(held, workloads=[build_workload(HELD, "n1")])
    assert mark_placement(place.job, place.nodes) == "eelgrid:placed:n1"


def test_a_requeued_job_is_known_again_without_a_journal_and_keeps_its_run_when_it_is_let_go():
    waits = replace(HELD, admin_comment="eelgrid:requeued/2@4", restarts=4, required_nodes=("n0",))
    (found,) = decide(waits)
    assert found.request.workload_id == "slurm-12.2"
    assert decide(replace(waits, peculiar="odd")) == [LetJobGo("12", "odd", "/2@4")]
    left = replace(waits, admin_comment="eelgrid:left/2@4 odd", is_held=False)
    known = replace(build_workload(HELD), workload_id="slurm-12.2")
    assert decide(left, workloads=[known]) == [EndJob("slurm-12.2", "left to Slurm")]


def test_only_jobs_that_slurm_may_requeue_are_victims_and_a_qos_is_the_priority_class_of_its_name():
    wanted = [build_request(replace(HELD, can_requeue=can), SteeringSettings()).spec for can in (True, False)]
    assert [one.evicted_by_engine for one in wanted] == [True, False]
    for names, given in ((frozenset({"high"}), "high"), (frozenset(), "")):
        urgent = [replace(HELD, qos="high")]
        (found,) = Steering().decide(
            urgent, (), {}, has_agent=frozenset(), gpus={}, now_s=1.0, dependencies=judge_by(urgent), priority_classes=names
        )  # fmt: skip
        assert found.request.spec.priority_class == given


@pytest.mark.parametrize("time_limit_s", [0.0, 60.0, 6e8])
def test_a_job_with_any_time_limit_is_submitted_as_the_core_takes_it(time_limit_s):
    request = build_request(replace(HELD, time_limit_s=time_limit_s), SteeringSettings())
    assert list(list_violations(request)) == []
    assert request.spec.expected_runtime_s == (min(time_limit_s, 3e8) or None)


def test_a_job_whose_user_names_its_nodes_is_left_to_slurm():
    (found,) = decide(replace(HELD, required_nodes=("n1",)))
    assert found == LetJobGo("12", "its user has named its nodes")


def test_a_job_that_was_cancelled_here_is_cancelled_in_slurm():
    assert decide(HELD, workloads=[build_workload(HELD, phase=WorkloadPhase.CANCELLED)]) == [CancelJob("12")]
    running = replace(RUNNING, admin_comment="eelgrid:placed:n0")
    cancelled = build_workload(running, phase=WorkloadPhase.CANCELLED)
    assert decide(running, workloads=[cancelled]) == [CancelJob("12")]
    assert decide(replace(running, flags=frozenset({"COMPLETING"})), workloads=[cancelled]) == []
    # One that the engine itself has ended here, since somebody released it, runs on.
    assert decide(running, workloads=[replace(cancelled, reason="runs in Slurm without having been placed")]) == []


def test_a_refused_job_is_let_go_after_the_patience_and_one_that_waits_after_ten_times():
    steering = Steering(SteeringSettings(patience_s=30.0))
    refused = replace(PLACED, reason="BadConstraints")
    known = [build_workload(PLACED, "n0")]
    assert decide(refused, workloads=known, steering=steering, now_s=100.0) == []
    assert decide(PLACED, workloads=known, steering=steering, now_s=120.0) == []
    # It was not refused in between: the patience begins anew.
    assert decide(refused, workloads=known, steering=steering, now_s=131.0) == []
    assert decide(refused, workloads=known, steering=steering, now_s=161.0) == [
        LetJobGo("12", "Slurm says BadConstraints")
    ]
    steering = Steering(SteeringSettings(patience_s=30.0))
    assert decide(PLACED, workloads=known, steering=steering, now_s=100.0) == []
    assert decide(PLACED, workloads=known, steering=steering, now_s=399.0) == []
    assert decide(PLACED, workloads=known, steering=steering, now_s=400.0) == [LetJobGo("12", "Slurm says Priority")]


def test_a_job_that_was_let_go_is_ended_in_the_core_and_never_held_again():
    left = replace(PLACED, admin_comment="eelgrid:left for a reason")
    assert decide(left, workloads=[build_workload(PLACED, "n0")]) == [EndJob("slurm-12", "left to Slurm")]
    assert decide(left) == []


@pytest.mark.parametrize(
    "reason", ["BadConstraints", "ReqNodeNotAvail, UnavailableNodes:n1", "QOSMaxJobsPerUserLimit", "AssocGrpCpuLimit"]
)
def test_reasons_that_waiting_does_not_end_are_refusals(reason):
    assert is_refusal(reason)


@pytest.mark.parametrize("reason", ["Resources", "Priority", "None", "", "BeginTime", "Dependency"])
def test_reasons_of_any_queue_are_none(reason):
    assert not is_refusal(reason)


def test_what_cannot_be_steered_is_let_go_at_once_with_the_reason():
    assert decide(replace(HELD, peculiar="it needs licenses, which only Slurm counts")) == [
        LetJobGo("12", "it needs licenses, which only Slurm counts")
    ]
    many = replace(HELD, features="&".join(f"f{number}" for number in range(20)))
    assert decide(many) == [LetJobGo("12", "it names more than 16 features")]


def test_a_begin_time_is_waited_for():
    later = replace(HELD, eligible_s=200)
    assert decide(later, now_s=199.0) == []
    assert isinstance(decide(later, now_s=200.0)[0], SubmitJob)


ENDED = replace(RUNNING, job_id="7", state="COMPLETED", nodes=())
BAD = replace(ENDED, job_id="8", state="FAILED", exit_code=1)
TASKS = tuple(replace(ENDED, job_id=f"9_{task}", array_id="9") for task in range(2))


@pytest.mark.parametrize(
    ("dependency", "state"),
    [
        ("", DependencyState.FULFILLED),
        ("afterany:12(unfulfilled)", DependencyState.WAITS),
        ("afterok:7(unfulfilled)", DependencyState.FULFILLED),
        ("afterok:8(unfulfilled)", DependencyState.UNKNOWN),
        ("afternotok:8(unfulfilled),afterany:7(unfulfilled)", DependencyState.FULFILLED),
        ("afternotok:7(unfulfilled)", DependencyState.UNKNOWN),
        ("afterany:9_*(unfulfilled)", DependencyState.FULFILLED),
        ("afterok:9_1(unfulfilled)", DependencyState.FULFILLED),
        ("after:12(unfulfilled)", DependencyState.WAITS),
        ("afterok:1(fulfilled),after:7(unfulfilled)", DependencyState.FULFILLED),
        ("afterany:999(unfulfilled)", DependencyState.FULFILLED),
        ("afterok:999(unfulfilled)", DependencyState.UNKNOWN),
        ("singleton(unfulfilled)", DependencyState.UNKNOWN),
        ("afterok:7(unfulfilled)?afterok:8(unfulfilled)", DependencyState.UNKNOWN),
    ],
)
def test_dependencies_are_judged_as_slurm_would(dependency, state):
    assert judge_by((HELD, ENDED, BAD, *TASKS)).judge(dependency) is state


def test_what_slurm_alone_can_judge_is_left_to_it():
    (found,) = decide(replace(HELD, dependency="singleton(unfulfilled)"))
    assert found == LetJobGo("12", "its dependency singleton(unfulfilled) is for Slurm to judge")


def test_nodes_without_an_agent_are_registered_from_what_slurm_says_of_them():
    steering = Steering()
    found = decide(steering=steering, agents=frozenset({"n1"}))
    assert [type(one) for one in found] == [RegisterNode]
    inventory = found[0].inventory
    assert (inventory.node_name, inventory.cpu_milli, len(inventory.gpus)) == ("n0", 16_000, 4)
    assert decide(steering=steering, agents=frozenset({"n1"})) == []
    assert decide(steering=steering, nodes=NODES[1:], agents=frozenset({"n1"})) == [RemoveNode("n0")]


def test_a_node_is_reported_once_until_something_changes():
    steering, jobs = Steering(), []

    def count(nodes=NODES):
        found = steering.decide(
            jobs, nodes, {}, has_agent=frozenset({"n0", "n1"}), gpus={}, now_s=1.0, dependencies=judge_by(jobs)
        )
        return [(one.node_name, one.others.closed) for one in found if isinstance(one, ReportUsage)]

    assert count() == [("n0", ""), ("n1", "")]
    assert count() == []
    drained = replace(NODES[0], states=frozenset({"IDLE", "DRAIN"}), reason="fan")
    assert count((drained, NODES[1])) == [("n0", "Slurm: the node is drained (fan)")]
    steering.reports.forget("n1")
    assert count((drained, NODES[1])) == [("n1", "")]


def test_the_core_learns_which_gpus_slurm_chose():
    gpus = {"n0": {0: "u0", 1: "u1", 2: "u2", 3: "u3"}}
    swapped = replace(RUNNING, gpu_indexes={"n0": (2, 3)})
    known = [build_workload(RUNNING, "n0")]
    assert decide(RUNNING, workloads=known, gpus=gpus) == []
    assert decide(swapped, workloads=known, gpus=gpus) == [CorrectDevices("n0", {("slurm-12", 0): ("u2", "u3")})]


def test_replicas_of_a_job_of_several_nodes_go_to_nodes_of_their_own():
    rules, pair = DistinctNodes(), replace(HELD, node_count=2)
    rules.update((pair, replace(HELD, job_id="13")), NODES)
    assert rules.has_rules_for("slurm-12")
    assert not rules.has_rules_for("slurm-13")
    assert rules.list_eligible_nodes("slurm-12", {}, {}) == {"n0", "n1"}
    assert rules.list_eligible_nodes("slurm-12", {0: "n0"}, {}) == {"n1"}
    rules.update((replace(pair, features="h100"),), NODES)
    assert rules.list_eligible_nodes("slurm-12", {}, {}) == frozenset()


def test_a_job_that_waits_is_not_looked_at_again_until_it_or_its_workload_changes(monkeypatch):
    looked = list[str]()
    steer = Steering._steer

    def note(self, key, *more):
        looked.append(key)
        return steer(self, key, *more)

    monkeypatch.setattr(Steering, "_steer", note)
    steering, waits = Steering(), build_workload(HELD)
    later = replace(HELD, job_id="13", dependency="afterok:12(unfulfilled)")
    for _ in range(3):
        assert decide(HELD, later, workloads=[waits, build_workload(later)], steering=steering) == []
    # What others decide of the second one may change without it.
    assert looked == ["slurm-12", "slurm-13", "slurm-13", "slurm-13"]
    placed = build_workload(HELD, "n1")
    assert decide(HELD, workloads=[placed], steering=steering) == [PlaceJob(HELD, ("n1",))]
    assert decide(HELD, workloads=[waits], steering=steering) == []
    edited = replace(HELD, required_nodes=("n0",))
    assert decide(edited, workloads=[waits], steering=steering) == [LetJobGo("12", "its user has named its nodes")]
    assert decide(HELD, workloads=[waits], steering=steering) == []
    ended = replace(HELD, state="CANCELLED", is_held=False)
    assert decide(ended, workloads=[waits], steering=steering) == [EndJob("slurm-12", "cancelled in Slurm")]


def test_jobs_beyond_the_bound_wait_for_those_before_them():
    jobs = [replace(HELD, job_id=str(number), submit_s=number) for number in range(1, WAITING_MOST + 4)]
    found = [one for one in decide(*jobs) if isinstance(one, SubmitJob)]
    assert len(found) == WAITING_MOST
    assert found[0].request.workload_id == "slurm-1"


def test_a_reason_is_one_line_that_slurm_takes():
    assert shorten_reason("a\nb 'c' = \"d\" \x00" + 300 * "x") == ("a b 'c' d " + 300 * "x")[:160]
