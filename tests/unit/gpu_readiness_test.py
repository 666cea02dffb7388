"""Whole GPUs are free for a start only when the driver says so: others' processes and memory that is not back."""

from dataclasses import replace

from tests.builders.agent import ManualClock, build_agent_node, build_devices

from eelgrid_agent.devices.port import GpuProcess, ProcessKind
from eelgrid_agent.energy.windows import EnergyOutbox, OutboxState
from eelgrid_agent.engine.contact import LeaderContact
from eelgrid_agent.engine.port import attempt_key
from eelgrid_agent.engine.readiness import (
    HELD_MOST_NS,
    MEMORY_BACK_WITHIN_NS,
    GpuReadiness,
    GpuUse,
    describe_process,
    needs_free_gpus,
    read_gpu_use,
)
from eelgrid_agent.node.inventory import read_each_gpu
from eelgrid_agent.simulation.gpu import GpuLoad
from eelgrid_protos.messages import Assignment, AttemptState, AttemptStatus, GpuSetting, NodePlan, ProcessSpec, Slice

SECOND = 1_000_000_000
GIB = 2**30


def assignment(key="w", *gpus, milli=1000, **fields):
    process = ProcessSpec(argv=("true",), working_directory="/")
    return Assignment(
        workload_id=key, replica=0, gpu_uuids=gpus, gpu_milli=milli, process=process, attempt=1, replicas=1, **fields
    )


def waiting(*items):
    found = GpuReadiness(describe=lambda pid: f"process {pid} (eve, miner)", name=lambda pid: "miner")
    found.set_wanted(items)
    return found


def free(memory=GIB):
    return GpuUse((), memory)


def test_only_whole_gpus_are_waited_for():
    assert needs_free_gpus(assignment("w", "A"))
    assert not needs_free_gpus(assignment("w", "A", milli=500))
    assert not needs_free_gpus(assignment("w", milli=0))
    slice_ = Slice(profile="1g.5gb")
    assert not needs_free_gpus(assignment("w", "A", gpu_instance=slice_))


def test_an_attempt_starts_at_the_first_look_that_finds_its_gpus_free():
    one = assignment("w", "A", "B")
    found = waiting(one)
    assert found.list_due_gpus(0) == ("A", "B")
    assert found.observe({"A": free(), "B": free()}, 0) == (one,)
    assert found.list_due_gpus(0) == ()


def test_a_gpu_that_another_holds_is_cordoned_with_its_name_and_looked_at_every_second():
    one = assignment("w", "A")
    found = waiting(one)
    assert found.observe({"A": GpuUse((7,), GIB)}, 0) == ()
    assert "process 7 (eve, miner)" in found.cordons["A"]
    assert found.list_due_gpus(SECOND - 1) == ()
    # Also when nobody waits for it any more, so that the cordon ends with the process.
    found.set_wanted(())
    assert found.list_due_gpus(SECOND) == ("A",)
    assert found.observe({"A": free()}, SECOND) == ()
    assert found.cordons == {}


def test_an_attempt_that_a_newer_plan_puts_on_other_gpus_starts_on_these():
    before, after = assignment("w", "A"), assignment("w", "B")
    found = waiting(before)
    assert found.observe({"A": GpuUse((7,), GIB)}, 0) == ()
    found.set_wanted((after,))
    assert found.observe({"A": GpuUse((7,), GIB), "B": free()}, SECOND) == (after,)


def test_an_attempt_starts_as_the_newest_plan_has_it_and_its_wait_goes_on():
    before = assignment("w", "A")
    after = replace(before, replicas=2)
    found = waiting(before)
    assert found.observe({"A": GpuUse((7,), GIB)}, SECOND) == ()
    found.set_wanted((after,))
    assert found.observe({"A": GpuUse((7,), GIB)}, 2 * SECOND) == ()
    assert [item for item, _ in found.withdraw_overdue(SECOND + HELD_MOST_NS).values()] == [after]


def test_a_waiting_attempt_starts_when_the_other_process_has_ended():
    one = assignment("w", "A", "B")
    found = waiting(one)
    assert found.observe({"A": free(), "B": GpuUse((7, 8), GIB)}, 0) == ()
    assert found.observe({"A": free(), "B": free()}, SECOND) == (one,)


def test_an_attempt_waits_until_memory_is_back_but_not_for_ever(caplog):
    first, second = assignment("first", "A"), assignment("second", "A")
    found = waiting(first)
    assert found.observe({"A": free(GIB)}, 0) == (first,)
    found.set_wanted((second,))
    assert found.observe({"A": free(20 * GIB)}, SECOND) == ()
    assert found.observe({"A": free(GIB)}, 2 * SECOND) == (second,)
    third = assignment("third", "A")
    found.set_wanted((third,))
    assert found.observe({"A": free(20 * GIB)}, SECOND) == ()
    assert found.observe({"A": free(20 * GIB)}, SECOND + MEMORY_BACK_WITHIN_NS) == (third,)
    assert "gpu_memory_not_returned" in caplog.text


def test_what_the_driver_does_not_tell_keeps_nothing_waiting():
    one = assignment("w", "A")
    assert waiting(one).observe({"A": GpuUse(None, None)}, 0) == (one,)
    # One that did not answer at all is asked again.
    assert waiting(one).observe({}, 0) == ()


def test_a_server_that_shares_gpus_does_not_hold_them():
    one = assignment("w", "A")
    found = GpuReadiness(name=lambda pid: "nvidia-cuda-mps")
    found.set_wanted((one,))
    assert found.observe({"A": GpuUse((7,), GIB)}, 0) == (one,)


def test_a_process_is_named_by_user_and_program_where_it_can_be_seen():
    assert "process 1 (root, " in describe_process(1)
    assert describe_process(2**30) == f"process {2**30}"


class RecordedProcesses:
    """A process engine that records starts and never ends anything."""

    def __init__(self):
        self.contact = LeaderContact()
        self.attempts = {}
        self.on_change = lambda: None

    def list_attempts(self):
        return self.attempts

    def drop_waiting(self, wanted):
        """Nothing waits here."""

    def start(self, *items):
        for item in items:
            key = attempt_key(item)
            self.attempts[key] = AttemptStatus(
                workload_id=key.workload_id, replica=key.replica, attempt=key.attempt, state=AttemptState.RUNNING
            )
        self.on_change()

    def refuse(self, item, reason, *, gpu_held=False):
        key = attempt_key(item)
        self.attempts[key] = AttemptStatus(
            workload_id=key.workload_id,
            replica=key.replica,
            attempt=key.attempt,
            state=AttemptState.ENDED,
            reason=reason,
            gpu_held=gpu_held,
        )
        self.on_change()

    def stop(self, key):
        pass

    def forget(self, key):
        pass


def test_a_node_starts_nothing_on_a_simulated_gpu_that_another_process_holds_and_tells_who_does():
    clock = ManualClock()
    device = build_devices(clock)
    (gpu,) = device.gpus()
    device.start_process(gpu.uuid, GpuProcess(pid=4711, kind=ProcessKind.COMPUTE, memory_bytes=GIB))
    device.set_load(gpu.uuid, GpuLoad(utilization_ratio=0.5, memory_bytes=GIB))
    processes = RecordedProcesses()
    node = build_agent_node(device, clock, processes=processes, readiness=GpuReadiness())
    looks = []
    node.starting = lambda: looks.append(node.list_gpus_to_check())
    plan = NodePlan(node_name="n", epoch=1, lease_s=60.0, assignments=(assignment("w", gpu.uuid),))

    node.on_message(plan_message(plan))
    assert looks == [(gpu.uuid,)]
    node.on_gpu_use(read_gpu_use(device, looks[0]))
    assert processes.attempts == {}
    assert "held by process 4711" in node.inventory.gpus[0].cordon

    device.end_process(gpu.uuid, 4711)
    device.set_load(gpu.uuid, GpuLoad())
    clock.now_ns += SECOND
    node.on_gpu_use(read_gpu_use(device, node.list_gpus_to_check()))
    assert [key.workload_id for key in processes.attempts] == ["w"]
    assert node.inventory.gpus[0].cordon == ""


def plan_message(plan):
    from eelgrid_protos.messages import ConnectResponse

    return ConnectResponse(message=plan)


def test_an_attempt_whose_gpu_another_holds_too_long_is_given_up_and_one_whose_gpu_was_free_meanwhile_is_not():
    one, other = assignment("w", "A"), assignment("v", "B")
    found = waiting()
    found.observe({"B": free()}, 0)
    found.set_wanted((one, other))
    held = {"A": GpuUse((7,), GIB), "B": GpuUse((8,), GIB)}
    found.observe(held, SECOND)
    found.observe({"B": free(20 * GIB)}, 2 * SECOND)
    found.observe(held, 3 * SECOND)
    assert found.withdraw_overdue(SECOND + HELD_MOST_NS - 1) == {}
    assert found.withdraw_overdue(SECOND + HELD_MOST_NS) == {
        attempt_key(one): (one, "its GPU is held by process 7 (eve, miner)")
    }
    assert found.waiting == {attempt_key(other)}
    assert found.withdraw_overdue(SECOND + HELD_MOST_NS) == {}


class RecordedOutbox(EnergyOutbox):
    """An outbox that records whom each tick is charged to."""

    def __init__(self):
        super().__init__(OutboxState(incarnation=1), by_plan=True)
        self.charged = []

    def on_tick(self, tick, looks, assignments):
        self.charged.append(assignments)
        super().on_tick(tick, looks, assignments)


def test_a_job_is_charged_from_its_begin_on_and_not_while_another_holds_its_gpu():
    clock = ManualClock()
    device = build_devices(clock)
    (gpu,) = device.gpus()
    device.start_process(gpu.uuid, GpuProcess(pid=4711, kind=ProcessKind.COMPUTE, memory_bytes=GIB))
    processes, outbox = RecordedProcesses(), RecordedOutbox()
    node = build_agent_node(device, clock, processes=processes, readiness=GpuReadiness(), outbox=outbox)
    node.starting = lambda: None
    waits, runs = assignment("w", gpu.uuid), replace(assignment("other"), process=None)
    node.on_message(plan_message(NodePlan(node_name="n", epoch=1, lease_s=600.0, assignments=(runs, waits))))

    def tick():
        clock.now_ns += SECOND
        node.record_tick(read_each_gpu(device, node.gpu_uuids), monotonic_ns=clock.now_ns)
        return outbox.charged[-1]

    assert tick() == tick() == (runs,)
    # The same tuple, so that no window is cut for it.
    assert outbox.charged[-1] is outbox.charged[-2]
    node.on_gpu_use(read_gpu_use(device, node.list_gpus_to_check()))
    assert tick() == (runs,)
    device.end_process(gpu.uuid, 4711)
    clock.now_ns += SECOND
    node.on_gpu_use(read_gpu_use(device, node.list_gpus_to_check()))
    assert tick() == (runs, waits)


def test_a_node_gives_an_attempt_back_whose_gpu_another_holds_and_says_that_it_is_no_failure():
    clock = ManualClock()
    device = build_devices(clock)
    (gpu,) = device.gpus()
    device.start_process(gpu.uuid, GpuProcess(pid=4711, kind=ProcessKind.COMPUTE, memory_bytes=GIB))
    processes = RecordedProcesses()
    node = build_agent_node(device, clock, processes=processes, readiness=GpuReadiness())
    node.starting = lambda: None
    node.on_message(
        plan_message(NodePlan(node_name="n", epoch=1, lease_s=600.0, assignments=(assignment("w", gpu.uuid),)))
    )
    node.on_gpu_use(read_gpu_use(device, node.list_gpus_to_check()))
    assert processes.attempts == {}
    clock.now_ns += HELD_MOST_NS
    node.on_gpu_use(read_gpu_use(device, node.list_gpus_to_check()))
    (status,) = processes.attempts.values()
    assert (status.state, status.gpu_held) == (AttemptState.ENDED, True)
    assert "its GPU is held by process 4711" in status.reason


def limited(one, limit_w=300.0):
    """Readiness for an attempt that starts only once its GPUs have a limit."""
    found = waiting()
    found.set_wanted((one,), [GpuSetting(gpu_uuid=uuid, power_limit_w=limit_w) for uuid in one.gpu_uuids])
    return found


def test_an_attempt_starts_once_each_of_its_gpus_has_the_limit_that_the_plan_sets():
    one = assignment("w", "A", "B", limit_before_start=True)
    found = limited(one)
    high, low = GpuUse((), GIB, 700.0), GpuUse((), GIB, 300.5)
    assert found.observe({"A": low, "B": high}, 0) == ()
    # What does not say its limit may have any, and is looked at again a little later.
    assert found.observe({"A": low, "B": GpuUse((), GIB, None)}, SECOND) == ()
    assert found.list_due_gpus(SECOND) == ("A",)
    assert found.list_due_gpus(2 * SECOND) == ("A", "B")
    assert found.observe({"A": low, "B": low}, 2 * SECOND) == (one,)


def test_a_limit_that_the_plan_sets_holds_no_other_attempt_and_follows_the_plan():
    plain, one = assignment("v", "A"), assignment("w", "B", limit_before_start=True)
    found = waiting()
    settings = [GpuSetting(gpu_uuid=uuid, power_limit_w=300.0) for uuid in "AB"]
    found.set_wanted((plain, one), settings)
    above = GpuUse((), GIB, 400.0)
    assert found.observe({"A": above, "B": above}, 0) == (plain,)
    found.set_wanted((one,), [GpuSetting(gpu_uuid="B", power_limit_w=400.0)])
    assert found.observe({"B": above}, SECOND) == (one,)
    # Without a limit in the plan its default is meant.
    found = waiting()
    found.set_wanted((one,), [])
    assert found.observe({"B": GpuUse((), GIB, 700.0)}, 0) == (one,)


def test_an_attempt_whose_gpus_never_get_their_limit_is_given_up_and_says_so():
    one = assignment("w", "A", limit_before_start=True)
    found = limited(one)
    above = GpuUse((), GIB, 700.0)
    found.observe({"A": above}, SECOND)
    assert found.withdraw_overdue(SECOND + HELD_MOST_NS - 1) == {}
    reason = "a GPU of it did not get its power limit of 300 W in time"
    assert found.withdraw_overdue(SECOND + HELD_MOST_NS) == {attempt_key(one): (one, reason)}
    assert found.waiting == frozenset()
    # It would be placed there again at once.
    assert "did not get its power limit of 300 W" in found.cordons["A"]
    later = SECOND + HELD_MOST_NS + 600 * SECOND
    assert found.list_due_gpus(later - 1) == ()
    assert found.list_due_gpus(later) == ("A",)
    found.observe({"A": above}, later)
    assert found.cordons == {}


def test_no_gpu_is_cordoned_for_a_limit_that_a_plan_only_observes():
    one = assignment("w", "A", limit_before_start=True)
    found = limited(one)
    found.observe({"A": GpuUse((), GIB, 700.0)}, SECOND)
    assert found.withdraw_overdue(SECOND + HELD_MOST_NS, is_enforcing=False).keys() == {attempt_key(one)}
    assert (found.cordons, found.waiting) == ({}, frozenset())


def test_a_node_starts_a_process_when_the_driver_says_that_its_limit_is_in_force():
    clock = ManualClock()
    device = build_devices(clock)
    (gpu,) = device.gpus()
    processes = RecordedProcesses()
    node = build_agent_node(device, clock, processes=processes, readiness=GpuReadiness())
    node.starting = lambda: None
    limit_w = gpu.power_limit_default_w - 25.0
    plan = NodePlan(
        node_name="n",
        epoch=1,
        lease_s=600.0,
        enforce=True,
        assignments=(assignment("w", gpu.uuid, limit_before_start=True),),
        gpu_settings=(GpuSetting(gpu_uuid=gpu.uuid, power_limit_w=limit_w),),
    )
    node.on_message(plan_message(plan))
    node.on_gpu_use(read_gpu_use(device, node.list_gpus_to_check()))
    assert processes.attempts == {}
    device.set_power_limit(gpu.uuid, limit_w)
    clock.now_ns += SECOND
    node.on_gpu_use(read_gpu_use(device, node.list_gpus_to_check()))
    assert [key.workload_id for key in processes.attempts] == ["w"]


def test_an_attempt_whose_gpu_another_holds_meanwhile_is_not_said_to_lack_its_limit():
    one = assignment("w", "A", limit_before_start=True)
    found = limited(one)
    found.observe({"A": GpuUse((), GIB, 700.0)}, SECOND)
    # The limit comes while another holds the GPU.
    found.observe({"A": GpuUse((7,), GIB, 300.0)}, 2 * SECOND)
    assert found.withdraw_overdue(SECOND + HELD_MOST_NS) == {}
    (_, reason) = found.withdraw_overdue(2 * SECOND + HELD_MOST_NS)[attempt_key(one)]
    assert "held by" in reason
    assert "limit" not in found.cordons["A"]
