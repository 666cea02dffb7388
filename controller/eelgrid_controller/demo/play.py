"""The play: start, wait, submit, settle, report, end.

Owns the order of things and the limits on waiting. Must not know how a picture
looks or a child is ended. Whatever happens, the children are ended.
"""

import asyncio
import random
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from eelgrid_controller.config import ControllerConfig
from eelgrid_controller.demo import monitoring, sample_node
from eelgrid_controller.demo import report as reporting
from eelgrid_controller.demo.children import Child, Silent
from eelgrid_controller.demo.report import DemoReport, ProcessFigures, Times
from eelgrid_controller.demo.scene import Scene
from eelgrid_controller.replay.fleet import write_fleet
from eelgrid_controller.replay.locate import Trace
from eelgrid_controller.replay.openb import submission
from eelgrid_controller.replay.submit import Report, Rules, Submitter
from eelgrid_protos import catalogue, faults, rpc, transport
from eelgrid_protos.messages import GetSummaryRequest, GpuStatus, ListGpusRequest, Summary, WatchSummaryRequest

__all__ = ["Play"]

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
    """A port of the loopback that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@dataclass(slots=True, kw_only=True)
class Play:
    """One run of the demo."""

    trace: Trace
    scene: Scene
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
    children: list[Child] = field(default_factory=list)

    async def run(self, afterwards: Callable[[DemoReport, str], Awaitable[None]]) -> DemoReport:
        """Plays to the end; `afterwards` is awaited with everything still running."""
        begun_s = time.monotonic()
        self.address = f"127.0.0.1:{_free_port()}"
        async with AsyncExitStack() as stack:
            controller = self._start(
                stack, "controller", "eelgrid_controller", "--data", str(self.work / "data"), *self._page_flags()
            )
            client = rpc.client(
                rpc.OPERATOR_SERVICE,
                await stack.enter_async_context(transport.channel(self.address, tls=None, insecure=False)),
            )
            await self._ready(client, controller)
            ready_s = time.monotonic()
            write_fleet(self.work / "fleet.json", self.trace.nodes, catalogue.load().products)
            fleet = self._start(stack, "fleet", "eelgrid_agent", "--simulate", str(self.work / "fleet.json"),
                                "--energy-window", f"{_window_s(len(self.trace.nodes)):g}")  # fmt: skip
            children = (controller, fleet)
            stack.push_async_callback(_cancel, asyncio.create_task(self._watch(client)))
            await self._joined(client, children)
            joined_s = time.monotonic()
            submitted = await self._submit(client, children)
            steady = await self._settle(children)
            self.scene.summary = summary = await self._summary(client)
            times = Times(
                controller_s=ready_s - begun_s, fleet_s=joined_s - ready_s, total_s=time.monotonic() - begun_s
            )
            result = self._report(summary, submitted, times, [_figures(c, steady.get(c.name)) for c in children])
            self.scene.tell("done")
            self.scene.stop()
            reporting.write_summary(self.out / "summary.json", result)
            reporting.print_report(self.scene.console, result)
            if self.has_gpu:
                await self._observe(client, stack)
            if self.keep:
                await self._one_node(client, stack)
                await self._monitor(stack)
            await afterwards(result, self.address)
        return result

    def _start(self, stack: AsyncExitStack, name: str, module: str, *arguments: str) -> Child:
        side = ["--listen", self.address] if name == "controller" else ["--controller", self.address]
        side += [] if name == "controller" else ["--listen", "127.0.0.1:0"]
        self.metrics[name] = metrics = f"127.0.0.1:{_free_port()}"
        return self._launch(stack, name, [sys.executable, "-m", module, *side, "--metrics", metrics, *arguments])

    def _launch(self, stack: AsyncExitStack, name: str, command: Sequence[str]) -> Child:
        child = Child(name, command, self.out / f"{name}.log")
        self.children.append(child)
        stack.push_async_callback(child.end)
        return child

    def _page_flags(self) -> tuple[str, ...]:
        """The live page's address, where this controller has one."""
        if not self.keep or all(one.name != "page" for one in fields(ControllerConfig)):
            return ()
        self.page = f"127.0.0.1:{_free_port()}"
        return "--page", self.page

    async def _one_node(self, client: Any, stack: AsyncExitStack) -> None:
        """Adds a node whose agent shows all its series, and work for it."""
        sample_node.write_node(self.work / "node.json")
        agent = self._start(stack, "node", "eelgrid_agent", "--simulate", str(self.work / "node.json"),
                            "--energy-window", f"{_WINDOW_S[0]:g}")  # fmt: skip
        deadline_s = time.monotonic() + _GPU_S
        for request in sample_node.submissions():
            # Refused as long as no node has its model.
            while True:
                agent.check()
                try:
                    await client.submit_workload(request, timeout=5.0)
                    break
                except faults.Fault as fault:
                    if time.monotonic() > deadline_s:
                        self.notes.append(f"{request.workload_id} was not taken: {fault.message}")
                        break
                await asyncio.sleep(5 * _POLL_S)

    async def _monitor(self, stack: AsyncExitStack) -> None:
        """Adds Prometheus, last: the figures of the demo are without it. What keeps it away is a note."""
        program = monitoring.program()
        if program is None:
            self.notes.append("no Prometheus is installed; on Debian: apt-get install prometheus")
            return
        rules = monitoring.rules_file()
        if rules is None:
            self.notes.append("Prometheus has no rules: they come with the sources, not with the package")
        agents = [address for name, address in self.metrics.items() if name != "controller"]
        jobs = {"controller": [self.metrics["controller"]], "agent": agents}
        configured, address = self.work / "prometheus.yaml", f"127.0.0.1:{_free_port()}"
        configured.write_text(monitoring.configuration(jobs, rules), encoding="utf-8")
        command = monitoring.command(program, configured, self.work / "prometheus", address)
        child = self._launch(stack, "prometheus", command)
        if await monitoring.ready(address):
            self.prometheus = address
            return
        await child.end()
        self.children.remove(child)
        self.notes.append(f"Prometheus did not become ready; see {child.log}")

    async def _ready(self, client: Any, controller: Child) -> None:
        self.scene.tell("starting the controller")
        deadline_s = time.monotonic() + _READY_S
        while True:
            controller.check()
            with suppress(faults.Unavailable, faults.DeadlineExceeded):
                await client.get_summary(GetSummaryRequest(), timeout=2.0)
                return
            if time.monotonic() > deadline_s:
                raise Silent(f"the controller did not answer in {_READY_S:.0f} s", f"see {controller.log}")
            self.scene.tick()
            await asyncio.sleep(_POLL_S)

    async def _watch(self, client: Any) -> None:
        """Keeps the newest summary in the scene, also across a restart of the controller."""
        while True:
            with suppress(faults.Fault):
                async for answer in client.watch_summary(WatchSummaryRequest(interval_s=_SUMMARY_S)):
                    self.scene.summary = answer.summary
                    self.scene.tick()
            await asyncio.sleep(_WATCH_S)

    async def _joined(self, client: Any, children: tuple[Child, ...]) -> None:
        wanted = len(self.trace.nodes)
        self.scene.tell(f"waiting for {wanted:,} nodes")
        deadline_s = time.monotonic() + _JOIN_S
        while (await self._summary(client)).nodes_ready < wanted:
            _check(children)
            if time.monotonic() > deadline_s:
                ready = (await self._summary(client)).nodes_ready
                raise Silent(
                    f"{ready} of {wanted} nodes joined in {_JOIN_S:.0f} s",
                    f"see {children[-1].log}; with less memory or CPU, try --nodes 200",
                )
            await asyncio.sleep(_POLL_S)

    async def _summary(self, client: Any) -> Summary:
        summary: Summary = (await client.get_summary(GetSummaryRequest(), timeout=10.0)).summary
        return summary

    async def _submit(self, client: Any, children: tuple[Child, ...]) -> Report:
        self.scene.tell("placing")
        submitter = Submitter(
            operators=client,
            clock=time.monotonic,
            sleep=asyncio.sleep,
            jitter=random.random,
            rules=Rules(in_flight=self.in_flight, silence_longest_s=_SILENCE_S),
        )
        requests = [submission(task) for task in self.trace.tasks]
        work = asyncio.create_task(submitter.run(requests, self.scene.answered))
        try:
            while not work.done():
                await asyncio.wait({work}, timeout=_WATCH_S)
                _check(children)
                for child in children:
                    child.usage()
        finally:
            await _cancel(work)
        return work.result()

    async def _settle(self, children: tuple[Child, ...]) -> dict[str, float]:
        """Until the measured watts have caught up; the CPU share of each child meanwhile."""
        self.scene.tell("measuring")
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
        self, summary: Summary, submitted: Report, times: Times, processes: Sequence[ProcessFigures]
    ) -> DemoReport:
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
            start_controller_s=times.controller_s,
            start_fleet_s=times.fleet_s,
            submit_s=submitted.elapsed_s,
            total_s=times.total_s,
            processes=tuple(processes),
            notes=tuple(self.notes),
        )

    async def _observe(self, client: Any, stack: AsyncExitStack) -> None:
        """Adds this machine's own agent, last: the figures above are those of the trace alone."""
        agent = self._start(stack, "this-machine", "eelgrid_agent", "--node-name", _REAL_NODE)
        deadline_s = time.monotonic() + _GPU_S
        found: tuple[GpuStatus, ...] = ()
        while time.monotonic() < deadline_s:
            agent.check()
            found = (await client.list_gpus(ListGpusRequest(node_name=_REAL_NODE), timeout=5.0)).gpus
            if found and all(gpu.power_w is not None or gpu.temperature_c is not None for gpu in found):
                break
            await asyncio.sleep(5 * _POLL_S)
        reporting.print_gpus(self.scene.console, found)


def _window_s(nodes: int) -> float:
    least_s, most_s = _WINDOW_S
    return max(least_s, min(most_s, nodes / _WINDOWS_HZ))


def _figures(child: Child, steady: float | None) -> ProcessFigures:
    usage = child.usage()
    return ProcessFigures(
        name=child.name,
        cpu_s=usage.cpu_s if usage else None,
        steady_cpu_share=steady,
        memory_bytes=usage.memory_bytes if usage else None,
        peak_memory_bytes=child.peak_memory_bytes or None,
    )


def _check(children: tuple[Child, ...]) -> None:
    for child in children:
        child.check()


async def _cancel(task: "asyncio.Task[Any]") -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
