"""A core in simulated time, in front of which work arrives that runs for a known time."""

import heapq
import json
from dataclasses import replace

from eelgrid_controller.state.events import WorkloadPlaced, WorkloadPromised, event_from_plain, event_to_plain
from eelgrid_protos.messages import BackfillMode
from tests.builders.cluster import build_core, build_request

S = 1_000_000_000


class Simulation:
    """A core in simulated time: work arrives, and ends exactly when it is expected to, or by `ends_s`."""

    def __init__(self, *nodes, backfill=BackfillMode.EASY, reservations=()):
        self.core = build_core(*nodes)
        self.initial = self.core.state.copy()
        self.events = []
        self.starts, self.promised, self.ends, self.specs = {}, {}, [], {}
        self.now_s = 1
        policy = replace(self.core.state.policy, backfill=backfill, reservations=reservations)
        self.apply(self.core.update_policy(policy, now_ns=S))

    def apply(self, step):
        steps = [step]
        while self.core.has_backlog:
            steps.append(self.core.retry(now_ns=self.now_s * S))
        for event in (event for one in steps for event in one.events):
            self.events.append(event)
            if isinstance(event, WorkloadPlaced):
                self.starts[event.workload_id] = self.now_s
                heapq.heappush(self.ends, (self.now_s + self.specs[event.workload_id], event.workload_id))
            if isinstance(event, WorkloadPromised) and event.promise is not None:
                self.promised.setdefault(event.workload_id, []).append(event.promise.start_ns)
        return step

    def submit(self, key, gpus, run_s, **spec):
        self.specs[key] = run_s
        request = build_request(
            key, name=key, gpus=gpus, cpu=0, memory_gib=0, **{"expected_runtime_s": float(run_s), **spec}
        )
        return self.apply(self.core.submit(request, now_ns=self.now_s * S)).result

    def end_next(self):
        self.now_s, key = heapq.heappop(self.ends)
        self.apply(self.core.cancel(key, now_ns=self.now_s * S))
        self.wake()

    def wake(self):
        """Tries the queue if that is due by time, as the server's loop does."""
        if self.core.is_round_due(self.now_s * S):
            self.apply(self.core.retry_waiting(now_ns=self.now_s * S))

    def advance(self, until_s):
        """Ends what ends by then."""
        while self.ends and self.ends[0][0] <= until_s:
            self.end_next()
        self.now_s = max(self.now_s, until_s)
        self.wake()

    def finish(self):
        while self.ends:
            self.end_next()

    def replay(self):
        """A core from the journal alone, through JSON."""
        state = self.initial.copy()
        for event in self.events:
            kind, body = event_to_plain(event)
            state.apply(event_from_plain(kind, json.loads(json.dumps(body))))
        return state
