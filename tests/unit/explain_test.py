"""Explanations: what was weighed, what stands in the way, what would help."""

from dataclasses import replace

import pytest
from tests.builders.cluster import build_core, build_node, build_request

from eelgrid_protos.codec import decode_message, encode_message
from eelgrid_protos.messages import Explanation, Removal


def reason_of(core, wanted):
    return core.submit(wanted, now_ns=1).result.reason.partition(":")[0]


def test_a_placed_workload_shows_the_alternatives_that_it_beat():
    core = build_core(build_node("a", model="T4"), build_node("b", model="G3"), build_node("c"))
    core.submit(build_request(gpus=1, milli=500), now_ns=1)
    explanation = core.explain_workload("w-1")
    (replica,) = explanation.replicas
    assert [found.node_name for found in replica.candidates] == ["a", "c", "b"]
    best = replica.candidates[0]
    assert best.gpu_indexes == (0,)
    assert best.cost_w == pytest.approx(sum(term.cost_w for term in best.terms))
    assert {term.name: term.cost_w for term in best.terms}["power"] == (70 - 10) + (120 - 15)
    assert (replica.feasible_nodes, replica.removals, explanation.remedy) == (3, (), "")
    assert decode_message(Explanation, encode_message(explanation)) == explanation


def test_only_the_first_replicas_are_explained():
    core = build_core(build_node("a", gpus=8))
    core.submit(build_request(gpus=1, milli=100, replicas=40), now_ns=1)
    assert [replica.replica for replica in core.explain_workload("w-1").replicas] == list(range(16))


@pytest.mark.parametrize(
    ("wanted", "constraint"),
    [
        (build_request(gpus=2), "gpu_count"),
        (build_request(gpus=1, milli=600), "gpu_share"),
        (build_request(gpus=0, cpu=95), "cpu"),
        (build_request(gpus=0, memory_gib=384), "memory"),
        (build_request(gpus=1, models=("A10",)), "gpu_mig"),
        (build_request(gpus=1, milli=400, models=("G2",), replicas=3), "replicas"),
    ],
)
def test_the_reason_names_the_constraint_and_holds_no_numbers(wanted, constraint):
    plain = build_node("mig", gpus=1, model="A10", cpu=1, memory_gib=1)
    partitioned = replace(plain, gpus=tuple(replace(gpu, mig_enabled=True) for gpu in plain.gpus))
    core = build_core(build_node("a"), partitioned)
    core.submit(build_request(gpus=1, milli=500), now_ns=1)
    core.submit(build_request(gpus=1, milli=510), now_ns=1)
    assert core.state.nodes["a"].gpu_milli == {"GPU-a-0": 500, "GPU-a-1": 510}
    step = core.submit(wanted, now_ns=2)
    kind, _, sentence = step.result.reason.partition(": ")
    assert kind == constraint
    assert sentence
    assert not any(letter.isdigit() for letter in sentence)
    explanation = core.explain_workload(step.result.workload_id)
    assert "To help:" in explanation.remedy
    if constraint == "replicas":
        assert "room for 2 of 3 replicas" in explanation.remedy
    else:
        assert constraint in {removal.constraint for removal in explanation.replicas[0].removals}


def test_without_nodes_everything_waits():
    core = build_core()
    assert reason_of(core, build_request(gpus=64)) == "no_nodes"
    assert "start eelgrid-agent" in core.explain_workload("w-1").remedy


def test_lost_nodes_are_named_when_nothing_else_stands_in_the_way():
    core = build_core(build_node("a"))
    core.mark_node_lost("a", now_ns=1)
    assert reason_of(core, build_request(gpus=1)) == "unavailable"


def test_counts_are_of_now_not_of_submission():
    core = build_core(build_node("a"))
    core.submit(build_request(gpus=2), now_ns=1)
    core.submit(build_request(gpus=2), now_ns=1)
    core.register_node(build_node("b", gpus=1, cpu=0), now_ns=2)
    core.mark_node_lost("a", now_ns=3)
    (replica,) = core.explain_workload("w-2").replicas
    assert replica.removals == (Removal(constraint="unavailable", nodes=1), Removal(constraint="gpu_count", nodes=1))


def test_an_ended_workload_has_nothing_to_explain():
    core = build_core(build_node("a"))
    core.submit(build_request(gpus=1), now_ns=1)
    core.cancel("w-1", now_ns=2)
    assert core.explain_workload("w-1").replicas == ()
