"""Moves from a state to events: found within the budget, executed all or not at all, and never half."""

from dataclasses import replace

import pytest
from tests.builders.cluster import build_core, build_node, build_request
from tests.state_invariants import check_invariants

from eelgrid_controller.core.core import Core
from eelgrid_controller.core.workloads import MoveRefused
from eelgrid_controller.placement import migration_planner
from eelgrid_controller.placement.migration_planner import build_migration_problem, recommend_moves
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.engine_reports import ExternalUsage
from eelgrid_controller.state.events import WorkloadMoved, event_from_plain, event_to_plain
from eelgrid_controller.state.node_allocations import ContradictoryEvent
from eelgrid_kernels.move_search import OVERLAPS
from eelgrid_protos import catalogue
from eelgrid_protos.messages import (
    BudgetScope,
    Mobility,
    Move,
    MoveGoal,
    PowerBudget,
    Queue,
    QueueQuota,
    Recommendation,
    RecommendMovesRequest,
    ReplicaMove,
    Reservation,
    WorkloadKind,
    WorkloadPhase,
)

S = 10**9


def asked(core: Core, **wanted) -> Recommendation:
    survey = core.survey_moves(RecommendMovesRequest(**{"moves_ratio": 1.0} | wanted))
    return recommend_moves(build_migration_problem(survey))


def places(core: Core, key: str) -> list[tuple[str, tuple[int, ...]]]:
    return [(item.node_name, item.gpu_indexes) for item in core.workload(key).placements]


def two_halves(**spec) -> Core:
    """Node a and node b hold a half of a GPU each."""
    core = build_core(build_node("a", gpus=1))
    core.submit(build_request(gpus=1, milli=500, key="one", **spec), now_ns=1)
    core.submit(build_request(gpus=1, milli=500, key="gap"), now_ns=1)
    core.register_node(build_node("b", gpus=1), now_ns=1)
    core.submit(build_request(gpus=1, milli=500, key="two", **spec), now_ns=1)
    core.cancel("gap", now_ns=2)
    assert (places(core, "one"), places(core, "two")) == ([("a", (0,))], [("b", (0,))])
    return core


def test_two_halves_join_and_the_watts_are_those_of_the_model():
    core = two_halves()
    before_w, epochs = core.modelled_power_w(), {name: core.node_plan(name).epoch for name in "ab"}
    found = asked(core, moves_most=5)
    (move,) = found.moves
    (replica,) = move.replicas
    assert {replica.source.node_name, replica.target.node_name} == {"a", "b"}
    step = core.apply_moves(found.moves, now_ns=3)
    assert [type(event) for event in step.events] == [WorkloadMoved]
    assert (step.result, step.nodes) == (1, {"a", "b"})
    assert {name: core.node_plan(name).epoch for name in "ab"} == {name: epoch + 1 for name, epoch in epochs.items()}
    # G2: a GPU falls from 150 W to 30 W; a package of CPU on the other node falls idle, too.
    assert before_w - core.modelled_power_w() == pytest.approx(120.0 + 105.0)
    assert found.before.power_w == pytest.approx(before_w)
    assert found.after.power_w == pytest.approx(core.modelled_power_w())
    # 500 milli of 150 W and a vCPU of 120/32 W, for a minute of an hour.
    assert move.restart_w == pytest.approx((75.0 + 3.75) / 60.0)
    assert found.gain_w == pytest.approx(found.before.cost_w - found.after.cost_w - move.restart_w)
    # The bound does not ask where work goes: it counts both nodes as emptied, and with one move one of them.
    assert found.saved_most_w == pytest.approx(2 * (120.0 + 105.0))
    assert asked(two_halves(), moves_most=1).saved_most_w == pytest.approx(120.0 + 105.0)
    check_invariants(core.state)


def test_the_bound_on_watts_grows_with_the_budget_and_leaves_out_what_stays():
    core = build_core(build_node("a", gpus=4))
    for key in ("one", "two", "three"):
        core.submit(build_request(gpus=1, milli=1000, key=key), now_ns=1)
    # Whole GPUs draw elsewhere what they free here; a package of CPU would sleep.
    assert asked(core, moves_most=3).saved_most_w == pytest.approx(105.0)
    core = two_halves(mobility=Mobility.FIXED)
    assert asked(core).saved_most_w == 0.0
    core = two_halves()
    core.register_node(build_node("c", gpus=1), now_ns=2)
    core.submit(build_request(gpus=1, milli=600, key="three"), now_ns=3)
    least, most = (asked(core, moves_most=budget).saved_most_w for budget in (1, 2))
    assert 0.0 < least < most


def test_a_survey_is_of_one_moment_whatever_happens_before_its_problem_is_built():
    """The problem is built in another thread while the controller goes on."""
    core = build_core(build_node("a", gpus=1))
    for name, keys in (("a", ("one", "gap")), ("b", ("two",))):
        core.register_node(build_node(name, gpus=1), now_ns=1)
        core.update_external_usage(name, ExternalUsage(traits=("nvlink",)), now_ns=1)
        for key in keys:
            core.submit(build_request(gpus=1, milli=500, key=key, required_traits=("nvlink",)), now_ns=1)
    core.cancel("gap", now_ns=2)
    assert (places(core, "one"), places(core, "two")) == ([("a", (0,))], [("b", (0,))])
    survey = core.survey_moves(RecommendMovesRequest(moves_ratio=1.0))
    before = build_migration_problem(survey)
    assert [unit.manner for unit in before.units] == [OVERLAPS, OVERLAPS]
    assert before.limits.gpu_milli == sum(record.allocated_gpu_milli for record in core.state.nodes.values()) == 1000
    first = recommend_moves(before)
    core.update_external_usage("a", ExternalUsage(traits=()), now_ns=3)
    core.apply_moves(first.moves, now_ns=3)
    core.submit(build_request(gpus=1, milli=500, key="late"), now_ns=4)
    core.cancel("two", now_ns=5)
    core.register_node(build_node("z", gpus=2), now_ns=6)
    core.mark_node_lost("b", now_ns=7)
    again = build_migration_problem(survey)
    assert (again.units, again.names, again.limits, again.largest) == (
        before.units, before.names, before.limits, before.largest,
    )  # fmt: skip
    assert recommend_moves(again) == first
    assert recommend_moves(build_migration_problem(core.survey_moves(RecommendMovesRequest(moves_ratio=1.0)))) != first


@pytest.mark.parametrize("doubts", [True, False])
def test_nothing_moves_to_a_node_of_which_nobody_knows_what_it_holds(doubts):
    """A controller has just begun, and moves were recommended before; or entries of the journal may be lost."""
    core = two_halves()
    found = asked(core)
    target = core.state.nodes[found.moves[0].replicas[0].target.node_name]
    if doubts:
        target.doubt_plan()
    else:
        target.withheld = True
    with pytest.raises(MoveRefused, match=r"what node \w holds is not known yet; nothing was moved"):
        core.apply_moves(found.moves, now_ns=3)
    # A move that its engine could not make goes back.
    (move,) = found.moves
    (replica,) = move.replicas
    assert core.apply_moves((replace(move, replicas=(replica,)),), now_ns=4, is_back=True).result == 1


# G2 GPUs: idle and default watts of the catalogue.
IDLE_W, DEFAULT_W = 30.0, 150.0


def set_budget(core: Core, limit_w: float, *, node: str = "") -> None:
    scope = BudgetScope.NODE if node else BudgetScope.CLUSTER
    budget = PowerBudget(scope=scope, name=node, limit_w=limit_w)
    core.update_policy(replace(core.state.policy, budgets=(budget,)), now_ns=2)


def scattered(**spec) -> Core:
    """Whole GPUs on two nodes, whose work fits on one of them: the CPU of the other would sleep."""
    core = build_core(build_node("a", gpus=2))
    core.submit(build_request(gpus=1, key="one", **spec), now_ns=1)
    core.submit(build_request(gpus=1, key="gap"), now_ns=1)
    core.register_node(build_node("b", gpus=1), now_ns=1)
    core.submit(build_request(gpus=1, key="two", **spec), now_ns=1)
    core.cancel("gap", now_ns=2)
    assert (places(core, "one"), places(core, "two")) == ([("a", (0,))], [("b", (0,))])
    return core


def test_shares_join_under_a_power_budget_that_leaves_nothing():
    """The GPU that they go to counts already."""
    core = two_halves()
    set_budget(core, 2 * DEFAULT_W)
    found = asked(core)
    assert len(found.moves) == 1
    assert core.apply_moves(found.moves, now_ns=3).result == 1


def test_no_idle_gpu_is_recommended_that_a_power_budget_leaves_nothing_for():
    """Its old place draws power until the new one has begun; so the draw of three GPUs must be left."""
    room_w = 3 * DEFAULT_W
    for short_w, moves in ((0.0, 1), (1.0, 0)):
        core = scattered()
        set_budget(core, room_w - short_w)
        assert len(asked(core).moves) == moves
    # Released first, two are enough.
    core = scattered(mobility=Mobility.RESTARTABLE)
    set_budget(core, 2 * DEFAULT_W + IDLE_W)
    found = asked(core)
    assert len(found.moves) == 1
    core.apply_moves(found.moves, now_ns=3)
    assert core.state.nodes["b"].gpu_milli == {}


def test_moves_that_exceed_a_power_budget_are_refused_and_say_by_how_much():
    core = scattered()
    found = asked(core)
    set_budget(core, DEFAULT_W + IDLE_W + 100.0, node="a")
    words = r"node a has 100 of its 280 W left, and 120 W more would be drawn; nothing was moved"
    with pytest.raises(MoveRefused, match=words):
        core.apply_moves(found.moves, now_ns=3)
    assert places(core, "two") == [("b", (0,))]
    # A move that its engine could not make goes back whatever the budget.
    (move,) = found.moves
    back = tuple(replace(item, source=item.target, target=item.source) for item in move.replicas)
    set_budget(core, 2 * DEFAULT_W + 100.0, node="a")
    core.apply_moves(found.moves, now_ns=4)
    set_budget(core, 10.0, node="b")
    assert core.apply_moves((replace(move, replicas=back),), now_ns=5, is_back=True).result == 1


def test_a_move_counts_the_power_that_moves_before_it_draw_at_their_default_limits():
    core = build_core(build_node("a", gpus=3))
    core.submit(build_request(gpus=3, key="gap"), now_ns=1)
    for name, key in (("b", "one"), ("c", "two")):
        core.register_node(build_node(name, gpus=1), now_ns=1)
        core.submit(build_request(gpus=1, key=key), now_ns=1)
    core.cancel("gap", now_ns=1)
    core.set_limit("one", 100.0, now_ns=2)
    moves = []
    for index, key in enumerate(("one", "two")):
        (source,) = core.workload(key).placements
        target = replace(source, node_name="a", gpu_uuids=(f"GPU-a-{index}",), gpu_indexes=(index,))
        moves.append(Move(workload_id=key, replicas=(ReplicaMove(source=source, target=target, candidates=()),)))
    # While the second moves: three GPUs at their default, one of them that it leaves, and two that are idle.
    most_w = 3 * DEFAULT_W + 2 * IDLE_W
    set_budget(core, most_w - 1.0)
    core.report_limits({}, now_ns=3)
    with pytest.raises(MoveRefused, match=r"move 2 of 2 .* the cluster has 169 of its 509 W left, and 170 W more"):
        core.apply_moves(moves, now_ns=3)
    set_budget(core, most_w)
    assert core.apply_moves(moves, now_ns=4).result == 2


def test_a_moved_limit_counts_once_it_is_read_back_from_the_new_gpu():
    """The new GPU has its default limit until the agent sets the workload's."""
    core = scattered()
    core.set_limit("two", 100.0, now_ns=2)
    set_budget(core, 3 * DEFAULT_W)
    core.report_limits({}, now_ns=3)
    core.apply_moves(asked(core).moves, now_ns=4)
    # Both GPUs of a, and what b draws while it is idle.
    drawn_w = 3 * DEFAULT_W - core.survey_moves(RecommendMovesRequest()).power.left_mw["cluster"] / 1000
    assert drawn_w == pytest.approx(2 * DEFAULT_W + IDLE_W)
    core.report_limits({}, now_ns=5)
    drawn_w = 3 * DEFAULT_W - core.survey_moves(RecommendMovesRequest()).power.left_mw["cluster"] / 1000
    assert drawn_w == pytest.approx(DEFAULT_W + 100.0 + IDLE_W)


def test_the_explanation_of_a_moved_replica_is_that_of_the_move():
    core = two_halves()
    (move,) = asked(core).moves
    core.apply_moves((move,), now_ns=3)
    (explained,) = core.explain_workload(move.workload_id).replicas
    assert explained.candidates == move.replicas[0].candidates
    there, here = explained.candidates
    assert (there.node_name, here.node_name) == (move.replicas[0].target.node_name, move.replicas[0].source.node_name)
    assert there.cost_w < here.cost_w
    assert sum(term.cost_w for term in here.terms) == pytest.approx(here.cost_w)
    assert here.cost_w - there.cost_w - move.restart_w == pytest.approx(move.gain_w)


@pytest.mark.parametrize("wanted", [{"moves_ratio": 0.0, "restart_s": 86_400.0, "horizon_s": 60.0}, {"gpu_ratio": 0.4}])
def test_what_does_not_pay_or_is_beyond_the_budget_is_not_recommended(wanted):
    core = two_halves()
    assert asked(core).moves
    found = asked(core, **wanted)
    assert (found.moves, found.gain_w) == ((), 0.0)
    assert found.before == found.after


def test_fixed_work_stays_and_lost_nodes_are_neither_emptied_nor_filled():
    assert asked(two_halves(mobility=Mobility.FIXED)).moves == ()
    core = two_halves()
    core.mark_node_lost("b", now_ns=3)
    assert asked(core).moves == ()
    core = two_halves()
    core.mark_gpu_lost("a", "GPU-a-0", now_ns=3)
    assert asked(core).moves == ()


def test_a_gang_moves_together_and_pays_for_the_whole_of_it():
    core = build_core(build_node("a", gpus=2))
    core.submit(build_request(gpus=1, milli=700, key="here", mobility=Mobility.FIXED), now_ns=1)
    core.submit(build_request(gpus=1, milli=600, key="gap"), now_ns=1)
    core.register_node(build_node("b", gpus=2), now_ns=1)
    core.submit(build_request(gpus=1, milli=500, replicas=2, key="gang", kind=WorkloadKind.TRAINING_JOB), now_ns=1)
    assert {name for name, _ in places(core, "gang")} == {"b"}
    core.cancel("gap", now_ns=2)
    # With one replica to move, the gang is too large: half of it would stop all of it.
    assert asked(core, moves_most=1).moves == ()
    (move,) = asked(core, moves_most=2).moves
    assert (move.workload_id, len(move.replicas)) == ("gang", 2)
    assert move.restart_w == pytest.approx(2 * (75.0 + 3.75) / 60.0)
    step = core.apply_moves((move,), now_ns=3)
    assert ([type(event) for event in step.events], step.result) == ([WorkloadMoved], 2)
    assert {name for name, _ in places(core, "gang")} == {"a"}


def test_only_restartable_work_may_use_what_it_holds_itself():
    """Both GPUs of the node are held by halves; its CPU is so full that nothing can stand twice."""

    def crowded(mobility: Mobility) -> Core:
        core = build_core(build_node("a", gpus=2, cpu=8))
        core.submit(build_request(gpus=1, milli=500, cpu=3, key="one", mobility=mobility), now_ns=1)
        core.submit(build_request(gpus=1, milli=500, cpu=1, key="gap"), now_ns=1)
        core.submit(build_request(gpus=1, milli=500, cpu=3, key="two", mobility=mobility), now_ns=1)
        core.cancel("gap", now_ns=2)
        assert [places(core, key)[0][1] for key in ("one", "two")] == [(0,), (1,)]
        return core

    assert asked(crowded(Mobility.MOVABLE)).moves == ()
    core = crowded(Mobility.RESTARTABLE)
    (move,) = asked(core).moves
    assert move.release_first
    before_w = core.modelled_power_w()
    core.apply_moves((move,), now_ns=3)
    assert before_w - core.modelled_power_w() == pytest.approx(120.0)


def test_a_move_that_no_longer_holds_is_named_and_nothing_moves():
    core = two_halves()
    found = asked(core)
    key = found.moves[0].workload_id
    target = found.moves[0].replicas[0].target.node_name
    other = found.moves[0].replicas[0].source.node_name

    def refused(words: str) -> None:
        before = core.state.digest()
        with pytest.raises(MoveRefused, match=words) as error:
            core.apply_moves(found.moves, now_ns=9)
        assert (error.value.number, error.value.move) == (1, found.moves[0])
        assert f"move 1 of 1 ({key} from {other} to {target})" in str(error.value)
        assert core.state.digest() == before

    filled = core.submit(build_request(gpus=1, milli=500), now_ns=4).result
    if filled.placements[0].node_name == target:
        refused("held already")
    core.cancel(filled.workload_id, now_ns=5)
    core.mark_node_lost(target, now_ns=6)
    refused("the node is lost")
    core.register_node(build_node(target, gpus=1), now_ns=7)
    core.cancel(key, now_ns=8)
    refused("does not run")


def test_the_second_of_two_moves_refuses_the_first_as_well():
    core = two_halves()
    (move,) = asked(core).moves
    before = core.state.digest()
    with pytest.raises(MoveRefused, match=r"move 2 of 2 .* moved twice"):
        core.apply_moves((move, move), now_ns=3)
    assert core.state.digest() == before


def test_moves_make_room_for_work_that_waits():
    core = two_halves()
    waiting = core.submit(build_request(gpus=1), now_ns=3).result
    assert waiting.phase is WorkloadPhase.PENDING
    core.apply_moves(asked(core).moves, now_ns=4)
    assert core.workload(waiting.workload_id).phase is WorkloadPhase.PLACED


def test_the_journal_with_moves_gives_the_same_state():
    core = two_halves()
    replayed = ClusterState.load(core.state.dump())
    for event in core.apply_moves(asked(core).moves, now_ns=3).events:
        kind, body = event_to_plain(event)
        replayed.apply(event_from_plain(kind, body))
    assert replayed.digest() == core.state.digest()
    assert ClusterState.load(core.state.dump()).digest() == core.state.digest()
    check_invariants(replayed)


def test_the_state_refuses_a_move_to_where_no_room_is_and_keeps_what_was():
    core = two_halves()
    (placement,) = core.workload("one").placements
    before = core.state.digest()
    for target in (
        replace(placement, node_name="nowhere"),
        replace(placement, gpu_uuids=("GPU-a-0", "GPU-a-0")),
        replace(placement, replica=1),
    ):
        with pytest.raises(ContradictoryEvent):
            core.state.apply(WorkloadMoved(time_ns=3, workload_id="one", placements=(target,)))
        assert core.state.digest() == before
        check_invariants(core.state)


def test_equal_clusters_give_equal_recommendations_and_goals_differ_in_weights():
    assert asked(two_halves()) == asked(two_halves())
    found = {goal: asked(two_halves(), goal=goal).weights for goal in (MoveGoal.POWER, MoveGoal.ROOM)}
    assert found[MoveGoal.POWER].power > found[MoveGoal.ROOM].power
    assert found[MoveGoal.ROOM].fragmentation_w > found[MoveGoal.POWER].fragmentation_w
    assert asked(two_halves()).goal is MoveGoal.BALANCED


def test_room_counts_what_would_fit():
    core = two_halves()
    found = asked(core)
    sizes = {(task.gpu_count, task.gpu_milli): task.tasks for task in found.before.largest}
    assert sizes == {(1, 500): 2}
    core.submit(build_request(gpus=1, key="whole"), now_ns=3)  # waits, but it is demand
    found = asked(core)
    rooms = [
        {(task.gpu_count, task.gpu_milli): task.tasks for task in one.largest} for one in (found.before, found.after)
    ]
    assert rooms == [{(1, 1000): 0, (1, 500): 2}, {(1, 1000): 1, (1, 500): 2}]


def test_an_empty_cluster_has_nothing_to_move():
    for core in (build_core(), build_core(build_node("a")), Core(ClusterState(), catalogue.load_catalogue())):
        found = asked(core)
        assert (found.moves, found.running, found.gain_w) == ((), 0, 0.0)


def test_a_later_move_may_use_what_an_earlier_one_freed_and_not_the_other_way_round():
    core = build_core(build_node("a", gpus=1))
    core.submit(build_request(gpus=1, key="one"), now_ns=1)
    core.register_node(build_node("b", gpus=1), now_ns=1)
    core.submit(build_request(gpus=1, key="two"), now_ns=1)
    core.register_node(build_node("c", gpus=1), now_ns=1)

    def move(key: str, target: str) -> Move:
        (source,) = core.workload(key).placements
        there = replace(source, node_name=target, gpu_uuids=(f"GPU-{target}-0",))
        return Move(workload_id=key, replicas=(ReplicaMove(source=source, target=there),))

    moves = (move("one", "c"), move("two", "a"))
    with pytest.raises(MoveRefused, match="move 1 of 2"):
        core.apply_moves(moves[::-1], now_ns=2)
    core.apply_moves(moves, now_ns=2)
    assert [places(core, key)[0][0] for key in ("one", "two")] == ["c", "a"]
    check_invariants(core.state)


def test_kinds_of_request_beyond_the_bound_stay_and_the_rest_is_booked_by_its_own_request(monkeypatch):
    """A cluster may run more kinds of request than a search has rows for: the rarest do not move, no figure is wrong."""
    core = two_halves()
    core.register_node(build_node("c", gpus=2), now_ns=2)
    core.submit(build_request(gpus=1, milli=600, key="rare", mobility=Mobility.MOVABLE), now_ns=2)
    core.submit(build_request(gpus=1, milli=700, key="rarer", mobility=Mobility.MOVABLE), now_ns=2)
    before_w = core.modelled_power_w()
    monkeypatch.setattr(migration_planner, "REQUEST_KINDS_MOST", 1)
    found = asked(core, moves_most=5)
    assert found.moves
    assert {move.workload_id for move in found.moves} <= {"one", "two"}
    core.apply_moves(found.moves, now_ns=3)
    assert found.after.power_w == pytest.approx(core.modelled_power_w())
    assert sum(move.power_w for move in found.moves) == pytest.approx(before_w - core.modelled_power_w())
    assert found.gain_w == pytest.approx(
        found.before.cost_w - found.after.cost_w - sum(move.restart_w for move in found.moves)
    )
    check_invariants(core.state)


@pytest.mark.parametrize("start_s", [1, 3600])
def test_nothing_moves_onto_a_node_that_is_reserved(start_s):
    core = two_halves(mobility=Mobility.MOVABLE)
    (move,) = asked(core, moves_most=5).moves
    target = move.replicas[0].target.node_name
    repair = Reservation(name="r", node_names=(target,), start_ns=start_s * S, end_ns=7200 * S, maintenance=True)
    core.update_policy(replace(core.state.policy, reservations=(repair,)), now_ns=2 * S)
    with pytest.raises(MoveRefused, match=f"node {target} is reserved"):
        core.apply_moves((move,), now_ns=3 * S)
    # What is there leaves it.
    (other,) = asked(core, moves_most=5).moves
    assert {item.target.node_name for item in other.replicas} == {"a", "b"} - {target}
    core.update_policy(replace(core.state.policy, reservations=()), now_ns=4 * S)
    core.apply_moves((move,), now_ns=5 * S)


def test_work_stays_on_its_gpu_model_where_its_queue_has_quotas_of_models():
    def begin(*quotas: QueueQuota) -> Core:
        core = build_core(build_node("a", gpus=4, model="V100M16"))
        core.update_policy(replace(core.state.policy, queues=(Queue(name="default", quotas=quotas),)), now_ns=1)
        core.submit(build_request("one"), now_ns=1)
        core.register_node(build_node("b", gpus=4, model="T4"), now_ns=1)
        core.submit(build_request("two", gpus=2, models=("T4",), mobility=Mobility.FIXED), now_ns=1)
        return core

    of_models = [QueueQuota(resource=f"gpu/{model}", nominal=most) for model, most in (("V100M16", 4000), ("T4", 2000))]
    assert asked(begin(QueueQuota(resource="gpu", nominal=8000)), moves_most=5).moves
    assert not asked(begin(*of_models), moves_most=5).moves
