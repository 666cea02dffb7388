"""Jobs that start below their default power limits: where budgets never hold these, and agents set limits before starts."""

import json
from dataclasses import replace

import pytest
from tests.builders.cluster import build_core, build_node, build_request, drop_quotes

from eelgrid_controller.core.core import Core
from eelgrid_controller.core.node_plans import build_node_plan
from eelgrid_controller.state.attempts import describe_start_hold
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import WorkloadPlaced, event_from_plain, event_to_plain
from eelgrid_controller.state.journal import Checkpoint, JournalEntry, JournalHistory
from eelgrid_controller.whatif.decision_record import record_decision, replay_decision
from eelgrid_protos import catalogue
from eelgrid_protos.messages import (
    AttemptState,
    AttemptStatus,
    BackfillMode,
    BudgetScope,
    EnforcementMode,
    Mobility,
    PoolMode,
    PowerBudget,
    ProcessSpec,
    Queue,
    WorkloadKind,
    WorkloadPhase,
)

IDLE_W, LOWEST_W, DEFAULT_W = 30.0, 150.0, 300.0
TOLD = {"power_limit_min_w": LOWEST_W, "power_limit_default_w": DEFAULT_W, "power_limit_max_w": DEFAULT_W}
PROCESS = ProcessSpec(argv=("train",), working_directory="/")
JOB = {"process": PROCESS, "kind": WorkloadKind.TRAINING_JOB, "mobility": Mobility.FIXED}
ENFORCED = (PoolMode(pool="default", mode=EnforcementMode.ENFORCE),)


def make_node(name: str, rack: str = "r1", *, gpus: int = 4, **changes):
    """A node of V100 whose agent runs processes, and sets limits before it starts them."""
    plain = build_node(name, gpus=gpus, model="V100M16", topology=(rack,), runs_processes=True)
    told = replace(plain, gpus=tuple(replace(gpu, **TOLD) for gpu in plain.gpus))
    return replace(told, **({"sets_limits": True, "limits_before_starts": True} | changes))


def bound_rack(limit_w: float, name: str = "r1") -> PowerBudget:
    return PowerBudget(scope=BudgetScope.RACK, name=name, limit_w=limit_w)


def make_core(*budgets: PowerBudget, nodes, pools=ENFORCED) -> Core:
    core = build_core(*nodes)
    core.update_policy(replace(core.state.policy, budgets=budgets, pools=pools), now_ns=2)
    return core


def submit(core: Core, key: str, *, gpus: int = 4, now_ns: int = 3, **spec):
    core.submit(build_request(gpus=gpus, key=key, **{**JOB, **spec}), now_ns=now_ns)
    return core.workload(key)


@pytest.mark.parametrize(
    ("limit_w", "starts_at_w"),
    [
        # At its default limits it draws 1,200 W, at the lowest ones 600; limits are 25 W apart.
        (1200.0, None),
        (1199.0, 275.0),
        (1100.0, 275.0),
        (1099.0, 250.0),
        (600.0, 150.0),
    ],
)
def test_a_job_starts_at_the_highest_limit_that_the_budget_of_its_rack_holds(limit_w, starts_at_w):
    core = make_core(bound_rack(limit_w), nodes=[make_node("a")])
    found = submit(core, "job")
    assert found.phase is WorkloadPhase.PLACED
    assert (found.power_limit_w, found.limit_before_start) == (starts_at_w, starts_at_w is not None)
    plan = build_node_plan(core.state.nodes["a"], core.state)
    assert {one.power_limit_w for one in plan.gpu_settings} == ({starts_at_w} if starts_at_w else set())
    assert [one.limit_before_start for one in plan.assignments] == [starts_at_w is not None]
    assert bool(describe_start_hold(found, core.state.nodes)) is (starts_at_w is not None)


@pytest.mark.parametrize(
    ("limit_w", "node", "spec", "pools"),
    [
        (599.0, {}, {}, ENFORCED),
        (900.0, {"limits_before_starts": False}, {}, ENFORCED),
        (900.0, {}, {}, ()),
        (900.0, {}, {"process": None}, ENFORCED),
    ],
)
def test_it_waits_where_no_limit_is_low_enough_or_nobody_would_set_it_in_time(limit_w, node, spec, pools):
    core = make_core(bound_rack(limit_w), nodes=[make_node("a", **node)], pools=pools)
    found = submit(core, "job", **spec)
    assert found.phase is WorkloadPhase.PENDING
    assert found.reason == "budget: waits for watts of rack r1"


def test_it_waits_where_the_driver_does_not_tell_which_limits_a_gpu_takes():
    node = make_node("a")
    silent = replace(node, gpus=tuple(replace(gpu, power_limit_min_w=None) for gpu in node.gpus))
    core = make_core(bound_rack(900.0), nodes=[silent])
    assert submit(core, "job").phase is WorkloadPhase.PENDING


def report_end(core: Core, key: str, *, now_ns: int) -> None:
    """An agent tells that a process has ended well."""
    (place,) = core.workload(key).placements
    status = AttemptStatus(
        workload_id=key, attempt=1, replica=0, state=AttemptState.ENDED, started_ns=3, ended_ns=now_ns, exit_code=0
    )
    core.record_attempts(place.node_name, (status,), now_ns=now_ns)


def test_work_that_a_budget_holds_once_other_work_has_ended_waits_for_that():
    core = make_core(bound_rack(1200.0), nodes=[make_node("a"), make_node("b")])
    assert submit(core, "first", gpus=2).power_limit_w is None
    assert submit(core, "second", gpus=3, now_ns=4).phase is WorkloadPhase.PENDING
    report_end(core, "first", now_ns=5)
    found = core.workload("second")
    assert (found.phase, found.power_limit_w) == (WorkloadPhase.PLACED, None)


def test_it_leaves_to_others_what_they_have_and_counts_with_its_limit_at_once():
    core = make_core(bound_rack(1250.0), nodes=[make_node("a"), make_node("b")])
    assert submit(core, "small", gpus=1).power_limit_w is None
    found = submit(core, "large", now_ns=4)
    # 1,250 W less 300 for the other and 30 for each of three idle ones leave 215 W for each of four.
    assert (found.phase, found.power_limit_w) == (WorkloadPhase.PLACED, 200.0)
    assert submit(core, "late", gpus=1, now_ns=5).phase is WorkloadPhase.PENDING
    core.update_policy(replace(core.state.policy, budgets=(bound_rack(1460.0),)), now_ns=6)
    assert core.workload("late").phase is WorkloadPhase.PLACED


def test_it_goes_where_budgets_hold_its_default_limits_before_it_is_limited():
    nodes = [make_node("a"), make_node("b", "r2")]
    core = make_core(bound_rack(900.0), bound_rack(1500.0, "r2"), nodes=nodes)
    found = submit(core, "job")
    assert (found.placements[0].node_name, found.power_limit_w) == ("b", None)
    other = submit(core, "other", now_ns=4)
    assert (other.placements[0].node_name, other.power_limit_w) == ("a", 225.0)


def test_a_rack_that_could_hold_it_later_is_not_in_the_way_of_one_that_never_can():
    """The first rack waits for other work, the second has never enough: it starts in the second."""
    nodes = [make_node("a"), make_node("b", "r2"), make_node("c", gpus=1)]
    core = make_core(bound_rack(1300.0), bound_rack(800.0, "r2"), nodes=nodes)
    assert submit(core, "small", gpus=1).placements[0].node_name in ("a", "c")
    found = submit(core, "job", now_ns=4)
    assert (found.placements[0].node_name, found.power_limit_w) == ("b", 200.0)


def test_a_gang_over_two_nodes_gets_one_limit_for_the_budget_of_the_cluster():
    whole = PowerBudget(scope=BudgetScope.CLUSTER, limit_w=1500.0)
    core = make_core(whole, nodes=[make_node("a"), make_node("b")])
    found = submit(core, "gang", replicas=2)
    assert (found.phase, found.power_limit_w) == (WorkloadPhase.PLACED, 175.0)
    assert {place.node_name for place in found.placements} == {"a", "b"}


def test_a_gang_whose_gpus_have_no_limit_in_common_waits():
    small = make_node("b")
    told = {"power_limit_min_w": 60.0, "power_limit_default_w": 70.0, "power_limit_max_w": 70.0}
    small = replace(small, gpus=tuple(replace(gpu, **told) for gpu in small.gpus))
    core = make_core(bound_rack(1000.0), nodes=[make_node("a"), small])
    assert submit(core, "gang", replicas=2).phase is WorkloadPhase.PENDING


def test_the_limits_of_a_former_run_do_not_count():
    core = make_core(bound_rack(900.0), nodes=[make_node("a")])
    submit(core, "job")
    core.record_attempts("a", (build_status(AttemptState.RUNNING),), now_ns=4)
    # Lowered, and not read back when the run ends.
    core.set_limit("job", 150.0, now_ns=5)
    core.requeue("job", now_ns=6)
    core.record_attempts("a", (build_status(AttemptState.ENDED, ended_ns=7, signal=15),), now_ns=7)
    assert (core.workload("job").attempt, core.workload("job").power_limit_w) == (2, 225.0)
    assert core._chooser.allowance.left_w("rack/r1") == 0.0


def test_limits_that_were_not_read_back_in_a_former_run_at_default_limits_do_not_count():
    core = make_core(bound_rack(1300.0), nodes=[make_node("a")])
    assert submit(core, "job").power_limit_w is None
    core.record_attempts("a", (build_status(AttemptState.RUNNING),), now_ns=4)
    core.set_limit("job", 150.0, now_ns=5)
    core.update_policy(replace(core.state.policy, budgets=(bound_rack(900.0),)), now_ns=6)
    core.requeue("job", now_ns=7)
    core.record_attempts("a", (build_status(AttemptState.ENDED, ended_ns=8, signal=15),), now_ns=8)
    assert core.workload("job").power_limit_w == 225.0
    assert core._chooser.allowance.left_w("rack/r1") == 0.0


def build_status(state: AttemptState, **fields) -> AttemptStatus:
    return AttemptStatus(workload_id="job", attempt=1, replica=0, state=state, started_ns=3, **fields)


def test_the_next_attempt_starts_with_the_limit_of_then():
    core = make_core(bound_rack(900.0), nodes=[make_node("a")])
    assert submit(core, "job").power_limit_w == 225.0
    core.update_policy(replace(core.state.policy, budgets=(bound_rack(700.0),)), now_ns=4)
    core.requeue("job", now_ns=5)
    stopped = AttemptStatus(
        workload_id="job", attempt=1, replica=0, state=AttemptState.ENDED, started_ns=3, ended_ns=6, signal=15
    )
    core.record_attempts("a", (stopped,), now_ns=6)
    found = core.workload("job")
    assert (found.attempt, found.power_limit_w, found.limit_before_start) == (2, 175.0, True)
    # Raised by power control meanwhile, or returned to the default: the plan says what is to be in force.
    core.set_limit("job", None, now_ns=7)
    assert not build_node_plan(core.state.nodes["a"], core.state).gpu_settings


def test_the_limit_of_a_lost_gpu_does_not_count():
    core = make_core(bound_rack(900.0), nodes=[make_node("a", gpus=5)])
    core.mark_gpu_lost("a", "GPU-a-0", now_ns=3)
    assert submit(core, "job", now_ns=4).power_limit_w == 225.0


def test_a_start_at_a_limit_is_in_the_journal_and_a_decision_file_replays_it():
    core = make_core(bound_rack(900.0), nodes=[make_node("a")])
    before = Checkpoint(core.state.revision, json.loads(json.dumps(core.state.dump())), "")
    step = core.submit(build_request(gpus=4, key="job", **JOB), now_ns=3)
    placed = next(one for one in step.events if isinstance(one, WorkloadPlaced))
    kind, body = event_to_plain(placed)
    assert event_from_plain(kind, json.loads(json.dumps(body))) == placed
    assert placed.power_limit_w == 225.0
    again = ClusterState.load(before.state)
    for event in step.events:
        again.apply(event)
    assert again.workloads["job"] == core.workload("job")
    entries = [(before.seq + at, JournalEntry(*event_to_plain(event))) for at, event in enumerate(step.events, start=1)]
    document = record_decision(
        JournalHistory(before, tuple(entries)), step.result.spec, "job", catalogue.load_catalogue()
    )
    found = replay_decision(json.loads(json.dumps(document)))
    assert found.differences == ()
    assert found.now["placements"]


def test_an_event_without_a_limit_is_written_as_before():
    core = make_core(nodes=[make_node("a")])
    step = core.submit(build_request(gpus=4, key="job", **JOB), now_ns=3)
    (placed,) = [one for one in drop_quotes(step.events) if isinstance(one, WorkloadPlaced)]
    assert "power_limit_w" not in event_to_plain(placed)[1]


def test_who_waits_for_watts_that_limits_would_leave_is_told_to_enforce_its_pool():
    core = make_core(bound_rack(900.0), nodes=[make_node("a")], pools=())
    submit(core, "job")
    remedy = core.explain_workload("job").remedy
    assert "eelctl policy set --pool-mode default=enforce" in remedy
    core.update_policy(replace(core.state.policy, pools=ENFORCED), now_ns=4)
    assert core.workload("job").power_limit_w == 225.0


def bound_cluster(limit_w: float) -> PowerBudget:
    return PowerBudget(scope=BudgetScope.CLUSTER, limit_w=limit_w)


@pytest.mark.parametrize(("cluster_w", "starts_at_w"), [(2100.0, 225.0), (2099.0, None)])
def test_of_a_budget_that_others_use_it_needs_only_what_it_draws_at_the_limit_of_its_rack(cluster_w, starts_at_w):
    """Its rack holds 225 W for each GPU at the most; the cluster leaves as much, and never what it would not draw."""
    core = make_core(bound_rack(900.0), bound_cluster(cluster_w), nodes=[make_node("a"), make_node("b", "r2")])
    assert submit(core, "other").placements[0].node_name == "b"
    assert submit(core, "job", now_ns=4).power_limit_w == starts_at_w
    # Once the other has ended it starts anyway.
    core.cancel("other", now_ns=5)
    report_end(core, "other", now_ns=6)
    assert core.workload("job").phase is WorkloadPhase.PLACED


def test_it_goes_to_nodes_whose_agents_set_limits_first_where_the_cluster_has_others():
    others = [make_node(name, f"r{name}", limits_before_starts=False) for name in "abc"]
    core = make_core(bound_cluster(1200.0), nodes=[*others, make_node("z")])
    found = submit(core, "job")
    assert (found.placements[0].node_name, found.power_limit_w) == ("z", 200.0)


def test_many_racks_that_hold_it_later_are_not_in_the_way_of_one_that_never_does():
    racks = [f"r{number:02}" for number in range(20)]
    nodes = [make_node(f"{kind}-{rack}", rack) for rack in racks for kind in ("a", "b")]
    small = make_node("z", "small")
    budgets = (*(bound_rack(1500.0, rack) for rack in racks), bound_rack(900.0, "small"))
    core = make_core(*budgets, nodes=nodes)
    for number in range(20):
        assert submit(core, f"w{number}").power_limit_w is None
    core.register_node(small, now_ns=4)
    found = submit(core, "job", now_ns=5)
    assert (found.placements[0].node_name, found.power_limit_w) == ("z", 225.0)


def test_who_waits_for_the_lowest_limits_is_told_whose_end_leaves_them():
    core = make_core(bound_rack(1000.0), nodes=[make_node("a"), make_node("b")])
    assert submit(core, "other", gpus=3).phase is WorkloadPhase.PLACED
    assert submit(core, "job", now_ns=4).phase is WorkloadPhase.PENDING
    assert core.explain_workload("job").remedy.endswith("Or wait for or cancel other.")
    report_end(core, "other", now_ns=5)
    assert core.workload("job").power_limit_w is not None


def test_more_replicas_than_a_budget_ever_holds_are_tried_behind_fewer_that_it_holds_later():
    """With 250 W left one waits for 270 W more, and two start with 240 W at their lowest limits."""
    core = make_core(bound_rack(600.0), nodes=[make_node(name, gpus=2) for name in "abc"])
    assert submit(core, "first", gpus=1).power_limit_w is None
    assert submit(core, "one", gpus=1, now_ns=4).phase is WorkloadPhase.PENDING
    assert submit(core, "two", gpus=1, replicas=2, now_ns=5).phase is WorkloadPhase.PENDING
    core.update_policy(replace(core.state.policy, budgets=(bound_rack(700.0),)), now_ns=6)
    while core.has_backlog:
        core.retry(now_ns=7)
    assert core.workload("one").phase is WorkloadPhase.PENDING
    assert core.workload("two").power_limit_w == 150.0


def test_gpus_of_two_models_may_have_the_default_limit_of_the_lesser():
    plain = make_node("a")
    gpus = tuple(replace(gpu, power_limit_default_w=250.0) if gpu.index < 2 else gpu for gpu in plain.gpus)
    core = make_core(bound_rack(1050.0), nodes=[replace(plain, gpus=gpus)])
    assert submit(core, "job").power_limit_w == 250.0


def test_in_a_queue_a_process_is_tried_behind_equal_work_that_no_agent_would_limit():
    core = make_core(bound_rack(500.0), nodes=[make_node("a")])
    queues = (Queue(name="default"),)
    core.update_policy(replace(core.state.policy, queues=queues, backfill=BackfillMode.NONE), now_ns=3)
    assert submit(core, "pods", process=None, now_ns=4).phase is WorkloadPhase.PENDING
    assert submit(core, "job", now_ns=5).phase is WorkloadPhase.PENDING
    core.update_policy(replace(core.state.policy, budgets=(bound_rack(900.0),)), now_ns=6)
    while core.has_backlog:
        core.retry(now_ns=7)
    assert core.workload("pods").phase is WorkloadPhase.PENDING
    assert core.workload("job").power_limit_w == 225.0
