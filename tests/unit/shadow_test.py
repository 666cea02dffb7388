"""The shadow: the same policy gives the same cluster; another shows where it differs, and the live one never waits."""

import functools
import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders.cluster import build_core, build_node, build_request
from tests.builders.server import run_controller
from tests.fakes.operators import FakeOperators
from tests.fakes.terminal import terminal
from tests.state_invariants import check_invariants
from tests.waiting import wait_until

from eelgrid_controller.core.core import Core
from eelgrid_controller.server.grpc import whatif_runner
from eelgrid_controller.whatif.scenarios import ShadowPolicy, compute_cluster_figures
from eelgrid_protos import catalogue, messages
from eelgrid_protos.faults import FailedPrecondition
from eelgrid_protos.messages import (
    OBJECTIVES,
    GetShadowRequest,
    ImaginedOutcome,
    SetWeights,
    StartShadowRequest,
    StopShadowRequest,
    Weights,
    WorkloadPhase,
)

CARELESS = Weights(power=0.0, fragmentation_w=0.0, stranding_w=0.0)


def shadow_of(core, weights):
    policy = replace(core.state.policy, objective="custom", weights=weights)
    return ShadowPolicy(core.state.copy(), policy, lambda state: Core(state, catalogue.load_catalogue()), now_ns=2)


def reported(shadow, core):
    return shadow.build_report(compute_cluster_figures(core), core.state.workloads, core.state.revision)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 60), st.sampled_from((0, 300, 700, 1000))),
        st.tuples(st.just("cancel"), st.integers(0, 20)),
        st.tuples(st.just("lose"), st.sampled_from("ab")),
        st.tuples(st.just("join"), st.sampled_from("abc")),
    ),
    max_size=25,
)


@settings(max_examples=50, deadline=None)
@given(STEPS)
def test_the_policy_in_force_as_its_own_shadow_is_the_cluster(steps):
    core = build_core(build_node("a"), build_node("b", model="T4"))
    core.submit(build_request(gpus=1, milli=400), now_ns=1)
    shadow = shadow_of(core, core.state.policy.weights)
    for now_ns, step in enumerate(steps, start=3):
        match step:
            case ("submit", cpu, milli):
                found = core.submit(build_request(cpu=cpu, gpus=int(milli > 0), milli=milli), now_ns=now_ns)
            case ("cancel", number) if number < len(core.state.workloads):
                found = core.cancel(list(core.state.workloads)[number], now_ns=now_ns)
            case ("lose", name):
                found = core.mark_node_lost(name, now_ns=now_ns)
            case ("join", name):
                found = core.register_node(build_node(name, model="G3" if name == "c" else "G2"), now_ns=now_ns)
            case _:
                continue
        for event in found.events:
            shadow.follow_event(event)
    report = reported(shadow, core)
    assert report.live == report.shadow
    assert (report.elsewhere, report.live_alone, report.shadow_alone, report.differences) == (0, 0, 0, ())
    for key, workload in core.state.workloads.items():
        assert shadow.core.state.workloads[key].placements == workload.placements
    check_invariants(shadow.core.state)


def test_another_policy_shows_where_it_differs():
    core = build_core(build_node("a", model="G3"), build_node("b", model="T4"), build_node("c", gpus=0, cpu=1))
    shadow = shadow_of(core, CARELESS)
    keys = []
    for spec in ({"milli": 500}, {"milli": 500}, {"milli": 1000, "models": ("G3",)}):
        step = core.submit(build_request(gpus=1, **spec), now_ns=3)
        keys.append(step.result.workload_id)
        for event in step.events:
            shadow.follow_event(event)
    core.cancel(keys[1], now_ns=4)
    report = reported(shadow, core)
    assert (report.alike, report.elsewhere) == (0, 2)
    newest, oldest = report.differences
    assert (newest.workload_id, oldest.workload_id) == (keys[2], keys[0])
    assert (oldest.outcome, oldest.nodes_before, oldest.nodes_after) == (ImaginedOutcome.MOVED, ("b",), ("a",))
    assert report.shadow.modelled_power_w > report.live.modelled_power_w
    assert core.state.policy.weights == OBJECTIVES["balanced"]


def test_what_waited_before_it_began_is_tried_by_it_too():
    core = build_core(build_node("a"))
    core.submit(build_request(gpus=2), now_ns=1)
    core.submit(build_request(gpus=1), now_ns=1)
    shadow = shadow_of(core, CARELESS)
    assert shadow.core.has_backlog
    for event in core.submit(build_request(gpus=0, cpu=1), now_ns=3).events:
        shadow.follow_event(event)
    assert not shadow.core.has_backlog


async def test_it_is_started_asked_and_stopped(tmp_path):
    async with run_controller(tmp_path) as rig:
        api = rig.operators
        with pytest.raises(FailedPrecondition, match="no shadow runs"):
            await api.get_shadow(GetShadowRequest())
        await rig.join(build_node("n1"), build_node("n2"))
        await api.submit_workload(build_request())
        entries = rig.controller.loop.journal.counters.entries
        begun = (await api.start_shadow(StartShadowRequest(weights=SetWeights(weights=CARELESS)))).report
        assert (begun.live, begun.events) == (begun.shadow, 0)
        assert rig.controller.loop.journal.counters.entries == entries
        for number in range(4):
            await api.submit_workload(build_request(f"k{number}", milli=500))
        report = (await api.get_shadow(GetShadowRequest())).report
        assert report.events == rig.controller.loop.core.state.revision - report.started_revision >= 8
        assert report.alike + report.elsewhere == 4
        assert report.shadow.placed == report.live.placed == 5
        assert report.revision == rig.controller.loop.core.state.revision
        again = (await api.start_shadow(StartShadowRequest(weights=SetWeights(objective="energy")))).report
        assert (again.objective, again.events, again.weights) == ("energy", 0, OBJECTIVES["energy"])
        await api.stop_shadow(StopShadowRequest())
        with pytest.raises(FailedPrecondition, match="no shadow runs"):
            await api.stop_shadow(StopShadowRequest())


async def test_one_that_cannot_keep_up_is_ended_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(whatif_runner, "_BEHIND_MOST", 1)
    async with run_controller(tmp_path) as rig:
        await rig.join(build_node("n1"))
        await rig.operators.start_shadow(StartShadowRequest(weights=SetWeights(objective="energy")))
        assert (await rig.operators.submit_workload(build_request())).workload.phase is WorkloadPhase.PLACED
        with pytest.raises(FailedPrecondition, match=r"[23] events waited for it"):
            await rig.operators.get_shadow(GetShadowRequest())


async def test_what_was_followed_no_longer_counts_as_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(whatif_runner, "_BEHIND_MOST", 3)  # a submission, its place, and prices quoted before
    async with run_controller(tmp_path) as rig:
        await rig.join(build_node("n1"))
        await rig.operators.start_shadow(StartShadowRequest(weights=SetWeights(objective="energy")))
        service = rig.controller.shadowing
        for number in range(4):
            await rig.operators.submit_workload(build_request(f"k{number}", milli=200))
            await wait_until(lambda: service._behind == 0)
        report = (await rig.operators.get_shadow(GetShadowRequest())).report
        assert report.events == rig.controller.loop.core.state.revision - report.started_revision >= 8


class Shadowed(FakeOperators):
    """The fake's calls, and a real shadow of a small cluster."""

    def __init__(self):
        super().__init__()
        self.core = build_core(build_node("a", model="G3"), build_node("b", model="T4"))
        self.asked = None

    async def start_shadow(self, request_, context):
        self._begin("start_shadow")
        self.asked = request_.weights
        self.shadow = shadow_of(self.core, CARELESS)
        for event in self.core.submit(build_request(gpus=1, milli=500), now_ns=3).events:
            self.shadow.follow_event(event)
        return messages.StartShadowResponse(report=reported(self.shadow, self.core))

    async def get_shadow(self, request_, context):
        self._begin("get_shadow")
        return messages.GetShadowResponse(report=reported(self.shadow, self.core))


def test_the_commands():
    fake = Shadowed()
    with terminal(fake) as eelctl:
        run = functools.partial(eelctl.run, "shadow")
        assert run("start").exit_code == 2
        assert run("stop").exit_code == 5
        assert run("start", "--objective", "energy").exit_code == 0
        assert fake.asked == SetWeights(objective="energy")
        assert run("start", "--weight", "power=3").exit_code == 0
        assert fake.asked.weights == replace(OBJECTIVES["balanced"], power=3.0)
        shown = run("show")
        assert shown.exit_code == 0
        for line in ("shadow custom: power 0,", "0 placed alike, 1 elsewhere", "CLUSTER", "w-2  moved  b        a"):
            assert line in shown.output
        assert json.loads(run("show", "-o", "json").output)["elsewhere"] == 1
