"""Capacity that is held back: for whom, on which nodes, whom it binds, and that it ends."""

import json
from dataclasses import replace

import pytest
from tests.builders.cluster import build_core, build_node, build_request

from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import CapacityHoldsChanged
from eelgrid_controller.state.journal import digest_of
from eelgrid_protos.messages import GangPart, Queue, WorkloadKind, WorkloadPhase

S = 10**9
HOUR_NS = 3600 * S
LIMIT_S = 6 * 3600.0
REASON = "fair_share: there is room, but it is held for queue y, which has used less than its share"


class Cluster:
    """Two queues of one tree on nodes of 2 GPUs: x runs jobs of one GPU, y waits with one of two."""

    def __init__(self, nodes=1, limit_s=LIMIT_S, parent="root", **spec):
        self.core = build_core(*(build_node(f"n{n}", gpus=2) for n in range(nodes)))
        queues = (Queue(name="root"), *(Queue(name=name, parent=parent) for name in "xyz"))
        policy = replace(self.core.state.policy, queues=queues, queue_half_life_s=16 * LIMIT_S)
        self.core.update_policy(replace(policy, capacity_hold_s=limit_s, queue_age_limit_s=3e8), now_ns=1)
        for n in range(2 * nodes):
            self.submit(f"x{n}", "x", now_ns=2, **spec)

    def submit(self, key, queue, gpus=1, now_ns=0, **spec):
        spec = {"kind": WorkloadKind.BATCH_JOB, **spec}
        step = self.core.submit(build_request(key, queue=queue, gpus=gpus, **spec), now_ns=now_ns)
        self.settle(now_ns)
        return self.core.state.workloads[step.result.workload_id]

    def settle(self, now_ns):
        if self.core.is_round_due(now_ns):
            self.core.retry_waiting(now_ns=now_ns)
        while self.core.has_backlog:
            self.core.retry(now_ns=now_ns)

    def end(self, key, now_ns):
        self.core.cancel(key, now_ns=now_ns)
        self.settle(now_ns)

    def restart(self, now_ns):
        """Another core from a checkpoint of this one."""
        plain = json.loads(json.dumps(self.core.state.dump()))
        self.core = build_core(state=ClusterState.load(plain))
        assert self.core.state.digest() == digest_of(plain)
        self.settle(now_ns)

    def phase(self, key):
        return self.core.workload(key).phase


def test_freed_capacity_waits_for_the_queue_that_has_used_less_than_its_share():
    cluster = Cluster()
    at_ns = 48 * HOUR_NS
    cluster.submit("y1", "y", 2, now_ns=at_ns)
    cluster.submit("x9", "x", now_ns=at_ns)
    cluster.end("x0", at_ns + S)
    assert cluster.phase("x9") is WorkloadPhase.PENDING
    assert cluster.core.workload("x9").reason == REASON
    assert cluster.core.explain_workload("x9").constraint == "fair_share"
    # What is submitted meanwhile waits, too, unless its priority is higher.
    assert cluster.submit("z1", "z", now_ns=at_ns + 2 * S).phase is WorkloadPhase.PENDING
    cluster.end("x1", at_ns + 3 * S)
    assert cluster.phase("y1") is WorkloadPhase.PLACED


def test_work_of_higher_priority_is_not_bound():
    cluster = Cluster()
    cluster.submit("y1", "y", 2, now_ns=48 * HOUR_NS)
    cluster.end("x0", 48 * HOUR_NS + S)
    assert cluster.submit("z1", "z", now_ns=48 * HOUR_NS + 2 * S, priority=1).phase is WorkloadPhase.PLACED


def test_a_queue_that_is_owed_little_gets_no_hold():
    """After an hour x has used 2 GPU-hours more, and y would use 12 in the limit."""
    cluster = Cluster()
    cluster.submit("y1", "y", 2, now_ns=HOUR_NS)
    cluster.submit("x9", "x", now_ns=HOUR_NS)
    cluster.end("x0", HOUR_NS + S)
    assert cluster.phase("x9") is WorkloadPhase.PLACED


def test_work_that_is_aged_gets_a_hold_whatever_was_used():
    cluster = Cluster()
    policy = cluster.core.state.policy
    cluster.core.update_policy(replace(policy, queue_age_limit_s=1800.0), now_ns=3)
    cluster.submit("y1", "y", 2, now_ns=4)
    cluster.submit("x9", "x", now_ns=5)
    cluster.end("x0", HOUR_NS)
    assert cluster.core.workload("x9").reason == REASON


def test_queues_at_the_top_are_siblings_too():
    cluster = Cluster(parent="")
    cluster.submit("y1", "y", 2, now_ns=48 * HOUR_NS)
    cluster.submit("x9", "x", now_ns=48 * HOUR_NS)
    cluster.end("x0", 48 * HOUR_NS + S)
    assert cluster.core.workload("x9").reason == REASON


def test_only_the_node_that_lacks_least_is_held():
    cluster = Cluster(nodes=3)
    at_ns = 48 * HOUR_NS
    cluster.submit("y1", "y", 2, now_ns=at_ns)
    names = {key: cluster.core.workload(key).placements[0].node_name for key in ("x0", "x1", "x2", "x3", "x4", "x5")}
    for n, key in enumerate(("x9", "x10", "x11")):
        cluster.submit(key, "x", now_ns=at_ns + n)
    first, second, *_ = sorted(set(names.values()))
    freed = [next(key for key, name in names.items() if name == one) for one in (first, second)]
    # Both lack one GPU now; the first by name is held, and the other is free for others.
    cluster.end(freed[0], at_ns + S)
    assert cluster.phase("x9") is WorkloadPhase.PENDING
    cluster.end(freed[1], at_ns + 2 * S)
    placed = [key for key in ("x9", "x10", "x11") if cluster.phase(key) is WorkloadPhase.PLACED]
    assert [cluster.core.workload(key).placements[0].node_name for key in placed] == [second]


def test_a_part_of_a_gang_that_finds_only_held_room_says_for_whom_it_is_held():
    """The only room that is not held goes to the other part, which starts in the same step."""
    cluster = Cluster(nodes=2)
    at_ns = 48 * HOUR_NS
    cluster.submit("y1", "y", 2, now_ns=at_ns)
    for key in ("z1", "z2"):
        cluster.submit(key, "z", now_ns=at_ns, gang=GangPart(name="pair", parts=2))
    runs = {cluster.core.workload(f"x{n}").placements[0].node_name: f"x{n}" for n in range(4)}
    for node_name in ("n0", "n1"):
        cluster.end(runs[node_name], at_ns + S)
    for key in ("z1", "z2"):
        assert cluster.phase(key) is WorkloadPhase.PENDING
        assert cluster.core.workload(key).reason == REASON


@pytest.mark.parametrize("restarts", [False, True])
def test_a_hold_ends_after_its_limit_and_does_not_come_back_for_four_times_as_long(restarts):
    """What else runs on the node never ends: nobody waits for it for ever, and four fifths of the time are used."""
    cluster = Cluster()
    at_ns = 48 * HOUR_NS
    cluster.submit("y1", "y", 2, now_ns=at_ns)
    cluster.end("x0", at_ns)
    cluster.submit("x9", "x", now_ns=at_ns + S)
    assert cluster.phase("x9") is WorkloadPhase.PENDING
    limit_ns = int(LIMIT_S * S)
    for hours in (1, 3, 5) if restarts else ():
        cluster.restart(at_ns + hours * HOUR_NS)
        assert cluster.phase("x9") is WorkloadPhase.PENDING
    assert not cluster.core.is_round_due(at_ns + limit_ns - S)
    assert cluster.core.is_round_due(at_ns + limit_ns)
    cluster.settle(at_ns + limit_ns)
    assert cluster.phase("x9") is WorkloadPhase.PLACED
    # Four times as long the next ones start at once; then capacity is held again.
    for n, hours in enumerate((7, 12, 18, 24, 29, 31)):
        now_ns = at_ns + hours * HOUR_NS
        if restarts:
            cluster.restart(now_ns)
        cluster.submit(f"next{n}", "x", now_ns=now_ns)
        running = next(
            key for key in ("x9", *(f"next{m}" for m in range(n))) if cluster.phase(key) is WorkloadPhase.PLACED
        )
        cluster.end(running, now_ns)
        assert (cluster.phase(f"next{n}") is WorkloadPhase.PLACED) == (hours < 30)


def test_no_node_is_held_that_services_fill():
    cluster = Cluster(kind=WorkloadKind.INFERENCE_SERVICE)
    cluster.submit("y1", "y", 2, now_ns=48 * HOUR_NS)
    cluster.submit("x9", "x", now_ns=48 * HOUR_NS)
    cluster.end("x0", 48 * HOUR_NS + S)
    assert cluster.phase("x9") is WorkloadPhase.PLACED


def test_with_a_limit_of_zero_nothing_is_held():
    cluster = Cluster(limit_s=0.0)
    cluster.submit("y1", "y", 2, now_ns=48 * HOUR_NS)
    cluster.submit("x9", "x", now_ns=48 * HOUR_NS)
    cluster.end("x0", 48 * HOUR_NS + S)
    assert cluster.phase("x9") is WorkloadPhase.PLACED


def test_what_cannot_have_room_on_any_node_holds_none():
    cluster = Cluster(nodes=2)
    cluster.core.cordon_node("n1", now_ns=47 * HOUR_NS)
    cluster.submit("y1", "y", 1, now_ns=48 * HOUR_NS, replicas=3)
    cluster.submit("x9", "x", now_ns=48 * HOUR_NS)
    here = next(key for key in ("x0", "x1", "x2") if cluster.core.workload(key).placements[0].node_name == "n0")
    cluster.end(here, 48 * HOUR_NS + S)
    assert cluster.phase("x9") is WorkloadPhase.PLACED


def test_since_when_capacity_is_held_is_an_event_of_rounds_that_change_it_alone():
    cluster = Cluster()
    at_ns = 48 * HOUR_NS
    step = cluster.core.submit(build_request("y1", queue="y", gpus=2, kind=WorkloadKind.BATCH_JOB), now_ns=at_ns)
    assert not [event for event in step.events if isinstance(event, CapacityHoldsChanged)]
    ended = cluster.core.cancel("x0", now_ns=at_ns + S)
    (changed,) = (event for event in ended.events if isinstance(event, CapacityHoldsChanged))
    (held,) = changed.held
    assert (held.queue, held.workload_id, held.since_ns, changed.barred) == ("y", "y1", at_ns + S, ())
    assert cluster.core.state.pending.held == changed.held
    again = cluster.core.retry_waiting(now_ns=at_ns + 2 * S)
    assert not [event for event in again.events if isinstance(event, CapacityHoldsChanged)]
    started = cluster.core.cancel("x1", now_ns=at_ns + 3 * S)
    assert cluster.phase("y1") is WorkloadPhase.PLACED
    assert started.events[-1] == CapacityHoldsChanged(time_ns=at_ns + 3 * S)
    assert "capacity_holds" not in cluster.core.state.dump()
