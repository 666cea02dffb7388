"""Pending reasons: the golden text of each, and that what selects nodes names only constraints of the union."""

import itertools

import pytest
from tests.builders.cluster import build_core, build_node, build_request

from eelgrid_controller.placement.explanations import select_binding_constraint
from eelgrid_controller.state.pending_reasons import PendingConstraint, describe_hint, find_constraint
from eelgrid_kernels import node_cost
from eelgrid_protos.messages import Removal

NAMES = {
    "node": "a",
    "cause": " by ann: kernel",
    "subject": "queue vision",
    "unit": "kWh",
    "period": "day",
    "queue": "vision",
    "resource": "gpu",
    "budget": "rack r1",
    "victims": "train",
    "gainer": "urgent",
    "reservation": "upgrade",
    "user": "ann",
    "parents": "prepare",
    "time": "noon",
    "failures": "one attempt has",
    "attempt": "one",
    "why": "exited",
    "gang": "llama",
    "part": "driver",
    "parts": "one more part",
}
# In order of precedence. A reason is part of the API: add rows, and change none.
GOLDEN = (
    ("preempting", "", "preempting: waits for train to stop"),
    ("preempted", "", "preempted: for urgent of queue vision"),
    ("preempted", "gone", "preempted: its place is gone"),
    ("evicted", "", "evicted: node a was drained by ann: kernel"),
    ("evicted", "gpu_lost", "evicted: its GPU on node a was lost"),
    ("evicted", "node_fault", "evicted: attempt one ended with its node: exited"),
    ("evicted", "requeued", "evicted: it was requeued by ann: kernel"),
    ("evicted", "held", "evicted: it had not begun: exited"),
    ("evicted", "gone_on", "evicted: it has run on a by entries that the journal has lost"),
    ("unknown_run", "", "unknown_run: runs on node a, of which the journal has lost the start"),
    ("held", "", "held: by ann"),
    ("dependency", "", "dependency: waits for prepare to end"),
    ("begin_time", "", "begin_time: not before noon"),
    ("retry", "", "retry: one attempt has failed; the next starts not before noon"),
    ("retry", "failed", "retry: attempt one failed: exited"),
    ("gang", "", "gang: waits for one more part of gang llama"),
    ("gang", "part", "gang: waits for part driver of gang llama, which may not start yet"),
    ("gang", "turn", "gang: is tried with the other parts of gang llama"),
    ("array", "", "array: its array runs as many elements at once as it may"),
    ("array", "turn", "array: is tried after the elements before it"),
    ("spending", "", "spending: queue vision has spent its kWh of the day"),
    ("partitions", "", "partitions: waits for the partition planner"),
    ("queue", "", "queue: no queue vision holds work"),
    ("queue", "unnamed", "queue: it names none"),
    ("max_quota", "", "max_quota: queue vision can never have so much gpu"),
    ("quota", "quota", "quota: queue vision has too little gpu quota left"),
    ("quota", "borrowing", "quota: queue vision may not borrow so much gpu"),
    ("quota", "usage", "quota: queue vision may not use so much more gpu"),
    (
        "fair_share",
        "",
        "fair_share: there is room, but it is held for queue vision, which has used less than its share",
    ),
    ("backfill", "", "backfill: there is room, but it would delay work that goes before it"),
    ("reservation", "", "reservation: the nodes that would do are reserved, and full"),
    ("reservation", "held", "reservation: there is room, but on nodes that reservation upgrade holds"),
    ("budget", "", "budget: waits for watts of rack r1"),
    ("replicas", "", "replicas: there is room for some replicas, not for all"),
    ("cpu+memory", "", "cpu+memory: nodes with free GPUs lack CPU or memory"),
    ("cpu+memory", "no_gpu", "cpu+memory: no node has enough CPU and memory free"),
    ("cpu", "", "cpu: nodes with free GPUs lack CPU"),
    ("cpu", "no_gpu", "cpu: no node has enough CPU free"),
    ("memory", "", "memory: nodes with free GPUs lack memory"),
    ("memory", "no_gpu", "memory: no node has enough memory free"),
    ("gpu_share", "", "gpu_share: no GPU has so large a share free"),
    (
        "interference",
        "",
        "interference: GPUs have room, but beside loads that slow it down beyond a limit, or it them",
    ),
    ("gpu_count", "", "gpu_count: no node has enough whole GPUs free"),
    ("gpu_mig", "", "gpu_mig: the GPUs that would do are cut by MIG, or the partition planner's"),
    ("gpu_model", "", "gpu_model: no node has a GPU of an allowed model"),
    ("traits", "", "traits: no node that would do has every trait that it requires"),
    ("processes", "", "processes: no agent of a node that would do runs processes"),
    (
        "unavailable",
        "",
        "unavailable: the nodes that would do are cordoned, lost or ahead of the journal, or as full as a plan allows",
    ),
    (
        "unavailable",
        "refused",
        "unavailable: the node that was chosen refuses it, which is a fault of the controller: report it",
    ),
    ("no_nodes", "", "no_nodes: no node has joined yet"),
)


def test_every_constraint_and_case_has_its_golden_text_in_order_of_precedence():
    rows = [(one.value, case) for one in PendingConstraint for case in one.sentences]
    assert rows == [(name, case) for name, case, _ in GOLDEN]
    for name, case, text in GOLDEN:
        assert find_constraint(name).describe(case, **NAMES) == text


@pytest.mark.parametrize("constraint", PendingConstraint)
def test_every_constraint_says_what_helps_and_is_one_word_before_a_colon(constraint):
    assert constraint.hint
    assert describe_hint(constraint.value) == constraint.hint
    assert not set(constraint.value) & set(" :")
    for case in constraint.sentences:
        name, _, sentence = constraint.describe(case, **NAMES).partition(": ")
        assert name == constraint
        assert sentence
        assert not any(letter.isdigit() for letter in sentence.replace("rack r1", ""))


def test_a_name_with_braces_is_said_as_it_is():
    assert PendingConstraint.QUEUE.describe(queue="{0}") == "queue: no queue {0} holds work"


def test_what_is_not_known_here_has_a_hint_too():
    assert describe_hint("a newer one") == "wait for work to end there, or add nodes"


def test_whatever_rules_out_nodes_a_constraint_of_the_union_is_named():
    names = node_cost.CONSTRAINTS
    for count in range(3):
        for chosen in itertools.combinations(names, count):
            removals = [Removal(constraint=name, nodes=1) for name in chosen]
            assert find_constraint(select_binding_constraint(removals, 0)).describe()
    assert find_constraint(select_binding_constraint((), 1)) is PendingConstraint.REPLICAS


def test_a_model_that_only_nodes_out_of_service_have_is_not_said_to_be_nowhere():
    """Each way in which three nodes may have the model or another, and be in service, full or cordoned."""
    states = list(itertools.product(("G2", "G3"), ("open", "full", "cordoned")))
    for nodes in itertools.combinations_with_replacement(states, 3):
        core = build_core(*(build_node(f"n{n}", gpus=1, model=model) for n, (model, _) in enumerate(nodes)))
        for model in ("G2", "G3"):
            for number in range(nodes.count((model, "full"))):
                core.submit(build_request(f"{model}-{number}", models=(model,)), now_ns=1)
        taken = {place.node_name for held in core.state.workloads.values() for place in held.placements}
        closed = {f"n{n}" for n, (model, state) in enumerate(nodes) if state == "cordoned" and f"n{n}" not in taken}
        for name in sorted(closed):
            core.cordon_node(name, now_ns=2)
        having = {f"n{n}" for n, (model, _) in enumerate(nodes) if model == "G3"}
        if not having:
            continue
        core.submit(build_request("job", models=("G3",)), now_ns=3)
        workload = core.workload("job")
        if having - closed - taken:
            assert workload.placements, nodes
        else:
            named = workload.reason.partition(":")[0]
            assert named == ("gpu_count" if having & taken else "unavailable"), (nodes, workload.reason)
