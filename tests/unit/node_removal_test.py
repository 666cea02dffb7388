"""Nodes that are gone for good: removed by hand, forgotten after a while, and bounds on new names."""

import random
from dataclasses import replace

import pytest
from tests.builders.cluster import build_batch, build_core, build_node, build_request
from tests.builders.server import AgentStream, run_controller
from tests.state_invariants import check_invariants
from tests.waiting import wait_until

from eelgrid_controller.core.core import Core
from eelgrid_controller.energy.savings import InitialCluster, PlacementSavings
from eelgrid_controller.placement.power import PriorPowerModel
from eelgrid_controller.state.agent_liveness import (
    EXPIRY_CONFIRM_S,
    REGISTRATION_WINDOW_S,
    LostNodeExpiry,
    RegistrationLimiter,
    RegistrationRefused,
)
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import (
    NodesRemoved,
    WorkloadCancelled,
    WorkloadScaled,
    event_from_plain,
    event_to_plain,
)
from eelgrid_controller.state.node_allocations import ContradictoryEvent
from eelgrid_controller.state.telemetry import Telemetry
from eelgrid_controller.whatif.scenarios import ShadowPolicy
from eelgrid_protos import catalogue
from eelgrid_protos.faults import Aborted, FailedPrecondition, NotFound, ResourceExhausted
from eelgrid_protos.messages import (
    BudgetScope,
    Hello,
    ListNodesRequest,
    NodeState,
    PowerBudget,
    RemoveNodeRequest,
    Welcome,
    WorkloadKind,
    WorkloadPhase,
)

DAY_NS = 86_400 * 10**9
NS = 10**9


def removed(core, name, *, force=False, is_connected=False, now_ns=50):
    return core.remove_node(name, force=force, is_connected=is_connected, now_ns=now_ns)


def replayed(events):
    state = ClusterState()
    for event in events:
        state.apply(event_from_plain(*event_to_plain(event)))
    return state


# The core


def test_an_empty_node_is_removed_and_the_journal_replays_it():
    core, events = Core(ClusterState(), catalogue.load_catalogue()), []
    for name in ("a", "b"):
        events += core.register_node(build_node(name), now_ns=1).events
    step = removed(core, "a")
    assert step.events == (NodesRemoved(time_ns=50, node_names=("a",), reason="operator"),)
    assert (list(core.state.nodes), step.nodes) == (["b"], frozenset())
    assert replayed([*events, *step.events]).digest() == core.state.digest()
    check_invariants(core.state)
    with pytest.raises(NotFound):
        removed(core, "a")


@pytest.mark.parametrize(("force", "is_connected"), [(False, True), (False, False)])
def test_a_node_in_use_stays_unless_forced(force, is_connected):
    core = build_core(build_node("a"))
    if not is_connected:
        core.submit(build_request(gpus=1, key="w"), now_ns=2)
    before = core.state.digest()
    with pytest.raises(FailedPrecondition, match="is connected" if is_connected else r"holds 1 workload \(w\)"):
        removed(core, "a", force=force, is_connected=is_connected)
    assert core.state.digest() == before


def test_by_force_services_go_on_elsewhere_and_everything_else_on_the_node_ends():
    core = build_core(build_node("a", gpus=4), build_node("b", gpus=4))
    spread = build_request(gpus=4, replicas=2, key="gang")
    core.submit(spread, now_ns=2)
    core.cancel("gang", now_ns=3)
    kind = WorkloadKind.INFERENCE_SERVICE
    service = build_request(gpus=2, replicas=4, key="service")
    core.submit(replace(service, spec=replace(service.spec, kind=kind)), now_ns=4)
    would = core.preview_node_removal("a", force=True, is_connected=False, now_ns=5)
    step = removed(core, "a", force=True, now_ns=5)
    assert (step.result.ended, step.result.shrunk) == (would.ended, would.shrunk) == ((), ("service",))
    assert isinstance(step.events[0], WorkloadScaled)
    left = core.workload("service")
    assert (left.phase, left.spec.replicas, left.replicas_begun) == (WorkloadPhase.PLACED, 2, 4)
    assert {item.node_name for item in left.placements} == {"b"}
    check_invariants(core.state)


def test_by_force_a_gang_with_a_member_there_ends_and_what_waits_takes_its_room_elsewhere():
    core = build_core(build_node("a", gpus=4), build_node("b", gpus=4))
    core.submit(build_request(gpus=4, replicas=2, key="gang"), now_ns=2)
    core.submit(build_request(gpus=4, key="waits"), now_ns=3)
    assert core.workload("waits").phase is WorkloadPhase.PENDING
    step = removed(core, "a", force=True)
    assert step.result.ended == ("gang",)
    assert isinstance(step.events[0], WorkloadCancelled)
    assert core.workload("gang").phase is WorkloadPhase.CANCELLED
    assert core.workload("waits").placements[0].node_name == "b"
    assert "a" not in step.nodes
    check_invariants(core.state)


def test_a_node_that_holds_work_cannot_be_removed_by_an_event():
    core = build_core(build_node("a"))
    core.submit(build_request(gpus=1, key="w"), now_ns=2)
    with pytest.raises(ContradictoryEvent, match="holds work"):
        core.state.apply(NodesRemoved(time_ns=3, node_names=("a",)))


@pytest.mark.parametrize("seed", range(6))
def test_after_removals_a_core_decides_as_one_that_was_made_again(seed):
    draw = random.Random(seed)
    core = build_core(*(build_node(f"n{number}", gpus=draw.choice((1, 2, 4))) for number in range(8)))
    now_ns = 10
    for turn in range(60):
        now_ns += 1
        choice = draw.random()
        if choice < 0.15 and core.state.nodes:
            removed(core, draw.choice(sorted(core.state.nodes)), force=True, now_ns=now_ns)
        elif choice < 0.3:
            core.register_node(build_node(f"n{draw.randrange(12)}", gpus=draw.choice((1, 2, 4))), now_ns=now_ns)
        elif core.state.nodes:
            asked = build_request(gpus=draw.choice((1, 1, 2)), key=f"w{turn}")
            anew = Core(ClusterState.load(core.state.dump()), catalogue.load_catalogue())
            assert _placed(anew, asked, now_ns) == _placed(core, asked, now_ns)
        check_invariants(core.state)


def _placed(core, asked, now_ns):
    try:
        return core.submit(asked, now_ns=now_ns).result
    except Exception as error:  # noqa: BLE001  # both refuse alike
        return str(error)


def test_a_removed_node_draws_from_no_budget():
    core = build_core(build_node("a", gpus=4), build_node("b", gpus=4))
    budget = PowerBudget(scope=BudgetScope.CLUSTER, limit_w=10_000.0)
    core.update_policy(replace(core.state.policy, budgets=(budget,)), now_ns=2)
    left_w = [core._chooser.allowance.left_w(key) for key in core._chooser.allowance._places.limits_w]
    removed(core, "a")
    freed = [core._chooser.allowance.left_w(key) for key in core._chooser.allowance._places.limits_w]
    assert freed[0] > left_w[0]
    core.register_node(build_node("a", gpus=4), now_ns=60)
    assert [core._chooser.allowance.left_w(key) for key in core._chooser.allowance._places.limits_w] == left_w


def test_a_node_that_comes_back_is_a_new_one_with_plans_above_the_one_that_it_holds():
    core = build_core(build_node("a"))
    core.submit(build_request(gpus=1, key="w"), now_ns=2)
    epoch = core.node_plan("a").epoch
    removed(core, "a", force=True)
    core.register_node(build_node("a"), now_ns=60, plan_epoch=epoch)
    assert core.node_plan("a").epoch > epoch
    assert core.submit(build_request(gpus=1, key="again"), now_ns=61).result.phase is WorkloadPhase.PLACED


def test_where_names_run_out_the_longest_lost_make_room_and_those_in_use_never_do():
    core = Core(ClusterState(), catalogue.load_catalogue(), nodes_most=3)
    for number, name in enumerate("abc"):
        core.register_node(build_node(name), now_ns=number)
    with pytest.raises(ResourceExhausted, match="eelctl node remove"):
        core.register_node(build_node("d"), now_ns=5)
    core.submit(build_request(gpus=1, key="w"), now_ns=6)
    held = core.workload("w").placements[0].node_name
    for time_ns, name in enumerate("abc", start=7):
        core.mark_node_lost(name, now_ns=time_ns)
    step = core.register_node(build_node("d"), now_ns=20)
    gone = min({"a", "b", "c"} - {held})
    assert step.events[0].node_names == (gone,)
    assert set(core.state.nodes) == {"a", "b", "c", "d"} - {gone}


def test_since_when_a_node_is_lost_survives_a_checkpoint_and_ends_with_its_return():
    core = build_core(build_node("a"))
    core.mark_node_lost("a", now_ns=70)
    loaded = ClusterState.load(core.state.dump())
    assert loaded.nodes["a"].lost_ns == 70
    core.register_node(build_node("a"), now_ns=80)
    assert core.state.nodes["a"].lost_ns == 0
    assert "lost_ns" not in core.state.dump()["nodes"][0]


def test_followers_outlive_a_removal():
    core = build_core(build_node("a", gpus=2), build_node("b", gpus=2))
    savings = PlacementSavings(
        InitialCluster.from_state(core.state, 1), PriorPowerModel(catalogue.load_catalogue()).gpu
    )
    shadow = ShadowPolicy(
        core.state.copy(), core.state.policy, lambda state: Core(state, catalogue.load_catalogue()), now_ns=1
    )
    steps = [core.submit(build_request(gpus=2, key="w"), now_ns=2)]
    steps.append(removed(core, core.workload("w").placements[0].node_name, force=True))
    steps.append(core.submit(build_request(gpus=2, key="x"), now_ns=60))
    for step in steps:
        for event in step.events:
            savings.follow_event(event)
            shadow.follow_event(event)
        savings.advance_to(100)
    assert core.workload("x").phase is WorkloadPhase.PLACED
    assert shadow.core.state.workloads["x"].phase is WorkloadPhase.PLACED


def test_telemetry_of_removed_nodes_takes_no_room():
    telemetry = Telemetry()
    for number in range(300):
        telemetry.open_stream(build_node(f"n{number}"), 1)
        telemetry.receive_batch(f"n{number}", build_batch(1, time_ns=5), now_s=1.0)
        telemetry.forget_node(f"n{number}")
    telemetry.open_stream(build_node("last"), 1)
    telemetry.receive_batch("last", build_batch(1, time_ns=5), now_s=1.0)
    readings = telemetry.readings(now_s=1.0, now_ns=5)
    assert [readings.names[row] for row in readings.row] == ["last"]
    assert len(readings.names) == 1


# Expiry


def test_lost_nodes_expire_when_both_clocks_say_so():
    lost = LostNodeExpiry(7 * 86_400.0)
    assert lost.select_expired([(5, "a")], now_ns=6 * DAY_NS, now_s=0.0) == ()
    assert lost.select_expired([(5, "a")], now_ns=8 * DAY_NS, now_s=10.0) == ()
    assert lost.select_expired([(5, "a")], now_ns=8 * DAY_NS, now_s=10.0 + EXPIRY_CONFIRM_S) == ("a",)


def test_a_clock_that_jumps_ahead_for_a_moment_expires_nothing():
    lost = LostNodeExpiry(7 * 86_400.0)
    assert lost.select_expired([(5, "a")], now_ns=4000 * DAY_NS, now_s=0.0) == ()
    assert lost.select_expired([(5, "a")], now_ns=DAY_NS, now_s=60.0) == ()
    assert lost.select_expired([(5, "a")], now_ns=4000 * DAY_NS, now_s=EXPIRY_CONFIRM_S + 1.0) == ()


def test_a_node_lost_before_that_was_kept_counts_from_now():
    lost = LostNodeExpiry(100.0)
    began_ns = 50 * DAY_NS
    assert lost.select_expired([(0, "a")], now_ns=began_ns, now_s=0.0) == ()
    assert lost.select_expired([(0, "a")], now_ns=began_ns + 99 * NS, now_s=99.0) == ()
    lost.select_expired([(0, "a")], now_ns=began_ns + 101 * NS, now_s=101.0)
    assert lost.select_expired([(0, "a")], now_ns=began_ns + 201 * NS, now_s=201.0) == ("a",)


def test_nodes_never_expire_where_that_is_asked():
    assert LostNodeExpiry(0.0).select_expired([(5, "a")], now_ns=10**18, now_s=1e9) == ()


def test_forgetting_passes_over_what_came_back_or_holds_work():
    core = build_core(build_node("a"), build_node("b"), build_node("c"))
    core.submit(build_request(gpus=1, key="w"), now_ns=2)
    held = core.workload("w").placements[0].node_name
    for name in "abc":
        core.mark_node_lost(name, now_ns=3)
    back = next(name for name in "abc" if name != held)
    core.register_node(build_node(back), now_ns=4)
    (gone,) = set("abc") - {held, back}
    assert core.forget_lost_nodes(("a", "b", "c", "never"), now_ns=5).result == (gone,)
    assert core.forget_lost_nodes(("a", "b", "c"), now_ns=6).events == ()


async def test_a_lost_node_is_forgotten_by_itself(tmp_path):
    async with run_controller(tmp_path, away_grace_s=0.0, lost_node_ttl_s=1.0) as rig:
        agent = await rig.join(build_node("n1"), build_node("n2"))
        await agent.leave()
        rig.agents.remove(agent)
        loop = rig.controller.loop
        await wait_until(lambda: list(loop.core.state.nodes) == ["n1"], within_s=20.0)


# Bounds on new names


def test_a_certificate_registers_so_many_new_nodes_an_hour_and_another_is_not_shut_out():
    limits = RegistrationLimiter(3, now_s=0.0)
    for number in range(3):
        limits.register_node(f"ghost-{number}", "CN=mallory", now_s=0.0)
    with pytest.raises(RegistrationRefused, match=r"CN=mallory has registered 3 new nodes.*--registrations") as caught:
        limits.register_node("ghost-3", "CN=mallory", now_s=1.0)
    assert caught.value.limit == "peer"
    limits.register_node("honest", "CN=alice", now_s=1.0)
    # A third of the hour later there is room for one more.
    limits.register_node("ghost-3", "CN=mallory", now_s=REGISTRATION_WINDOW_S / 3.0 + 1.0)


def test_all_certificates_together_register_twice_as_many():
    limits = RegistrationLimiter(3, now_s=0.0)
    for number in range(6):
        limits.register_node(f"n{number}", f"CN={number}", now_s=0.0)
    with pytest.raises(RegistrationRefused) as caught:
        limits.register_node("n6", "CN=6", now_s=0.0)
    assert caught.value.limit == "all"


def test_certificates_that_are_told_apart_are_bounded():
    limits = RegistrationLimiter(10**9, now_s=0.0)
    for number in range(5000):
        limits.register_node("n", f"CN={number}", now_s=0.0)
    assert len(limits._peers) <= 4096


async def test_new_nodes_beyond_the_limit_are_refused_and_known_ones_come_back(tmp_path):
    async with run_controller(tmp_path, registrations_most=2) as rig:
        for name in ("n1", "n2"):
            await rig.join(build_node(name))
        late = AgentStream(rig.address)
        rig.agents.append(late)
        await late.say(Hello(incarnation=1, inventory=build_node("n3")))
        with pytest.raises(ResourceExhausted, match="has registered 2 new nodes within an hour"):
            await late.hear()
        again = AgentStream(rig.address)
        rig.agents.append(again)
        await again.say(Hello(incarnation=1, inventory=build_node("n1")))
        assert isinstance(await again.hear(), Welcome)
        nodes = (await rig.operators.list_nodes(ListNodesRequest())).nodes
        assert [one.inventory.node_name for one in nodes] == ["n1", "n2"]


# The call


async def test_removing_over_the_wire(tmp_path):
    async with run_controller(tmp_path, away_grace_s=0.0) as rig:
        agent = await rig.join(build_node("n1"), build_node("n2"))
        await rig.operators.submit_workload(build_request("w", gpus=2))
        await rig.operators.submit_workload(build_request("x", gpus=2))
        with pytest.raises(FailedPrecondition, match="agent of node n2 is connected"):
            await rig.operators.remove_node(RemoveNodeRequest(node_name="n2"))
        with pytest.raises(NotFound):
            await rig.operators.remove_node(RemoveNodeRequest(node_name="n3", force=True))
        state = rig.controller.loop.core.state
        here = next(iter(state.nodes["n2"].assignments))[0]
        dry = await rig.operators.remove_node(RemoveNodeRequest(node_name="n2", force=True, dry_run=True))
        assert (dry.ended, dry.connected, "n2" in state.nodes) == ((here,), True, True)
        found = await rig.operators.remove_node(RemoveNodeRequest(node_name="n2", force=True))
        assert found == dry
        with pytest.raises(Aborted, match="connect again to register it anew"):
            await agent.hear_to_the_end()
        assert sorted(state.nodes) == ["n1"]
        # Its agent registers it anew, as a node of its own.
        await rig.join(build_node("n2"))
        nodes = (await rig.operators.list_nodes(ListNodesRequest())).nodes
        assert [(one.inventory.node_name, one.state) for one in nodes] == [
            ("n1", NodeState.READY),
            ("n2", NodeState.READY),
        ]
