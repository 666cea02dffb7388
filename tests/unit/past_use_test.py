"""Reclaim by past use: endless work of two queues takes turns, what can be divided is shared, and quotas come first."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from tests.builders.cluster import build_core, build_node, build_request
from tests.state_invariants import check_invariants

from eelgrid_controller.core.core import Core
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import WorkloadEvicted, event_to_plain
from eelgrid_controller.state.policy import find_queue_violations
from eelgrid_protos import catalogue
from eelgrid_protos.messages import PreemptionReclaim, Queue, QueuePreemption, QueueQuota, WorkloadKind

S = 10**9
STEP_S = 600
HALF_LIFE_S = 128.0 * STEP_S
PAST_USE = QueuePreemption(reclaim=PreemptionReclaim.PAST_USE, min_runtime_s=60.0)
FAIR = QueuePreemption(reclaim=PreemptionReclaim.FAIR_SHARE)


class Pool:
    """Queues of one tree whose jobs never end, on one node, with a step every ten minutes."""

    def __init__(self, *leaves, gpus=16, rules=PAST_USE):
        self.core = build_core(build_node("a", gpus=gpus))
        queues = (Queue(name="root", preemption=rules), *(replace(one, parent="root") for one in leaves))
        policy = replace(self.core.state.policy, queues=queues, queue_half_life_s=HALF_LIFE_S)
        self.core.update_policy(policy, now_ns=1)
        self.step, self.count = 0, 0
        self.gpu_steps = {one.name: 0 for one in leaves}
        # The steps of the evictions, by the queue that lost.
        self.evictions = []

    def submit(self, queue, gpus, count=1):
        for _ in range(count):
            self.count += 1
            request = build_request(f"{queue}{self.count}", queue=queue, gpus=gpus, kind=WorkloadKind.BATCH_JOB)
            self._note(self.core.submit(request, now_ns=self.step * STEP_S * S + 2).events)

    def run(self, steps):
        for _ in range(steps):
            self.step += 1
            now_ns = self.step * STEP_S * S
            self._note(self.core.continue_drains(now_ns=now_ns).events)
            while self.core.has_backlog:
                self._note(self.core.retry(now_ns=now_ns).events)
            for queue, gpus in self.held().items():
                self.gpu_steps[queue] += gpus
        check_invariants(self.core.state)

    def _note(self, events):
        for event in events:
            if isinstance(event, WorkloadEvicted):
                self.evictions.append((self.step, self.core.state.workloads[event.workload_id].spec.queue))

    def held(self):
        found = dict.fromkeys(self.gpu_steps, 0)
        for charge in self.core.state.queue_usage.charges.values():
            found[charge.queue] += charge.amounts["gpu"] // 1000
        return found

    def restart(self):
        plain = json.loads(json.dumps(self.core.state.dump()))
        self.core = Core(ClusterState.load(plain), catalogue.load_catalogue())


def quota(gpus):
    return (QueueQuota(resource="gpu", nominal=1000 * gpus),)


def find_turns(pool):
    moments = sorted({step for step, _ in pool.evictions})
    return [after - before for before, after in pairwise(moments)]


@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, 3.0)])
def test_two_queues_that_each_need_the_whole_pool_share_its_time_by_their_weights(weights):
    pool = Pool(*(Queue(name=name, weight=weight) for name, weight in zip("xy", weights, strict=True)))
    pool.submit("x", 16, 2)
    pool.submit("y", 16, 2)
    pool.run(1280)
    want = weights[0] / sum(weights)
    assert pool.gpu_steps["x"] / sum(pool.gpu_steps.values()) == pytest.approx(want, abs=0.01)
    # The horizon is 8 steps: nobody loses what it took earlier than that.
    assert min(find_turns(pool)) >= 8 or weights != (1.0, 1.0)
    assert sum(pool.gpu_steps.values()) == 16 * 1280


def test_what_can_be_divided_is_shared_once_what_was_missed_is_made_up_for():
    """After a half-life alone x owes y: y has all, then each one half, and nobody is preempted any more."""
    pool = Pool(Queue(name="x"), Queue(name="y"))
    pool.submit("x", 1, 20)
    pool.run(128)
    assert pool.held() == {"x": 16, "y": 0}
    pool.submit("y", 1, 20)
    pool.run(2)
    assert pool.held() == {"x": 0, "y": 16}
    pool.run(1000)
    assert pool.held() == {"x": 8, "y": 8}
    # Each lost its GPUs once, some of them one by one.
    assert len(pool.evictions) <= 40
    quiet = len(pool.evictions)
    pool.run(300)
    assert len(pool.evictions) == quiet


def test_work_within_its_quota_is_no_victim_however_much_its_queue_has_used():
    pool = Pool(Queue(name="x", quotas=quota(8)), Queue(name="y"), rules=replace(PAST_USE, horizon_s=60.0))
    pool.submit("x", 1, 8)
    pool.submit("y", 8)
    pool.run(200)
    pool.submit("y", 4)
    pool.run(400)
    assert pool.held() == {"x": 8, "y": 0}
    assert not pool.evictions


def test_a_quota_is_reclaimed_at_once_whatever_was_used():
    pool = Pool(Queue(name="x", quotas=quota(8)), Queue(name="y", quotas=quota(8)))
    pool.submit("x", 1, 8)
    pool.run(100)
    pool.submit("x", 1, 8)
    pool.run(2)
    assert pool.held() == {"x": 16, "y": 0}
    pool.submit("y", 8)
    pool.run(1)
    assert pool.held() == {"x": 8, "y": 8}
    # Later x has no right to them, though y has used more for a while.
    pool.run(400)
    assert pool.held() == {"x": 8, "y": 8}


def test_the_minimum_run_time_of_the_victims_queue_makes_turns_longer():
    pool = Pool(Queue(name="x"), Queue(name="y"), rules=replace(PAST_USE, min_runtime_s=30.0 * STEP_S))
    pool.submit("x", 16, 2)
    pool.submit("y", 16, 2)
    pool.run(640)
    assert min(find_turns(pool)) >= 30
    assert pool.gpu_steps["x"] / (16 * 640) == pytest.approx(0.5, abs=0.03)


def test_three_queues_take_turns():
    pool = Pool(*(Queue(name=name) for name in "xyz"))
    for name in "xyz":
        pool.submit(name, 16)
    pool.run(1280)
    assert [count / (16 * 1280) for count in pool.gpu_steps.values()] == pytest.approx([1 / 3] * 3, abs=0.01)


def test_a_restart_changes_no_turn():
    pools = [Pool(Queue(name="x"), Queue(name="y")) for _ in range(2)]
    for pool in pools:
        pool.submit("x", 16, 2)
        pool.submit("y", 16, 2)
    for _ in range(25):
        pools[0].restart()
        for pool in pools:
            pool.run(4)
            # What is due after a restart is tried at once, so that the next search may come earlier, but no turn does.
            assert pool.held() == pools[0].held()


def test_a_tree_reclaims_beyond_quotas_by_one_measure():
    root = Queue(name="root")
    mixed = (
        root,
        Queue(name="x", parent="root", preemption=PAST_USE),
        Queue(name="y", parent="root", preemption=QueuePreemption(reclaim=PreemptionReclaim.NOMINAL)),
        Queue(name="z", parent="root", preemption=FAIR),
    )
    (found,) = find_queue_violations(mixed)
    assert found.field == "policy.queues[3].preemption.reclaim"
    assert "past_use" in found.problem
    assert not find_queue_violations(mixed[:3])
    assert not find_queue_violations((*mixed[:3], replace(mixed[3], parent="")))


def test_without_a_horizon_the_journal_is_what_older_versions_read():
    pool = Pool(Queue(name="x"), rules=FAIR)
    event = next(iter(pool.core.update_policy(pool.core.state.policy, now_ns=9).events))
    assert "horizon_s" not in event_to_plain(event)[1]["policy"]["queues"][0]["preemption"]
    policy = pool.core.state.policy
    rules = replace(PAST_USE, horizon_s=90.0)
    changed = replace(policy, queues=(replace(policy.queues[0], preemption=rules), *policy.queues[1:]))
    event = next(iter(pool.core.update_policy(changed, now_ns=10).events))
    assert event_to_plain(event)[1]["policy"]["queues"][0]["preemption"]["horizon_s"] == 90.0
