"""What-if: the copy does what the cluster would do, and the cluster stays as it was."""

import json
from collections import deque
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders.cluster import GIB, build_core, build_node, build_request
from tests.builders.server import run_controller
from tests.state_invariants import check_invariants

from eelgrid_controller.core.core import Core
from eelgrid_controller.state.node_allocations import NodeRecord
from eelgrid_controller.whatif import scenarios
from eelgrid_controller.whatif.scenarios import ScenarioContext, plan_capacity, run_what_if
from eelgrid_protos import catalogue
from eelgrid_protos.faults import DeadlineExceeded, InvalidArgument, NotFound
from eelgrid_protos.messages import (
    OBJECTIVES,
    AddNodes,
    BudgetScope,
    CancelWorkloads,
    DrainNodes,
    ImaginedOutcome,
    NodeShape,
    PlaceAnew,
    PlanCapacityRequest,
    PowerBudget,
    SetPowerBudgets,
    SetWeights,
    SubmitCopies,
    WhatIfChange,
    WhatIfRequest,
)

BENCH = ScenarioContext(lambda state: Core(state, catalogue.load_catalogue()), catalogue.load_catalogue(), now_ns=99)


def imagined(core, *changes, bench=BENCH, **options):
    found = tuple(WhatIfChange(change=change) for change in changes)
    before = json.dumps(core.state.dump())
    answer = run_what_if(core.state.copy(), WhatIfRequest(changes=found, **options), bench)
    assert json.dumps(core.state.dump()) == before
    check_invariants(core.state)
    return answer


def planned(core, shape, *changes, **options):
    found = tuple(WhatIfChange(change=change) for change in changes)
    return plan_capacity(core.state, PlanCapacityRequest(changes=found, shape=shape, **options), BENCH)


def counts(answer):
    return {count.outcome.name: count.workloads for count in answer.counts}


def cluster_budget(limit_w):
    return PowerBudget(scope=BudgetScope.CLUSTER, limit_w=limit_w)


def busy(**more):
    """Two nodes of two GPUs, full; w-4 waits."""
    core = build_core(build_node("a"), build_node("b"), **more)
    for _ in range(3):
        core.submit(build_request(gpus=1), now_ns=2)
    core.submit(build_request(gpus=2), now_ns=3)
    return core


def test_under_other_budgets_new_work_waits_for_watts_or_no_longer_does_and_what_runs_stays():
    """Each GPU may draw 300 W by default, and some watts idle; three hold work, and a fourth is free."""
    nodes = (build_node(name) for name in ("a", "b"))
    core = build_core(
        *(
            replace(
                node,
                gpus=tuple(replace(gpu, power_limit_default_w=300.0, power_limit_max_w=300.0) for gpu in node.gpus),
            )
            for node in nodes
        )
    )
    core.update_policy(replace(core.state.policy, budgets=(cluster_budget(1000.0),)), now_ns=2)
    for _ in range(4):
        core.submit(build_request(gpus=1), now_ns=2)
    assert core.workload("w-4").reason.startswith("budget:")

    def submit(*budgets):
        return imagined(core, SetPowerBudgets(budgets=budgets), SubmitCopies(spec=build_request(gpus=1).spec))

    raised = submit(cluster_budget(1200.0))
    assert counts(raised) == {"PLACED": 1, "WAITS": 1}
    (placed,) = [one for one in raised.differences if one.outcome is ImaginedOutcome.PLACED]
    assert (placed.workload_id, placed.reason) == ("w-4", f"waited for {core.workload('w-4').reason}")
    # Without any, what waits goes before what is new.
    assert counts(submit()) == {"PLACED": 1, "WAITS": 1}
    # What runs is held to lower limits instead, which is not placement's.
    assert counts(submit(cluster_budget(100.0))) == {"WAITS": 1}
    drained = imagined(core, SetPowerBudgets(budgets=(cluster_budget(300.0),)), DrainNodes(node_names=("a",)))
    assert counts(drained)["DISPLACED"] == len(core.state.nodes["a"].assignments)
    assert core.state.policy.budgets == (cluster_budget(1000.0),)


def test_a_copy_shares_nothing_that_changes():
    core = busy()
    core.cancel("w-1", now_ns=4)
    state, twin = core.state, core.state.copy()
    assert twin.dump() == state.dump()
    mutable = (dict, list, set, deque)
    for name, value in vars(state).items():
        if isinstance(value, mutable):
            assert vars(twin)[name] is not value, name
    for name, record in state.nodes.items():
        for slot in NodeRecord.__slots__:
            if isinstance(getattr(record, slot), mutable):
                assert getattr(twin.nodes[name], slot) is not getattr(record, slot), slot
    before = json.dumps(state.dump())
    other = BENCH.make_core(twin)
    other.submit(build_request(gpus=0, cpu=7), now_ns=5)
    other.cancel("w-2", now_ns=6)
    other.mark_node_lost("b", now_ns=7)
    other.mark_gpu_lost("a", "GPU-a-0", now_ns=8)
    assert json.dumps(state.dump()) == before
    check_invariants(state)
    check_invariants(twin)


def test_no_change_changes_nothing():
    answer = imagined(busy())
    assert answer.before == answer.after
    assert (answer.differences, answer.counts, answer.complete) == ((), (), True)
    assert all(room.before == room.after for room in answer.rooms)


def test_added_nodes_take_what_they_would_take():
    core = busy()
    answer = imagined(core, AddNodes(shape=NodeShape(like_node="a"), count=2))
    core.register_node(replace(build_node("added-1"), generation=0), now_ns=99)
    core.register_node(replace(build_node("added-2"), generation=0), now_ns=99)
    assert core.workload("w-4").placements
    assert answer.after.modelled_power_w == core.modelled_power_w()
    assert counts(answer) == {"PLACED": 1}
    (found,) = answer.differences
    assert (found.workload_id, found.nodes_before, found.nodes_after) == ("w-4", (), ("added-1",))
    assert found.reason == "waited for gpu_count: no node has enough whole GPUs free"
    assert found.candidate is not None
    assert found.candidate.cost_w == pytest.approx(sum(term.cost_w for term in found.candidate.terms))
    assert (answer.before.gpus, answer.after.gpus) == (4, 8)


def test_a_drained_node_stays_on_and_a_removed_one_does_not():
    core = build_core(build_node("a"), build_node("b"), build_node("c", gpus=1, model="T4"))
    core.submit(build_request(gpus=2), now_ns=2)
    core.submit(build_request(gpus=1, models=("T4",)), now_ns=2)  # stays where it is, on c
    (first,) = core.workload("w-1").placements
    drained = imagined(core, DrainNodes(node_names=(first.node_name,)))
    assert counts(drained) == {"MOVED": 1}
    (found,) = drained.differences
    other = {"a": "b", "b": "a"}[first.node_name]
    assert (found.nodes_before, found.nodes_after) == ((first.node_name,), (other,))
    assert found.reason == f"{first.node_name} taken out of use"
    assert drained.after.modelled_power_w == drained.before.modelled_power_w
    removed = imagined(core, DrainNodes(node_names=(first.node_name,), remove=True))
    idle_w = 2 * 30.0 + 3 * 15.0
    assert removed.after.modelled_power_w == drained.after.modelled_power_w - idle_w
    assert removed.after.nodes_ready == 2


def test_work_that_ran_goes_before_work_that_never_did():
    core = busy()
    core.submit(build_request(gpus=1, key="last"), now_ns=4)
    core.register_node(build_node("c", gpus=1), now_ns=5)
    core.submit(build_request(gpus=1, key="held"), now_ns=6)
    core.submit(build_request(gpus=1, key="late"), now_ns=7)
    answer = imagined(core, CancelWorkloads(workload_ids=("w-1",)), DrainNodes(node_names=("c",)))
    places = {found.workload_id: found.outcome.name for found in answer.differences}
    # The share that w-1 gives back goes to what waits at once; what ran on c then finds nothing.
    assert places == {"held": "DISPLACED", "late": "PLACED", "w-1": "CANCELLED"}
    answer = imagined(core, DrainNodes(node_names=("c",)), CancelWorkloads(workload_ids=("w-1",)))
    places = {found.workload_id: found.outcome.name for found in answer.differences}
    assert places == {"held": "MOVED", "w-1": "CANCELLED"}


def test_bad_news_comes_first_and_the_list_is_bounded():
    core = busy()
    answer = imagined(core, DrainNodes(node_names=("a",)), SubmitCopies(spec=build_request(gpus=1).spec, copies=3))
    assert [count.outcome.name for count in answer.counts] == ["DISPLACED", "WAITS", "MOVED"]
    short = imagined(
        core, DrainNodes(node_names=("a",)), SubmitCopies(spec=build_request(gpus=1).spec, copies=3), differences_most=1
    )
    assert (short.differences, short.counts) == (answer.differences[:1], answer.counts)


def test_placing_again_follows_the_weights():
    core = build_core(build_node("a", model="G3"), build_node("b", model="T4"), build_node("c", model="T4"))
    for _ in range(2):
        core.submit(build_request(gpus=1, milli=500, models=("G3", "T4")), now_ns=2)
    again = imagined(core, PlaceAnew())
    assert (again.after, again.differences) == (again.before, ())
    costly = replace(OBJECTIVES["balanced"], power=0.0, stranding_w=0.0, lookahead=0.0)
    core.update_policy(replace(core.state.policy, objective="custom", weights=costly), now_ns=3)
    core.cancel("w-1", now_ns=4)
    core.cancel("w-2", now_ns=4)
    core.submit(build_request(gpus=1, milli=500, models=("G3", "T4")), now_ns=5)
    assert core.workload("w-3").placements[0].node_name == "a"
    left = imagined(core, SetWeights(objective="energy"))
    assert left.after == left.before, "weights alone move nothing that runs"
    anew = imagined(core, SetWeights(objective="energy"), PlaceAnew())
    assert counts(anew) == {"MOVED": 1}
    assert (anew.differences[0].nodes_after, anew.differences[0].reason) == (("b",), "placed anew")
    assert anew.before.modelled_power_w - anew.after.modelled_power_w == (400 - 50) - (70 - 10)


def test_catalogue_nodes_have_sensible_defaults():
    core = build_core(build_node("a"))
    answer = imagined(core, AddNodes(shape=NodeShape(gpu="H100-SXM5-80GB", gpu_count=8), count=10))
    assert answer.after.gpus - answer.before.gpus == 80
    assert answer.after.cpu_milli - answer.before.cpu_milli == 10 * 8 * 24_000
    by_model = imagined(core, AddNodes(shape=NodeShape(gpu="T4", gpu_count=1, cpu_milli=8000), count=1))
    assert by_model.after.cpu_milli - by_model.before.cpu_milli == 8000
    wide = build_request(gpus=8, memory_gib=1800, models=("H100-80GB-HBM3",)).spec
    fits = imagined(
        core, AddNodes(shape=NodeShape(gpu="h100-sxm5-80gb", gpu_count=8), count=1), SubmitCopies(spec=wide)
    )
    assert counts(fits) == {"PLACED": 1}


def test_what_could_never_run_is_refused_with_the_field():
    answer = imagined(busy(), SubmitCopies(spec=build_request(gpus=3).spec, copies=2))
    assert counts(answer) == {"REFUSED": 2}
    assert answer.differences[0].outcome is ImaginedOutcome.REFUSED
    assert "no registered node has more than 2" in answer.differences[0].reason


def test_mistakes_are_named():
    core = busy()
    with pytest.raises(NotFound, match="'z'"):
        imagined(core, DrainNodes(node_names=("z",)))
    with pytest.raises(NotFound, match="'z'"):
        imagined(core, AddNodes(shape=NodeShape(like_node="z"), count=1))
    with pytest.raises(NotFound, match="'z'"):
        imagined(core, CancelWorkloads(workload_ids=("z",)))
    with pytest.raises(InvalidArgument, match="H100-80GB-HBM3"):
        imagined(core, AddNodes(shape=NodeShape(gpu="H1000", gpu_count=8), count=1))
    with pytest.raises(InvalidArgument, match="newer than this controller"):
        imagined(core, None)
    with pytest.raises(InvalidArgument, match="at most 10000"):
        imagined(core, *[AddNodes(shape=NodeShape(like_node="a"), count=5001)] * 2)
    with pytest.raises(InvalidArgument, match="at most 10000"):
        imagined(
            core,
            SubmitCopies(spec=build_request(gpus=9).spec, copies=1),
            SubmitCopies(spec=build_request(gpus=0).spec, copies=10_000),
        )


def test_who_hangs_up_is_not_worked_for():
    with pytest.raises(DeadlineExceeded):
        imagined(busy(), DrainNodes(node_names=("a",)), bench=replace(BENCH, proceed=lambda: False))


@pytest.mark.parametrize(
    "change",
    [AddNodes(shape=NodeShape(like_node="a"), count=10), SubmitCopies(spec=build_request(gpus=0).spec, copies=10)],
    ids=lambda change: type(change).__name__,
)
def test_each_step_of_a_long_change_asks_whether_somebody_waits(change):
    asked = []
    imagined(busy(), change, bench=replace(BENCH, proceed=lambda: asked.append(change) is None))
    assert len(asked) >= 10


def test_a_trial_cut_short_says_so(monkeypatch):
    monkeypatch.setattr(scenarios, "_ROUNDS_MOST", 0)
    assert imagined(busy(), AddNodes(shape=NodeShape(like_node="a"), count=1)).complete is False


@settings(max_examples=40, deadline=None)
@given(
    have=st.integers(0, 3),
    work=st.lists(st.tuples(st.integers(1, 2), st.integers(1, 40), st.integers(1, 4)), min_size=1, max_size=4),
)
def test_the_count_of_nodes_is_the_first_that_does(have, work):
    core = build_core(*(build_node(f"n{index}") for index in range(have)))
    changes = [SubmitCopies(spec=build_request(gpus=gpus, cpu=cpu).spec, copies=copies) for gpus, cpu, copies in work]
    shape = NodeShape(gpu="openb-g2", gpu_count=2, cpu_milli=96_000, memory_bytes=384 * GIB)
    answer = planned(core, shape, *changes, nodes_most=16)

    def left(nodes):
        more = [AddNodes(shape=shape, count=nodes)] if nodes else []
        found = counts(imagined(core, *more, *changes))
        return found.get("WAITS", 0) + found.get("REFUSED", 0)

    linear = next(nodes for nodes in range(17) if left(nodes) == 0)
    assert answer.nodes == linear
    assert answer.wanted == sum(copies for *_, copies in work)
    assert answer.outcome.after.pending == 0
    if linear:
        assert answer.waiting_with_one_less == left(linear - 1) > 0


def test_a_plan_for_what_waits_and_one_beyond_its_limit():
    core = busy()
    core.submit(build_request(gpus=2), now_ns=4)
    answer = planned(core, NodeShape(like_node="a"))
    assert (answer.nodes, answer.wanted, answer.waiting_with_one_less) == (2, 2, 1)
    answer = planned(core, NodeShape(like_node="a"), nodes_most=1)
    assert (answer.nodes, answer.outcome.after.pending) == (None, 1)
    with pytest.raises(NotFound):
        planned(build_core(build_node("a")), NodeShape(like_node="z"))
    assert planned(build_core(build_node("a")), NodeShape(like_node="a")).nodes == 0


async def test_the_live_cluster_and_its_journal_stay_as_they_were(tmp_path):
    async with run_controller(tmp_path) as rig:
        await rig.join(build_node("n1"), build_node("n2"))
        for _ in range(5):
            await rig.operators.submit_workload(build_request())
        loop = rig.controller.loop
        before = (json.dumps(loop.core.state.dump()), loop.journal.counters.entries, loop.journal.last_seq)
        changes = (
            WhatIfChange(change=DrainNodes(node_names=("n1",))),
            WhatIfChange(change=AddNodes(shape=NodeShape(like_node="n1"), count=3)),
            WhatIfChange(change=SetWeights(objective="performance")),
            WhatIfChange(change=PlaceAnew()),
            WhatIfChange(change=SubmitCopies(spec=build_request().spec, copies=4)),
        )
        answer = await rig.operators.what_if(WhatIfRequest(changes=changes))
        assert answer.after.placed > answer.before.placed
        assert 0.0 < answer.copy_s < answer.total_s
        plan = await rig.operators.plan_capacity(
            PlanCapacityRequest(changes=changes[-1:], shape=NodeShape(like_node="n1"))
        )
        assert plan.nodes == 3
        assert (json.dumps(loop.core.state.dump()), loop.journal.counters.entries, loop.journal.last_seq) == before
        lost = WhatIfChange(change=DrainNodes(node_names=("n9",)))
        with pytest.raises(NotFound, match="n9"):
            await rig.operators.what_if(WhatIfRequest(changes=(lost,)))
