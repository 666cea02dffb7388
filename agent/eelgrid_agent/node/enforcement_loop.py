"""The enforcement loop of a node: executes guard commands where the driver is asked, and reports outcomes.

A cycle is a generator that yields driver requests, so the same cycle runs with a driver thread or inline over
simulated devices; the guard is touched only between yields. No cycle is due where nothing is requested or changed.
At start, a local power budget that no GPU can follow is refused (`check_budget_reach`).
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Generator, Iterable, Sequence
from functools import partial
from typing import Any

from eelgrid_agent.devices.port import Missing, RawReadings
from eelgrid_agent.enforce.guard.events import (
    CommandOutcome,
    CommandsExecuted,
    DeviceCheck,
    DeviceRecord,
    GuardCommand,
    GuardTick,
)
from eelgrid_agent.enforce.mig.mig_service import MigService
from eelgrid_agent.enforce.power import PowerExecutor
from eelgrid_agent.node.inventory import BatchReader, GpuReadings
from eelgrid_agent.node.loop import DriverThread
from eelgrid_agent.node.node import AgentClock, AgentNode
from eelgrid_protos.messages import ApplyResult, Gpu, GpuLayout, Reading

_LOG = logging.getLogger("eelgrid.agent")


class BudgetNotEnforceable(Exception):
    """The operator requested enforcement that is not possible here; the message says what to do."""


def check_budget_reach(budget_w: float | None, node_name: str, gpus: Sequence[Gpu]) -> None:
    """Warns of GPUs that the budget cannot lower; raises BudgetNotEnforceable where it can lower none of them.

    `budget_w` is in watts, None for no budget. A node without GPUs, or whose driver does not answer yet, passes.
    """
    there = [gpu for gpu in gpus if not gpu.lost]
    silent = [gpu for gpu in there if gpu.power_limit_min_w is None or gpu.power_limit_max_w is None]
    if budget_w is None or not silent:
        return
    if len(silent) == len(there):
        raise BudgetNotEnforceable(
            f"--power-budget {budget_w:g} cannot be kept on {node_name}: none of its {len(there)} GPUs reports "
            "its limit range (`nvidia-smi -q -d POWER`), so none can be lowered; leave it out"
        )
    _LOG.warning(
        "event=power_budget_out_of_reach node=%s watts=%g gpus=%s reason=%r",
        node_name,
        budget_w,
        ",".join(str(gpu.index) for gpu in silent),
        "they do not report their limit range: their draw counts and is not lowered",
    )


# How often the MIG layouts are compared with what was asked for.
LAYOUT_CHECK_INTERVAL_S = 30.0
# How soon a cycle follows an order, and how often somebody looks whether one is due.
POLL_INTERVAL_S = 0.25
# A batch may lead to another (an unlock after a failed lock); beyond, the next cycle goes on.
MAX_ROUNDS = 8
# What is put back at the end must not hold up the end for longer.
STOP_TIMEOUT_S = 20.0

EnforcementCycle = Generator[Callable[[], Any], Any, tuple[GpuLayout, ...]]


class Enforcement:
    """One node's guard, carried out."""

    def __init__(self, node: AgentNode, enforcer: PowerExecutor, *, looking: BatchReader, clock: AgentClock) -> None:
        self._node = node
        self._enforcer = enforcer
        self._looking = looking
        self._clock = clock
        self._due_ns = 0
        self._looked_ns = 0
        self._is_ordered = False
        self._held: tuple[str, ...] | None = None

    def is_due(self, now_ns: int) -> bool:
        """Whether a cycle has something to do by now."""
        return now_ns >= self._due_ns and self._node.guard.has_work

    def schedule_now(self) -> None:
        """The next cycle is due at once: there is a new order."""
        self._due_ns = 0
        self._is_ordered = True

    def pending_holds(self) -> tuple[str, ...] | None:
        """What the assignments in force hold, when that is not what was held last; None when it is."""
        if not self._is_ordered or self._node.guard.plan is None:
            return None
        uuids = {uuid for assignment in self._node.guard.held_assignments for uuid in assignment.gpu_uuids}
        self._is_ordered = False
        return None if (held := tuple(sorted(uuids))) == self._held else held

    def on_hold_result(self, uuids: tuple[str, ...], *, is_kept: bool) -> None:
        """What became of `pending_holds`; what could not be kept is tried again."""
        self._held = uuids if is_kept else None
        self._is_ordered = self._is_ordered or not is_kept

    def start_cycle(self, records: tuple[DeviceRecord, ...]) -> EnforcementCycle:
        """Puts back what the run before left changed."""
        yield from self._carry_out(self._node.guard.start(records))
        return ()

    def cycle(self) -> EnforcementCycle:
        """Reads back, mends and carries out; returns the MIG layouts that are to be made, which may take long."""
        guard, node = self._node.guard, self._node
        now_ns = self._clock.monotonic_ns()
        self._due_ns = now_ns + int(guard.cycle_s * 1e9)
        uuids, quick = node.gpu_uuids, node.quick
        # A look that is older than the one before would show energy counters that fall.
        if now_ns - node.last_tick_ns > guard.cycle_s * 0.5e9 or node.last_tick_ns < self._looked_ns:
            quick = yield lambda: self._looking.read_gpus(uuids)
            self._looked_ns = self._clock.monotonic_ns()
        asked = frozenset(uuid for uuid, _ in quick if guard.needs_settings(uuid))
        checks = yield lambda: self._read_back(quick, asked)
        tick = GuardTick(
            now_ns=self._clock.monotonic_ns(),
            wall_ns=self._clock.wall_ns(),
            gpus=checks,
            origin=self._enforcer.read_origin(),
        )
        yield from self._carry_out(guard.on_tick(tick))
        return guard.drain_layouts()

    def stop_cycle(self) -> EnforcementCycle:
        """Puts back everything that is changed."""
        yield from self._carry_out(self._node.guard.stop())
        return ()

    def on_layout_result(self, layout: GpuLayout, result: ApplyResult) -> None:
        """What became of a MIG layout that a cycle returned."""
        self._node.guard.on_layout_result(layout, result)
        self._node.flush_guard()

    def on_layout_results(self, results: Iterable[ApplyResult]) -> None:
        """What became of layouts without anybody asking."""
        for result in results:
            layout = self._node.guard.requested_layout(result.subject)
            if layout is not None:
                self.on_layout_result(layout, result)

    def _read_back(self, quick: GpuReadings, asked: frozenset[str]) -> tuple[DeviceCheck, ...]:
        checks = []
        for uuid, raw in quick:
            power_w, counter_j = _number(raw.values.get(Reading.POWER_W)), _counter(raw)
            if uuid in asked:
                checks.append(self._enforcer.check_device(uuid, power_w=power_w, energy_counter_j=counter_j))
            else:
                checks.append(DeviceCheck(gpu_uuid=uuid, power_w=power_w, energy_counter_j=counter_j))
        return tuple(checks)

    def _carry_out(self, commands: tuple[GuardCommand, ...]) -> Generator[Callable[[], Any], Any, None]:
        rounds = 0
        while commands and rounds < MAX_ROUNDS:
            outcomes = yield lambda commands=commands: self._enforcer.execute_commands(commands)  # type: ignore[misc]
            commands = self._node.guard.on_executed(self._executed_event(outcomes))
            rounds += 1
        self._node.flush_guard()

    def _executed_event(self, outcomes: tuple[CommandOutcome, ...]) -> CommandsExecuted:
        return CommandsExecuted(now_ns=self._clock.monotonic_ns(), wall_ns=self._clock.wall_ns(), outcomes=outcomes)


def _number(value: object) -> float | None:
    return value if isinstance(value, float) else None


def _counter(raw: RawReadings) -> float | None:
    return None if isinstance(raw.energy_counter_j, Missing) else raw.energy_counter_j


def run_cycle_inline(cycle: EnforcementCycle) -> tuple[GpuLayout, ...]:
    """Asks the driver here and now."""
    try:
        ask = next(cycle)
        while True:
            ask = cycle.send(ask())
    except StopIteration as end:
        layouts: tuple[GpuLayout, ...] = end.value
        return layouts


class InlineEnforcementLoop:
    """Simulated nodes: everything happens on the event loop, since nothing blocks.

    Of a thousand nodes few have anything to do, so only those are looked at that got an order and are not done with it.
    """

    def __init__(self, kept: Sequence[tuple[Enforcement, AgentNode, MigService]], *, clock: AgentClock) -> None:
        self._kept = kept
        self._clock = clock
        self._tended_ns = clock.monotonic_ns()
        self._busy = set(range(len(kept)))
        # Most simulated nodes never see a layout; the others are tended from the first on, and those of an engine always.
        self._laid: set[int] = set()
        for index, (enforcement, node, layouts) in enumerate(kept):
            node.ordered = partial(self._schedule, index, enforcement)
            node.returned = layouts.on_device_reset
            if layouts.has_service or any(gpu.gpu_instances for gpu in node.inventory.gpus):
                self._lay(index)

    async def run(self) -> None:
        """Until cancelled; what was changed is put back then."""
        try:
            while True:
                self.run_due_cycles()
                await asyncio.sleep(POLL_INTERVAL_S)
        finally:
            for enforcement, _, _ in self._kept:
                run_cycle_inline(enforcement.stop_cycle())

    def run_due_cycles(self) -> None:
        """Every cycle that is due."""
        now_ns = self._clock.monotonic_ns()
        for index in sorted(self._busy):
            self._serve(index, now_ns)
        if now_ns - self._tended_ns >= LAYOUT_CHECK_INTERVAL_S * 1e9:
            self._tended_ns = now_ns
            for index in sorted(self._laid):
                enforcement, node, layouts = self._kept[index]
                enforcement.on_layout_results(layouts.check_layouts())
                _report_layout_events(node, layouts)

    def _schedule(self, index: int, enforcement: Enforcement) -> None:
        enforcement.schedule_now()
        self._busy.add(index)

    def _serve(self, index: int, now_ns: int) -> None:
        enforcement, node, layouts = self._kept[index]
        asked = run_cycle_inline(enforcement.cycle()) if enforcement.is_due(now_ns) else ()
        if asked:
            self._lay(index)
        if index in self._laid:
            uuids = enforcement.pending_holds()
            if uuids is not None:
                enforcement.on_hold_result(uuids, is_kept=layouts.hold_devices(uuids))
            for layout in asked:
                enforcement.on_layout_result(layout, layouts.apply_layout(layout))
            _report_layout_events(node, layouts)
        if not node.guard.has_work:
            self._busy.discard(index)

    def _lay(self, index: int) -> None:
        if index in self._laid:
            return
        self._laid.add(index)
        _, node, layouts = self._kept[index]
        layouts.recover()
        node.stamp = layouts.stamp_gpus
        _report_layout_events(node, layouts)


class NodeEnforcementLoop:
    """A real node: settings are asked for on the driver's thread, layouts on one of their own, since they take long.

    Without `is_enforcing` nothing is changed: instances are observed, so that they can be leased, and that is all.
    """

    def __init__(
        self,
        node: AgentNode,
        enforcement: Enforcement,
        layouts: MigService,
        *,
        driver: DriverThread,
        slow_driver: DriverThread,
        records: tuple[DeviceRecord, ...],
        is_enforcing: bool,
        clock: AgentClock,
        end_s: float = STOP_TIMEOUT_S,
    ) -> None:
        self._node = node
        self._enforcement = enforcement
        self._layouts = layouts
        self._driver = driver
        self._slow_driver = slow_driver
        self._records = records
        self._recover: Callable[[], object] = layouts.recover if is_enforcing else layouts.observe
        self._tend: Callable[[], object] = layouts.check_layouts if is_enforcing else layouts.observe
        self._clock = clock
        self._end_s = end_s
        self._ordered = asyncio.Event()
        self._under_way: set[asyncio.Task[None]] = set()
        node.ordered = self._schedule
        node.returned = lambda uuid: self._slowly(lambda: layouts.on_device_reset(uuid))
        node.stamp = layouts.stamp_gpus

    async def run(self) -> None:
        """Until cancelled; what was changed is put back then."""
        await self._drive(self._enforcement.start_cycle(self._records))
        self._slowly(self._recover)
        tended_ns = self._clock.monotonic_ns()
        try:
            while True:
                now_ns = self._clock.monotonic_ns()
                uuids = self._enforcement.pending_holds()
                if uuids is not None:
                    self._track(self._hold_devices(uuids))
                if self._enforcement.is_due(now_ns):
                    for layout in await self._drive(self._enforcement.cycle()):
                        self._track(self._lay_out(layout))
                if now_ns - tended_ns >= LAYOUT_CHECK_INTERVAL_S * 1e9 and not self._under_way:
                    tended_ns = now_ns
                    self._slowly(self._tend)
                await self._rest()
        finally:
            # A driver that hangs is left after a while: what is not put back now is at the next start.
            ending = asyncio.ensure_future(self._drive(self._enforcement.stop_cycle()))
            await asyncio.wait([ending], timeout=self._end_s)

    def _schedule(self) -> None:
        self._enforcement.schedule_now()
        self._ordered.set()

    async def _rest(self) -> None:
        try:
            async with asyncio.timeout(POLL_INTERVAL_S):
                await self._ordered.wait()
        except TimeoutError:
            pass
        self._ordered.clear()

    async def _drive(self, cycle: EnforcementCycle) -> tuple[GpuLayout, ...]:
        try:
            ask = next(cycle)
            while True:
                ask = cycle.send(await asyncio.wrap_future(self._driver.call(ask)))
        except StopIteration as end:
            layouts: tuple[GpuLayout, ...] = end.value
            return layouts

    def _slowly(self, work: Callable[[], object]) -> None:
        self._track(self._work(work))

    def _track(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def _work(self, work: Callable[[], object]) -> None:
        results = await asyncio.wrap_future(self._slow_driver.call(work))
        if isinstance(results, tuple):
            self._enforcement.on_layout_results(results)
        _report_layout_events(self._node, self._layouts)

    async def _hold_devices(self, uuids: tuple[str, ...]) -> None:
        is_kept = await asyncio.wrap_future(self._slow_driver.call(lambda: self._layouts.hold_devices(uuids)))
        self._enforcement.on_hold_result(uuids, is_kept=bool(is_kept))

    async def _lay_out(self, layout: GpuLayout) -> None:
        result = await asyncio.wrap_future(self._slow_driver.call(lambda: self._layouts.apply_layout(layout)))
        assert isinstance(result, ApplyResult)
        self._enforcement.on_layout_result(layout, result)
        _report_layout_events(self._node, self._layouts)


def _report_layout_events(node: AgentNode, layouts: MigService) -> None:
    """What befell is told, and the inventory follows."""
    events = layouts.drain_events()
    if events:
        node.queue_events(events)
        node.survey_due = True
