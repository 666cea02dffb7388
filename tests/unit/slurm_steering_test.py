"""Steering decides what is to be done about jobs of Slurm from one look: each rule with jobs as values."""

from dataclasses import replace

import pytest

from eelgrid_controller.engines.node_reports import CorrectDevices, RegisterNode, RemoveNode, ReportUsage
from eelgrid_controller.engines.slurm.answers import GresCount, SlurmJob, SlurmNode
from eelgrid_controller.engines.slurm.steering import (
    WAITING_MOST,
    AdoptJob,
    CancelJob,
    Dependencies,
    DependencyState,
    DistinctNodes,
    EndJob,
    LetJobGo,
    PlaceJob,
    Steering,
    SteeringSettings,
    SubmitJob,
    build_request,
    is_refusal,
    shorten_reason,
)
from eelgrid_protos.messages import Placement, Workload, WorkloadPhase

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
PLACED = replace(HELD, admin_comment="eelgrid:placed n0", is_held=False, required_nodes=("n0",), reason="Priority")
RUNNING = replace(PLACED, state="RUNNING", nodes=("n0",), gpu_indexes={"n0": (0, 1)}, reason="None")


def build_workload(job, *nodes, phase=WorkloadPhase.PENDING, gpus=("u0", "u1")):
    request = build_request(job, SteeringSettings())
    places = tuple(Placement(replica=at, node_name=name, gpu_uuids=gpus) for at, name in enumerate(nodes))
    return Workload(
        workload_id=request.workload_id,
        spec=request.spec,
        phase=WorkloadPhase.PLACED if nodes else phase,
        submitted_ns=1,
        placements=places,
    )


def decide(*jobs, workloads=(), steering=None, nodes=NODES, now_s=100.0, agents=frozenset({"n0", "n1"}), gpus=None):
    """What is to be done, without what is reported of nodes."""
    known = {one.workload_id: one for one in workloads}
    found = (steering or Steering()).decide(jobs, nodes, known, has_agent=agents, gpus=gpus or {}, now_s=now_s)
    return [one for one in found if not isinstance(one, ReportUsage)]


def reports(*jobs, workloads=()):
    known = {one.workload_id: one for one in workloads}
    found = Steering().decide(jobs, NODES, known, has_agent=frozenset({"n0", "n1"}), gpus={}, now_s=1.0)
    return {one.node_name: one.others for one in found if isinstance(one, ReportUsage)}


def test_a_held_job_is_submitted_with_what_it_asks_for():
    (found,) = decide(HELD)
    assert isinstance(found, SubmitJob)
    spec = found.request.spec
    assert (found.request.workload_id, spec.name, spec.user, spec.replicas) == ("slurm-12", "train", "alice", 1)
    assert (spec.request.gpu_count, spec.request.cpu_milli, spec.request.memory_bytes) == (2, 4000, 2**30)
    assert spec.required_traits == ("slurm/partition/main", "slurm/gres/a100")


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
    assert found.adoption.first == 0
    (moved,) = decide(RUNNING, workloads=[build_workload(RUNNING, "n1")])
    assert isinstance(moved, AdoptJob)
    assert (moved.adoption.first, moved.adoption.released) == (1, (0,))
    assert decide(RUNNING, workloads=[build_workload(RUNNING, "n0")]) == []


def test_a_job_that_somebody_else_released_is_given_up_and_counts_as_external():
    assert decide(RUNNING, workloads=[build_workload(RUNNING)]) == [
        EndJob("slurm-12", "runs in Slurm without having been placed")
    ]
    assert reports(RUNNING, workloads=[build_workload(RUNNING, phase=WorkloadPhase.CANCELLED)])["n0"].gpu_count == 2


@pytest.mark.parametrize(
    "job", [(), (replace(RUNNING, state="COMPLETED", nodes=()),), (replace(RUNNING, state="FAILED"),)]
)
def test_a_job_that_ended_is_ended_in_the_core(job):
    (found,) = decide(*job, workloads=[build_workload(RUNNING, "n0")])
    assert isinstance(found, EndJob)
    assert found.workload_id == "slurm-12"


def test_a_completing_job_still_holds_its_place():
    completing = replace(RUNNING, state="COMPLETED", flags=frozenset({"COMPLETING"}))
    assert decide(completing, workloads=[build_workload(RUNNING, "n0")]) == []


def test_a_restart_is_another_run_and_what_was_said_of_the_first_is_not_of_it():
    again = replace(HELD, restarts=1)
    ended, submitted = decide(again, workloads=[build_workload(HELD, "n0")])
    assert ended == EndJob("slurm-12", "the job is no more in Slurm")
    assert submitted.request.workload_id == "slurm-12.1"


def test_a_job_that_was_cancelled_here_while_held_is_cancelled_in_slurm():
    assert decide(HELD, workloads=[build_workload(HELD, phase=WorkloadPhase.CANCELLED)]) == [CancelJob("12")]


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
    assert Dependencies((HELD, ENDED, BAD, *TASKS)).judge(dependency) is state


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
        found = steering.decide(jobs, nodes, {}, has_agent=frozenset({"n0", "n1"}), gpus={}, now_s=1.0)
        return [(one.node_name, one.others.closed) for one in found if isinstance(one, ReportUsage)]

    assert count() == [("n0", ""), ("n1", "")]
    assert count() == []
    drained = replace(NODES[0], states=frozenset({"IDLE", "DRAIN"}), reason="fan")
    assert count((drained, NODES[1])) == [("n0", "Slurm: the node is drained (fan)")]
    steering.forget_report("n1")
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


def test_jobs_beyond_the_bound_wait_for_those_before_them():
    jobs = [replace(HELD, job_id=str(number), submit_s=number) for number in range(1, WAITING_MOST + 4)]
    found = [one for one in decide(*jobs) if isinstance(one, SubmitJob)]
    assert len(found) == WAITING_MOST
    assert found[0].request.workload_id == "slurm-1"


def test_a_reason_is_one_line_that_slurm_takes():
    assert shorten_reason("a\nb 'c' = \"d\" \x00" + 300 * "x") == ("a b 'c' d " + 300 * "x")[:160]
