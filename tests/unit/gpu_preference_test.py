"""Preferred GPU models: taken where they have room, or as long as they cost no more than that is worth."""

from dataclasses import replace

import click
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders.cluster import build_core, build_node, build_request
from tests.unit.decision_test import Recorder
from tests.unit.preemption_test import submit
from tests.unit.service_growth_test import begin_models, models_of

from eelgrid_controller.cli.preferences import build_preference
from eelgrid_controller.engines.kubernetes.model import annotations
from eelgrid_controller.engines.kubernetes.model.quantities import AnnotationUnreadable
from eelgrid_controller.placement.migration_planner import build_migration_problem, recommend_moves
from eelgrid_controller.whatif.decision_record import replay_decision
from eelgrid_protos.faults import InvalidArgument
from eelgrid_protos.messages import GpuPreference, RecommendMovesRequest, WorkloadPhase
from eelgrid_protos.schema import InvalidMessage, check_message

G3 = GpuPreference(models=("G3",))


def place(core, key="job", **spec):
    core.submit(build_request(key, **spec), now_ns=9)
    return models_of(core, key)


def build_two(g2=2, g3=2):
    return build_core(build_node("a", gpus=g2, model="G2"), build_node("b", gpus=g3, model="G3"))


def cost_of(core, key):
    return core.explain_workload(key).replicas[0].candidates[0].cost_w


@pytest.mark.parametrize("models", [(), ("G2", "G3")])
def test_work_goes_to_what_it_prefers_and_elsewhere_once_that_is_full(models):
    for preferred in ("G2", "G3"):
        core = build_two()
        rather = GpuPreference(models=(preferred,))
        placed = [place(core, f"job{n}", models=models, gpu_preference=rather) for n in range(4)]
        (other,) = {"G2", "G3"} - {preferred}
        assert placed == [{preferred}, {preferred}, {other}, {other}]


def test_replicas_that_do_not_all_fit_go_elsewhere_together():
    core = build_two(g2=4, g3=1)
    assert place(core, replicas=2, gpu_preference=G3) == {"G2"}


def test_a_preference_is_worth_so_many_watts():
    """The model that costs less is taken beyond what the other is worth."""
    costs = {}
    for model in ("G2", "G3"):
        core = build_two()
        place(core, models=(model,))
        costs[model] = cost_of(core, "job")
    cheap, dear = sorted(costs, key=costs.__getitem__)
    more_w = costs[dear] - costs[cheap]
    assert more_w > 1.0
    for worth_w, chosen in ((None, dear), (more_w + 0.5, dear), (more_w - 0.5, cheap), (0.0, cheap)):
        rather = GpuPreference(models=(dear,), worth_w=worth_w)
        assert place(build_two(), gpu_preference=rather) == {chosen}
        # What costs less anyway is taken whatever it is worth.
        assert place(build_two(), gpu_preference=GpuPreference(models=(cheap,), worth_w=worth_w)) == {cheap}


@given(
    nodes=st.lists(
        st.tuples(st.sampled_from(["G2", "G3", "T4"]), st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=4
    ),
    preferred=st.sets(st.sampled_from(["G2", "G3", "T4"]), min_size=1),
    worth_w=st.sampled_from([None, 0.0, 5.0, 40.0, 200.0]),
    gpus=st.integers(1, 2),
)
@settings(deadline=None, max_examples=150)
def test_the_choice_is_the_least_cost_less_what_a_preferred_model_is_worth(nodes, preferred, worth_w, gpus):
    def build():
        core = build_core(*(build_node(f"n{n}", gpus=count, model=model) for n, (model, count, _) in enumerate(nodes)))
        for number, (model, count, used) in enumerate(nodes):
            for one in range(min(used, count)):
                core.submit(build_request(f"w{number}-{one}", models=(model,)), now_ns=3)
        return core

    there = sorted({model for model, count, _ in nodes if count >= gpus})
    costs = {}
    for model in there:
        core = build()
        core.submit(build_request("job", gpus=gpus, models=(model,)), now_ns=9)
        if core.workload("job").phase is WorkloadPhase.PLACED:
            costs[model] = cost_of(core, "job")
    core = build()
    rather = GpuPreference(models=tuple(sorted(preferred)), worth_w=worth_w)
    try:
        core.submit(build_request("job", gpus=gpus, gpu_preference=rather), now_ns=9)
    except InvalidArgument:
        assert not there or not preferred & {model for model, _, _ in nodes}
        return
    if not costs:
        assert core.workload("job").phase is WorkloadPhase.PENDING
        return
    (chosen,) = models_of(core, "job")
    worth = {model: (1e9 if worth_w is None else worth_w) if model in preferred else 0.0 for model in costs}
    assert costs[chosen] - worth[chosen] <= min(costs[model] - worth[model] for model in costs) + 1e-6


def test_names_are_those_of_the_catalogue_and_unknown_ones_are_refused():
    core = build_two()
    with pytest.raises(InvalidArgument, match=r"gpu_preference\.models"):
        core.submit(build_request("job", gpu_preference=GpuPreference(models=("nosuch",))), now_ns=9)
    assert "job" not in core.state.workloads


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"gpu_preference": GpuPreference()}, r"is empty"),
        ({"gpus": 0, "gpu_preference": G3}, "asks for no GPU"),
        ({"gpu_preference": replace(G3, worth_w=-1.0)}, "worth_w"),
    ],
)
def test_a_preference_that_contradicts_the_request_is_refused(changes, what):
    with pytest.raises(InvalidMessage, match=what):
        check_message(build_request("job", **changes))


def test_a_preference_for_none_of_the_allowed_models_is_refused_by_their_resolved_names():
    core = build_core(build_node("a", model="A100-SXM4-80GB"), build_node("b", model="T4"))
    with pytest.raises(InvalidArgument, match="has none of the models that the request allows, which are T4"):
        core.submit(build_request("job", models=("T4",), gpu_preference=GpuPreference(models=("a100",))), now_ns=9)
    # By a short name and by its whole name a model is the same, also when the call is repeated.
    rather = GpuPreference(models=("a100",))
    for _ in range(2):
        step = core.submit(build_request("job", models=("A100-SXM4-80GB", "T4"), gpu_preference=rather), now_ns=9)
        assert step.result.spec.gpu_preference == GpuPreference(models=("A100-SXM4-80GB",))
    assert models_of(core, "job") == {"A100-SXM4-80GB"}


def test_quota_that_need_not_be_borrowed_goes_before_a_preference():
    core = begin_models()
    for n in range(3):
        submit(core, f"job{n}", "train", now_ns=3 + n, gpu_preference=GpuPreference(models=("G2",)))
    assert [models_of(core, f"job{n}") for n in range(3)] == [{"G3"}, {"G3"}, {"G2"}]


def test_a_pod_says_it_by_annotations():
    parse = annotations.parse_gpu_preference
    key, worth = "eelgrid.io/preferred-gpu-models", "eelgrid.io/preferred-gpu-worth-watts"
    assert parse({}) is None
    assert parse({key: "NVIDIA-H100-80GB-HBM3, A10"}) == GpuPreference(models=("H100-80GB-HBM3", "A10"))
    assert parse({key: "A10", worth: "40.5"}) == GpuPreference(models=("A10",), worth_w=40.5)
    for wrong in ({worth: "40"}, {key: "A10", worth: "much"}, {key: ""}):
        with pytest.raises(AnnotationUnreadable):
            parse(wrong)


@pytest.mark.parametrize("is_preferred", [False, True])
def test_moves_keep_work_on_what_it_prefers(is_preferred):
    """Two halves of GPUs of two models join, unless each prefers the one that it has."""
    core = build_core(build_node("a", gpus=1, model="G3"))
    rather = {model: GpuPreference(models=(model,)) if is_preferred else None for model in ("G2", "G3")}
    core.submit(build_request("one", milli=500, gpu_preference=rather["G3"]), now_ns=1)
    core.submit(build_request("gap", milli=500), now_ns=1)
    core.register_node(build_node("b", gpus=1, model="G2"), now_ns=1)
    core.submit(build_request("two", milli=500, gpu_preference=rather["G2"]), now_ns=1)
    core.cancel("gap", now_ns=2)
    assert (models_of(core, "one"), models_of(core, "two")) == ({"G3"}, {"G2"})
    survey = core.survey_moves(RecommendMovesRequest(moves_ratio=1.0, moves_most=5))
    assert len(recommend_moves(build_migration_problem(survey)).moves) == (not is_preferred)


def test_a_decision_by_a_preference_replays_to_the_last_bit():
    rig = Recorder(build_node("a", model="G3", gpus=1), build_node("b", model="G2", gpus=4))
    rather = GpuPreference(models=("G3",))
    for n in range(3):
        rig.do(rig.core.submit, build_request(f"job{n}", gpu_preference=rather))
        found = replay_decision(rig.exported(f"job{n}"))
        assert found.differences == ()
    assert [models_of(rig.core, f"job{n}") for n in range(3)] == [{"G3"}, {"G2"}, {"G2"}]


def test_flags_make_a_preference():
    def flags(model, worth=None):
        return {"prefer_gpu_model": model, "prefer_gpu_worth": worth}

    assert build_preference(flags("")) is None
    assert build_preference(flags("h100, a10")) == GpuPreference(models=("h100", "a10"))
    assert build_preference(flags("h100", 40.0)) == GpuPreference(models=("h100",), worth_w=40.0)
    with pytest.raises(click.UsageError, match="needs --prefer-gpu-model"):
        build_preference(flags("", 40.0))
