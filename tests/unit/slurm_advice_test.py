"""Advice to Slurm: which kinds of jobs are asked about, and which weights nodes get and get back."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from eelgrid_controller.engines.slurm.advice import KINDS_MOST, RANK_WEIGHT, get_site_weight, plan_weights, select_kinds
from eelgrid_controller.engines.slurm.answers import GresCount, SlurmJob, SlurmNode

JOB = SlurmJob(job_id="1", partition="main", cpus=4, gpus=(GresCount("a100", 2),), submit_s=5)


def nodes(**weights):
    return [SlurmNode(name=name, weight=weight) for name, weight in weights.items()]


def apply(before, changes):
    found = {name: weight for weight, names in changes.items() for name in names}
    return [replace(node, weight=found.get(node.name, node.weight)) for node in before]


def test_the_kinds_that_came_last_are_asked_about_each_once():
    same = replace(JOB, job_id="2", user="bob", name="other", submit_s=6)
    odd = [replace(JOB, cpus=9, peculiar="licenses"), replace(JOB, cpus=10, required_nodes=("n1",))]
    assert select_kinds([JOB, same, *odd]) == [same]
    many = [replace(JOB, job_id=str(number), cpus=number, submit_s=number) for number in range(1, 20)]
    assert [one.cpus for one in select_kinds(many)] == list(range(19, 19 - KINDS_MOST, -1))


def test_nodes_that_are_not_preferred_get_a_million_more_and_the_sites_own_order_stays_among_them():
    assert plan_weights(nodes(a=1, b=1, c=7), {"b"}) == {RANK_WEIGHT + 1: ("a",), RANK_WEIGHT + 7: ("c",)}
    # Written once.
    assert plan_weights(nodes(a=RANK_WEIGHT + 1, b=1, c=RANK_WEIGHT + 7), {"b"}) == {}
    # Another is preferred; and slurmctld has restarted.
    assert plan_weights(nodes(a=RANK_WEIGHT + 1, b=1), {"a"}) == {1: ("a",), RANK_WEIGHT + 1: ("b",)}
    assert plan_weights(nodes(a=1, b=1), {"a"}) == {RANK_WEIGHT + 1: ("b",)}


def test_a_weight_beyond_ours_is_left_alone():
    assert plan_weights(nodes(a=5 * RANK_WEIGHT, b=1), {"b"}) == {}


@given(
    weights=st.dictionaries(
        st.sampled_from("abcdef"), st.integers(0, RANK_WEIGHT - 1) | st.integers(2 * RANK_WEIGHT, 2**31)
    ),
    preferences=st.lists(st.sets(st.sampled_from("abcdef")), max_size=4),
)
def test_whatever_was_preferred_the_sites_weights_come_back(weights, preferences):
    before = now = nodes(**weights)
    for preferred in preferences:
        now = apply(now, plan_weights(now, preferred))
        assert plan_weights(now, preferred) == {}
        ours = [node for node in now if get_site_weight(node) is not None]
        if preferred:
            best = [node.weight for node in ours if node.name in preferred]
            rest = [node.weight for node in ours if node.name not in preferred]
            assert not best or not rest or max(best) < min(rest)
    assert apply(now, plan_weights(now, ())) == before
