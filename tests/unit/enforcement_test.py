"""Enforcement through a node: plans come in as messages, devices change, answers and events go out, all is put back."""

import asyncio
import itertools

import pytest
from tests.builders.agent import ManualClock, SystemClock
from tests.waiting import wait_until

from eelgrid_agent.enforce.guard.events import DriverOrigin
from eelgrid_agent.enforce.power import PowerExecutor
from eelgrid_agent.enforce.rules import LocalPolicy
from eelgrid_agent.node.enforcement_loop import Enforcement, InlineEnforcementLoop, NodeEnforcementLoop
from eelgrid_agent.node.inventory import SequentialReader, read_each_gpu, survey_devices
from eelgrid_agent.node.loop import DriverThread
from eelgrid_agent.simulated_composition import build_simulated_node
from eelgrid_agent.simulation.node import SimulatedNode
from eelgrid_agent.simulation.spec import GpuLoad, GpuSpec, NodeSpec
from eelgrid_agent.state_files import MemoryState
from eelgrid_protos.messages import (
    Acknowledgement,
    ApplyStatus,
    Assignment,
    Cadence,
    ConnectResponse,
    GpuLayout,
    GpuSetting,
    NodeEvent,
    NodeEventKind,
    NodePlan,
    PlanApplied,
    SampleBatch,
    WantedInstance,
    Welcome,
)

PRODUCT = "h100-sxm5-80gb"
HALVES = (WantedInstance(profile="4g.40gb", start=0), WantedInstance(profile="3g.40gb", start=4))


class Counted:
    """Layouts that count what is applied."""

    def __init__(self, layouts):
        self._layouts = layouts
        self.applied = 0

    def __getattr__(self, name):
        return getattr(self._layouts, name)

    def apply_layout(self, layout):
        self.applied += 1
        return self._layouts.apply_layout(layout)


class Bench:
    """One simulated node with two H100, its clock and its keeper."""

    def __init__(self, *, local=None, has_control=True):
        self.clock = ManualClock(epoch_ns=1_700_000_000 * 10**9)
        spec = NodeSpec(node_name="n", cpu_milli=1000, memory_bytes=2**30, gpus=(GpuSpec(product=PRODUCT),) * 2)
        self.machine = SimulatedNode(spec, monotonic_ns=self.clock.monotonic_ns, seed=3)
        self.agent = build_simulated_node(
            self.machine,
            self.machine,
            spec=spec,
            clock=self.clock,
            draw_incarnation=lambda: 1,
            control=self.machine,
            ticks_most=1000,
            send_phase=0.0,
            local=local,
            has_control=has_control,
        )
        self.node = self.agent.node
        self.layouts = Counted(self.agent.layouts)
        self.keeper = InlineEnforcementLoop(((self.agent.enforcement, self.node, self.layouts),), clock=self.clock)
        self.uuids = self.node.gpu_uuids
        self.node.on_welcome(Welcome(acknowledged_sequence=0, cadence=Cadence(sample_interval_s=1.0)))
        self.said = []
        self.epochs = itertools.count(1)

    def settings(self, watts):
        return tuple(GpuSetting(gpu_uuid=uuid, power_limit_w=watts) for uuid in self.uuids)

    def send(self, **wanted):
        plan = NodePlan(node_name="n", epoch=next(self.epochs), lease_s=wanted.pop("lease_s", 1e6), **wanted)
        self.node.on_message(ConnectResponse(message=plan))

    def live(self, seconds, *, ticks=True):
        """Quarter seconds of the keeper, with the wheel's tick at each whole one."""
        for quarter in range(int(seconds * 4)):
            self.clock.now_ns += 250_000_000
            if ticks and quarter % 4 == 3:
                now_ns = self.clock.now_ns
                if self.node.record_tick(read_each_gpu(self.machine, self.node.gpu_uuids), monotonic_ns=now_ns):
                    self.node.update_inventory(survey_devices(self.machine))
            self.keeper.run_due_cycles()
            if self.node.survey_due:
                self.node.update_inventory(survey_devices(self.machine))
            while (message := self.node.next_message()) is not None:
                self.said.append(message.message)

    def limits_w(self):
        return [self.machine.power_settings(uuid).requested_w for uuid in self.uuids]

    def power_w(self):
        return sum(gpu.power_mw for gpu in self.machine.devices) / 1000.0

    def answer(self):
        return next(one for one in reversed(self.said) if isinstance(one, PlanApplied))

    def events(self):
        return [one.kind for one in self.said if isinstance(one, NodeEvent)]


def test_an_enforced_limit_is_set_read_back_answered_and_put_back_when_the_lease_ends():
    bench = Bench()
    before = bench.limits_w()
    bench.send(enforce=True, gpu_settings=bench.settings(500.0), lease_s=20.0)
    bench.live(8)
    assert bench.limits_w() == [500.0, 500.0]
    results = {result.subject: result for result in bench.answer().results}
    assert bench.answer().status is ApplyStatus.APPLIED
    assert [results[uuid].power_limit_w for uuid in bench.uuids] == [500.0, 500.0]
    bench.live(20)
    assert bench.limits_w() == before
    assert NodeEventKind.LEASE_EXPIRED in bench.events()
    assert not bench.node.guard.has_work


def test_that_the_lease_ended_is_told_to_each_next_controller_until_the_plan_is_sent_again():
    bench = Bench()

    def connect_anew():
        sent = max((one.sequence for one in bench.said if isinstance(one, SampleBatch)), default=0)
        bench.node.on_message(ConnectResponse(message=Acknowledgement(sequence=sent)))
        bench.node.on_disconnected()
        bench.node.on_welcome(Welcome(acknowledged_sequence=sent, cadence=Cadence(sample_interval_s=1.0)))
        bench.live(2)
        return bench.events().count(NodeEventKind.LEASE_EXPIRED)

    bench.send(lease_s=5.0)
    bench.live(8)
    assert bench.events().count(NodeEventKind.LEASE_EXPIRED) == 1
    # Whoever has acknowledged it may have died before it sent the plan again.
    assert connect_anew() == 2
    assert bench.node.guard.expired
    bench.send()
    assert not bench.node.guard.expired
    assert connect_anew() == 2


def test_a_pool_that_observes_and_an_agent_that_only_observes_change_nothing():
    cases = (
        (Bench(), False, {(ApplyStatus.OBSERVED, "")}),
        (Bench(has_control=False), True, {(ApplyStatus.REFUSED, "no-permission")}),
    )
    for bench, enforce, said in cases:
        before = bench.limits_w()
        layout = GpuLayout(gpu_uuid=bench.uuids[0], mig_enabled=True, instances=HALVES)
        bench.send(enforce=enforce, gpu_settings=bench.settings(400.0), gpu_layouts=(layout,))
        bench.live(5)
        assert bench.limits_w() == before
        assert not any(gpu.mig_enabled for gpu in bench.machine.gpus())
        assert {(result.status, result.rule) for result in bench.answer().results} == said
        assert bench.node.guard.unmet_layouts == ({bench.uuids[0]} if enforce else set())


def test_a_layout_of_a_plan_is_made_stamped_and_not_changed_under_work_that_holds_it():
    bench = Bench()
    layout = GpuLayout(gpu_uuid=bench.uuids[1], mig_enabled=True, instances=HALVES)
    bench.send(enforce=True, gpu_layouts=(layout,))
    assert bench.node.guard.unmet_layouts == {bench.uuids[1]}
    bench.live(3)
    assert bench.node.guard.unmet_layouts == set()
    gpu = bench.node.inventory.gpus[1]
    assert gpu.mig_enabled
    assert [instance.start for instance in gpu.gpu_instances] == [0, 4]
    first = {
        instance.compute_instances[0].uuid: instance.compute_instances[0].generation for instance in gpu.gpu_instances
    }
    assert set(first.values()) == {1}
    assert bench.answer().status is ApplyStatus.APPLIED
    assert NodeEventKind.LAYOUT_CHANGED in bench.events()

    # Work on one half: a layout without it is refused by name, and the other half may go.
    held = gpu.gpu_instances[1].compute_instances[0].uuid
    work = Assignment(workload_id="w", replica=0, gpu_uuids=(held,), gpu_milli=1000)
    bench.send(enforce=True, gpu_layouts=(layout,), assignments=(work,))
    bench.live(2)
    bench.send(enforce=True, gpu_layouts=(GpuLayout(gpu_uuid=bench.uuids[1]),), assignments=(work,))
    bench.live(2)
    refusals = [result for result in bench.answer().results if result.status is ApplyStatus.REFUSED]
    assert [refusal.rule for refusal in refusals] == ["busy"]
    assert bench.node.guard.unmet_layouts == {bench.uuids[1]}
    assert [instance.start for instance in bench.node.inventory.gpus[1].gpu_instances] == [0, 4]


def test_an_instance_made_again_has_another_generation_under_its_old_uuid():
    bench = Bench()
    whole = GpuLayout(gpu_uuid=bench.uuids[0], mig_enabled=True, instances=HALVES)
    bare = GpuLayout(gpu_uuid=bench.uuids[0], mig_enabled=True)
    seen = []
    for layout in (whole, bare, whole):
        bench.send(enforce=True, gpu_layouts=(layout,))
        bench.live(3)
        seen.append(
            [
                (compute.uuid, compute.generation)
                for instance in bench.node.inventory.gpus[0].gpu_instances
                for compute in instance.compute_instances
            ]
        )
    assert seen[1] == []
    assert [uuid for uuid, _ in seen[0]] == [uuid for uuid, _ in seen[2]]
    assert [generation for _, generation in seen[2]] == [2, 2]


def test_a_standing_layout_is_not_asked_for_again_and_a_foreign_change_is_repaired():
    bench = Bench()
    uuid = bench.uuids[0]
    layout = GpuLayout(gpu_uuid=uuid, mig_enabled=True, instances=HALVES)
    for watts in (600.0, 550.0, 500.0):
        bench.send(enforce=True, gpu_layouts=(layout,), gpu_settings=bench.settings(watts))
        bench.live(3)
        assert bench.answer().status is ApplyStatus.APPLIED
    assert bench.layouts.applied == 1
    bench.machine.faults.destroy_foreign_instance(uuid, bench.node.inventory.gpus[0].gpu_instances[0].id)
    bench.live(40)
    assert [instance.start for instance in bench.node.inventory.gpus[0].gpu_instances] == [0, 4]
    assert [
        kind for kind in bench.events() if kind in {NodeEventKind.SETTING_DRIFT, NodeEventKind.SETTING_RESTORED}
    ] == [NodeEventKind.SETTING_DRIFT, NodeEventKind.SETTING_RESTORED]
    # Somebody who undoes it for ever is left alone after some repairs, and the answer says so.
    for _ in range(8):
        gone = bench.machine.gpus()[0].gpu_instances
        if gone:
            bench.machine.faults.destroy_foreign_instance(uuid, gone[0].id)
        bench.live(35)
    assert NodeEventKind.ENFORCEMENT_SUSPENDED in bench.events()
    (result,) = [result for result in bench.answer().results if result.rule == "drift"]
    assert (result.subject, result.status) == (uuid, ApplyStatus.FAILED)
    # Asked for once more, it is made once more.
    bench.send(enforce=True, gpu_layouts=(layout,))
    bench.live(3)
    assert bench.answer().status is ApplyStatus.APPLIED
    assert bench.layouts.applied == 2


def test_a_local_budget_holds_within_a_second_of_a_rise_without_any_controller():
    bench = Bench(local=LocalPolicy(power_budget_w=900.0, enforce=True))
    bench.live(3)
    for uuid in bench.uuids:
        bench.machine.set_load(uuid, GpuLoad(utilization_ratio=1.0))
    over_s = 0.0
    for _ in range(40):
        bench.live(0.25)
        over_s += 0.25 if bench.power_w() > 900.0 else 0.0
    assert bench.power_w() <= 900.0
    assert 0.0 < over_s <= 1.0


def test_work_that_comes_back_after_a_lost_gpu_finds_its_limit_again():
    bench = Bench()
    bench.send(enforce=True, gpu_settings=bench.settings(450.0))
    bench.live(6)
    bench.machine.faults.lose_gpu(bench.uuids[0])
    bench.live(3)
    bench.machine.faults.restore_gpu(bench.uuids[0])
    bench.live(8)
    assert bench.limits_w() == [450.0, 450.0]
    assert {NodeEventKind.GPU_LOST, NodeEventKind.GPU_RETURNED} <= set(bench.events())


def test_a_gpu_that_is_lost_again_and_again_is_cordoned():
    bench = Bench()
    bench.send(enforce=True, gpu_settings=bench.settings(450.0))
    for _ in range(3):
        bench.machine.faults.lose_gpu(bench.uuids[0])
        bench.live(3)
        bench.machine.faults.restore_gpu(bench.uuids[0])
        bench.live(3)
    assert "quarantined" in bench.node.inventory.gpus[0].cordon
    assert not bench.node.inventory.gpus[1].cordon
    assert NodeEventKind.GPU_QUARANTINED in bench.events()


class Threads:
    """A machine's keeper on real threads, with a journal that outlives the keeper."""

    def __init__(self, journal):
        self.bench = Bench()
        self.clock = self.bench.clock = SystemClock()
        node = self.bench.node
        enforcer = PowerExecutor(self.bench.machine, journal, origin=DriverOrigin)
        self.enforcement = Enforcement(node, enforcer, looking=SequentialReader(self.bench.machine), clock=self.clock)
        self.driver, self.slow = DriverThread(), DriverThread()
        self.records = journal.load()

    def keeper(self, layouts, end_s=5.0):
        return NodeEnforcementLoop(
            self.bench.node,
            self.enforcement,
            layouts,
            driver=self.driver,
            slow_driver=self.slow,
            records=self.records,
            is_enforcing=True,
            clock=self.clock,
            end_s=end_s,
        )

    def close(self):
        self.driver.close()
        self.slow.close()


async def test_a_machine_sets_in_the_background_and_puts_back_when_it_is_cancelled():
    journal = MemoryState(())
    threads = Threads(journal)
    bench = threads.bench
    before = bench.limits_w()
    task = asyncio.ensure_future(threads.keeper(bench.agent.layouts).run())
    try:
        bench.node.record_tick(read_each_gpu(bench.machine, bench.uuids), monotonic_ns=threads.clock.monotonic_ns())
        bench.send(enforce=True, gpu_settings=bench.settings(650.0))
        layout = GpuLayout(gpu_uuid=bench.uuids[1], mig_enabled=True, instances=HALVES)
        await wait_until(lambda: bench.limits_w() == [650.0, 650.0])
        assert len(journal.load()) == 2
        bench.send(enforce=True, gpu_settings=bench.settings(650.0), gpu_layouts=(layout,))
        await wait_until(lambda: len(bench.machine.gpus()[1].gpu_instances) == 2 and bench.node.survey_due)
    finally:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        threads.close()
    assert bench.limits_w() == before
    assert journal.load() == ()


async def test_what_a_crash_left_is_put_back_at_the_next_start():
    journal = MemoryState(())
    crashed = Threads(journal)
    bench = crashed.bench
    before = bench.limits_w()
    task = asyncio.ensure_future(crashed.keeper(bench.agent.layouts, end_s=0.0).run())
    bench.node.record_tick(read_each_gpu(bench.machine, bench.uuids), monotonic_ns=crashed.clock.monotonic_ns())
    bench.send(enforce=True, gpu_settings=bench.settings(650.0))
    await wait_until(lambda: bench.limits_w() == [650.0, 650.0] and len(journal.load()) == 2)
    left = journal.load()
    # The process dies: whatever its end writes does not happen.
    crashed.driver.close()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    crashed.slow.close()
    journal.store(left)
    assert bench.limits_w() == [650.0, 650.0]

    after = Threads(journal)
    after.bench = bench
    enforcer = PowerExecutor(bench.machine, journal, origin=DriverOrigin)
    fresh = Bench()
    after.enforcement = Enforcement(fresh.node, enforcer, looking=SequentialReader(bench.machine), clock=after.clock)
    after.bench = fresh
    again = asyncio.ensure_future(after.keeper(fresh.agent.layouts).run())
    await wait_until(lambda: journal.load() == ())
    again.cancel()
    with pytest.raises(asyncio.CancelledError):
        await again
    after.close()
    assert bench.limits_w() == before
