"""The schedules: a driver that hangs costs its readings and nothing else; a fleet's ticks are spread."""

import asyncio
import itertools
import threading
import time

import pytest
from tests.builders.agent import A10, SystemClock, build_agent_node, build_devices
from tests.waiting import wait_until

from eelgrid_agent.node.loop import DriverThread, MachineLoop, SimulatedNodesLoop
from eelgrid_protos.messages import AbsenceReason, Cadence, Reading, Welcome


def node_named(name, device):
    return build_agent_node(device, SystemClock(), name, ticks_most=100)


def simulation(name="n"):
    return build_devices(SystemClock(), name)


def welcome(node, sample_interval_s):
    cadence = Cadence(sample_interval_s=sample_interval_s, send_interval_s=5.0)
    node.on_welcome(Welcome(acknowledged_sequence=0, cadence=cadence))


class StickyDevice:
    """A device whose look does not return until it is let go, and which notes who asks."""

    def __init__(self, device):
        self._device = device
        self.free = threading.Event()
        self.free.set()
        self.threads = set()
        self.looks = 0

    def __getattr__(self, name):
        return getattr(self._device, name)

    def driver_version(self):
        return self._device.driver_version()

    def read(self, uuid):
        self.threads.add(threading.get_ident())
        self.looks += 1
        self.free.wait()
        return self._device.read(uuid)

    def close(self):
        self._device.close()


async def test_a_driver_that_hangs_is_recorded_as_timed_out_and_asked_by_one_thread():
    device = StickyDevice(simulation())
    node = node_named("n", device)
    welcome(node, 0.1)
    driver = DriverThread()
    loop = MachineLoop(node, device, clock=SystemClock(), driver=driver, stalled=lambda _: None)
    task = asyncio.ensure_future(loop.run())
    try:
        await wait_until(lambda: node.ticks_total >= 2)
        assert node.last_tick.reading(Reading.POWER_W, 0) is not None
        device.free.clear()
        await wait_until(lambda: node.last_tick.reading(Reading.POWER_W, 0) is None)
        assert AbsenceReason.TIMED_OUT in {reason for _, reason in node.last_tick.gpu_absences}
        asked, ticks = device.looks, node.ticks_total
        await wait_until(lambda: node.ticks_total >= ticks + 3)
        assert device.looks == asked, "a busy driver is not asked again"
        device.free.set()
        await wait_until(lambda: node.last_tick.reading(Reading.POWER_W, 0) is not None)
        assert len(device.threads) == 1
        assert threading.get_ident() not in device.threads
    finally:
        device.free.set()
        task.cancel()
        await asyncio.wait({task})
        driver.close()


async def test_simulated_nodes_tick_each_at_its_own_moment():
    pairs = [(node_named(f"n{index}", device), device) for index, device in enumerate(map(simulation, "abcdefgh"))]
    wheel = SimulatedNodesLoop(pairs, clock=SystemClock(), stalled=lambda _: None)
    for node, _ in pairs:
        welcome(node, 0.4)
    task = asyncio.ensure_future(wheel.run())
    try:
        await wait_until(lambda: all(node.ticks_total >= 3 for node, _ in pairs))
        phases = sorted(node.last_tick_ns % 400_000_000 for node, _ in pairs)
        gaps = [later - earlier for earlier, later in itertools.pairwise(phases)]
        assert max(gaps) < 200_000_000, "eight nodes 50 ms apart"
        assert len({phase // 25_000_000 for phase in phases}) >= 4
    finally:
        task.cancel()
        await asyncio.wait({task})


async def test_a_changed_cadence_takes_hold_at_once():
    device = simulation()
    node = node_named("n", device)
    welcome(node, 3600.0)
    wheel = SimulatedNodesLoop([(node, device)], clock=SystemClock(), stalled=lambda _: None)
    task = asyncio.ensure_future(wheel.run())
    try:
        await asyncio.sleep(0.05)
        before = node.ticks_total
        welcome(node, 0.1)
        await wait_until(lambda: node.ticks_total >= before + 3)
    finally:
        task.cancel()
        await asyncio.wait({task})


async def test_a_fleet_that_cannot_be_sampled_in_time_leaves_the_streams_a_turn():
    """All are due at once and each look takes 5 ms of a clock that only looks move on."""
    now_ns = [10**9]

    class HandClock:
        wall_ns = staticmethod(time.time_ns)

        @staticmethod
        def monotonic_ns():
            return now_ns[0]

    pairs = [(node_named(f"n{index}", device), device) for index, device in enumerate(map(simulation, "abcdefgh" * 5))]
    for node, _ in pairs:
        tick = node.record_tick

        def slowly(looks, *, monotonic_ns, tick=tick):
            now_ns[0] += 5_000_000
            return tick(looks, monotonic_ns=monotonic_ns)

        node.record_tick = slowly
    wheel = SimulatedNodesLoop(pairs, clock=HandClock(), stalled=lambda _: None)
    task = asyncio.ensure_future(wheel.run())
    try:
        await asyncio.sleep(0)
        now_ns[0] += 10 * 10**9
        await wait_until(lambda: any(node.ticks_total for node, _ in pairs))
        assert sum(node.ticks_total for node, _ in pairs) < len(pairs), "the streams had a turn before all had theirs"
    finally:
        task.cancel()
        await asyncio.wait({task})


class SteppingClock(SystemClock):
    """Goes on by so much at each reading."""

    def __init__(self, step_s):
        self._step_ns, self._now_ns = int(step_s * 1e9), 0

    def monotonic_ns(self):
        self._now_ns += self._step_ns
        return self._now_ns


@pytest.mark.parametrize(("step_s", "most", "least"), [(0.02, 5, 4), (0.0, 1, 0)], ids=["each takes long", "none does"])
async def test_a_slow_look_lets_others_have_a_turn_after_each_slice_and_finds_all_gpus(step_s, most, least):
    device = build_devices(SystemClock(), "n", gpus=(A10,) * 4)
    node = node_named("n", device)
    loop = SimulatedNodesLoop([(node, device)], clock=SteppingClock(step_s), stalled=lambda _: None)
    turns = 0

    async def count():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.ensure_future(count())
    try:
        await loop._look_slowly(0)
    finally:
        task.cancel()
    assert set(node.slow.gpus) == set(node.gpu_uuids)
    # A thousand nodes that gave up their turn after each GPU would find none for themselves.
    assert least <= turns <= most
