"""One run of the demo: start, wait, submit, settle, report, end; more under --keep.

A child process runs in a session of its own, so that Ctrl-C reaches only the demo, which then ends its children in
order: SIGTERM, some seconds, SIGKILL; by pid, never by name, and whatever happens. Prometheus, where installed, keeps
its data in the demo's temporary folder. The sample node has an agent of its own, which shows all series of a real node
(devices, MIG slices, owners); the agent that simulates a whole fleet shows none, or its metrics page would have
millions.

DemoError                   the demo cannot continue; the message says what to do
├── ChildDied               a process ended by itself; carries its last log lines
└── ProcessSilent           a process did not respond in time
"""

import asyncio
import json
import random
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from eelgrid_controller.demo import display
from eelgrid_controller.demo.display import DemoReport, DemoView, ProcessFigures
from eelgrid_controller.formatting import describe_start
from eelgrid_controller.replay.openb import submission_of_task, write_fleet_file
from eelgrid_controller.replay.submitter import SubmitLimits, SubmitReport, Submitter
from eelgrid_controller.replay.trace_loading import OpenbTrace
from eelgrid_protos import catalogue, faults, rpc, transport
from eelgrid_protos.messages import (
    GetSummaryRequest,
    GpuStatus,
    ListGpusRequest,
    ResourceRequest,
    SubmitWorkloadRequest,
    Summary,
    WatchSummaryRequest,
    WorkloadKind,
    WorkloadSpec,
)

_TERM_S = 8.0
_TAIL_BYTES = 16_384
_TAIL_LINES = 15


class DemoError(Exception):
    """The demo cannot continue."""

    def __init__(self, what: str, remedy: str, log: str = "") -> None:
        self.what, self.remedy, self.log = what, remedy, log
        super().__init__(f"{what}; {remedy}")


class ChildDied(DemoError):
    """A process ended by itself."""


class ProcessSilent(DemoError):
    """A process did not respond in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessUsage:
    """What a process has used since its start."""

    cpu_s: float
    memory_bytes: int


class DemoProcess:
    """One process and its log file."""

    def __init__(self, name: str, command: Sequence[str], log: Path) -> None:
        self.name = name
        self.log = log
        with log.open("wb") as out:
            self._process = subprocess.Popen(  # noqa: S603 - our own programs
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
        self._handle: Any = None
        self.peak_memory_bytes = 0

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def check(self) -> None:
        """Raises ChildDied if the process has ended."""
        code = self._process.poll()
        if code is not None:
            raise ChildDied(
                f"{self.name} ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}",
                f"its last log lines are above; the whole log is {self.log}",
                self.tail(),
            )

    def tail(self) -> str:
        """Returns the last lines of the log."""
        with suppress(OSError), self.log.open("rb") as stream:
            stream.seek(0, 2)
            stream.seek(max(0, stream.tell() - _TAIL_BYTES))
            lines = stream.read().decode("utf-8", "replace").splitlines()
            return "\n".join(lines[-_TAIL_LINES:])
        return ""

    def usage(self) -> ProcessUsage | None:
        """Returns CPU seconds and resident memory, None once the process is gone."""
        import psutil

        try:
            if self._handle is None:
                self._handle = psutil.Process(self.pid)
            times, memory_bytes = self._handle.cpu_times(), self._handle.memory_info().rss
        except psutil.Error:
            return None
        self.peak_memory_bytes = max(self.peak_memory_bytes, memory_bytes)
        return ProcessUsage(cpu_s=times.user + times.system, memory_bytes=memory_bytes)

    async def end(self) -> None:
        """Ends the process if it runs, and waits until it is gone."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                await asyncio.to_thread(self._process.wait, _TERM_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait()

    def kill(self) -> None:
        """Kills the process: the last resort, when the event loop no longer runs."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


# As dense as the agents' batches, so that graphs fill while somebody looks.
SCRAPE_S = 5
_PROMETHEUS_READY_S = 30.0
_PROMETHEUS_POLL_S = 0.2
_RETENTION = "6h"
_RULES = Path("deploy/helm/eelgrid/files/rules.yaml")


def alert_rules_file() -> Path | None:
    """The chart's rules, where the demo runs from the sources; an installed package has none."""
    found = Path(__file__).resolve().parents[3] / _RULES
    return found if found.is_file() else None


def prometheus_configuration(
    targets: Mapping[str, Sequence[str]], rules: Path | None, *, scrape_s: int = SCRAPE_S
) -> str:
    """Prometheus' configuration: jobs of addresses, under the names that the chart gives its jobs."""
    jobs = [
        # Our own labels of nodes and pods stay, as the chart's monitors have it.
        {"job_name": name, "honor_labels": True, "static_configs": [{"targets": list(addresses)}]}
        for name, addresses in targets.items()
    ]
    times = {"scrape_interval": f"{scrape_s}s", "scrape_timeout": f"{scrape_s}s", "evaluation_interval": f"{scrape_s}s"}
    return yaml.safe_dump(
        {"global": times, "scrape_configs": jobs, "rule_files": [] if rules is None else [str(rules)]}, sort_keys=False
    )


def prometheus_command(path: str, configured: Path, folder: Path, address: str) -> list[str]:
    """How it is started: on the loopback, without its console pages, keeping some hours."""
    return [
        path,
        f"--config.file={configured}",
        f"--storage.tsdb.path={folder}",
        f"--web.listen-address={address}",
        f"--storage.tsdb.retention.time={_RETENTION}",
        "--log.level=warn",
    ]


async def wait_for_prometheus(address: str) -> bool:
    """Whether it answers within half a minute."""
    deadline_s = time.monotonic() + _PROMETHEUS_READY_S
    while time.monotonic() < deadline_s:
        if await asyncio.to_thread(_is_prometheus_ready, address):
            return True
        await asyncio.sleep(_PROMETHEUS_POLL_S)
    return False


def _is_prometheus_ready(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{address}/-/ready", timeout=2.0) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


SAMPLE_NODE_NAME = "demo-node"
# An agent of one node asks through NVML, which tells products: the model is the catalogue's.
_PRODUCT, _MODEL = "a100-sxm4-40gb", "A100-SXM4-40GB"
_GIB = 1024**3
_NODE = {
    "name": SAMPLE_NODE_NAME,
    "count": 1,
    "cpu_milli": 96_000,
    "memory_bytes": 768 * _GIB,
    "pool": "demo",
    "topology": "zone-a/spine-1/rack-1",
    "gpus": [
        {"product": _PRODUCT, "count": 3},
        {"product": _PRODUCT, "mig": ["3g@4", "1g.5gb@0"]},
    ],
}


def write_sample_node(path: Path) -> None:
    """The fleet file of this one node."""
    path.write_text(json.dumps({"nodes": [_NODE]}) + "\n", encoding="utf-8")


def sample_submissions() -> tuple[SubmitWorkloadRequest, ...]:
    """A training job on two devices and a service with two shares of the third: no other node has this model."""
    return (
        _submission("demo-train", WorkloadKind.TRAINING_JOB, user="ann", gpu_count=2, gpu_milli=1000),
        _submission("demo-serve-a", WorkloadKind.INFERENCE_SERVICE, user="bob", gpu_count=1, gpu_milli=500),
        _submission("demo-serve-b", WorkloadKind.INFERENCE_SERVICE, user="bob", gpu_count=1, gpu_milli=300),
    )


def _submission(name: str, kind: WorkloadKind, *, user: str, gpu_count: int, gpu_milli: int) -> SubmitWorkloadRequest:
    request = ResourceRequest(
        cpu_milli=4000, memory_bytes=16 * _GIB, gpu_count=gpu_count, gpu_milli=gpu_milli, gpu_models=(_MODEL,)
    )
    spec = WorkloadSpec(name=name, kind=kind, namespace="demo", user=user, request=request, labels={"team": "demo"})
    return SubmitWorkloadRequest(workload_id=name, spec=spec)


# Compiling the kernels on a machine that never did takes the longest of all.
_READY_S = 180.0
_JOIN_S = 120.0
# A batch of every agent (5 s), and the tick before it.
_SETTLE_S = 7.0
_GPU_S = 15.0
_POLL_S = 0.1
_WATCH_S = 0.5
# A summary of a thousand nodes takes the controller some 20 ms, during which it places nothing.
_SUMMARY_S = 1.0
_SILENCE_S = 60.0
_REAL_NODE = "this-machine"
# Windows of energy that all agents together send in a second: a small fleet's ledger fills sooner.
_WINDOWS_HZ = 20.0
_WINDOW_S = (5.0, 60.0)


def _free_port() -> int:
    """Finds a free loopback port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@dataclass(slots=True, kw_only=True)
class DemoRun:
    """One run of the demo."""

    trace: OpenbTrace
    scene: DemoView
    out: Path
    work: Path
    in_flight: int
    has_gpu: bool
    notes: list[str]
    # Whether it is to be looked at afterwards: with a page and Prometheus, where there are any.
    keep: bool = False
    address: str = ""
    # Addresses of metrics by child, and of the page and Prometheus, empty without one.
    metrics: dict[str, str] = field(default_factory=dict)
    page: str = ""
    prometheus: str = ""
    # Every process of this run, so that the caller can end what an interrupted ending left.
    children: list[DemoProcess] = field(default_factory=list)

    async def run(self, afterwards: Callable[[DemoReport, str], Awaitable[None]]) -> DemoReport:
        """Runs the demo; awaits `afterwards` while everything is still running."""
        begun_s = time.monotonic()
        self.address = f"127.0.0.1:{_free_port()}"
        async with AsyncExitStack() as stack:
            controller = self._start(
                stack, "controller", "eelgrid_controller", "--data", str(self.work / "data"), *self._page_flags()
            )
            client = rpc.build_client(
                rpc.OPERATOR_SERVICE,
                await stack.enter_async_context(transport.open_channel(self.address, tls=None, insecure=False)),
            )
            # Beside the compilation of kernels; its agents connect as soon as they can.
            write_fleet_file(self.work / "fleet.json", self.trace.nodes, catalogue.load_catalogue().products)
            fleet = self._start(
                stack,
                "fleet",
                "eelgrid_agent",
                "--simulate",
                str(self.work / "fleet.json"),
                "--energy-window",
                f"{_window_s(len(self.trace.nodes)):g}",
            )
            children = (controller, fleet)
            await self._ready(client, controller)
            ready_s = time.monotonic()
            stack.push_async_callback(_cancel, asyncio.create_task(self._watch_summary(client)))
            await self._wait_for_nodes(client, children)
            joined_s = time.monotonic()
            submitted = await self._submit(client, children)
            steady = await self._wait_for_power(children)
            self.scene.summary = summary = await self._summary(client)
            times_s = ready_s - begun_s, joined_s - ready_s, time.monotonic() - begun_s
            result = self._report(summary, submitted, times_s, [_figures(c, steady.get(c.name)) for c in children])
            self.scene.show_phase("done")
            self.scene.stop()
            text = json.dumps(asdict(result), indent=2, ensure_ascii=False)
            (self.out / "summary.json").write_text(text + "\n", encoding="utf-8")
            display.print_report(self.scene.console, result)
            if self.has_gpu:
                await self._observe(client, stack)
            if self.keep:
                await self._one_node(client, stack)
                await self._monitor(stack)
            await afterwards(result, self.address)
        return result

    def _start(self, stack: AsyncExitStack, name: str, module: str, *arguments: str) -> DemoProcess:
        side = ["--listen", self.address] if name == "controller" else ["--controller", self.address]
        side += [] if name == "controller" else ["--listen", "127.0.0.1:0"]
        self.metrics[name] = metrics = f"127.0.0.1:{_free_port()}"
        return self._launch(stack, name, [sys.executable, "-m", module, *side, "--metrics", metrics, *arguments])

    def _launch(self, stack: AsyncExitStack, name: str, command: Sequence[str]) -> DemoProcess:
        child = DemoProcess(name, command, self.out / f"{name}.log")
        self.children.append(child)
        stack.push_async_callback(child.end)
        return child

    def _page_flags(self) -> tuple[str, ...]:
        """Returns the flags for the live page, with --keep only."""
        if not self.keep:
            return ()
        self.page = f"127.0.0.1:{_free_port()}"
        return "--page", self.page

    async def _one_node(self, client: Any, stack: AsyncExitStack) -> None:
        """Adds a node whose agent shows all its series, and workloads for it."""
        write_sample_node(self.work / "node.json")
        agent = self._start(
            stack,
            "node",
            "eelgrid_agent",
            "--simulate",
            str(self.work / "node.json"),
            "--energy-window",
            f"{_WINDOW_S[0]:g}",
        )
        deadline_s = time.monotonic() + _GPU_S
        for request in sample_submissions():
            # Refused as long as no node has its model.
            while True:
                agent.check()
                try:
                    await client.submit_workload(request, timeout=5.0)
                    break
                except faults.Fault as fault:
                    if time.monotonic() > deadline_s:
                        self.notes.append(f"{request.workload_id} was not accepted: {fault.message}")
                        break
                await asyncio.sleep(5 * _POLL_S)

    async def _monitor(self, stack: AsyncExitStack) -> None:
        """Starts Prometheus last, so that the figures of the demo exclude it; adds a note if it cannot start."""
        program = shutil.which("prometheus")
        if program is None:
            self.notes.append("Prometheus is not installed; on Debian: apt-get install prometheus")
            return
        rules = alert_rules_file()
        if rules is None:
            self.notes.append("Prometheus runs without rules: they are in the source tree, not in the package")
        agents = [address for name, address in self.metrics.items() if name != "controller"]
        jobs = {"controller": [self.metrics["controller"]], "agent": agents}
        configured, address = self.work / "prometheus.yaml", f"127.0.0.1:{_free_port()}"
        configured.write_text(prometheus_configuration(jobs, rules), encoding="utf-8")
        command = prometheus_command(program, configured, self.work / "prometheus", address)
        child = self._launch(stack, "prometheus", command)
        if await wait_for_prometheus(address):
            self.prometheus = address
            return
        await child.end()
        self.children.remove(child)
        self.notes.append(f"Prometheus did not become ready; see {child.log}")

    async def _ready(self, client: Any, controller: DemoProcess) -> None:
        self.scene.show_phase("starting the controller")
        deadline_s = time.monotonic() + _READY_S
        while True:
            controller.check()
            with suppress(faults.Unavailable, faults.DeadlineExceeded):
                await client.get_summary(GetSummaryRequest(), timeout=2.0)
                # With so many nodes decisions wait for machine code.
                if "kernels=warm" in controller.log.read_text("utf-8", "replace"):
                    return
            if time.monotonic() > deadline_s:
                raise ProcessSilent(f"the controller did not answer in {_READY_S:.0f} s", f"see {controller.log}")
            if (phase := describe_start(controller.tail())) != self.scene.act:
                self.scene.show_phase(phase)
            self.scene.tick()
            await asyncio.sleep(_POLL_S)

    async def _watch_summary(self, client: Any) -> None:
        """Keeps the latest summary in the view, also across a restart of the controller."""
        while True:
            with suppress(faults.Fault):
                async for answer in client.watch_summary(WatchSummaryRequest(interval_s=_SUMMARY_S)):
                    self.scene.summary = answer.summary
                    self.scene.tick()
            await asyncio.sleep(_WATCH_S)

    async def _wait_for_nodes(self, client: Any, children: tuple[DemoProcess, ...]) -> None:
        wanted = len(self.trace.nodes)
        self.scene.show_phase(f"waiting for {wanted:,} nodes")
        deadline_s = time.monotonic() + _JOIN_S
        while (await self._summary(client)).nodes_ready < wanted:
            _check(children)
            if time.monotonic() > deadline_s:
                ready = (await self._summary(client)).nodes_ready
                raise ProcessSilent(
                    f"{ready} of {wanted} nodes joined in {_JOIN_S:.0f} s",
                    f"see {children[-1].log}; with less memory or CPU, try --nodes 200",
                )
            await asyncio.sleep(_POLL_S)

    async def _summary(self, client: Any) -> Summary:
        summary: Summary = (await client.get_summary(GetSummaryRequest(), timeout=10.0)).summary
        return summary

    async def _submit(self, client: Any, children: tuple[DemoProcess, ...]) -> SubmitReport:
        self.scene.show_phase("placing")
        submitter = Submitter(
            operators=client,
            clock=time.monotonic,
            sleep=asyncio.sleep,
            jitter=random.random,
            rules=SubmitLimits(in_flight=self.in_flight, silence_longest_s=_SILENCE_S),
        )
        requests = [submission_of_task(task) for task in self.trace.tasks]
        work = asyncio.create_task(submitter.run(requests, self.scene.on_answer))
        try:
            while not work.done():
                await asyncio.wait({work}, timeout=_WATCH_S)
                _check(children)
                for child in children:
                    child.usage()
        finally:
            await _cancel(work)
        return work.result()

    async def _wait_for_power(self, children: tuple[DemoProcess, ...]) -> dict[str, float]:
        """Waits until measured power has caught up; returns the CPU share of each child meanwhile."""
        self.scene.show_phase("measuring")
        before = {child.name: child.usage() for child in children}
        begun_s = time.monotonic()
        while time.monotonic() - begun_s < _SETTLE_S:
            await asyncio.sleep(_WATCH_S)
            _check(children)
        elapsed_s = time.monotonic() - begun_s
        shares = {}
        for child in children:
            first, last = before[child.name], child.usage()
            if first and last:
                shares[child.name] = (last.cpu_s - first.cpu_s) / elapsed_s
        return shares

    def _report(
        self,
        summary: Summary,
        submitted: SubmitReport,
        times_s: tuple[float, float, float],
        processes: Sequence[ProcessFigures],
    ) -> DemoReport:
        """`times_s` are those until the controller answered, from then until all nodes had joined, and in total."""
        start_controller_s, start_fleet_s, total_s = times_s
        allocated = summary.allocated_gpu_milli / 1000
        measured_w = summary.measured_power_w if summary.measured_gpus else None
        return DemoReport(
            trace=self.trace.source.value,
            trace_where=self.trace.where,
            nodes=len(self.trace.nodes),
            gpus=summary.gpus,
            tasks=len(self.trace.tasks),
            placed=summary.placed,
            pending=summary.pending,
            refused=submitted.refused,
            pending_reasons={reason.reason: reason.workloads for reason in summary.pending_reasons},
            refused_reasons={refusal.workload_id: refusal.reason for refusal in submitted.refusals[:100]},
            allocated_gpu=allocated,
            allocated_gpu_share=allocated / summary.gpus if summary.gpus else 0.0,
            modelled_power_w=summary.modelled_power_w,
            modelled_power_per_allocated_gpu_w=summary.modelled_power_w / allocated if allocated else None,
            measured_power_w=measured_w,
            measured_power_per_allocated_gpu_w=measured_w / allocated if measured_w is not None and allocated else None,
            measured_gpus=summary.measured_gpus,
            decision_p50_s=summary.decision_p50_s,
            decision_p99_s=summary.decision_p99_s,
            submit_p50_s=submitted.latency.quantile(0.5),
            submit_p99_s=submitted.latency.quantile(0.99),
            submit_in_flight=self.in_flight,
            repeats=submitted.repeats,
            agents=summary.nodes_ready,
            samples_received=summary.samples_received,
            samples_lost=summary.samples_lost,
            start_controller_s=start_controller_s,
            start_fleet_s=start_fleet_s,
            submit_s=submitted.elapsed_s,
            total_s=total_s,
            processes=tuple(processes),
            notes=tuple(self.notes),
        )

    async def _observe(self, client: Any, stack: AsyncExitStack) -> None:
        """Starts this machine's own agent last, so that the figures are those of the trace only."""
        agent = self._start(stack, "this-machine", "eelgrid_agent", "--node-name", _REAL_NODE)
        deadline_s = time.monotonic() + _GPU_S
        found: tuple[GpuStatus, ...] = ()
        while time.monotonic() < deadline_s:
            agent.check()
            found = (await client.list_gpus(ListGpusRequest(node_name=_REAL_NODE), timeout=5.0)).gpus
            if found and all(gpu.power_w is not None or gpu.temperature_c is not None for gpu in found):
                break
            await asyncio.sleep(5 * _POLL_S)
        display.print_gpus(self.scene.console, found)


def _window_s(nodes: int) -> float:
    least_s, most_s = _WINDOW_S
    return max(least_s, min(most_s, nodes / _WINDOWS_HZ))


def _figures(child: DemoProcess, steady: float | None) -> ProcessFigures:
    usage = child.usage()
    return ProcessFigures(
        name=child.name,
        cpu_s=usage.cpu_s if usage else None,
        steady_cpu_share=steady,
        memory_bytes=usage.memory_bytes if usage else None,
        peak_memory_bytes=child.peak_memory_bytes or None,
    )


def _check(children: tuple[DemoProcess, ...]) -> None:
    for child in children:
        child.check()


async def _cancel(task: "asyncio.Task[Any]") -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
