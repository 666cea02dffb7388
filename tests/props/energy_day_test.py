"""A whole random day, from simulated devices to the ledger: parts add up to the millijoule, and to what was drawn.

On the way agents are killed, the controller is killed, acknowledgements are lost, the connection is gone for hours, and
clocks are set. EELGRID_LEDGER_DAYS=20 takes as many days, each with another seed.
"""

import asyncio
import logging
import os
import random
from functools import partial
from types import SimpleNamespace

import pytest
from tests.builders.agent import SECOND, build_agent_node, build_devices

from eelgrid_agent.devices.port import GpuProcess, ProcessKind
from eelgrid_agent.devices.sampler import read_extended_readings
from eelgrid_agent.energy.node_energy import ENERGY_OUTBOX, AttributionSources, NodeEnergy, load_outbox_state
from eelgrid_agent.energy.process_owners import ProcessOwnerResolver
from eelgrid_agent.energy.windows import EnergyOutbox
from eelgrid_agent.node.inventory import read_each_gpu
from eelgrid_agent.simulation.spec import GpuLoad, GpuSpec
from eelgrid_agent.state_files import StateFile
from eelgrid_controller.clock import Clock
from eelgrid_controller.energy.ledger import parse_query
from eelgrid_controller.energy.store import ledger_writer
from eelgrid_controller.energy.store.ledger_store import open_ledger
from eelgrid_controller.energy.store.ledger_writer import LedgerWriter
from eelgrid_protos import codec
from eelgrid_protos.catalogue.loader import load_catalogue
from eelgrid_protos.messages import Assignment, ConnectResponse, EnergyWindow, NodePlan

BEGIN_NS = 1_799_971_200 * SECOND
STEP_S, LOOK_S, DAY_S = 10, 30, 86_400
DAYS = int(os.environ.get("EELGRID_LEDGER_DAYS", "1"))
GPUS = (GpuSpec(product="h100-sxm5-80gb"), GpuSpec(product="a100-sxm4-80gb"))


class SetClock:
    """A monotonic clock, and a wall clock that people set."""

    now_ns = SECOND
    offset_ns = BEGIN_NS

    def monotonic_ns(self):
        return self.now_ns

    def wall_ns(self):
        return self.now_ns + self.offset_ns


class Day:
    """One node with its agent, which comes and goes, and the controller's ledger writer, which does, too."""

    def __init__(self, folder, rng):
        self.folder, self.rng, self.clock = folder, rng, SetClock()
        # Answers come when the disk is done, so they draw for themselves: the day's faults are the seed's alone.
        self.losing = random.Random(rng.random())
        (folder / "proc").mkdir()
        (folder / "data").mkdir()
        self.device = build_devices(self.clock, "n0", GPUS, seed=rng.randrange(2**31))
        self.incarnations, self.pids, self.running, self.step = iter(range(1, 10**6)), iter(range(10, 10**6)), {}, 0
        self.file = StateFile(folder / "windows.json", ENERGY_OUTBOX)
        self.begin_agent()
        self.truth_pj = self.drawn_pj()
        self.counts = dict.fromkeys(("agents", "controllers", "unheard", "clocks", "away"), 0)

    def drawn_pj(self):
        return sum(gpu.energy_pj(self.clock.now_ns) for gpu in self.device.devices)

    def begin_agent(self):
        outbox = EnergyOutbox(load_outbox_state(self.file, draw_incarnation=lambda: next(self.incarnations)), boot="b")
        energy = NodeEnergy(load_catalogue(), AttributionSources(ProcessOwnerResolver(self.folder / "proc")))
        self.node = build_agent_node(self.device, self.clock, "n0", energy=energy, outbox=outbox)
        self.kept, self.changes = outbox.state(), -1
        self.plan()

    def plan(self):
        held = Assignment(workload_id="w-1", replica=0, gpu_uuids=(self.node.gpu_uuids[1],), gpu_milli=1000)
        self.node.on_message(
            ConnectResponse(message=NodePlan(node_name="n0", epoch=1, lease_s=1e9, assignments=(held,)))
        )

    def kill_agent(self):
        """What is not on its disk is lost; devices go on counting."""
        self.file.store(self.kept)
        self.clock.now_ns += self.rng.randrange(5, 120) * SECOND
        self.begin_agent()
        self.counts["agents"] += 1

    async def begin_writer(self):
        core = SimpleNamespace(state=SimpleNamespace(workloads={}, policy=SimpleNamespace(prices=None)))
        self.writer = LedgerWriter(
            partial(open_ledger, self.folder / "data"),
            core=lambda: core,
            clock=Clock(now_ns=self.clock.wall_ns),
            log=logging.getLogger("test"),
            bytes_most=10**9,
        )
        self.task = asyncio.create_task(self.writer.run())
        self.node.outbox.windows.resume()

    async def kill_writer(self):
        """What is not on its disk is lost."""
        self.writer._batch = ledger_writer._Batch()
        self.task.cancel()
        await asyncio.wait((self.task,))
        self.counts["controllers"] += 1
        await self.begin_writer()

    def work(self):
        """Jobs come and go, and load with them."""
        index = self.rng.randrange(len(GPUS))
        uuid = self.node.gpu_uuids[index]
        if index in self.running:
            self.device.end_process(uuid, self.running.pop(index))
            self.device.set_load(uuid, GpuLoad())
            return
        pid = next(self.pids)
        (self.folder / "proc" / str(pid)).mkdir()
        (self.folder / "proc" / str(pid) / "cgroup").write_text(
            f"0::/system.slice/slurmstepd.scope/job_{pid}/step_0/user/task_0\n"
        )
        (self.folder / "proc" / str(pid) / "stat").write_text(f"{pid} (p) " + " ".join(["S", *["0"] * 18, "77"]))
        self.device.start_process(uuid, GpuProcess(pid=pid, kind=ProcessKind.COMPUTE))
        self.device.set_load(uuid, GpuLoad(utilization_ratio=self.rng.random()))
        self.running[index] = pid

    def tick(self):
        self.clock.now_ns += STEP_S * SECOND
        self.step += 1
        self.node.record_tick(read_each_gpu(self.device, self.node.gpu_uuids), monotonic_ns=self.clock.now_ns)
        if self.step % (LOOK_S // STEP_S) == 0:
            slow = read_extended_readings(self.device, self.node.gpu_uuids)
            found = self.node.energy.read_sources(self.node.inventory.gpus, slow, now_ns=self.clock.now_ns)
            self.node.observe_slow(slow, found)
        outbox = self.node.outbox
        if outbox.windows.changes != self.changes:
            self.kept, self.changes = outbox.state(), outbox.windows.changes

    def hear(self, windows, told):
        if self.losing.random() < 0.3:
            self.counts["unheard"] += 1
        else:
            windows.acknowledge(told.incarnation, told.number)

    def send(self):
        windows = self.node.outbox.windows
        while (window := windows.next_window()) is not None:
            arrived = codec.decode_message(EnergyWindow, codec.encode_message(window))
            self.writer.add_window(self.node.inventory, arrived, lambda told, of=windows: self.hear(of, told))

    async def run(self):
        await self.begin_writer()
        away_until = 0
        while self.step * STEP_S < DAY_S:
            self.tick()
            chance = self.rng.random()
            if chance < 0.004:
                self.work()
            elif chance < 0.0046:
                self.kill_agent()
            elif chance < 0.006:
                await self.kill_writer()
            elif chance < 0.0063:
                self.clock.offset_ns += self.rng.randrange(-300, 300) * SECOND
                self.counts["clocks"] += 1
            elif chance < 0.0068 and self.step > away_until:
                away_until = self.step + self.rng.randrange(60, 1200)
                self.counts["away"] += 1
            if self.step > away_until:
                if self.step == away_until + 1:
                    self.node.outbox.windows.resume()
                self.send()
            if self.step % 3 == 0:
                await asyncio.sleep(0.0005)
        drawn_pj = self.drawn_pj() - self.truth_pj
        self.node.outbox.close()
        async with asyncio.timeout(30.0):
            while self.node.outbox.windows.closed:
                self.node.outbox.windows.resume()
                self.send()
                await asyncio.sleep(0.01)
        self.task.cancel()
        await asyncio.wait((self.task,))
        return drawn_pj


@pytest.mark.parametrize("seed", range(DAYS))
async def test_a_random_day_adds_up_and_is_what_was_drawn(tmp_path, monkeypatch, seed):
    monkeypatch.setattr(ledger_writer, "_BATCH_S", 0.0)
    day = Day(tmp_path, random.Random(seed))
    drawn_j = await day.run() / 1e12
    store = open_ledger(tmp_path / "data")
    stretch = {"begin_ns": BEGIN_NS - DAY_S * SECOND, "end_ns": BEGIN_NS + 3 * DAY_S * SECOND, "filters": {}}
    for by in ((), ("hour",), ("kind", "name"), ("gpu_model", "day")):
        answer = store.query(parse_query(**stretch, group_by=by, rows_most=5))
        assert answer.total.energy_mj == answer.measured_mj, by
    assert sum(store.namespaces.counters_mj().values()) == answer.measured_mj
    for hour in range(-1, 26):
        begin_ns = BEGIN_NS + hour * 3600 * SECOND
        one = store.query(
            parse_query(begin_ns=begin_ns, end_ns=begin_ns + 3600 * SECOND, group_by=(), filters={}, rows_most=5)
        )
        assert one.total.energy_mj == one.measured_mj, hour
    store.close()
    assert seed or all(day.counts.values()), f"every fault came: {day.counts}"
    assert answer.measured_mj / 1000.0 == pytest.approx(drawn_j, rel=0.01), day.counts
