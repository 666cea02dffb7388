"""`python -m bench.scrape --out DIR`: Cost of a scrape: the controller at 1,213 nodes, the agent with 8 GPUs.

The controller's parts are composed as its daemon composes them, without a journal and without
processes: the openb fleet (1,213 nodes, 6,212 GPUs), the default task list submitted until some
wait, fresh readings of every node. `full` has 100 services, 100 jobs, 100 budgets and 150
namespaces in addition, the most that may have series of their own. Each scrape reads
everything again, because cached values are too old. "On the loop" is the part that blocks the
event loop; the text is rendered in a thread. The agent has 8 simulated H100 with all readings and
30 pods that share them, each in three parts; each scrape is of a new tick. For the agent "loop" is
not measured, because its server renders in a thread.

Targets: the controller under 50 ms and under 20 MB more at its peak (tracemalloc, in a scrape that
is not timed), the agent under 5 ms. Wall time, median and extremes; also CPU time, because the
machine is shared.
"""

import asyncio
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import click
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from bench.openb.traces import csv_folder
from bench.runner import Options, benchmark, data_option
from bench.tables import format_table, write_csv
from eelgrid_agent.devices.host import SimulatedHost
from eelgrid_agent.devices.sampler import read_extended_readings
from eelgrid_agent.energy.accounts import (
    EnergyAccount,
    EnergyUse,
    ShareConfidence,
    ShareMethod,
    UsageOwner,
    UsageOwnerKind,
)
from eelgrid_agent.energy.attributor import Attribution
from eelgrid_agent.metrics.collector import AgentCollector
from eelgrid_agent.metrics.server import ScrapeHandler
from eelgrid_agent.node.inventory import NodeIdentity, read_each_gpu, survey_devices
from eelgrid_agent.node.node import AgentNode
from eelgrid_agent.node.workload_engine import NoEngine
from eelgrid_agent.simulation.node import SimulatedNode
from eelgrid_agent.simulation.spec import GpuLoad, GpuSpec, NodeSpec
from eelgrid_controller.clock import RecentLatencies
from eelgrid_controller.core.core import Core
from eelgrid_controller.energy.ledger import EXPORTERS_MOST, Exporter, NamespaceSums
from eelgrid_controller.objectives.power.control_events import (
    BudgetControlStatus,
    JobControlStatus,
    LimitPhase,
    ServiceControlStatus,
)
from eelgrid_controller.objectives.status import ControlCounts
from eelgrid_controller.replay.openb import (
    NODE_LIST,
    TraceNode,
    openb_product_key,
    read_nodes,
    read_tasks,
    submission_of_task,
    task_list_name,
)
from eelgrid_controller.server.grpc.resource_views import ResourceViews
from eelgrid_controller.server.http.metrics_server import ControllerMetrics
from eelgrid_controller.server.metric_collectors import FleetMetrics, LedgerMetrics, ObjectiveMetrics, ShellMetrics
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.journal import JournalCounters
from eelgrid_controller.state.telemetry import Telemetry
from eelgrid_protos import catalogue
from eelgrid_protos.faults import Fault
from eelgrid_protos.messages import (
    BudgetScope,
    BudgetStatus,
    Column,
    Gpu,
    Inventory,
    NodeEventKind,
    PowerBudget,
    Reading,
    SampleBatch,
    Summary,
)
from eelgrid_protos.openmetrics import MetricFamily, render_openmetrics

_SECOND_NS = 1_000_000_000
_WAITING = 500
CONTROLLER_MS, CONTROLLER_MB, AGENT_MS = 50.0, 20.0, 5.0
CONTROLLER_CPU_MS, AGENT_CPU_MS = 20.0, 3.0


class Row(NamedTuple):
    """One measure: median and extremes of n, and what was asked."""

    measure: str
    median: float
    least: float
    most: float
    n: int
    asked: str


@dataclass(slots=True)
class _World:
    """The controller's parts with a clock that the measure moves."""

    core: Core
    telemetry: Telemetry
    now_s: float = 1e6
    views: ResourceViews = field(init=False)

    def __post_init__(self) -> None:
        self.views = ResourceViews(
            telemetry=self.telemetry,
            decisions=RecentLatencies(1000),
            now_ns=self.now_ns,
            monotonic_s=lambda: self.now_s,
        )

    def now_ns(self) -> int:
        return int(self.now_s * _SECOND_NS)


class _Sources:
    """What the composition hands to the page."""

    def __init__(self, world: _World, objectives: ObjectiveMetrics) -> None:
        self._world, self._objectives = world, objectives

    async def settled(self) -> None:
        """Nothing is written here."""

    def summary(self) -> Summary:
        """The cluster at a glance."""
        return self._world.views.recent_summary(self._world.core)

    def objectives(self) -> Iterable[MetricFamily]:
        """Promises and budgets."""
        state = self._world.core.state
        return self._objectives.families(state.workloads, state.policy)

    def shell(self) -> Iterable[MetricFamily]:
        """The controller's own work."""
        loop = SimpleNamespace(
            core=self._world.core,
            queued=0,
            journal_fault=None,
            lag_s=0.0,
            journal=SimpleNamespace(counters=JournalCounters()),
        )
        agents = SimpleNamespace(
            connected=1213, plans_sent=9, refused_batches=0, events=dict.fromkeys(NodeEventKind, 1), delayed_events=3
        )
        guard = SimpleNamespace(
            refused={"call": 1, "watch": 2}, ended={"flood": 1, "expired": 1, "authority": 1, "unread": 1, "idle": 1}
        )
        parts = cast("Any", (loop, agents, self._world.telemetry, guard))
        return ShellMetrics(*parts).families()


def _inventory(row: TraceNode, products: Iterable[str]) -> Inventory:
    key = openb_product_key(row.gpu_model, products) if row.gpu_count else ""
    gpus = tuple(
        Gpu(uuid=f"GPU-{row.name}-{index}", index=index, product=key, model=row.gpu_model, catalogue_key=key)
        for index in range(row.gpu_count)
    )
    return Inventory(
        node_name=row.name,
        cpu_milli=row.cpu_milli,
        memory_bytes=row.memory_bytes,
        generation=1,
        simulated=True,
        pool=row.gpu_model.lower() or "cpu",
        gpus=gpus,
    )


def _filled(data: Path) -> _World:
    """The fleet with work on it until some of it waits, and a reading of every GPU."""
    folder, products = csv_folder(data), catalogue.load_catalogue()
    world = _World(Core(ClusterState(), products), Telemetry(send_interval_s=1000.0))
    moment = 0
    for row in read_nodes(folder / NODE_LIST):
        moment += 1
        inventory = _inventory(row, products.products)
        world.core.register_node(inventory, now_ns=moment)
        world.telemetry.open_stream(inventory, 1)
        column = Column(reading=Reading.POWER_W, values=(100.0,) * row.gpu_count)
        batch = SampleBatch(
            sequence=1,
            inventory_generation=1,
            time_ns=(world.now_ns(),),
            gpu_columns=(column,) if row.gpu_count else (),
        )
        world.telemetry.receive_batch(row.name, batch, now_s=world.now_s)
    for task in read_tasks(folder / task_list_name("default")):
        moment += 1
        try:
            world.core.submit(submission_of_task(task), now_ns=moment)
        except Fault:
            continue
        if len(world.core.state.pending) >= _WAITING:
            break
    return world


def _build_objectives(promised: int) -> ObjectiveMetrics:
    services = tuple(
        ServiceControlStatus(f"s{n}", 1.0, 0.04, 0.05, 1.1, 0.1, False, cast("Any", LimitPhase.SETTLED), 2, 3, "")
        for n in range(promised)
    )
    jobs = tuple(
        JobControlStatus(f"j{n}", LimitPhase.SETTLED, 300.0, 310.0, 400.0, 0.05, 9.0, 0.1, "") for n in range(promised)
    )
    budgets = tuple(BudgetControlStatus(f"rack/r{n}", 9000.0, 7000.0 + n, 0.0, "", 100.0) for n in range(promised))
    counts = ControlCounts()
    counts.attainment.count_windows(services, {one.name: 0.05 for one in services})
    standing = SimpleNamespace(
        steering=SimpleNamespace(
            services=services, jobs=jobs, budgets=budgets, ignored={}, at_s=2.0, price_per_j=None, price_weight=1.0
        ),
        unsteered={},
    )
    shown = tuple(
        BudgetStatus(
            budget=PowerBudget(scope=BudgetScope.RACK, name=f"r{n}", limit_w=9100.0),
            claimed_w=7100.0 + n,
            measured_w=6000.0,
            measured_gpus=15,
            gpus=16,
        )
        for n in range(promised)
    )
    loop = SimpleNamespace(objectives_status=standing, budgets=lambda: shown, counts=counts, cycles=9, failures=0)
    return ObjectiveMetrics(cast("Any", loop), cast("Any", SimpleNamespace(target_count=0, pages=0, failures={})))


def _composed(world: _World, promised: int) -> ControllerMetrics:
    metrics = ControllerMetrics()
    metrics.attach(_Sources(world, _build_objectives(promised)))
    fleet = FleetMetrics(
        core=lambda: world.core,
        summary=lambda: world.views.recent_summary(world.core),
        telemetry=world.telemetry,
        monotonic_s=lambda: world.now_s,
        now_ns=world.now_ns,
    )
    metrics.add(fleet.families, reads_state=True)
    sums, _ = NamespaceSums({}).plus({f"team-{n}": n for n in range(promised * 3 // 2)})
    marks = {f"exporter-{n}": Exporter(f"exporter-{n}", 0, 1) for n in range(EXPORTERS_MOST)}
    desk = SimpleNamespace(
        windows=9,
        again=1,
        dropped=0,
        refused=0,
        unplaced=0,
        damaged_parts=0,
        failures=0,
        newest_ns=1,
        joules_by_namespace=sums.counters_mj,
        exporters=marks,
        forgotten={"age": 0, "size": 0},
        used_bytes=1,
        bytes_most=2,
    )
    metrics.add(LedgerMetrics(desk, now_ns=world.now_ns).families)
    for number in range(1000):
        metrics.on_decision(1e-6 * number, f"w-{number}")
    return metrics


def _row(measure: str, values: list[float], asked: str = "-") -> Row:
    return Row(
        measure, *(round(one, 3) for one in (statistics.median(values), min(values), max(values))), len(values), asked
    )


class _Both:
    """Wall and CPU time of what is called, in milliseconds."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self._began = 0.0, 0.0

    def __enter__(self) -> None:
        self._began = time.perf_counter(), time.process_time()

    def __exit__(self, *_: object) -> None:
        self.cpu.append(1e3 * (time.process_time() - self._began[1]))
        self.wall.append(1e3 * (time.perf_counter() - self._began[0]))

    def rows(self, name: str, wall_ms: float, cpu_ms: float) -> list[Row]:
        """Of what is asked to be below these."""
        return [_row(f"{name}_ms", self.wall, f"< {wall_ms:g}"), _row(f"{name}_cpu_ms", self.cpu, f"< {cpu_ms:g}")]


class _Collected:
    """What the client library's writer takes for a registry."""

    def __init__(self, families: list[Any]) -> None:
        self._families = families

    def collect(self) -> list[Any]:
        """Everything."""
        return self._families


async def _controller(world: _World, promised: int, rounds: int) -> list[Row]:
    metrics, name = _composed(world, promised), "full" if promised else "plain"
    page, loop, ours, library = _Both(), _Both(), _Both(), _Both()
    for _ in range(rounds):
        world.now_s += 1.0
        with page:
            await metrics.render_page(opened=True)
        world.now_s += 1.0
        with loop:
            families = list(metrics.collect())
        with ours:
            render_openmetrics(families)
        with library:
            generate_openmetrics(cast("Any", _Collected(families)))
    peak_mb, text = await _peak(world, metrics)
    return [
        *page.rows(f"controller_{name}", CONTROLLER_MS, CONTROLLER_CPU_MS),
        _row(f"controller_{name}_on_the_loop_ms", loop.wall),
        _row(f"controller_{name}_on_the_loop_cpu_ms", loop.cpu),
        _row(f"controller_{name}_text_cpu_ms", ours.cpu),
        _row(f"controller_{name}_text_by_the_library_cpu_ms", library.cpu),
        _row(f"controller_{name}_peak_mb", [peak_mb], f"< {CONTROLLER_MB:g}"),
        _row(f"controller_{name}_series", [_series(text)]),
        _row(f"controller_{name}_page_kb", [len(text) / 1e3]),
    ]


async def _peak(world: _World, metrics: ControllerMetrics) -> tuple[float, bytes]:
    """Memory that a scrape takes at its highest, and the page."""
    tracemalloc.start()
    world.now_s += 1.0
    page = await metrics.render_page(opened=True)
    peak_mb = tracemalloc.get_traced_memory()[1] / 1e6
    tracemalloc.stop()
    return peak_mb, page


def _series(page: bytes) -> float:
    return float(sum(len(one.samples) for one in text_string_to_metric_families(page.decode())))


class _HandClock:
    def __init__(self) -> None:
        self.now_ns = _SECOND_NS

    def monotonic_ns(self) -> int:
        return self.now_ns

    def wall_ns(self) -> int:
        return self.now_ns


def _shared(uuids: tuple[str, ...], sharers: int) -> Attribution:
    accounts = {}
    for number in range(sharers):
        owner = UsageOwner(
            kind=UsageOwnerKind.POD, namespace=f"team-{number % 5}", pod=f"job-{number}-worker-0", container="main"
        )
        for part in (EnergyUse.BARE_IDLE, EnergyUse.CONTEXT_IDLE, EnergyUse.ACTIVE):
            account = EnergyAccount(
                owner=owner.account(),
                gpu_uuid=uuids[number % len(uuids)],
                part=part,
                method=ShareMethod.PROCESS_SM,
                confidence=ShareConfidence.MEDIUM,
            )
            accounts[account] = 1000 + number
    return Attribution(
        shares={}, accounts=accounts, nobody={key: {"unallocated": 3000} for key in uuids}, estimates={}, anomalies=()
    )


def _agent_page(sharers: int) -> tuple[ScrapeHandler, Callable[[], None]]:
    """A page, and what makes a new tick."""
    clock, engine = _HandClock(), NoEngine()
    spec = NodeSpec(
        node_name="n",
        cpu_milli=128_000,
        memory_bytes=10**12,
        gpus=tuple(GpuSpec(product="h100-sxm5-80gb") for _ in range(8)),
    )
    device = SimulatedNode(spec, monotonic_ns=clock.monotonic_ns, seed=1)
    host = SimulatedHost(cpu_milli=128_000, memory_bytes=10**12, load=engine.host_load, monotonic_ns=clock.monotonic_ns)
    node = AgentNode(
        NodeIdentity(node_name="n", agent_version="bench", simulated=True),
        host=host,
        engine=engine,
        clock=clock,
        draw_incarnation=lambda: 1,
        ticks_most=10,
        first=survey_devices(device),
    )
    for uuid in node.gpu_uuids:
        device.set_load(uuid, GpuLoad(utilization_ratio=0.7, memory_bytes=40 * 2**30))
    shares = _shared(tuple(node.gpu_uuids), sharers)
    collector = AgentCollector(
        [node], connections=lambda: 1, monotonic_ns=clock.monotonic_ns, attribution=lambda: shares
    )
    page = ScrapeHandler(collector, ticks=lambda: node.ticks_total, monotonic_ns=clock.monotonic_ns)

    def tick() -> None:
        clock.now_ns += _SECOND_NS
        node.observe_slow(read_extended_readings(device, node.gpu_uuids))
        node.record_tick(read_each_gpu(device, node.gpu_uuids), monotonic_ns=clock.now_ns)

    return page, tick


def _agent(sharers: int, rounds: int) -> list[Row]:
    page, tick = _agent_page(sharers)
    rows = []
    for name, encoding in (("agent", ""), ("agent_gzip", "gzip")):
        tick()
        # The first makes the names of series, which are kept.
        answer = page.build_response("/metrics", accept="application/openmetrics-text", accept_encoding=encoding)
        took = _Both()
        for _ in range(rounds):
            tick()
            with took:
                page.build_response("/metrics", accept="application/openmetrics-text", accept_encoding=encoding)
        rows += [_row(f"{name}_page_kb", [len(answer.body) / 1e3]), *took.rows(name, AGENT_MS, AGENT_CPU_MS)]
    tick()
    tracemalloc.start()
    whole = page.build_response("/metrics", accept="application/openmetrics-text").body
    peak_mb = tracemalloc.get_traced_memory()[1] / 1e6
    tracemalloc.stop()
    return [*rows, _row("agent_peak_mb", [peak_mb]), _row("agent_series", [_series(whole)])]


@benchmark(out="bench-out/scrape")
@data_option()
@click.option("--rounds", default=50)
@click.option("--sharers", default=30)
def main(options: Options) -> int:
    """Measures, prints and writes DIR/summary.csv."""
    world = _filled(options.data)
    state = world.core.state
    rows = [
        _row("nodes", [len(state.nodes)]),
        _row("gpus", [sum(len(one.inventory.gpus) for one in state.nodes.values())]),
    ]
    rows.append(_row("workloads", [len(state.workloads)]))
    for promised in (0, 100):
        rows += asyncio.run(_controller(world, promised, options.rounds))
    rows += _agent(options.sharers, options.rounds)
    write_csv(options.out / "summary.csv", Row._fields, rows)
    print(format_table(Row._fields, rows, 1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
