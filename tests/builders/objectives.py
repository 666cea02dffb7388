"""The control loop of objectives over a real loop, core and telemetry, with clocks and pages that a test sets.

Owns the fakes of its two ports beside the loop: what servers' pages say, and which time
it is. Must not know what is expected of it.
"""

import asyncio
import contextlib
import dataclasses
import logging
import time
from dataclasses import replace
from pathlib import Path

from eelgrid_controller.clock import Clock
from eelgrid_controller.core.core import Core
from eelgrid_controller.objectives.control_loop import ControlLoop
from eelgrid_controller.objectives.forecasts import LearningFailed
from eelgrid_controller.objectives.observation import ObjectiveSettings
from eelgrid_controller.objectives.services.service_metrics import MetricsWindow, ScrapeRound
from eelgrid_controller.runtime.config import ControllerConfig
from eelgrid_controller.runtime.loop import ControllerLoop
from eelgrid_controller.runtime.scraper import parse_samples
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.telemetry import Telemetry
from eelgrid_protos import catalogue
from eelgrid_protos.messages import (
    ApplyResult,
    ApplyStatus,
    Column,
    EnforcementMode,
    LatencyMetric,
    LatencyObjective,
    MetricsServer,
    MetricsSource,
    PlanApplied,
    PoolMode,
    Reading,
    ResourceRequest,
    SampleBatch,
    ServicePromise,
    ServiceStatus,
    SubmitWorkloadRequest,
    TrainingPromise,
    WorkloadKind,
    WorkloadSpec,
)
from tests.builders.cluster import build_node
from tests.builders.server import MemoryJournal
from tests.fakes.metrics_servers import Replica

LOG = logging.getLogger("test.objectives")
WHOLE = ResourceRequest(cpu_milli=1000, memory_bytes=2**30, gpu_count=1, gpu_milli=1000)
URL = "http://{node}:8000/{replica}/metrics"
VLLM = MetricsSource(server=MetricsServer.VLLM, url=URL)


def build_powered_node(name, *, gpus=4, pool="p", least_w=100.0, default_w=400.0):
    """A node whose GPUs have power limits."""
    limits = {"power_limit_default_w": default_w, "power_limit_min_w": least_w, "power_limit_max_w": default_w}
    plain = build_node(name, gpus=gpus, pool=pool)
    return replace(plain, gpus=tuple(replace(gpu, **limits) for gpu in plain.gpus))


def build_service(key, *, replicas=1, metrics=VLLM, profile="llm", **promise):
    """A service that answers token by token."""
    objective = LatencyObjective(metric=LatencyMetric.INTER_TOKEN, latency_s=0.05)
    promised = ServicePromise(
        profile=profile, objectives=(objective,), output_tokens=100.0, metrics=metrics, start_s=10.0, **promise
    )
    spec = WorkloadSpec(
        name=key, kind=WorkloadKind.INFERENCE_SERVICE, request=WHOLE, replicas=replicas, service=promised
    )
    return SubmitWorkloadRequest(workload_id=key, spec=spec)


def build_training_job(key, *, replicas=1, gpus=1, **promise):
    """A training job."""
    training = TrainingPromise(**(promise or {"slowdown_most": 0.1}))
    request = replace(WHOLE, gpu_count=gpus)
    spec = WorkloadSpec(name=key, kind=WorkloadKind.TRAINING_JOB, request=request, replicas=replicas, training=training)
    return SubmitWorkloadRequest(workload_id=key, spec=spec)


def build_service_status(name="s", **changes):
    """What is reported of a service that keeps its objective."""
    fields = {"workload_id": name, "name": name, "phase": "steady", "objective_s": 0.5}
    return ServiceStatus(**(fields | changes))


def build_metrics_window(rate_hz=1.0, *, seconds=30.0, waiting=0.0, growth=0.0, **fields):
    """A window in which a service answered all that came; what `fields` do not name its servers do not tell."""
    known = {
        "seconds": seconds,
        "arrived_hz": rate_hz,
        "finished_hz": rate_hz,
        "waiting": waiting,
        "waiting_growth": growth,
    }
    names = (field.name for field in dataclasses.fields(MetricsWindow))
    return MetricsWindow(**dict.fromkeys(names) | known | fields)


class Pages:
    """What servers' pages say; implements the control loop's port."""

    def __init__(self):
        self.asked = {}
        self.rounds = {}
        self.runs = 0

    def set_targets(self, asked):
        self.asked = dict(asked)
        return frozenset()

    def collect_rounds(self):
        taken, self.rounds = self.rounds, {}
        return taken

    async def run(self):
        self.runs += 1
        await asyncio.Event().wait()


class NoLearner:
    """Learns nothing; implements the port of forecasts."""

    def __call__(self, profiles, family):
        raise LearningFailed("nobody learns here", "give the world a learner")

    def close(self):
        pass


class ObjectivesWorld:
    """The control loop and all that is around it; `now_s` is both clocks."""

    def __init__(self, journal=None, start_s=1_700_000_000.0, learner=None, **settings):
        self.learner = learner or NoLearner()
        self.now_s = start_s
        self.clock = Clock(lambda: int(self.now_s * 1e9), lambda: self.now_s, time.perf_counter)
        self.journal = journal or MemoryJournal()
        self.loop = ControllerLoop(
            journal=self.journal,
            fresh_state=ClusterState,
            make_core=lambda state: Core(state, catalogue.load_catalogue()),
            config=ControllerConfig(data=Path()),
            clock=self.clock,
            log=LOG,
        )
        self.telemetry = Telemetry(send_interval_s=5.0)
        self.pages = Pages()
        self.settings = ObjectiveSettings(**({"hold_s": 60.0, "cool_s": 10.0} | settings))
        self.servers = {}  # Replica by (workload, replica)
        self.energy_j = {}
        self._sequences = {}

    async def start(self):
        await self.loop.start()
        for name in self.loop.core.state.nodes:
            self.loop.presence.mark_connected(name)  # agents are back at once
            self.telemetry.open_stream(self.loop.core.state.nodes[name].inventory, 1)
        self.control_loop = ControlLoop(
            loop=self.loop,
            telemetry=self.telemetry,
            pages=self.pages,
            catalogue=catalogue.load_catalogue(),
            settings=self.settings,
            clock=self.clock,
            log=LOG,
            learner=self.learner,
        )

    async def join(self, *inventories):
        for item in inventories:
            await self.loop.register_node(item)
            self.telemetry.open_stream(item, 1)

    async def enforce(self, *pools, **changes):
        modes = tuple(PoolMode(pool=pool, mode=EnforcementMode.ENFORCE) for pool in pools)
        await self.loop.update_policy(replace(self.loop.core.state.policy, pools=modes, **changes))

    def workload(self, key):
        return self.loop.core.state.workloads[key]

    def replicas(self, key):
        return len(self.workload(key).placements)

    def limit_w(self, node_name, uuid):
        """What the plan sets, else the default."""
        plan = self.loop.core.node_plan(node_name)
        set_w = {one.gpu_uuid: one.power_limit_w for one in plan.gpu_settings} if plan.enforce else {}
        record = self.loop.core.state.nodes[node_name]
        return set_w.get(uuid) or record.gpu(uuid).power_limit_default_w

    def samples(self, *names, power_w=200.0, seconds=5.0, limits=None, answer=True):
        """A batch of each node, and its answer to its plan, as an agent that has carried it out."""
        for name in names:
            inventory = self.loop.core.state.nodes[name].inventory
            uuids = [gpu.uuid for gpu in inventory.gpus]
            shown = [self.limit_w(name, uuid) if limits is None else limits for uuid in uuids]
            for uuid, limit_w in zip(uuids, shown, strict=True):
                self.energy_j[uuid] = self.energy_j.get(uuid, 0.0) + seconds * min(power_w, 0.9 * limit_w)
            self._sequences[name] = self._sequences.get(name, 0) + 1
            columns = (
                Column(reading=Reading.ENERGY_J, values=tuple(self.energy_j[uuid] for uuid in uuids)),
                Column(reading=Reading.POWER_LIMIT_W, values=tuple(shown)),
            )
            batch = SampleBatch(
                sequence=self._sequences[name],
                inventory_generation=inventory.generation,
                time_ns=(int(self.now_s * 1e9),),
                gpu_columns=columns,
            )
            self.telemetry.receive_batch(name, batch, now_s=self.now_s)
            if answer:
                plan = self.loop.core.node_plan(name)
                results = tuple(
                    ApplyResult(subject=one.gpu_uuid, status=ApplyStatus.APPLIED, power_limit_w=one.power_limit_w)
                    for one in plan.gpu_settings
                )
                self.telemetry.record_plan_applied(
                    name,
                    PlanApplied(epoch=plan.epoch, status=ApplyStatus.APPLIED, results=results if plan.enforce else ()),
                )

    def serve(self, key, rate_hz, seconds=15.0, *, missing=()):
        """A round of pages: each replica serves its share of a rate as the profile says; what is too much waits."""
        asked = self.pages.asked[key]
        pages = {}
        for number, url in asked.urls.items():
            replica = self.servers.setdefault((key, number), Replica())
            replica.started_s = 1.0
            came = replica.waiting + round(rate_hz * seconds / len(asked.urls))
            done = min(came, round(40.0 * seconds))
            held = done / seconds * 100.0 / 1000.0
            replica.served(done, inter_s=0.01 * max(1.0, min(4.0, held + held**0.5)))
            replica.waiting = came - done
            page = parse_samples(replica.page().encode(), asked.names, self.now_s)
            pages[number, url] = "hung" if number in missing else page
        gone = [one for one in self.servers if one[0] == key and one[1] not in asked.urls]
        for one in gone:
            del self.servers[one]
        self.pages.rounds[key] = ScrapeRound(self.now_s, pages)

    async def cycle(self, seconds=5.0):
        self.now_s += seconds
        await self.control_loop.run_cycle()
        assert self.control_loop.failures == 0


@contextlib.asynccontextmanager
async def run_objectives(journal=None, **settings):
    """A world that is started, and stopped as a crash would."""
    world = ObjectivesWorld(journal, **settings)
    await world.start()
    try:
        yield world
    finally:
        world.control_loop._thread.shutdown()
        world.control_loop._telling.forecasts.close()
        await world.loop.stop()
