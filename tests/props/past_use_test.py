"""Reclaim by past use under endless jobs of any size: finite, never within the run time, and always toward fair shares."""

import math
from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.builders.cluster import build_core, build_node, build_request
from tests.state_invariants import check_invariants

from eelgrid_controller.queueing.past_use import PastUse, UseExchange
from eelgrid_controller.queueing.quota import QuotaTree
from eelgrid_controller.state.events import WorkloadEvicted, WorkloadPlaced
from eelgrid_controller.state.queue_usage import DecayedUsage
from eelgrid_protos.messages import PreemptionReclaim, Queue, QueuePreemption, WorkloadKind

S = 10**9
STEP_S = 600
HALF_LIFE_S = 32.0 * STEP_S
GPUS = 8


def past_of(core, now_ns):
    """The decayed use of each queue over its weight, in GPU-seconds."""
    policy = core.state.policy
    found = {queue.name: 0.0 for queue in policy.queues}
    for (queue, _), history in core.state.queue_usage.history.items():
        found[queue] += history.at(now_ns, policy.queue_half_life_s)[0] / 1000
    return {queue.name: found[queue.name] / queue.weight for queue in policy.queues}


def charge_of(gpus):
    """What an admission is charged with at once: a minute's use that has just ended."""
    return gpus * HALF_LIFE_S / math.log(2.0) * (1.0 - 2.0 ** (-60.0 / HALF_LIFE_S))


@example(
    # A queue is admitted, which makes it the one that has used more, and other work of it makes room at the same moment.
    weights=[0.1, 1.0, 1.0],
    jobs=[
        (0, 2, 8),
        (1, 4, 5),
        (2, 2, 37),
        (0, 2, 28),
        (0, 8, 31),
        (0, 3, 1),
        (1, 1, 19),
        (2, 2, 26),
        (0, 1, 0),
        (2, 4, 23),
        (2, 4, 20),
        (2, 4, 20),
    ],
    min_runtime=0,
    horizon=1,
)
@example(
    # The turn of a queue of little weight would be shorter than the minute that its admission is charged with.
    weights=[5.0, 0.1, 0.1],
    jobs=[(0, 1, 1), (0, 4, 1), (1, 1, 1), (2, 4, 1)],
    min_runtime=0,
    horizon=1,
)
@example(
    # A queue takes the place of a large job with a small one, starts a large one on the rest, and then has used more.
    weights=[5.0, 0.1, 5.0],
    jobs=[(0, 2, 2), (0, 4, 15), (1, 1, 15), (1, 3, 14), (2, 1, 16), (2, 4, 2), (2, 4, 1)],
    min_runtime=0,
    horizon=0,
)
@given(
    weights=st.lists(st.sampled_from([0.1, 1.0, 2.0, 5.0]), min_size=2, max_size=3),
    jobs=st.lists(st.tuples(st.integers(0, 2), st.sampled_from([1, 2, 3, 4, 8]), st.integers(0, 40)), max_size=12),
    min_runtime=st.sampled_from([0, 1, 5]),
    horizon=st.sampled_from([0, 1, 4, 16]),
)
@settings(deadline=None, max_examples=60)
def test_exchanges_are_finite_keep_the_run_time_and_move_shares_toward_fair(weights, jobs, min_runtime, horizon):
    rules = QueuePreemption(
        reclaim=PreemptionReclaim.PAST_USE, min_runtime_s=float(min_runtime * STEP_S), horizon_s=float(horizon * STEP_S)
    )
    core = build_core(build_node("a", gpus=GPUS))
    names = [f"q{n}" for n in range(len(weights))]
    queues = (
        Queue(name="root", preemption=rules),
        *(Queue(name=name, parent="root", weight=weight) for name, weight in zip(names, weights, strict=True)),
    )
    weight_of = {queue.name: queue.weight for queue in queues}
    core.update_policy(replace(core.state.policy, queues=queues, queue_half_life_s=HALF_LIFE_S), now_ns=1)
    started, taken, evictions = {}, {}, 0
    steps = 128
    for step in range(1, steps + 1):
        now_ns = step * STEP_S * S
        before = past_of(core, now_ns)
        events = list(core.continue_drains(now_ns=now_ns).events)
        for n, (queue, gpus, at) in enumerate(jobs):
            if at == step:
                name = names[queue % len(names)]
                request = build_request(f"w{n}", queue=name, gpus=gpus, kind=WorkloadKind.BATCH_JOB)
                events += core.submit(request, now_ns=now_ns).events
        rounds = 0
        while core.has_backlog:
            events += core.retry(now_ns=now_ns).events
            rounds += 1
            assert rounds < 100
        # By queue: for whom its work has started or stopped in this step.
        changes, exchanges = defaultdict(set), {}
        for event in events:
            if not isinstance(event, WorkloadPlaced | WorkloadEvicted):
                continue
            queue = core.state.workloads[event.workload_id].spec.queue
            if isinstance(event, WorkloadPlaced):
                started[event.workload_id] = step
                changes[queue].add(event.workload_id)
                before[queue] += (
                    charge_of(core.state.workloads[event.workload_id].spec.request.gpu_count) / weight_of[queue]
                )
                continue
            gainer = core.state.workloads[event.preempted_for].spec.queue
            evictions += 1
            changes[queue].add(event.preempted_for)
            exchanges[queue, gainer] = event.preempted_for
            # Nobody is stopped before it has run so long, and only who has used more, with the first minute of what was
            # admitted just before, makes room for who has used less.
            assert step - started[event.workload_id] >= min_runtime
            assert before[queue] > before[gainer]
            # If neither has started or lost other work, what was taken is not taken back before the horizon, less the
            # minute that an admission is charged with.
            back = taken.get((gainer, queue))
            part = 2.0 * weight_of[queue] / (weight_of[queue] + weight_of[gainer])
            assert back is None or step - back + 1 >= part * (horizon or 2) - 1.0
        # Nothing changes hands there and back at one moment, unless one of both has started or lost other work as well.
        for (queue, gainer), key in exchanges.items():
            back = exchanges.get((gainer, queue))
            assert back is None or (changes[queue] | changes[gainer]) - {key, back}
        taken = {pair: at for pair, at in taken.items() if changes.keys().isdisjoint(pair)}
        for (queue, gainer), key in exchanges.items():
            if changes[queue] == changes[gainer] == {key}:
                taken[queue, gainer] = step
    check_invariants(core.state)
    # At most all GPUs change queues in each run time or, without one, in each step.
    assert evictions <= GPUS * (steps // max(1, min_runtime) + 1)


@given(
    used=st.lists(st.tuples(st.floats(0.0, 9.0), st.floats(0.0, 9.0)), min_size=2, max_size=2),
    held=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), min_size=2, max_size=2),
    moved=st.integers(1, 8),
    weights=st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=2, max_size=2),
    horizon_s=st.sampled_from([60.0, 600.0, 0.0]),
)
@settings(deadline=None, max_examples=80)
def test_the_time_of_an_exchange_in_closed_form_is_that_of_a_walk(used, held, moved, weights, horizon_s):
    held[1] = held[1][0] + moved, held[1][1]
    half_life_s, walk_s = 6000.0, 60.0

    def build(now_s):
        queues = [Queue(name="r"), *(Queue(name=n, parent="r", weight=w) for n, w in zip("xy", weights, strict=True))]
        tree = QuotaTree(queues)
        history = {}
        for name, uses, rates in zip("xy", used, held, strict=True):
            tree.add(name, {"gpu": rates[0], "cpu": rates[1]})
            history[name, "ann"] = DecayedUsage(0, (1e3 * uses[0], 1e3 * uses[1], 0.0), (*map(float, rates), 0.0))
        past = PastUse(tree, lambda: history, (8, 8, 0), now_ns=int(now_s * S), half_life_s=half_life_s)
        exchange = UseExchange(past, half_life_s=half_life_s, horizon_s=horizon_s)
        tree.add("x", {"gpu": moved})
        tree.add("y", {"gpu": moved}, -1)
        return exchange, tree.numbers["x"], tree.numbers["y"]

    exchange, mine, theirs = build(0.0)
    if exchange.is_due(mine, theirs):
        return
    wait_s = exchange.find_wait_s(mine, theirs)
    walked_s = None
    for step in range(1, int(8 * half_life_s / walk_s)):
        at, mine, theirs = build(step * walk_s)
        if at.is_due(mine, theirs):
            walked_s = step * walk_s
            break
    if walked_s is None:
        # Never, or later than the walk goes, or for less than a step of it.
        return
    assert wait_s is not None
    assert walked_s - walk_s - 1e-3 <= wait_s or wait_s == pytest.approx(walked_s, abs=2 * walk_s)
    assert wait_s <= walked_s + 1e-3
    at, mine, theirs = build(wait_s + 1e-3)
    assert at.is_due(mine, theirs)
