"""Admission under budgets: work begins where its watts are left, waits and says for what, and begins when they come."""

import json
from dataclasses import replace

import pytest
from tests.builders.cluster import build_core, build_node, build_request, drop_quotes

from eelgrid_controller.core.core import Core
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import WorkloadDeferred, WorkloadPlaced, event_to_plain
from eelgrid_controller.state.journal import Checkpoint, JournalEntry, JournalHistory
from eelgrid_controller.whatif.decision_record import record_decision, replay_decision
from eelgrid_protos import catalogue
from eelgrid_protos.messages import (
    AttemptState,
    AttemptStatus,
    BudgetScope,
    EnforcementMode,
    LatencyMetric,
    LatencyObjective,
    Mobility,
    Policy,
    PoolMode,
    PowerBudget,
    PreemptionWithin,
    ProcessSpec,
    Queue,
    QueuePreemption,
    QueueQuota,
    ServicePromise,
    WorkloadKind,
    WorkloadPhase,
)

IDLE_W, DEFAULT_W = 30.0, 300.0
MORE_W = DEFAULT_W - IDLE_W


def v100s(name: str, rack: str = "", *, gpus: int = 2):
    """A node of V100 whose driver tells its limits; idle watts are the catalogue's."""
    plain = build_node(name, gpus=gpus, model="V100M16", topology=(rack,) if rack else ())
    told = {"power_limit_min_w": 150.0, "power_limit_default_w": DEFAULT_W, "power_limit_max_w": DEFAULT_W}
    return replace(plain, gpus=tuple(replace(gpu, **told) for gpu in plain.gpus))


def budget(limit_w: float, rack: str = "", on: str = "") -> PowerBudget:
    scope = BudgetScope.RACK if rack else BudgetScope.NODE if on else BudgetScope.CLUSTER
    return PowerBudget(scope=scope, name=rack or on, limit_w=limit_w)


def under(*budgets: PowerBudget, nodes) -> Core:
    core = build_core(*nodes)
    core.update_policy(replace(core.state.policy, budgets=budgets), now_ns=2)
    return core


def phase(core: Core, key: str) -> WorkloadPhase:
    return core.workload(key).phase


def test_the_watts_of_the_boards_are_what_these_tests_take_them_for():
    product = catalogue.load_catalogue().products["openb-v100m16"]
    assert product.idle_w == IDLE_W


def test_work_waits_for_the_watts_of_its_rack_and_says_so():
    core = under(budget(4 * IDLE_W + MORE_W, rack="r1"), nodes=[v100s("a", "r1"), v100s("b", "r1")])
    core.submit(build_request(gpus=1, key="first"), now_ns=3)
    step = core.submit(build_request(gpus=1, key="second"), now_ns=4)
    (_, event) = drop_quotes(step.events)
    assert isinstance(event, WorkloadDeferred)
    assert event.reason == "budget: waits for watts of rack r1"
    told = core.explain_workload("second")
    assert told.constraint == "budget"
    assert "rack r1 has 0 of its 390 W left" in told.remedy
    assert "270 W more" in told.remedy
    assert "--budget rack:r1=660W" in told.remedy
    assert phase(core, "first") is WorkloadPhase.PLACED


def keeping(
    *limits_w: float, gpus: int = 2, cluster_w: float = 0.0, is_enforced: bool = True, sets_limits: bool = True
):
    """Nodes a, b and so on, whose agents keep a budget each."""
    names = "abcd"[: len(limits_w)]
    nodes = [replace(v100s(name, gpus=gpus), sets_limits=sets_limits) for name in names]
    budgets = [budget(limit_w, on=name) for name, limit_w in zip(names, limits_w, strict=True)]
    core = build_core(*nodes)
    mode = EnforcementMode.ENFORCE if is_enforced else EnforcementMode.OBSERVE
    above = [budget(cluster_w)] if cluster_w else []
    pools = (PoolMode(pool="default", mode=mode),)
    core.update_policy(replace(core.state.policy, budgets=(*budgets, *above), pools=pools), now_ns=2)
    return core


@pytest.mark.parametrize(
    ("limit_w", "how", "starts"),
    [
        (599.0, {}, True),
        # The agent can lower two GPUs to 150 W each, and no further.
        (300.0, {}, True),
        (299.0, {}, False),
        (599.0, {"is_enforced": False}, False),
        (599.0, {"sets_limits": False}, False),
    ],
)
def test_work_that_its_node_never_holds_at_default_limits_starts_where_the_agent_keeps_the_budget(limit_w, how, starts):
    core = keeping(limit_w, **how)
    core.submit(build_request(gpus=2, key="all"), now_ns=3)
    assert phase(core, "all") is (WorkloadPhase.PLACED if starts else WorkloadPhase.PENDING)
    if starts:
        # Nothing more starts beside it: what it may draw is over the budget until its limits are lowered.
        core.submit(build_request(gpus=1, key="next"), now_ns=4)
        assert phase(core, "next") is WorkloadPhase.PENDING
        core.cancel("all", now_ns=5)
        assert phase(core, "next") is WorkloadPhase.PLACED


def test_who_waits_for_watts_that_an_agent_could_keep_is_told_to_enforce_its_pool():
    core = keeping(450.0, is_enforced=False)
    core.submit(build_request(gpus=2, key="all"), now_ns=3)
    remedy = core.explain_workload("all").remedy
    assert "node a has 390 of its 450 W left" in remedy
    assert "Or eelctl policy set --pool-mode default=enforce: the agent of node a then keeps the budget there" in remedy
    pools = (PoolMode(pool="default", mode=EnforcementMode.ENFORCE),)
    core.update_policy(replace(core.state.policy, pools=pools), now_ns=4)
    assert phase(core, "all") is WorkloadPhase.PLACED


def test_work_that_fits_at_default_limits_once_other_work_has_ended_waits_for_it():
    core = keeping(700.0, gpus=4)
    for key in ("one", "two", "three"):
        core.submit(build_request(gpus=1, key=key), now_ns=3)
    assert [phase(core, key) for key in ("one", "two", "three")] == [WorkloadPhase.PLACED] * 2 + [WorkloadPhase.PENDING]


@pytest.mark.parametrize(("limit_w", "starts"), [(600.0, True), (599.0, False)])
def test_others_keep_their_limits_where_work_starts_below_the_default(limit_w, starts):
    core = keeping(limit_w, gpus=3)
    core.submit(build_request(gpus=1, key="one"), now_ns=3)
    core.submit(build_request(gpus=2, key="two"), now_ns=4)
    assert phase(core, "two") is (WorkloadPhase.PLACED if starts else WorkloadPhase.PENDING)


def test_a_node_counts_with_no_more_than_the_budget_that_its_agent_keeps():
    core = keeping(400.0, 1e5, cluster_w=999.0)
    for key in ("one", "two"):
        core.submit(build_request(gpus=2, key=key), now_ns=3)
    assert [phase(core, key) for key in ("one", "two")] == [WorkloadPhase.PLACED, WorkloadPhase.PENDING]
    core = keeping(400.0, 1e5, cluster_w=1000.0)
    core.submit(build_request(gpus=2, key="one"), now_ns=3)
    assert [place.node_name for place in core.workload("one").placements] == ["a"]
    core.submit(build_request(gpus=2, key="two"), now_ns=4)
    assert {phase(core, "one"), phase(core, "two")} == {WorkloadPhase.PLACED}
    # Of a lost node nobody knows whether its agent runs.
    core.cancel("two", now_ns=5)
    core.mark_node_lost("a", now_ns=5)
    core.submit(build_request(gpus=2, key="late"), now_ns=5)
    assert phase(core, "late") is WorkloadPhase.PENDING
    core.register_node(core.state.nodes["a"].inventory, now_ns=5)
    assert phase(core, "late") is WorkloadPhase.PLACED
    core.cancel("late", now_ns=5)
    core.submit(build_request(gpus=2, key="two-again"), now_ns=5)
    # Without the agent's word the two could draw 1,200 W.
    core.register_node(v100s("a"), now_ns=5)
    core.cancel("two-again", now_ns=6)
    core.submit(build_request(gpus=2, key="three"), now_ns=7)
    assert phase(core, "three") is WorkloadPhase.PENDING


def test_idle_nodes_that_keep_their_budgets_are_found_behind_one_that_cannot():
    """The first node in the search cannot be kept within its budget; the second can."""
    core = keeping(200.0, 200.0, 450.0)
    core.submit(build_request(gpus=2, key="all"), now_ns=3)
    assert [place.node_name for place in core.workload("all").placements] == ["c"]


def test_it_begins_when_other_work_ends():
    core = under(budget(4 * IDLE_W + MORE_W), nodes=[v100s("a"), v100s("b")])
    core.submit(build_request(gpus=1, key="first"), now_ns=3)
    core.submit(build_request(gpus=1, key="second"), now_ns=4)
    step = core.cancel("first", now_ns=5)
    assert isinstance(drop_quotes(step.events)[-1], WorkloadPlaced)
    assert phase(core, "second") is WorkloadPhase.PLACED


def test_a_larger_budget_lets_it_begin_at_once():
    core = under(budget(4 * IDLE_W), nodes=[v100s("a"), v100s("b")])
    core.submit(build_request(gpus=2, key="w"), now_ns=3)
    policy = replace(core.state.policy, budgets=(budget(4 * IDLE_W + 2 * MORE_W),))
    step = core.update_policy(policy, now_ns=4)
    assert phase(core, "w") is WorkloadPhase.PLACED
    assert step.nodes >= {"a"} or step.nodes >= {"b"}


def test_work_goes_where_watts_are_left():
    core = under(budget(2 * IDLE_W, rack="r1"), budget(9_000.0, rack="r2"), nodes=[v100s("a", "r1"), v100s("b", "r2")])
    for number in range(2):
        core.submit(build_request(gpus=1, key=f"w{number}"), now_ns=3 + number)
        (placement,) = core.workload(f"w{number}").placements
        assert placement.node_name == "b"


def test_a_budget_of_a_node_closes_that_node_alone():
    core = under(budget(2 * IDLE_W + MORE_W, on="a"), nodes=[v100s("a"), v100s("b", gpus=1)])
    for number in range(3):
        core.submit(build_request(gpus=1, key=f"w{number}"), now_ns=3 + number)
    held = [core.workload(f"w{number}") for number in range(3)]
    assert sorted(one.placements[0].node_name for one in held if one.placements) == ["a", "b"]
    assert held[2].reason == "budget: waits for watts of node a"


def test_a_gang_begins_whole_or_not_at_all():
    core = under(budget(4 * IDLE_W + 3 * MORE_W, rack="r1"), nodes=[v100s("a", "r1"), v100s("b", "r1")])
    core.submit(build_request(gpus=1, key="gang", replicas=4), now_ns=3)
    assert phase(core, "gang") is WorkloadPhase.PENDING
    core.submit(build_request(gpus=1, key="three", replicas=3), now_ns=4)
    assert phase(core, "three") is WorkloadPhase.PLACED


def test_work_without_gpus_heeds_no_watts():
    core = under(budget(0.0), nodes=[v100s("a")])
    core.submit(build_request(gpus=0, cpu=4, key="w"), now_ns=3)
    assert phase(core, "w") is WorkloadPhase.PLACED


def test_a_share_of_a_gpu_that_is_held_draws_no_more():
    core = under(budget(2 * IDLE_W + MORE_W), nodes=[v100s("a")])
    for key in ("one", "two"):
        core.submit(build_request(gpus=1, milli=500, key=key), now_ns=3)
    assert phase(core, "two") is WorkloadPhase.PLACED
    core.submit(build_request(gpus=1, milli=500, key="three"), now_ns=4)
    assert core.workload("three").reason.startswith("budget:")


def test_a_lowered_limit_frees_watts_when_it_was_read_and_not_before():
    core = under(budget(2 * IDLE_W + MORE_W + 120.0), nodes=[v100s("a")])
    core.submit(build_request(gpus=1, key="first"), now_ns=3)
    core.submit(build_request(gpus=1, key="second"), now_ns=4)
    core.set_limit("first", 150.0, now_ns=5)
    core.report_limits({"first": DEFAULT_W}, now_ns=6)
    assert phase(core, "second") is WorkloadPhase.PENDING
    step = core.report_limits({}, now_ns=7)
    assert phase(core, "second") is WorkloadPhase.PLACED
    assert step.nodes == {"a"}


def test_nobody_takes_a_command_for_a_limit():
    core = under(budget(2 * IDLE_W + MORE_W + 120.0), nodes=[v100s("a")])
    core.submit(build_request(gpus=1, key="first"), now_ns=3)
    core.set_limit("first", 150.0, now_ns=4)
    core.submit(build_request(gpus=1, key="second"), now_ns=5)
    assert core.workload("second").reason == "budget: waits for watts of the cluster"


def test_a_service_grows_as_far_as_there_are_watts():
    core = under(budget(4 * IDLE_W + 3 * MORE_W), nodes=[v100s("a", gpus=4)])
    objective = LatencyObjective(metric=LatencyMetric.RESPONSE, latency_s=1.0)
    promise = ServicePromise(profile="chat", objectives=(objective,), replicas_most=4)
    asked = build_request(gpus=1, key="s", kind=WorkloadKind.INFERENCE_SERVICE, service=promise)
    core.submit(asked, now_ns=3)
    core.scale("s", 4, now_ns=4)
    assert len(core.workload("s").placements) == 3
    assert core.scale("s", 4, now_ns=5).events == ()


def test_a_gpu_that_is_lost_draws_nothing():
    core = under(budget(2 * IDLE_W + MORE_W), nodes=[v100s("a")])
    core.submit(build_request(gpus=1, key="first"), now_ns=3)
    core.submit(build_request(gpus=1, key="second"), now_ns=4)
    assert phase(core, "second") is WorkloadPhase.PENDING
    (held,) = core.workload("first").placements
    core.mark_gpu_lost("a", held.gpu_uuids[0], now_ns=5)
    assert phase(core, "second") is WorkloadPhase.PLACED


def test_a_core_that_begins_counts_the_same():
    core = under(budget(4 * IDLE_W + MORE_W, rack="r1"), nodes=[v100s("a", "r1"), v100s("b", "r1")])
    core.submit(build_request(gpus=1, key="first"), now_ns=3)
    again = Core(ClusterState.load(json.loads(json.dumps(core.state.dump()))), catalogue.load_catalogue())
    again.submit(build_request(gpus=1, key="second"), now_ns=4)
    assert again.workload("second").reason == "budget: waits for watts of rack r1"


@pytest.mark.parametrize("limit_w", [2 * IDLE_W, 9_000.0])
def test_a_decision_under_budgets_comes_out_the_same_again(limit_w):
    budgets = (budget(2 * IDLE_W, rack="r1"), budget(limit_w, rack="r2"))
    core = under(*budgets, nodes=[v100s("a", "r1"), v100s("b", "r2")])
    before = Checkpoint(core.state.revision, json.loads(json.dumps(core.state.dump())), "")
    step = core.submit(build_request(gpus=1, key="w"), now_ns=3)
    entries = [
        (before.seq + number, JournalEntry(*event_to_plain(event))) for number, event in enumerate(step.events, start=1)
    ]
    document = record_decision(
        JournalHistory(before, tuple(entries)), step.result.spec, "w", catalogue.load_catalogue()
    )
    assert document["closed"] == (["a"] if limit_w > 100.0 else ["a", "b"])
    found = replay_decision(json.loads(json.dumps(document)))
    assert found.differences == ()
    assert bool(found.now["placements"]) is (limit_w > 100.0)


def test_without_budgets_nothing_is_counted():
    core = build_core(v100s("a"), state=ClusterState(policy=Policy()))
    core.submit(build_request(gpus=2, key="w"), now_ns=3)
    assert phase(core, "w") is WorkloadPhase.PLACED


def test_work_for_which_others_make_room_does_not_start_above_a_budget_that_was_cut_meanwhile():
    within = QueuePreemption(within=PreemptionWithin.LOWER_PRIORITY)
    quotas = (QueueQuota(resource="gpu", nominal=8000),)
    node = replace(v100s("a"), runs_processes=True, agent_version="1")
    core = build_core(node)
    queues = (Queue(name="q", quotas=quotas, preemption=within),)
    core.update_policy(replace(core.state.policy, queues=queues, budgets=(budget(700.0),)), now_ns=2)
    process = ProcessSpec(argv=("train",), working_directory="/")
    fixed = {"process": process, "mobility": Mobility.FIXED, "queue": "q"}
    core.submit(build_request("low", gpus=1, priority=0, **fixed), now_ns=3)
    core.submit(build_request("high", gpus=2, priority=9, **fixed), now_ns=4)
    assert [one.workload_id for one in core.state.nominations] == ["high"]
    # Two GPUs would draw 600 W.
    core.update_policy(replace(core.state.policy, budgets=(budget(400.0),)), now_ns=5)
    ended = AttemptStatus(
        workload_id="low", attempt=1, replica=0, state=AttemptState.ENDED, started_ns=3, ended_ns=6, exit_code=0
    )
    core.record_attempts("a", (ended,), now_ns=6)
    assert phase(core, "high") is WorkloadPhase.PENDING
    core.update_policy(replace(core.state.policy, budgets=(budget(700.0),)), now_ns=7)
    while core.has_backlog:
        core.retry(now_ns=7)
    assert phase(core, "high") is WorkloadPhase.PLACED
