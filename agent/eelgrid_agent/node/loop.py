"""Sampling loops: when each node reads its devices, and on which thread.

A real driver is called on exactly one worker thread, since NVML serialises its callers and may block for ever in a
wedged driver: a sample that is late is recorded as TIMED_OUT, and the driver is called again only when it has answered.
Simulated nodes are read on the event loop, each at its own moment of the interval, so that a thousand of them do not
burst.
"""

import asyncio
import contextlib
import heapq
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Protocol

from eelgrid_agent.devices.port import DeviceEvent, DevicePort
from eelgrid_agent.devices.sampler import ExtendedReader, ExtendedReadings
from eelgrid_agent.energy.node_energy import NO_SOURCE_READINGS, SourceReadings
from eelgrid_agent.engine.readiness import GpuUse, read_gpu_use
from eelgrid_agent.engine.slurm_jobs import HandoverError, HandoverFolder, describe_planned_limits
from eelgrid_agent.node.inventory import (
    BatchReader,
    DeviceSurvey,
    GpuReadings,
    SequentialReader,
    look_for_faults,
    missing_gpu_readings,
    read_each_gpu,
    survey_devices,
)
from eelgrid_agent.node.node import AgentClock, AgentNode
from eelgrid_protos.messages import AbsenceReason, NodeEvent

# How often the list of devices is read again; a lost device brings it forward.
SURVEY_S = 30.0
# How often a machine asks what is dear, and a fleet, whose slow looks serve the controller only.
SLOW_S = 5.0
FLEET_SLOW_S = 300.0
# Wake-ups are merged within this, so that a thousand nodes cost a hundred wake-ups a second.
GRAIN_S = 0.01
# Looks that are due go on for so long before the streams have their turn. Without an end a fleet that a busy machine
# cannot sample in time looked for a second between two turns of its streams, none of which was welcomed in time.
SLICE_S = 0.01
# How often output that somebody follows is looked for: faster than a person reads, and nothing to do without readers.
OUTPUT_POLL_S = 0.05
# How long a start waits to be told with others, or with an end: each report is a commit of the controller's journal.
START_REPORT_S = 0.05
# How often the folder of Slurm's prolog is asked whether it changed, and how often it is read at any rate.
HANDOVER_POLL_S = 0.1
HANDOVER_READ_S = 5.0
# A look may take this share of the interval, and at least the second bound: a cold driver takes a second to open.
READ_TIMEOUT_SHARE = 0.8
READ_TIMEOUT_LEAST_S = 2.0


GpuUses = dict[str, GpuUse]
FaultLook = tuple[GpuReadings, tuple[DeviceEvent, ...]]
_LOG = logging.getLogger("eelgrid.agent")


def log_turn(node: AgentNode, event: NodeEvent) -> None:
    """Logs that a device was lost, or came back."""
    index = next((gpu.index for gpu in node.inventory.gpus if gpu.uuid == event.gpu_uuid), None)
    _LOG.warning(
        "node=%s event=%s gpu=%s index=%s detail=%r",
        node.name,
        event.kind.name.lower(),
        event.gpu_uuid,
        "-" if index is None else index,
        event.detail,
    )


class DriverThread:
    """One daemon thread for one driver: a call that never returns must not hold up the end of the process."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Future[object], Callable[[], object]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="driver", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], object]) -> "Future[object]":
        """Queues a call on the thread."""
        future: Future[object] = Future()
        self._calls.put((future, function))
        return future

    def close(self) -> None:
        """No further calls; does not wait for one that hangs."""
        self._calls.put(None)
        self._thread.join(timeout=0.5)

    def _serve(self) -> None:
        while (entry := self._calls.get()) is not None:
            future, function = entry
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001  # whoever waits gets it
                future.set_exception(error)


class GpuQuestions(Protocol):
    """What processes ask of the driver beside the looks at intervals."""

    async def read_uses(self, uuids: tuple[str, ...]) -> GpuUses:
        """Asks who uses GPUs; empty if the driver does not answer, and then no attempt starts meanwhile."""

    async def read_faults(self, uuids: tuple[str, ...]) -> FaultLook:
        """Looks at GPUs, and at what the driver announced; empty if it does not answer."""


class QuestionsInPlace:
    """Asks simulated GPUs, which answer at once."""

    def __init__(self, device: DevicePort) -> None:
        self._device = device

    async def read_uses(self, uuids: tuple[str, ...]) -> GpuUses:
        """Asks who uses GPUs."""
        return read_gpu_use(self._device, uuids)

    async def read_faults(self, uuids: tuple[str, ...]) -> FaultLook:
        """Looks at GPUs, and at what the driver announced."""
        return look_for_faults(self._device, uuids)


class QuestionsToDriver:
    """Asks GPUs on the driver's thread; one question that is not answered in time is asked no second time meanwhile."""

    def __init__(self, device: DevicePort, driver: DriverThread) -> None:
        self._device, self._driver = device, driver
        self._asked: dict[str, asyncio.Future[object]] = {}

    async def read_uses(self, uuids: tuple[str, ...]) -> GpuUses:
        """Asks who uses GPUs."""
        found = await self._ask("uses", lambda: read_gpu_use(self._device, uuids))
        return {} if found is None else found  # type: ignore[return-value]

    async def read_faults(self, uuids: tuple[str, ...]) -> FaultLook:
        """Looks at GPUs, and at what the driver announced."""
        found = await self._ask("faults", lambda: look_for_faults(self._device, uuids))
        return ((), ()) if found is None else found  # type: ignore[return-value]

    async def _ask(self, question: str, ask: Callable[[], object]) -> object | None:
        if question not in self._asked:
            self._asked[question] = asyncio.wrap_future(self._driver.call(ask))
        done, _ = await asyncio.wait((self._asked[question],), timeout=READ_TIMEOUT_LEAST_S)
        return self._asked.pop(question).result() if done else None


async def run_process_engine(node: AgentNode, driver: GpuQuestions) -> None:
    """Runs what processes need of this loop, until cancelled.

    Adopts those of the agent's previous run, asks the driver about GPUs before starts and after failures, and answers
    whoever follows output.
    """
    node.adopt_processes()
    starting = asyncio.Event()
    node.starting = starting.set
    starts_due_s = 0.0
    while True:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(starting.wait(), OUTPUT_POLL_S)
        starting.clear()
        uuids = node.list_gpus_to_check()
        if uuids:
            node.on_gpu_use(await driver.read_uses(uuids))
        suspected = node.list_suspected_gpus()
        if suspected:
            node.on_fault_look(*await driver.read_faults(suspected))
        node.answer_log_requests()
        if asyncio.get_running_loop().time() >= starts_due_s:
            starts_due_s = asyncio.get_running_loop().time() + START_REPORT_S
            node.report_starts()


async def watch_slurm_jobs(node: AgentNode, folder: HandoverFolder) -> None:
    """Hands what Slurm's prolog wrote to the node, and the node's answers to the prolog, until cancelled."""
    refused: tuple[str, ...] = ()
    problem, read_s = "", float("-inf")
    while True:
        now_s = asyncio.get_running_loop().time()
        try:
            if now_s - read_s >= HANDOVER_READ_S or folder.has_changed():
                read_s = now_s
                node.update_slurm_jobs(await asyncio.to_thread(folder.read_jobs))
            plans = describe_planned_limits(node.guard.planned_job_limits_w)
            if plans != folder.plans:
                await asyncio.to_thread(folder.write_plans, plans)
            answers = node.guard.answer_jobs()
            if answers != folder.answers:
                await asyncio.to_thread(folder.write_answers, answers)
            fault = ""
        except (HandoverError, OSError) as error:
            fault = str(error)
        if fault and fault != problem:
            _LOG.warning("node=%s event=slurm_folder_unusable reason=%r", node.name, fault)
        if folder.refused and folder.refused != refused:
            _LOG.warning(
                "node=%s event=slurm_jobs_left_out jobs=%d first=%r", node.name, len(folder.refused), folder.refused[0]
            )
        problem, refused = fault, folder.refused
        await asyncio.sleep(HANDOVER_POLL_S)


class MachineLoop:
    """The schedule of one real node."""

    def __init__(
        self,
        node: AgentNode,
        device: DevicePort,
        *,
        clock: AgentClock,
        driver: DriverThread,
        stalled: Callable[[AgentNode], None],
        looking: BatchReader | None = None,
        collection_s: dict[str, float] | None = None,
    ) -> None:
        self._node = node
        self._device = device
        self._looking: BatchReader = SequentialReader(device) if looking is None else looking
        self._clock = clock
        self._driver = driver
        self._stalled = stalled
        self._retimed = asyncio.Event()
        # Seconds that the newest look of each kind took, where the driver is asked.
        self._collection_s = {} if collection_s is None else collection_s
        self._look: Future[object] | None = None
        self._survey: DeviceSurvey | None = None
        node.retime = self._retimed.set
        node.turned = partial(log_turn, node)

    async def run(self) -> None:
        """Until cancelled."""
        due_ns = self._clock.monotonic_ns()
        surveyed_ns = due_ns
        # The first slow look comes with the first quick one.
        slow_ns = due_ns - int(SLOW_S * 1e9)
        while True:
            interval_ns = int(self._node.cadence.sample_interval_s * 1e9)
            uuids = self._node.gpu_uuids
            looks = await self._within(lambda: self._time_collection("quick", self._quickly), interval_ns)
            now_ns = self._clock.monotonic_ns()
            found = missing_gpu_readings(uuids, AbsenceReason.TIMED_OUT) if looks is None else looks
            turned = self._node.record_tick(found, monotonic_ns=now_ns)  # type: ignore[arg-type]
            if turned or self._node.survey_due or now_ns - surveyed_ns >= SURVEY_S * 1e9:
                surveyed_ns = now_ns
                answer = await self._within(lambda: survey_devices(self._device, self._survey), interval_ns)
                if isinstance(answer, DeviceSurvey):
                    self._survey = answer
                    self._node.update_inventory(answer)
            if now_ns - slow_ns >= SLOW_S * 1e9:
                slow_ns = now_ns
                slow = await self._within(lambda: self._time_collection("slow", self._slowly), interval_ns)
                if slow is not None:
                    self._node.observe_slow(*slow)  # type: ignore[misc]
            if self._node.is_stalled(now_ns=now_ns):
                self._stalled(self._node)
            due_ns = _next_due(due_ns, interval_ns, self._clock.monotonic_ns())
            await self._sleep_until(due_ns)
            if self._retimed.is_set():
                self._retimed.clear()
                due_ns = self._clock.monotonic_ns()

    def _time_collection(self, kind: str, look: Callable[[], object]) -> object:
        began_ns = self._clock.monotonic_ns()
        try:
            return look()
        finally:
            self._collection_s[kind] = (self._clock.monotonic_ns() - began_ns) / 1e9

    def _quickly(self) -> GpuReadings:
        return self._looking.read_gpus(self._node.gpu_uuids)

    def _slowly(self) -> tuple[ExtendedReadings, SourceReadings]:
        """What is dear to ask, and whose the processes are: small files, which also want no two readers at once."""
        slow = self._looking.read_extended(self._node.gpu_uuids)
        return slow, _found(self._node, slow, self._clock)

    async def _within(self, ask: Callable[[], object], interval_ns: int) -> object | None:
        """The driver's answer, or None when it is late or still busy with a late one."""
        if self._look is not None and not self._look.done():
            return None
        self._look = self._driver.call(ask)
        try:
            async with asyncio.timeout(max(READ_TIMEOUT_LEAST_S, READ_TIMEOUT_SHARE * interval_ns / 1e9)):
                return await asyncio.shield(asyncio.wrap_future(self._look))
        except TimeoutError:
            return None

    async def _sleep_until(self, due_ns: int) -> None:
        """Until it is due, or the cadence changed."""
        delay_s = (due_ns - self._clock.monotonic_ns()) / 1e9
        try:
            async with asyncio.timeout(max(0.0, delay_s)):
                await self._retimed.wait()
        except TimeoutError:
            pass


class SimulatedNodesLoop:
    """The schedule of many simulated nodes on one thread."""

    def __init__(
        self, nodes: Sequence[tuple[AgentNode, DevicePort]], *, clock: AgentClock, stalled: Callable[[AgentNode], None]
    ) -> None:
        self._nodes = nodes
        self._clock = clock
        self._stalled = stalled
        self._began_ns = clock.monotonic_ns()
        self._due_ns = [0] * len(nodes)
        self._surveyed_ns = [0] * len(nodes)
        self._surveys: list[DeviceSurvey | None] = [None] * len(nodes)
        self._slow_interval_ns = int((SLOW_S if len(nodes) == 1 else FLEET_SLOW_S) * 1e9)
        # Spread over the interval, so that a fleet's slow looks do not burst.
        phases = range(len(nodes))
        self._slow_ns = [self._began_ns - self._slow_interval_ns * phase // len(nodes) for phase in phases]
        self._heap: list[tuple[int, int]] = []
        self.late_ticks_total = 0
        for index, (node, _) in enumerate(nodes):
            node.retime = lambda index=index: self._retime(index)  # type: ignore[misc]
            node.turned = partial(log_turn, node)

    async def run(self) -> None:
        """Until cancelled."""
        for index in range(len(self._nodes)):
            self._surveyed_ns[index] = self._began_ns
            self._retime(index)
        while True:
            now_ns = begun_ns = self._clock.monotonic_ns()
            while self._heap and self._heap[0][0] <= now_ns and now_ns - begun_ns < SLICE_S * 1e9:
                due_ns, index = heapq.heappop(self._heap)
                if due_ns == self._due_ns[index]:
                    self._run_tick(index, due_ns)
                    if now_ns - self._slow_ns[index] >= self._slow_interval_ns:
                        self._slow_ns[index] = now_ns
                        await self._look_slowly(index)
                    now_ns = self._clock.monotonic_ns()
            delay_s = GRAIN_S if not self._heap else (self._heap[0][0] - self._clock.monotonic_ns()) / 1e9
            # Never shorter than the grain: the stream's own work needs its turn too.
            await asyncio.sleep(min(max(delay_s, GRAIN_S), 0.5))

    def _retime(self, index: int) -> None:
        """Puts a node at its own moment of its interval."""
        interval_ns = int(self._nodes[index][0].cadence.sample_interval_s * 1e9)
        grid_ns = self._began_ns + interval_ns * index // len(self._nodes)
        self._push(index, _next_due(grid_ns - interval_ns, interval_ns, self._clock.monotonic_ns()))

    def _push(self, index: int, due_ns: int) -> None:
        self._due_ns[index] = due_ns
        if len(self._heap) > 4 * len(self._nodes):  # entries that a changed cadence left behind
            self._heap = [(due, other) for other, due in enumerate(self._due_ns) if due and other != index]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (due_ns, index))

    def _run_tick(self, index: int, due_ns: int) -> None:
        node, device = self._nodes[index]
        now_ns = self._clock.monotonic_ns()
        turned = node.record_tick(read_each_gpu(device, node.gpu_uuids), monotonic_ns=now_ns)
        if turned or node.survey_due or now_ns - self._surveyed_ns[index] >= SURVEY_S * 1e9:
            self._surveyed_ns[index] = now_ns
            found = self._surveys[index] = survey_devices(device, self._surveys[index])
            node.update_inventory(found)
        if node.is_stalled(now_ns=now_ns):
            self._stalled(node)
        interval_ns = int(node.cadence.sample_interval_s * 1e9)
        following_ns = _next_due(due_ns, interval_ns, now_ns)
        self.late_ticks_total += (following_ns - due_ns) // interval_ns - 1
        self._push(index, following_ns)

    async def _look_slowly(self, index: int) -> None:
        """Asks what is dear, with a turn for the streams after each slice of time: of eight GPUs it takes 50 ms."""
        node, device = self._nodes[index]
        reader, begun_ns = ExtendedReader(device), self._clock.monotonic_ns()
        for uuid in node.gpu_uuids:
            reader.read_gpu(uuid)
            if self._clock.monotonic_ns() - begun_ns >= SLICE_S * 1e9:
                await asyncio.sleep(0)
                begun_ns = self._clock.monotonic_ns()
        slow = reader.finish()
        node.observe_slow(slow, _found(node, slow, self._clock))


def _found(node: AgentNode, slow: ExtendedReadings, clock: AgentClock) -> SourceReadings:
    """Whose the processes of a slow look are; may block."""
    if node.energy is None:
        return NO_SOURCE_READINGS
    return node.energy.read_sources(node.inventory.gpus, slow, now_ns=clock.monotonic_ns())


def _next_due(due_ns: int, interval_ns: int, now_ns: int) -> int:
    """The next moment on the grid that has not passed; what was missed is not made up."""
    following_ns = due_ns + interval_ns
    if following_ns > now_ns:
        return following_ns
    return following_ns + ((now_ns - following_ns) // interval_ns + 1) * interval_ns
