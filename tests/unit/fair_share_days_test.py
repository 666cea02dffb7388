"""Fair share over simulated weeks: two queues that never run out of work, on 8 GPUs, with a half-life of seven days.

Jobs end at simulated times and are decided by a core. What is measured is the GPU time of each queue, from the begin.
"""

import heapq
import random
from dataclasses import dataclass, replace

import pytest
from tests.builders.cluster import build_core, build_node, build_request

from eelgrid_controller.state.events import WorkloadPlaced
from eelgrid_protos.messages import Queue, QueueQuota, WorkloadKind

S = 10**9
HOUR_NS, DAY_NS = 3600 * S, 86_400 * S
GPUS = 8
BACKLOG = 4


@dataclass(frozen=True)
class Jobs:
    """What a queue submits: sizes in GPUs and run times in hours, drawn evenly."""

    sizes: tuple[int, ...]
    hours: tuple[float, float]


class Backlog:
    """Two queues in which something always waits."""

    def __init__(self, jobs, *, weights=(1.0, 1.0), seed=0, quota=False, hold_s=None, nodes=1):
        self.random = random.Random(seed)
        self.core = build_core(*(build_node(f"n{n}", gpus=GPUS) for n in range(nodes)))
        parent = Queue(name="all", quotas=(QueueQuota(resource="gpu", nominal=1000 * GPUS),) if quota else ())
        below = [Queue(name=name, parent="all", weight=weight) for name, weight in zip("xy", weights, strict=True)]
        # Without an age limit: everything that waits here does so for longer than a day.
        policy = replace(self.core.state.policy, queues=(parent, *below), queue_age_limit_s=365 * 86_400.0)
        self.core.update_policy(replace(policy, capacity_hold_s=hold_s), now_ns=1)
        self.jobs = dict(zip("xy", jobs, strict=True))
        self.made, self.ends = 0, []
        self.hours = {}
        self.gpu_ns = {"x": 0, "y": 0}
        self.now_ns = 1

    def run(self, until_ns):
        """Runs until a moment; returns the share of x in all GPU time since the begin."""
        self._fill(self.now_ns)
        while self.ends and self.ends[0][0] <= until_ns:
            now_ns, key = heapq.heappop(self.ends)
            self._advance(now_ns)
            if self.core.is_round_due(now_ns):
                self._note(self.core.retry_waiting(now_ns=now_ns), now_ns)
            self._note(self.core.cancel(key, now_ns=now_ns), now_ns)
            self._fill(now_ns)
        self._advance(until_ns)
        return self.gpu_ns["x"] / sum(self.gpu_ns.values())

    def _advance(self, now_ns):
        for charge in self.core.state.queue_usage.charges.values():
            self.gpu_ns[charge.queue] += charge.amounts["gpu"] // 1000 * (now_ns - self.now_ns)
        self.now_ns = now_ns

    def _fill(self, now_ns):
        waiting = {"x": 0, "y": 0}
        for key in self.core.state.pending:
            waiting[self.core.state.workloads[key].spec.queue] += 1
        for queue, jobs in self.jobs.items():
            for _ in range(BACKLOG - waiting[queue]):
                self.made += 1
                key = f"w{self.made}"
                self.hours[key] = self.random.uniform(*jobs.hours)
                size = self.random.choice(jobs.sizes)
                request = build_request(key, queue=queue, gpus=size, cpu=1, kind=WorkloadKind.BATCH_JOB)
                self._note(self.core.submit(request, now_ns=now_ns), now_ns)

    def _note(self, step, now_ns):
        events = list(step.events)
        while self.core.has_backlog:
            events += self.core.retry(now_ns=now_ns).events
        for event in events:
            if isinstance(event, WorkloadPlaced):
                end_ns = now_ns + int(self.hours[event.workload_id] * HOUR_NS)
                heapq.heappush(self.ends, (end_ns, event.workload_id))


SHORT, LONG = Jobs((1,), (6.0, 18.0)), Jobs((1,), (24.0, 72.0))


@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, 3.0)])
def test_the_share_error_of_two_backlogged_queues_tends_to_zero_over_thirty_days(weights):
    """However different their run times are: half a day against two days."""
    run = Backlog((SHORT, LONG), weights=weights)
    want = weights[0] / sum(weights)
    first = abs(run.run(DAY_NS) - want)
    run.run(10 * DAY_NS)
    before = dict(run.gpu_ns)
    whole = abs(run.run(30 * DAY_NS) - want)
    last = {queue: spent - before[queue] for queue, spent in run.gpu_ns.items()}
    assert whole < 0.04
    assert whole < first
    # Of the last twenty days alone, in which what happened in the beginning has nearly been forgotten.
    assert abs(last["x"] / sum(last.values()) - want) < 0.02


@pytest.mark.parametrize("hours", [1.0, 4.0, 16.0], ids=["split", "as the other", "merged"])
def test_nobody_gains_gpu_time_by_splitting_or_merging_jobs_in_time(hours):
    """The most that is gained, once and for all, is one run on each GPU."""
    days = 6
    share = Backlog((Jobs((1,), (hours, hours)), Jobs((1,), (4.0, 4.0)))).run(days * DAY_NS)
    assert (share - 0.5) * GPUS * 24 * days <= hours * GPUS


def test_nobody_gains_by_asking_for_more_than_is_needed():
    """Twice the GPUs for work that needs one half: the useful part of the share is less."""
    honest = Backlog((Jobs((2,), (4.0, 4.0)), Jobs((2,), (4.0, 4.0)))).run(4 * DAY_NS)
    inflated = Backlog((Jobs((4,), (4.0, 4.0)), Jobs((2,), (4.0, 4.0)))).run(4 * DAY_NS)
    assert inflated / 2 < 0.6 * honest


@pytest.mark.parametrize(
    ("size", "hours"), [(2, ((4.0, 4.0), (4.0, 4.0))), (2, ((6.0, 18.0), (24.0, 72.0))), (4, ((2.0, 6.0), (2.0, 6.0)))]
)
def test_a_queue_of_larger_jobs_gets_its_share_beside_jobs_of_one_gpu_and_little_is_idle(size, hours):
    """Two nodes of 8 GPUs; without capacity that is held back the small jobs take every GPU that becomes free."""
    jobs = [Jobs((1,), hours[0]), Jobs((size,), hours[1])]
    days = 8
    run, free = Backlog(jobs, nodes=2), Backlog(jobs, nodes=2, hold_s=0.0)
    assert 0.45 <= run.run(days * DAY_NS) <= 0.55
    assert free.run(days * DAY_NS) > 0.6
    used, most = (sum(one.gpu_ns.values()) / (2 * GPUS * days * DAY_NS) for one in (run, free))
    assert used > most - 0.03


def test_jobs_of_a_whole_node_get_their_share_beside_jobs_of_one_gpu():
    run = Backlog((Jobs((1,), (4.0, 8.0)), Jobs((8,), (4.0, 8.0))), nodes=2)
    assert 0.45 <= run.run(8 * DAY_NS) <= 0.58
    assert sum(run.gpu_ns.values()) / (2 * GPUS * 8 * DAY_NS) > 0.85
