"""`eelctl cordon`, `uncordon` and `drain`: what is asked of the controller, and what a person is told and asked."""

import json
from dataclasses import replace

import click
import pytest

from eelgrid_controller.cli.drain import CordonTarget, cordon_word, group_targets
from eelgrid_protos.messages import CordonStatus, DrainedWorkload, DrainOutcome

MOVES = DrainedWorkload(workload_id="w-1", name="train", outcome=DrainOutcome.MOVES, node_names=("n2",), replicas=(0,))
ENDS = DrainedWorkload(
    workload_id="w-2", outcome=DrainOutcome.REQUEUED, replicas=(0,), reason="no other place has room for it"
)


@pytest.fixture
def name(fake):
    """The one node of the fake."""
    (node,) = fake.nodes
    return node.inventory.node_name


def test_gpus_of_one_node_are_one_call_and_a_node_is_not_named_twice():
    assert group_targets(["n1/0", "n2", "n1/GPU-7"]) == [CordonTarget("n1", ("0", "GPU-7")), CordonTarget("n2")]
    with pytest.raises(click.UsageError, match="as a whole and by GPUs"):
        group_targets(["n1", "n1/0"])
    with pytest.raises(click.UsageError, match="write NODE, NODE/INDEX or NODE/UUID"):
        group_targets(["n1/"])


@pytest.mark.parametrize(
    ("cordons", "word"),
    [
        ((), ""),
        ((CordonStatus(),), "cordoned"),
        ((CordonStatus(draining=True, workloads=3),), "draining 3 left"),
        ((CordonStatus(draining=True),), "drained"),
    ],
)
def test_the_state_says_how_far_it_is(cordons, word):
    assert cordon_word(cordons) == word


def test_a_cordon_is_said_with_what_runs_on_there(eelctl, fake, name):
    fake.nodes = [replace(fake.nodes[0], workloads=2)]
    assert eelctl("cordon", name, "--reason", "fan broken").stdout == f"{name}: cordoned; 2 workloads run on there\n"
    assert "cordoned before, now with this reason" in eelctl("cordon", name).stdout
    assert fake.cordoned.asked[0].reason == "fan broken"
    assert eelctl("uncordon", name).stdout == f"{name}: uncordoned\n"
    assert eelctl("uncordon", name).stdout == f"{name}: not cordoned\n"
    (found,) = json.loads(eelctl("uncordon", name, "-o", "json").stdout)
    assert found["node"]["inventory"]["node_name"] == name


def test_uncordon_says_what_it_does_not_lift(eelctl, fake, name):
    node = fake.nodes[0]
    gpus = (replace(node.inventory.gpus[0], cordon="ecc errors"), *node.inventory.gpus[1:])
    own = CordonStatus(gpu_uuid=gpus[0].uuid, reason="dusty")
    fake.nodes = [replace(node, inventory=replace(node.inventory, gpus=gpus), cordons=(CordonStatus(), own))]
    assert eelctl("uncordon", name).stdout.splitlines() == [
        f"{name}: uncordoned",
        "  GPU 0 stays cordoned by its agent, which lifts that itself: ecc errors",
        f"  GPU 0 was cordoned by itself: eelctl uncordon {name}/0",
    ]


def test_a_drain_shows_what_becomes_of_each_workload(eelctl, fake, name):
    fake.cordoned.drained = (ENDS, MOVES)
    assert eelctl("drain", name, "--grace", "30m", "--dry-run").stdout.splitlines() == [
        f"{name}: would be drained, 2 workloads there",
        "  w-1 (train) moves to n2",
        "  w-2 returns to the queue after the grace: no other place has room for it",
    ]
    assert not fake.nodes[0].cordons


def test_a_drain_that_would_stop_work_needs_yes_where_nobody_can_be_asked(eelctl, fake, name):
    fake.cordoned.drained = (ENDS,)
    refused = eelctl("drain", name, "--grace", "30m", code=5).stderr
    assert "stopped after the grace: 1 workload (w-2)" in refused
    assert "--yes" in refused
    assert not fake.nodes[0].cordons
    done = eelctl("drain", name, "--grace", "30m", "--yes", "--reason", "kernel")
    assert done.stdout.splitlines()[-1] == f"{name}: drained"
    request = fake.cordoned.asked[-1]
    assert (request.grace_s, request.reason, request.dry_run) == (1800.0, "kernel", False)


def test_json_has_the_node_and_what_becomes_of_its_work(eelctl, fake, name):
    fake.cordoned.drained = (MOVES,)
    (found,) = json.loads(eelctl("drain", name, "-o", "json").stdout)
    assert found["node"]["cordons"][0]["draining"] is True
    assert found["workloads"][0]["outcome"] == "moves"


def test_nodes_gpus_and_describe_show_the_cordon(eelctl, fake, name):
    fake.nodes = [replace(fake.nodes[0], cordons=(CordonStatus(reason="fan", user="ann", draining=True, workloads=3),))]
    assert "ready, draining 3 left" in eelctl("nodes").stdout
    told = eelctl("describe", "node", name).stdout
    assert "cordoned by ann for" in told
    assert ": fan; draining, 3 workloads left" in told


@pytest.mark.parametrize("arguments", [("--grace", "soon"), ("--force",)])
def test_contradictions_are_refused_before_a_call(eelctl, fake, name, arguments):
    eelctl("drain", name, *arguments, code=2)
    assert fake.cordoned.asked == []
