"""When a node is to blame for the end of a process: its GPU was lost or hangs, the driver announced a fatal error, a restart."""

import asyncio
import itertools
import os
import signal
from types import SimpleNamespace

import pytest
from tests.builders.agent import A10, ManualClock, build_agent_node, build_devices
from tests.builders.attempts import ended, run_one, shell
from tests.waiting import wait_until

from eelgrid_agent.devices.port import DeviceEvent, DeviceEventKind
from eelgrid_agent.engine import local
from eelgrid_agent.engine.contact import LeaderContact
from eelgrid_agent.engine.local import LocalEngine
from eelgrid_agent.engine.port import AttemptKey
from eelgrid_agent.node import loop as loop_module
from eelgrid_agent.node.attempt_reporter import LOOK_MOST_NS
from eelgrid_agent.node.inventory import APPLICATION_XIDS, FATAL_XIDS, look_for_faults
from eelgrid_agent.node.loop import DriverThread, QuestionsInPlace, QuestionsToDriver
from eelgrid_protos.messages import (
    Assignment,
    AttemptReport,
    AttemptState,
    AttemptStatus,
    Cadence,
    ConnectResponse,
    NodePlan,
    ProcessSpec,
    Welcome,
)

PROCESS = ProcessSpec(argv=("/bin/true",), working_directory="/")


class FailingJobs:
    """A node with two GPUs, and a job on each whose process ends as a test says."""

    def __init__(self):
        self.clock, self.attempts, self.wakes = ManualClock(), {}, 0
        self.clock.now_ns = 10**9
        self.device = build_devices(self.clock, gpus=(A10, A10))
        # The first call begins to listen.
        self.device.take_events()
        processes = SimpleNamespace(
            list_attempts=lambda: self.attempts,
            drop_waiting=lambda _: None,
            on_change=None,
            start=lambda *_: None,
            forget=lambda *_: None,
            contact=LeaderContact(),
        )
        self.node = build_agent_node(self.device, self.clock, processes=processes)
        self.node.on_welcome(Welcome(acknowledged_sequence=0, cadence=Cadence()))
        self.node.starting = lambda: setattr(self, "wakes", self.wakes + 1)
        self.gpus = self.node.gpu_uuids
        self.begun_ns = self.clock.wall_ns()
        self.processes = processes

    def begin(self, *uuids):
        """Sends a plan with a job on each of these GPUs; `cpu` is one without."""
        items = tuple(
            Assignment(
                workload_id=f"job-{number}",
                replica=0,
                gpu_uuids=() if uuid == "cpu" else (uuid,),
                gpu_milli=0 if uuid == "cpu" else 1000,
                process=PROCESS,
                attempt=1,
                replicas=1,
            )
            for number, uuid in enumerate(uuids)
        )
        self.node.on_message(
            ConnectResponse(message=NodePlan(node_name=self.node.name, epoch=1, lease_s=60.0, assignments=items))
        )
        for number in range(len(uuids)):
            self.change(number, state=AttemptState.RUNNING)
        self.node.report_starts()
        self.read()

    def change(self, number, **known):
        key = AttemptKey(f"job-{number}", 0, 1)
        self.attempts[key] = AttemptStatus(
            workload_id=key.workload_id, replica=0, attempt=1, started_ns=self.begun_ns, **known
        )
        self.processes.on_change()

    def end(self, number=0, **known):
        how = {"exit_code": 1} | known
        self.change(number, state=AttemptState.ENDED, ended_ns=self.clock.wall_ns(), **how)

    def read(self):
        """The ends that are told, with what their nodes are to blame for."""
        found = {}
        while (message := self.node.next_message()) is not None:
            if isinstance(message.message, AttemptReport):
                found |= {one.workload_id: one.node_fault for one in message.message.attempts if one.is_over}
        return found

    def look(self):
        told = self.read()
        self.node.on_fault_look(*look_for_faults(self.device, self.node.list_suspected_gpus()))
        return told | self.read()


@pytest.fixture
def jobs():
    return FailingJobs()


def test_a_failure_is_told_once_its_gpus_were_looked_at(jobs):
    jobs.begin(*jobs.gpus)
    jobs.end()
    assert jobs.read() == {}
    assert jobs.wakes == 1
    assert jobs.node.list_suspected_gpus() == (jobs.gpus[0],)
    assert jobs.look() == {"job-0": ""}
    assert jobs.node.list_suspected_gpus() == ()
    assert jobs.read() == {}


def test_what_succeeds_is_stopped_or_has_no_gpu_is_told_at_once(jobs):
    jobs.begin(jobs.gpus[0], jobs.gpus[1], "cpu")
    jobs.end(0, exit_code=0)
    jobs.end(1, exit_code=None, signal=15, reason="stopped")
    jobs.end(2)
    assert jobs.read() == {"job-0": "", "job-1": "", "job-2": ""}
    assert jobs.wakes == 0


def test_a_lost_gpu_is_to_blame_for_what_ran_on_it_alone(jobs):
    jobs.begin(*jobs.gpus)
    jobs.device.faults.lose_gpu(jobs.gpus[1])
    jobs.end(0)
    jobs.end(1, exit_code=None, signal=6)
    assert jobs.look() == {"job-0": "", "job-1": "GPU 1: it was lost"}


@pytest.mark.parametrize("code", sorted(FATAL_XIDS))
def test_a_fatal_error_since_the_start_is_to_blame(jobs, code):
    jobs.begin(*jobs.gpus)
    jobs.device.faults.announce_xid(jobs.gpus[0], code)
    jobs.end(0)
    jobs.end(1)
    assert jobs.look() == {"job-0": f"GPU 0: XID {code}", "job-1": ""}
    assert jobs.node.health.xids == {(jobs.gpus[0], code): 1}, "it is counted as if a slow look had found it"


@pytest.mark.parametrize("code", sorted(APPLICATION_XIDS))
def test_an_error_of_the_application_is_its_own(jobs, code):
    jobs.begin(*jobs.gpus)
    jobs.device.faults.announce_xid(jobs.gpus[0], code)
    jobs.end(0)
    assert jobs.look() == {"job-0": ""}


def test_an_error_before_the_start_is_not_to_blame(jobs):
    jobs.device.faults.announce_xid(jobs.gpus[0], 79)
    jobs.node.on_fault_look(*look_for_faults(jobs.device, ()))
    jobs.clock.now_ns += 10**9
    jobs.begun_ns = jobs.clock.wall_ns()
    jobs.begin(*jobs.gpus)
    jobs.end(0)
    assert jobs.look() == {"job-0": ""}


def test_a_gpu_that_hangs_is_to_blame_though_it_cannot_be_looked_at(jobs):
    jobs.begin(*jobs.gpus)
    # As the watchdog of the driver's process tells it.
    jobs.node.on_fault_look((), (DeviceEvent(kind=DeviceEventKind.HUNG, gpu_uuid=jobs.gpus[0]),))
    assert [bool(gpu.cordon) for gpu in jobs.node.inventory.gpus] == [True, False]
    jobs.end(0)
    assert jobs.read() == {}
    jobs.node.on_fault_look((), ())
    assert jobs.read() == {"job-0": "GPU 0: a call to it did not return"}


def test_a_failure_is_told_in_time_though_the_driver_does_not_answer(jobs):
    jobs.begin(*jobs.gpus)
    jobs.end(0)
    assert jobs.read() == {}
    jobs.node.on_fault_look((), ())
    assert jobs.read() == {}
    jobs.clock.now_ns += LOOK_MOST_NS
    assert jobs.read() == {"job-0": ""}


def test_a_fault_is_told_again_on_another_stream_and_forgotten_with_the_attempt(jobs):
    jobs.begin(*jobs.gpus)
    jobs.device.faults.lose_gpu(jobs.gpus[0])
    jobs.end(0)
    assert jobs.look() == {"job-0": "GPU 0: it was lost"}
    jobs.node.on_disconnected()
    jobs.node.on_welcome(Welcome(acknowledged_sequence=0, cadence=Cadence()))
    assert jobs.read() == {"job-0": "GPU 0: it was lost"}
    jobs.attempts.clear()
    jobs.processes.on_change()
    assert jobs.read() == {}
    assert jobs.node._reporter._faults == {}


def test_questions_to_a_driver_that_does_not_answer_in_time_are_asked_once(monkeypatch, jobs):
    monkeypatch.setattr(loop_module, "READ_TIMEOUT_LEAST_S", 0.01)
    driver = DriverThread()
    asked = itertools.count()

    async def scene():
        release = asyncio.Event()
        loop = asyncio.get_running_loop()

        def wait():
            next(asked)
            asyncio.run_coroutine_threadsafe(release.wait(), loop).result()

        busy = driver.call(wait)
        questions = QuestionsToDriver(jobs.device, driver)
        assert await questions.read_faults(jobs.gpus) == ((), ())
        assert await questions.read_faults(jobs.gpus) == ((), ())
        assert await questions.read_uses(jobs.gpus) == {}
        release.set()
        await asyncio.wrap_future(busy)
        while not (found := await questions.read_faults(jobs.gpus))[0]:
            pass
        assert [uuid for uuid, _ in found[0]] == list(jobs.gpus)
        assert await QuestionsInPlace(jobs.device).read_faults(jobs.gpus) == found

    asyncio.run(scene())
    driver.close()
    assert next(asked) == 1


def test_an_agent_that_finds_an_attempt_of_an_earlier_boot_blames_the_restart(tmp_path, monkeypatch):
    item = shell("sleep 60")

    async def begin():
        monkeypatch.setattr(local, "read_boot_id", lambda: "the boot before")
        engine = LocalEngine(tmp_path)
        monkeypatch.undo()
        engine.start(item)
        (folder,) = (tmp_path / "attempts").iterdir()
        await wait_until(lambda: "running" in local.read_records(folder))
        return local.read_records(folder)["running"]["pid"]

    async def find():
        engine = LocalEngine(tmp_path)
        engine.adopt()
        return await ended(engine, item)

    # Killed once nobody watches it any more, who would tell its end first.
    os.kill(asyncio.run(begin()), signal.SIGKILL)
    found = asyncio.run(find())
    assert (found.state, found.reason, found.node_fault) == (
        AttemptState.LOST, "the machine restarted", "the machine restarted"
    )  # fmt: skip
    # The next run of the agent reads it from the attempt's records.
    assert asyncio.run(find()).node_fault == "the machine restarted"


def test_a_launcher_that_was_killed_is_no_fault_of_the_node(tmp_path):
    async def scene():
        return await run_one(LocalEngine(tmp_path), shell("kill -9 $PPID; sleep 60"))

    found = asyncio.run(scene())
    assert (found.reason, found.node_fault) == ("its launcher was killed", "")
