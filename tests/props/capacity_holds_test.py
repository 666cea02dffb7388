"""Capacity that is held back under any load: everything starts, and what is idle is less than what it is held for."""

import heapq
import json
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders.cluster import build_core, build_node, build_request
from tests.state_invariants import check_invariants

from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import WorkloadPlaced
from eelgrid_protos.messages import Queue, WorkloadKind, WorkloadPhase

S = 10**9
HOUR_NS = 3600 * S
GPUS = 4

JOBS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from([1, 1, 2, 3, 4]),
        st.integers(1, 2),
        st.sampled_from([0, 0, 0, 1]),
        st.integers(1, 30),
        st.integers(0, 15),
    ),
    min_size=10,
    max_size=40,
)


@given(
    jobs=JOBS,
    limit_hours=st.sampled_from([1, 3, 10]),
    age_hours=st.sampled_from([2, 24, 1000]),
    weights=st.lists(st.sampled_from([1.0, 3.0]), min_size=3, max_size=3),
    restarted_every=st.sampled_from([0, 1, 7]),
)
@settings(deadline=None, max_examples=25)
def test_everything_starts_and_no_more_is_idle_than_a_hold_is_for(
    jobs, limit_hours, age_hours, weights, restarted_every
):
    core = build_core(*(build_node(f"n{n}", gpus=GPUS) for n in range(2)))
    queues = (Queue(name="root"), *(Queue(name=f"q{n}", parent="root", weight=w) for n, w in enumerate(weights)))
    policy = replace(core.state.policy, queues=queues, queue_half_life_s=48 * 3600.0)
    policy = replace(policy, capacity_hold_s=limit_hours * 3600.0, queue_age_limit_s=age_hours * 3600.0)
    core.update_policy(policy, now_ns=1)
    # Arrivals, ends, and an hour in which only time passes.
    agenda = [(at * HOUR_NS + 2, 0, n) for n, (*_, at) in enumerate(jobs)]
    agenda += [(hour * HOUR_NS + 3, 2, hour) for hour in range(1, 1200)]
    heapq.heapify(agenda)
    started = set()

    def note(step, now_ns):
        events = list(step.events)
        while core.has_backlog:
            events += core.retry(now_ns=now_ns).events
        for event in events:
            if isinstance(event, WorkloadPlaced):
                number = int(event.workload_id[1:])
                started.add(number)
                heapq.heappush(agenda, (now_ns + jobs[number][4] * HOUR_NS, 1, number))

    while agenda and len(started) < len(jobs):
        now_ns, kind, number = heapq.heappop(agenda)
        if kind == 2 and restarted_every and number % restarted_every == 0:
            core = build_core(state=ClusterState.load(json.loads(json.dumps(core.state.dump()))))
            note(core.retry(now_ns=now_ns), now_ns)
        if kind == 0:
            queue, gpus, replicas, priority, *_ = jobs[number]
            request = build_request(
                f"w{number}",
                queue=f"q{queue}",
                gpus=gpus,
                replicas=replicas,
                priority=priority,
                kind=WorkloadKind.BATCH_JOB,
            )
            note(core.submit(request, now_ns=now_ns), now_ns)
        elif kind == 1:
            note(core.cancel(f"w{number}", now_ns=now_ns), now_ns)
        elif core.is_round_due(now_ns):
            note(core.retry_waiting(now_ns=now_ns), now_ns)
        held_back = [key for key in core.state.pending if core.workload(key).reason.startswith("fair_share:")]
        for hold in core._holds.list_binding(core.workload(held_back[0]), is_round=False) if held_back else ():
            holder = core.workload(hold.workload_id)
            assert holder.phase is WorkloadPhase.PENDING
            # It is in force no longer than its limit, and an hour until time is looked at again.
            assert now_ns - hold.since_ns <= (limit_hours + 1) * HOUR_NS
            free = sum(GPUS - core.state.nodes[name].allocated_gpu_milli // 1000 for name in hold.node_names)
            assert free < holder.spec.request.gpu_count * holder.spec.replicas + GPUS * (len(hold.node_names) - 1)
    check_invariants(core.state)
    assert len(started) == len(jobs)
