"""Elastic jobs with deadlines in front of a core in simulated time: they end when their work is done, on what they have."""

from eelgrid_controller.queueing.elastic_shares import compute_elastic_end_ns
from eelgrid_protos.messages import JobDeadline, MeasuredPoint, TrainingPromise, WorkloadKind, WorkloadPhase
from tests.backfill_rig import S, Simulation

MODEL = "G2"
# A job of this run time ends by its work alone.
_BY_WORK_S = 10**9


class ElasticSimulation(Simulation):
    """A simulation in which elastic jobs run at the rates of their profile times a pace of their own."""

    def __init__(self, *nodes, **kwargs):
        super().__init__(*nodes, **kwargs)
        self.refused = {}
        self.ended = {}

    def measure(self, profile, rates, model=MODEL):
        """Records the rates of a profile by number of GPUs."""
        points = tuple(
            MeasuredPoint(profile=profile, gpu_model=model, gpus=gpus, throughput_hz=float(rate_hz))
            for gpus, rate_hz in rates.items()
        )
        self.apply(self.core.record_measurements(points, now_ns=self.now_s * S))

    def submit_elastic(self, key, rates, work, deadline_s, *, asked=None, restart_s=0.0, **spec):
        """Submits a job that may have as many workers of a GPU each as rates are known of."""
        self.measure(key, rates)
        training = TrainingPromise(
            profile=key,
            slowdown_most=0.1,
            work=float(work),
            replicas_least=min(rates),
            replicas_most=max(rates),
            restart_s=restart_s,
        )
        more = {"deadline": JobDeadline(end_ns=deadline_s * S), "expected_runtime_s": None, **spec}
        return self.submit(
            key,
            1,
            _BY_WORK_S,
            kind=WorkloadKind.TRAINING_JOB,
            training=training,
            replicas=asked or min(rates),
            **more,
        )

    def scale(self, key, replicas):
        self.apply(self.core.scale(key, replicas, now_ns=self.now_s * S))

    def report(self, key, work_done):
        now_ns = self.now_s * S
        self.apply(self.core.record_progress(key, float(work_done), at_ns=now_ns, now_ns=now_ns))

    def list_elastic(self):
        return [
            one
            for one in self.core.state.workloads.values()
            if one.share is not None and one.phase is WorkloadPhase.PLACED
        ]

    def advance(self, until_s):
        """Ends what ends by then, elastic jobs in the second in which their work is done, so never later than expected."""
        while True:
            done = [(compute_elastic_end_ns(one) // S, one.workload_id) for one in self.list_elastic()]
            next_s, key = min([*done, *self.ends[:1]], default=(until_s + 1, ""))
            if next_s > until_s:
                break
            if self.ends and (next_s, key) == self.ends[0]:
                self.end_next()
                continue
            self.now_s = max(self.now_s, next_s)
            self.ended[key] = self.now_s
            self.apply(self.core.cancel(key, now_ns=self.now_s * S))
            self.wake()
        self.now_s = max(self.now_s, until_s)
        self.wake()

    def replica_count(self, key):
        return self.core.workload(key).spec.replicas
