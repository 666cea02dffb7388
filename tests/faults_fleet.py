"""The fleet in which faults are rehearsed: which agents, which work, and the faults by name.

Owns what each fault does to a running fleet and how it is taken back. Must not know which
alert follows.
"""

import contextlib
import itertools
import sqlite3
import threading
import time

import pytest

from eelgrid_protos import faults
from eelgrid_protos.messages import (
    BudgetScope,
    ConfirmEnergyExportRequest,
    EnforcementMode,
    LatencyMetric,
    LatencyObjective,
    MetricsServer,
    MetricsSource,
    PoolMode,
    PowerBudget,
    RecordPointsRequest,
    RemoveEnergyExporterRequest,
    ResourceRequest,
    ServicePromise,
    SpendingPeriod,
    SubmitWorkloadRequest,
    TrainingPromise,
    WorkloadKind,
    WorkloadSpec,
)
from tests.builders.cluster import build_spending_limit
from tests.builders.profiles import build_engine_points
from tests.e2e.objectives_test import Fleet
from tests.fakes.metrics_servers import Listener
from tests.faults_rig import Scene
from tests.slow_disk import SlowDisk

# Each kind of fault has a part of its own, so that labels tell by which fault an alert fires.
PARTS = {
    "lost": "h100-pcie-80gb",
    "flapping": "h100-pcie-80gb",
    "broken": "h100-pcie-80gb",
    "contained": "h100-pcie-80gb",
    "worn": "h100-pcie-80gb",
    "used": "h100-pcie-80gb",
    "stalled": "h200-sxm-141gb",
    "held": "b200",
    "half-sliced": "a100-sxm4-80gb",
}
PLACES = {name: place for place, name in enumerate(PARTS)}
AGENTS = (
    ("devices", [{"product": product} for product in PARTS.values()], ()),
    ("lonely", [{"product": "l40s"}], ("--spool-ticks", "5")),
    # The budget is a little below what its one GPU draws, so that the agent holds a limit.
    ("limited", [{"product": "a100-sxm4-40gb"}], ("--power-budget", "370W")),
    ("serving", [{"product": "h100-sxm5-80gb", "count": 2}], ()),
)
FLAGS = (
    "--away-grace",
    "3",
    "--restart-grace",
    "10",
    "--steer-interval",
    "0.5",
    "--scrape-interval",
    "1",
    "--scale-hold",
    "3",
    "--job-window",
    "2",
    "--spend-interval",
    "0.5",
)
SERVED_HZ = 25.0
STRANGER = 4711


class Servers(Fleet):
    """The servers of the service and of the job; slow ones take a fifth of a second for each token.

    `stutter` of N: half of what each Nth page tells beside the page before was slow, so that one window in N is missed,
    however often somebody looks.
    """

    slow = False
    stutter = 0
    _pages = 0

    def reply(self, path):
        """The page, after what is to be slow on it."""
        if self.stutter and not path.startswith("/job"):
            self._pages += 1
            if self._pages % self.stutter == 0:
                with self._lock:
                    for replica in self.replicas.values():
                        replica.served(round(self.rate_hz), inter_s=0.2)
        return super().reply(path)

    def _serve(self, seconds):
        if not self.slow:
            super()._serve(seconds)
            return
        for replica in self.replicas.values():
            replica.served(max(1, round(self.rate_hz * seconds)), inter_s=0.2)


class FaultyFleet(Scene):
    """The fleet at work; a context."""

    def __init__(self, folder):
        super().__init__(folder, AGENTS, *FLAGS)
        self.servers = Servers()
        self.servers.rate_hz = SERVED_HZ
        self.listener = None

    def __enter__(self):
        self._held.enter_context(self.servers)
        self.listener = Listener(self.servers.reply)
        self._held.callback(self.unplug)
        super().__enter__()
        try:
            self._work()
        except BaseException:
            self._held.close()
            raise
        return self

    def _work(self):
        self.set_policy(pools=(PoolMode(pool="serving", mode=EnforcementMode.ENFORCE),))
        self.cluster.operators.record_points(
            RecordPointsRequest(points=tuple(build_engine_points(model="H100-80GB-HBM3"))), timeout=10.0
        )
        url = self.listener.url.removesuffix("/metrics")
        inter = LatencyObjective(metric=LatencyMetric.INTER_TOKEN, latency_s=0.05)
        pages = MetricsSource(server=MetricsServer.VLLM, url=url + "/{replica}/metrics", model="m")
        promise = ServicePromise(
            profile="llm", objectives=(inter,), output_tokens=100.0, replicas_most=1, start_s=1.0, metrics=pages
        )
        self.submit("chat", "H100-80GB-HBM3", kind=WorkloadKind.INFERENCE_SERVICE, service=promise)
        counter = MetricsSource(server=MetricsServer.GENERIC, url=url + "/job/metrics", work_counter="steps_total")
        training = TrainingPromise(slowdown_most=0.2, metrics=counter)
        self.submit("train", "H100-80GB-HBM3", kind=WorkloadKind.TRAINING_JOB, training=training)
        for key, model in (("burner", "A100-SXM4-40GB"), ("collective", "H200"), ("notebook", "B200")):
            self.submit(key, model)

    # Faults, each with what takes it back

    def at(self, name, fault, **fields):
        """Does this to the GPU of that name."""
        self.agents["devices"].fault(fault, PLACES[name], **fields)

    def flap(self):
        """A GPU falls off three times."""
        for _ in range(3):
            self.at("flapping", "lose")
            time.sleep(1.1)
            self.at("flapping", "restore")
            time.sleep(0.7)

    def meddle(self, times):
        """Somebody sets another limit by hand, again and again."""
        for _ in range(times):
            self.agents["limited"].fault("limit_power", 0, watts=400)
            time.sleep(1.2)

    def budget(self, **limits_w):
        """Budgets of nodes, and of no others."""
        budgets = [PowerBudget(scope=BudgetScope.NODE, name=name, limit_w=watts) for name, watts in limits_w.items()]
        self.set_policy(budgets=tuple(budgets))

    def limit_spending(self, *limits):
        """The GPU time of everybody's namespace has these limits, of (period, seconds, share that warns), and no others."""
        made = [
            build_spending_limit(
                name="default", period=SpendingPeriod[period.upper()], most=seconds, warn_ratio=warn_ratio
            )
            for period, seconds, warn_ratio in limits
        ]
        self.set_policy(spending=tuple(made))

    def unplug(self):
        """The servers' pages are gone."""
        self.listener.__exit__()

    def plug(self):
        """They are back where they were."""
        self.listener = Listener(self.servers.reply, port=self.listener.server_address[1])

    def cancel_in_vain(self, key):
        """Somebody ends a workload, and is told that nothing can be kept."""
        with pytest.raises(faults.Fault):
            self.cancel(key)

    def begin_export(self, name):
        """Somebody takes rows of the ledger until yesterday elsewhere, and then none."""
        day_ns, now_ns = 86_400 * 10**9, time.time_ns()
        request = ConfirmEnergyExportRequest(name=name, begin_ns=now_ns - 2 * day_ns, end_ns=now_ns - day_ns)
        self.cluster.operators.confirm_energy_export(request, timeout=10.0)

    def end_export(self, name):
        """Nobody waits for it any more."""
        self.cluster.operators.remove_energy_exporter(RemoveEnergyExporterRequest(name=name), timeout=10.0)

    def file(self, name):
        """A file of the controller's data."""
        return self.cluster.data / name

    def slow_disk(self, delay_s):
        """The controller's flushes take so much longer."""
        return SlowDisk(self.controller.process.pid, delay_s)


class Callers:
    """People who submit and end work of CPUs without a pause, so that some command always waits; one thread each."""

    def __init__(self, fleet, count):
        self._fleet = fleet
        self._done = threading.Event()
        self._threads = [threading.Thread(target=self._call, args=(number,), daemon=True) for number in range(count)]

    def begin(self):
        for thread in self._threads:
            thread.start()

    def end(self):
        self._done.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def _call(self, number):
        for turn in itertools.count():
            if self._done.is_set():
                return
            key = f"caller-{number}-{turn}"
            spec = WorkloadSpec(name=key, request=ResourceRequest(cpu_milli=100, memory_bytes=2**20))
            request = SubmitWorkloadRequest(workload_id=key, spec=spec)
            self._fleet.cluster.operators.submit_workload(request, timeout=60.0)
            self._fleet.cancel(key)


class Locked:
    """Another program that holds a SQLite file."""

    def __init__(self, path):
        self._path = path
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._hold, daemon=True)

    def begin(self):
        self._thread.start()

    def end(self):
        self._done.set()
        self._thread.join()

    def _hold(self):
        with contextlib.closing(sqlite3.connect(self._path, isolation_level=None, timeout=30.0)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            self._done.wait()
            connection.execute("ROLLBACK")
