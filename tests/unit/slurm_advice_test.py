"""Advice to Slurm: which kinds of jobs are asked about, and which weights nodes get and get back."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from tests.builders.cluster import build_core, build_node

from eelgrid_controller.engines.slurm.advice import (
    KINDS_MOST,
    ORDERED_MOST,
    RANK_WEIGHT,
    JobPriority,
    allows_factors,
    get_site_weight,
    parse_priorities,
    plan_factors,
    plan_order,
    plan_weights,
    select_kinds,
    select_ordered,
)
from eelgrid_controller.engines.slurm.answers import GresCount, SlurmJob, SlurmNode
from eelgrid_controller.engines.slurm.steering import Steering, SteeringSettings, build_request
from eelgrid_controller.state.engine_reports import ExternalUsage
from eelgrid_protos.messages import Queue

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


def rank(order, waiting, own, site):
    """What is written, and the priorities by it."""
    priorities = {job: JobPriority(own[job] + site.get(job, 0), site.get(job, 0)) for job in own}
    changes = plan_factors(order, waiting, priorities)
    factors = {**site, **changes}
    return changes, {job: own[job] + factors.get(job, 0) for job in own}


def test_jobs_exchange_their_priorities_and_equal_ones_are_told_apart_by_one():
    own = {"1": 500, "2": 300, "3": 300, "9": 400}
    changes, now = rank(["3", "1", "2"], ["1", "2", "3"], own, {})
    assert now == {"3": 500, "1": 300, "2": 299, "9": 400}
    assert changes == {"3": 200, "1": -200, "2": -1}
    # Written once; one that left the order, or all of them at the end, have their own again.
    assert rank(["3", "1", "2"], ["1", "2", "3"], own, changes)[0] == {}
    assert rank(["1", "2"], ["1", "2", "3"], own, changes)[1] == own | {"2": 300}
    assert rank([], ["1", "2", "3"], own, changes)[1] == own
    # One that Slurm gives no priority is left alone.
    assert plan_factors(["7", "1"], ["7", "1"], {"1": JobPriority(5, 0)}) == {}


@given(
    own=st.dictionaries(st.integers(1, 30).map(str), st.integers(1, 10**9), min_size=1),
    shuffled=st.permutations([str(one) for one in range(1, 31)]),
    site=st.dictionaries(st.integers(1, 30).map(str), st.integers(-(10**8), 10**8)),
)
def test_nobody_gets_more_than_the_highest_of_those_that_opted_in_had(own, shuffled, site):
    order = [job for job in shuffled if job in own]
    site = {job: factor for job, factor in site.items() if own.get(job, 0) + factor > 0}
    now = rank(order, list(own), own, site)[1]
    ranked = [now[job] for job in order]
    assert ranked == sorted(ranked, reverse=True)
    assert (
        all(after <= before for after, before in zip(ranked, sorted(own.values(), reverse=True), strict=True))
        or 1 in ranked
    )
    assert min(ranked) >= 1
    assert rank(order, list(own), own, {job: now[job] - own[job] for job in own})[0] == {}
    assert rank([], list(own), own, {job: now[job] - own[job] for job in own})[1] == own


def test_who_opted_in_and_waits_for_nothing_but_its_turn_is_ordered():
    mine = replace(JOB, comment="for me, eelgrid please")
    others = [
        replace(JOB, job_id="2", comment="eelgrids"), replace(mine, job_id="3", is_held=True),
        replace(mine, job_id="4", eligible_s=100), replace(mine, job_id="5_1", array_id="5"),
        replace(mine, job_id="6", dependency="afterok:1"), replace(mine, job_id="7", state="RUNNING"),
    ]  # fmt: skip
    waiting, running = select_ordered([*others, mine], 50.0)
    assert ([one.job_id for one in waiting], [one.job_id for one in running]) == (["1"], ["7"])
    many = [replace(mine, job_id=str(number), submit_s=number) for number in range(300, 0, -1)]
    assert [one.submit_s for one in select_ordered(many, 50.0)[0]] == list(range(1, ORDERED_MOST + 1))


def test_what_sprio_prints_is_read_and_what_is_no_job_of_its_own_left_out():
    text = " 12|4294901749|0\n13|7|-3\n14_[1-3]|5|0\nnonsense\n"
    assert parse_priorities(text) == {"12": JobPriority(4294901749, 0), "13": JobPriority(7, -3)}


def test_factors_are_left_to_a_plugin_of_the_site_and_to_slurm_without_factors():
    text = "PriorityType            = priority/multifactor\nPrioritySiteFactorPlugin = (null)\n"
    assert allows_factors(text)
    assert not allows_factors(text.replace("(null)", "site_factor/ours"))
    assert not allows_factors(text.replace("multifactor", "basic"))
    assert not allows_factors("")


def test_waiting_jobs_are_ordered_by_what_their_queues_already_have():
    core = build_core(build_node("n0", gpus=4, cpu_milli=64_000, memory_bytes=2**38))
    core.update_policy(replace(core.state.policy, queues=(Queue(name="a"), Queue(name="b"))), now_ns=1)
    core.update_external_usage("n0", ExternalUsage(cpu_milli=4000, gpu_count=2, gpu_indexes=(0, 1)), now_ns=1)
    jobs = [
        replace(
            JOB,
            job_id="1",
            account="a",
            state="RUNNING",
            nodes=("n0",),
            gpu_indexes={"n0": (0, 1)},
            gpus=(GresCount("", 2),),
        ),
        *(
            replace(JOB, job_id=number, account=queue, gpus=(GresCount("", 2),), partition="")
            for number, queue in ("2a", "3a", "4b", "5x")
        ),
    ]
    settings = SteeringSettings()
    steering = Steering(settings)
    running, waiting = [steering.adopt_job(jobs[0], None)], [build_request(job, settings) for job in jobs[1:]]
    # Those of a queue that does not exist have no place; there is room for one, and none is placed.
    assert plan_order(core, running, waiting, now_ns=2) == ["slurm-4", "slurm-2", "slurm-3"]
    assert core.state.nodes["n0"].others.gpu_count == 0
