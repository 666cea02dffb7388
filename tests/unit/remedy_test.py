"""Golden answers: for every constraint the binding one, how many nodes each ruled out, and what would help."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders.cluster import build_core, build_node, build_request

from eelgrid_controller.placement.explanations import PendingCase, describe_nearest_fit
from eelgrid_protos.codec import decode_message, encode_message
from eelgrid_protos.messages import Explanation, Weights

WHOLE = "wait for or cancel work that holds whole GPUs, ask for fewer GPUs, or allow further models."
SHARED = "wait for or cancel work that shares GPUs, ask for a smaller gpu_milli, or allow further models."


def mixed():
    """Two nodes of two G2 that are all shared, a partitioned one, and a large one without CPU left."""
    plain = build_node("mig", gpus=1, model="A10", cpu=64, memory_gib=64)
    partitioned = replace(plain, gpus=tuple(replace(gpu, mig_enabled=True) for gpu in plain.gpus))
    core = build_core(
        build_node("a"), build_node("b"), partitioned, build_node("big", gpus=8, cpu=100, model="V100M32")
    )
    weights = Weights(power=1.0, fragmentation_w=80.0, stranding_w=200.0)
    core.update_policy(replace(core.state.policy, objective="custom", weights=weights), now_ns=1)
    for key, milli in (("one", 700), ("two", 510), ("three", 600), ("four", 800)):
        core.submit(build_request(gpus=1, milli=milli, key=key, models=("G2",)), now_ns=1)
    core.submit(build_request(gpus=0, cpu=95, key="hog"), now_ns=1)
    return core


def lost():
    core = build_core(build_node("a"), build_node("b"))
    core.mark_node_lost("a", now_ns=1)
    core.mark_node_lost("b", now_ns=2)
    return core


def tight():
    core = build_core(build_node("a", gpus=8, cpu=16), build_node("c", gpus=8, cpu=4))
    core.submit(build_request(gpus=0, cpu=11, key="hog"), now_ns=1)
    return core


def crowded():
    core = build_core(build_node("a"), build_node("b", gpus=8))
    core.submit(build_request(gpus=2, cpu=90, key="x"), now_ns=1)
    core.submit(build_request(gpus=3, cpu=8, key="y"), now_ns=1)
    core.submit(build_request(gpus=0, cpu=80, key="z"), now_ns=1)
    return core


def leaning():
    core = build_core(build_node("a"))
    core.submit(build_request(gpus=1, milli=900, key="heavy"), now_ns=1)
    core.submit(build_request(gpus=1, milli=200, key="light"), now_ns=1)
    return core


GOLDENS = [
    (
        leaning,
        build_request(gpus=1),
        "gpu_count",
        {"gpu_count": 1},
        (
            "Of 1 node 1 by gpu_count ruled out. To help: free 1 GPU on node a, where none of 1 is free: GPU 1 is held by "
            f"light. Or {WHOLE}"
        ),
    ),
    (
        mixed, build_request(gpus=2, models=("G2",)), "gpu_count", {"gpu_model": 2, "gpu_count": 2},
        ("Of 4 nodes 2 by gpu_model, 2 by gpu_count ruled out. To help: free 2 GPUs on node a, where none of 2 is free: "
        f"GPU 0, 1 are held by one, two. Or {WHOLE}"),
    ),
    (
        crowded, build_request(gpus=6, cpu=60), "gpu_count", {"gpu_count": 2},
        ("Of 2 nodes 2 by gpu_count ruled out. To help: free 1 GPU on node b, where 5 of 6 are free: GPU 0 is held by y; "
        f"it also needs 44 more CPUs there. Or {WHOLE}"),
    ),
    (
        mixed, build_request(gpus=1, milli=501, models=("G2",)), "gpu_share", {"gpu_model": 2, "gpu_share": 2},
        ("Of 4 nodes 2 by gpu_model, 2 by gpu_share ruled out. To help: free 0.011 more of GPU 1 of node a, where 0.49 of "
        f"the 0.501 asked for is free and two holds the rest. Or {SHARED}"),
    ),
    (
        mixed, build_request(gpus=0, cpu=99), "cpu", {"cpu": 4},
        ("Of 4 nodes 4 by cpu ruled out. To help: 5,000 more milli-CPU are needed on node a: ask for at most 94 CPUs, or "
        "free 5 there."),
    ),
    (
        tight, build_request(gpus=8, cpu=8), "cpu", {"cpu": 2},
        ("Of 2 nodes 2 by cpu ruled out. To help: 3,000 more milli-CPU are needed on node a, which has 8 GPUs free: ask "
        "for at most 5 CPUs, or free 3 there."),
    ),
    (
        mixed, build_request(gpus=0, memory_gib=384), "memory", {"memory": 4},
        ("Of 4 nodes 4 by memory ruled out. To help: 1 GiB more memory is needed on node big: ask for at most 383 GiB, or "
        "free 1 GiB there."),
    ),
    (
        mixed, build_request(gpus=1, models=("A10",)), "gpu_mig", {"gpu_model": 3, "gpu_mig": 1},
        "Of 4 nodes 3 by gpu_model, 1 by gpu_mig ruled out. To help: switch MIG off on 1 GPU of node mig: GPU 0.",
    ),
    (
        lost, build_request(gpus=1), "unavailable", {"unavailable": 2},
        "Of 2 nodes 2 by unavailable ruled out. To help: bring back the agent of a, b: there is room for it.",
    ),
    (
        mixed, build_request(gpus=1, milli=400, models=("G2",), replicas=3), "replicas", {"gpu_model": 2},
        ("There is room for 2 of 3 replicas. To help: for the next replica, free 0.1 more of GPU 0 of node a, where 0.3 "
        "of the 0.4 asked for is free and one holds the rest. Or ask for fewer replicas, or submit them as workloads of "
        "their own."),
    ),
    (
        build_core, build_request(gpus=1), "no_nodes", {},
        "No node has joined. To help: start eelgrid-agent on a node; the workload is tried as soon as it joins.",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("make", "wanted", "constraint", "removals", "remedy"), GOLDENS)
def test_what_waits_is_told_what_would_help(make, wanted, constraint, removals, remedy):
    core = make()
    explanation = core.explain_workload(core.submit(wanted, now_ns=9).result.workload_id)
    assert explanation.constraint == constraint
    assert {found.constraint: found.nodes for found in explanation.replicas[0].removals} == removals
    assert explanation.remedy == remedy
    assert decode_message(Explanation, encode_message(explanation)) == explanation


def test_a_model_that_nobody_has():
    core = build_core()
    core.submit(build_request(gpus=1, models=("T4",)), now_ns=1)
    core.register_node(build_node("a"), now_ns=2)
    assert core.explain_workload("w-1").remedy == (
        "Of 1 node 1 by gpu_model ruled out. To help: allow G2: with every model allowed it would go to node a."
    )
    core.submit(build_request(gpus=2), now_ns=3)
    assert "with every model allowed it would wait all the same" in core.explain_workload("w-1").remedy


def test_what_was_placed_needs_no_remedy():
    core = mixed()
    explanation = core.explain_workload("one")
    assert (explanation.constraint, explanation.remedy) == ("", "")


@pytest.mark.parametrize(
    ("wanted", "freed"),
    [
        (build_request(gpus=2, models=("G2",)), ("one", "two")),
        (build_request(gpus=1, milli=501, models=("G2",)), ("two",)),
        (build_request(gpus=1, milli=400, models=("G2",), replicas=3), ("one",)),
    ],
)
def test_freeing_what_is_named_is_enough(wanted, freed):
    core = mixed()
    key = core.submit(wanted, now_ns=9).result.workload_id
    remedy = core.explain_workload(key).remedy
    for name in freed:
        assert name in remedy
        core.cancel(name, now_ns=10)
    assert core.workload(key).placements


@settings(max_examples=60, deadline=None)
@given(
    held=st.lists(st.tuples(st.integers(1, 60), st.sampled_from((0, 200, 600, 1000))), max_size=6),
    cpu=st.integers(1, 96),
    gpus=st.integers(0, 2),
    memory_gib=st.integers(1, 384),
)
def test_every_amount_named_is_what_is_missing(held, cpu, gpus, memory_gib):
    """Brute force: with the named CPU more on the named node the request would pass there."""
    core = build_core(build_node("a"), build_node("b"))
    for number, (cpus, milli) in enumerate(held):
        core.submit(build_request(cpu=cpus, gpus=int(milli > 0), milli=milli, key=f"k{number}"), now_ns=2)
    wanted = build_request(cpu=cpu, gpus=gpus, memory_gib=memory_gib)
    step = core.submit(wanted, now_ns=3)
    if step.result.placements:
        return
    explanation = core.explain_workload(step.result.workload_id)
    assert explanation.remedy.endswith(".")
    if explanation.constraint == "cpu":
        nodes = core.state.nodes.values()
        short = min(
            wanted.spec.request.cpu_milli - (record.inventory.cpu_milli - record.allocated_cpu_milli)
            for record in nodes
            if sum(record.gpu_milli.get(gpu.uuid, 0) == 0 for gpu in record.inventory.gpus) >= gpus
        )
        assert f"{short:,} more milli-CPU" in explanation.remedy
    case = PendingCase(wanted.spec, core.state, core.snapshot(), core._chooser.planner)
    for constraint in ("gpu_count", "gpu_share", "cpu", "memory", "gpu_mig", "gpu_model", "unavailable"):
        describe_nearest_fit(case, constraint, 0)
