"""Golden answers: for every constraint the binding one, how many nodes each ruled out, and what would help."""

from dataclasses import replace

import pytest
from tests.builders.cluster import build_core, build_node, build_request

from eelgrid_controller.state.engine_reports import ExternalUsage
from eelgrid_protos.codec import decode_message, encode_message
from eelgrid_protos.messages import BudgetScope, Explanation, PowerBudget, Weights


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


def short_of_cpu_and_memory():
    """64 nodes with a free GPU: 41 have no CPU left, 23 no memory."""
    core = build_core(*(build_node(f"n{number:02}", gpus=1, cpu=16, memory_gib=64) for number in range(64)))
    for number in range(64):
        cpu, memory_gib = (15, 8) if number < 41 else (2, 60)
        core.submit(build_request(gpus=0, cpu=cpu, memory_gib=memory_gib, key=f"hog-{number}"), now_ns=1)
    return core


def full_but_for_one():
    """Many nodes whose GPUs are held, and one whose GPU is free but that lacks CPU."""
    core = build_core(*(build_node(f"n{number}", gpus=1, cpu=16) for number in range(4)))
    for number in range(3):
        core.submit(build_request(gpus=1, cpu=1, key=f"gpu-{number}"), now_ns=1)
    core.submit(build_request(gpus=0, cpu=15.5, key="hog"), now_ns=1)
    return core


def shared_and_short():
    """A GPU with more free than is asked for, on a node without CPU: nothing of the GPU is to be freed."""
    core = build_core(build_node("a", gpus=1, cpu=8), build_node("b", gpus=0, cpu=8))
    core.submit(build_request(gpus=1, milli=100, cpu=7, key="small"), now_ns=1)
    return core


def short_of_both():
    core = build_core(build_node("a", gpus=1, cpu=8, memory_gib=16))
    core.submit(build_request(gpus=1, cpu=6, memory_gib=12, key="all"), now_ns=1)
    return core


def gang_of_holders():
    core = build_core(build_node("a", gpus=2), build_node("b", gpus=2))
    for number in range(4):
        core.submit(build_request(gpus=1, key=f"k{number}"), now_ns=1)
    return core


V100 = "Or allow V100M32: it would then go to node"
GOLDENS = [
    (
        short_of_cpu_and_memory, build_request(gpus=1, cpu=4, memory_gib=8), "cpu+memory", {"cpu": 41, "memory": 23},
        ("A GPU is free on 64 nodes; 41 lack CPU, 23 lack memory. To help: free 4 GiB of memory on node n41: wait for or "
        "cancel hog-41. Or ask for at most 1 CPU. Or ask for at most 4 GiB of memory."),
    ),
    (
        full_but_for_one, build_request(gpus=1, cpu=4), "cpu", {"gpu_count": 3, "cpu": 1},
        ("A GPU is free on 1 node, which lacks CPU. Of 4 nodes, 3 are ruled out by gpu_count. To help: free 3.5 CPUs on "
        "node n3: wait for or cancel hog. Or ask for at most 0.5 CPUs."),
    ),
    (
        shared_and_short, build_request(gpus=1, milli=500, cpu=4), "cpu", {"gpu_count": 1, "cpu": 1},
        ("0.5 of a GPU is free on 1 node, which lacks CPU. Of 2 nodes, 1 is ruled out by gpu_count. To help: free 3 CPUs "
        "on node a: wait for or cancel small. Or ask for at most 1 CPU."),
    ),
    (
        short_of_both, build_request(gpus=1, cpu=8, memory_gib=16), "gpu_count", {"gpu_count": 1},
        ("The only node is ruled out by gpu_count. To help: free GPU 0, 6 CPUs and 12 GiB of memory on node a: wait for or "
        "cancel all."),
    ),
    (
        gang_of_holders, build_request(gpus=1, replicas=2), "gpu_count", {"gpu_count": 2},
        ("All 2 nodes are ruled out by gpu_count. To help: free GPUs 0 and 1 on node a: wait for or cancel k0 and k1."),
    ),
    (
        leaning, build_request(gpus=1), "gpu_count", {"gpu_count": 1},
        "The only node is ruled out by gpu_count. To help: free GPU 1 on node a: wait for or cancel light.",
    ),
    (
        mixed, build_request(gpus=2, models=("G2",)), "gpu_count", {"gpu_model": 2, "gpu_count": 2},
        ("Of 4 nodes, 2 are ruled out by gpu_model and 2 by gpu_count. To help: free GPUs 0 and 1 on node a: wait for or "
        f"cancel one and two. {V100} big."),
    ),
    (
        crowded, build_request(gpus=6, cpu=60), "gpu_count", {"gpu_count": 2},
        ("All 2 nodes are ruled out by gpu_count. To help: free GPU 0 and 52 CPUs on node b: wait for or cancel y and z."),
    ),
    (
        mixed, build_request(gpus=1, milli=501, models=("G2",)), "gpu_share", {"gpu_model": 2, "gpu_share": 2},
        ("Of 4 nodes, 2 are ruled out by gpu_model and 2 by gpu_share. To help: free 0.011 of GPU 1 on node a: wait for or "
        f"cancel two. Or ask for at most 0.49 of a GPU. {V100} big."),
    ),
    (
        mixed, build_request(gpus=0, cpu=99), "cpu", {"cpu": 4},
        "4 nodes lack CPU. To help: free 94 CPUs on node big: wait for or cancel hog. Or ask for at most 94 CPUs.",
    ),
    (
        tight, build_request(gpus=8, cpu=8), "cpu", {"cpu": 2},
        ("8 GPUs are free on 2 nodes, which lack CPU. To help: free 3 CPUs on node a: wait for or cancel hog. Or ask for at "
        "most 5 CPUs."),
    ),
    (
        mixed, build_request(gpus=0, memory_gib=384), "memory", {"memory": 4},
        ("4 nodes lack memory. To help: free 1 GiB of memory on node big: wait for or cancel hog. Or ask for at most 383 "
        "GiB of memory."),
    ),
    (
        mixed, build_request(gpus=1, models=("A10",)), "gpu_mig", {"gpu_model": 3, "gpu_mig": 1},
        ("Of 4 nodes, 3 are ruled out by gpu_model and 1 by gpu_mig. To help: allow V100M32: it would then go to node big. "
        "Or switch MIG off on 1 GPU of node mig: GPU 0."),
    ),
    (
        lost, build_request(gpus=1), "unavailable", {"unavailable": 2},
        ("All 2 nodes are ruled out as unavailable. To help: bring back the agent of node a: there is room for it."),
    ),
    (
        mixed, build_request(gpus=1, milli=400, models=("G2",), replicas=3), "replicas", {"gpu_model": 2},
        ("There is room for 2 of 3 replicas. To help: free 0.1 of GPU 0 on node a: wait for or cancel one. Or ask for at "
        f"most 0.3 of a GPU for each replica. Or ask for at most 2 replicas. {V100} b."),
    ),
    (
        build_core, build_request(gpus=1), "no_nodes", {},
        ("No node has joined. To help: start eelgrid-agent on 1 node with 1 GPU, 1 CPU and 1 GiB of memory free."),
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


def test_the_reason_that_is_journalled_is_short_and_countable():
    core = short_of_cpu_and_memory()
    said = [core.submit(build_request(gpus=1, cpu=cpu, memory_gib=8), now_ns=9).result.reason for cpu in (3, 4)]
    assert said == 2 * ["cpu+memory: nodes with free GPUs lack CPU or memory"]
    assert core.submit(build_request(gpus=0, cpu=15), now_ns=9).result.reason == "cpu: no node has enough CPU free"


def test_a_model_that_nobody_has():
    core = build_core()
    core.submit(build_request(gpus=1, models=("T4",)), now_ns=1)
    core.register_node(build_node("a"), now_ns=2)
    assert core.explain_workload("w-1").remedy == (
        "The only node is ruled out by gpu_model. To help: allow G2: it would then go to node a."
    )
    core.submit(build_request(gpus=2), now_ns=3)
    assert core.explain_workload("w-1").remedy == (
        "The only node is ruled out by gpu_model. To help: start eelgrid-agent on 1 node with 1 GPU of model T4, 1 CPU and "
        "1 GiB of memory free."
    )


def test_work_that_is_tried_before_is_counted():
    core = build_core(build_node("a", gpus=1))
    for key in ("runs", "first", "second"):
        core.submit(build_request(gpus=1, key=key), now_ns=1)
    assert core.explain_workload("first").remedy.endswith("wait for or cancel runs.")
    assert core.explain_workload("second").remedy.endswith("runs. 1 workload that waits is tried before it.")


def test_budgets_are_raised_together_and_to_whole_watts_that_do():
    core = build_core(build_node("a", model="V100M16", topology=("r1",)))
    budgets = (
        PowerBudget(scope=BudgetScope.CLUSTER, limit_w=100.25),
        PowerBudget(scope=BudgetScope.RACK, name="r1", limit_w=90.0),
    )
    core.update_policy(replace(core.state.policy, budgets=budgets), now_ns=2)
    core.submit(build_request(gpus=1, key="w"), now_ns=3)
    assert core.explain_workload("w").remedy.endswith(
        "To help: eelctl policy set --budget rack:r1=330W --budget cluster=330W."
    )
    raised = tuple(replace(budget, limit_w=330.0) for budget in budgets)
    core.update_policy(replace(core.state.policy, budgets=raised), now_ns=4)
    assert core.workload("w").placements


def test_a_sentence_is_never_too_long_to_be_sent():
    core = build_core(*(build_node(f"{number:02}-{'n' * 110}", gpus=1) for number in range(16)))
    for number in range(16):
        core.submit(build_request(gpus=1, key=f"{number:02}-{'w' * 120}"), now_ns=1)
    core.submit(build_request(gpus=1, replicas=16, key="gang"), now_ns=2)
    explanation = core.explain_workload("gang")
    assert 1400 < len(explanation.remedy) <= 2000
    assert decode_message(Explanation, encode_message(explanation)) == explanation


def test_nodes_that_an_engine_has_closed_are_said_to_be_closed():
    core = build_core(build_node("a"))
    core.update_external_usage("a", ExternalUsage(closed="cordoned"), now_ns=2)
    core.submit(build_request(gpus=1, key="w"), now_ns=3)
    assert "let node a accept work again" in core.explain_workload("w").remedy


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
