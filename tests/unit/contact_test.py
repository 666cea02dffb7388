"""The last contact with the controller, and the launchers that end their process without one."""

import asyncio
import errno
import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.builders.agent import ManualClock, build_agent_node, build_devices
from tests.builders.attempts import ended, python, shell, status, until_said
from tests.waiting import wait_until

from eelgrid_agent.engine.attempt_records import read_records
from eelgrid_agent.engine.cgroups import AttemptCgroups
from eelgrid_agent.engine.contact import LeaderContact, read_contact
from eelgrid_agent.engine.local import LocalEngine, has_unfenced_attempts
from eelgrid_protos.messages import Acknowledgement, AttemptState, Cadence, ConnectResponse, SampleBatch, Welcome


class Clock:
    def __init__(self):
        self.now_s = 1000.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "contact.json"


def test_an_answer_is_as_old_as_what_it_answers(path, clock):
    contact = LeaderContact(path, 60.0, clock)
    contact.note_opening()
    clock.now_s = 1030.0
    contact.note_welcome()
    assert read_contact(path) == (1000.0, 60.0)
    contact.note_sent(1)
    clock.now_s = 1040.0
    contact.note_sent(2)
    # The process was stopped, and finds the answers of long ago.
    clock.now_s = 2000.0
    contact.note_acknowledged(1)
    assert read_contact(path) == (1030.0, 60.0)
    contact.note_acknowledged(2)
    assert read_contact(path) == (1040.0, 60.0)
    contact.note_acknowledged(2)
    assert read_contact(path) == (1040.0, 60.0)


def test_an_answer_to_what_another_stream_sent_says_nothing(path, clock):
    contact = LeaderContact(path, 60.0, clock)
    contact.note_sent(1)
    clock.now_s = 1100.0
    contact.note_opening()
    contact.note_acknowledged(1)
    assert read_contact(path) == (1000.0, 60.0)


def test_contact_never_becomes_older(path, clock):
    contact = LeaderContact(path, 60.0, clock)
    contact.note_opening()
    clock.now_s = 1050.0
    contact.note_sent(1)
    contact.note_acknowledged(1)
    contact.note_welcome()
    assert read_contact(path) == (1050.0, 60.0)


@pytest.mark.parametrize("opening", ["build_hello", "build_resume"])
def test_both_openings_of_a_stream_are_contact_once_they_are_answered(path, opening):
    clock, boottime = ManualClock(), Clock()
    node = build_node(clock, LeaderContact(path, 60.0, boottime))
    node.build_hello()
    node.on_welcome(Welcome(acknowledged_sequence=0, cadence=Cadence(), resumes=True))
    node.on_disconnected()
    boottime.now_s = 1500.0
    assert (node.build_hello() if opening == "build_hello" else node.build_resume(lambda _: "x")) is not None
    boottime.now_s = 1600.0
    node.on_welcome(Welcome(acknowledged_sequence=0, cadence=Cadence(), resumes=True))
    assert read_contact(path) == (1500.0, 60.0)


def test_the_file_is_written_now_and_then(path, clock):
    contact = LeaderContact(path, 20.0, clock)
    written = set()
    for number in range(100):
        clock.now_s += 0.5
        contact.note_sent(number)
        contact.note_acknowledged(number)
        written.add(read_contact(path))
        assert clock.now_s - read_contact(path)[0] <= 2.0
    assert len(written) <= 26


def test_until_the_controller_knows_of_a_longer_time_the_shorter_one_holds(path, clock):
    LeaderContact(path, 60.0, clock).note_welcome()
    for fence_s, before_welcome_s in ((300.0, 60.0), (100.0, 100.0), (0.0, 100.0)):
        contact = LeaderContact(path, fence_s, clock)
        assert contact.fence_after_s == fence_s
        assert read_contact(path)[1] == before_welcome_s
        contact.note_opening()
        contact.note_welcome()
        assert read_contact(path)[1] == fence_s


def test_contact_of_an_earlier_boot_does_not_outlive_it(path, clock):
    contact = LeaderContact(path, 60.0, clock)
    contact.note_opening()
    contact.note_welcome()
    clock.now_s = 50.0
    contact = LeaderContact(path, 60.0, clock)
    assert read_contact(path) == (50.0, 60.0)
    contact.note_opening()
    clock.now_s = 55.0
    contact.note_welcome()
    assert read_contact(path) == (50.0, 60.0)
    contact.note_sent(1)
    clock.now_s = 60.0
    contact.note_acknowledged(1)
    assert read_contact(path) == (55.0, 60.0)


def test_on_a_full_disk_what_is_there_is_written_over_and_nothing_else_ends(path, clock, monkeypatch, caplog):
    contact = LeaderContact(path, 60.0, clock)

    def refuse(*_args, **_kinds):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", refuse)
    clock.now_s = 1030.0
    contact.note_opening()
    contact.note_welcome()
    assert read_contact(path) == (1030.0, 60.0)
    path.unlink()
    for _ in range(2):
        clock.now_s += 10.0
        contact.note_opening()
        contact.note_welcome()
    assert caplog.text.count("event=contact_not_written") == 1
    monkeypatch.undo()
    contact.note_opening()
    contact.note_welcome()
    assert read_contact(path) == (1050.0, 60.0)


def test_without_a_fence_nothing_is_written(path, clock):
    contact = LeaderContact(path, 0.0, clock)
    assert contact.path is None
    contact.note_opening()
    contact.note_welcome()
    contact.note_sent(1)
    contact.note_acknowledged(1)
    assert not path.exists()


def build_node(clock, contact):
    processes = SimpleNamespace(list_attempts=dict, contact=contact)
    return build_agent_node(build_devices(clock), clock, processes=processes)


def test_a_node_notes_its_contact(path):
    clock, boottime = ManualClock(), Clock()
    contact = LeaderContact(path, 60.0, boottime)
    node = build_node(clock, contact)
    node.build_hello()
    boottime.now_s = 1005.0
    node.on_welcome(Welcome(acknowledged_sequence=0, cadence=Cadence()))
    assert read_contact(path)[0] == 1000.0
    node.record_tick((), monotonic_ns=clock.monotonic_ns())
    boottime.now_s = 1010.0
    batches = []
    while (message := node.next_message()) is not None:
        if isinstance(message.message, SampleBatch):
            batches.append(message.message.sequence)
    boottime.now_s = 1030.0
    node.on_message(ConnectResponse(message=Acknowledgement(sequence=batches[-1])))
    assert read_contact(path)[0] == 1010.0


# Launchers


def engine_of(tmp_path):
    contact = LeaderContact(tmp_path / "contact.json", 60.0)
    return LocalEngine(tmp_path / "engine", contact=contact), contact


@pytest.mark.parametrize("says_goodbye", [True, False])
def test_a_process_is_stopped_once_no_controller_was_heard_for_too_long(tmp_path, says_goodbye):
    handler = (
        "signal.signal(signal.SIGTERM, lambda *_: (print('saved', flush=True), sys.exit(0)))" if says_goodbye else ""
    )
    item = python(f"import signal, sys, time\n{handler}\nprint('begun', flush=True)\ntime.sleep(600)")

    async def scene():
        engine, contact = engine_of(tmp_path)
        contact.fence_after_s = 1.0
        contact.note_opening()
        contact.note_welcome()
        engine.start(item)
        await until_said(engine, item, "begun")
        found = await ended(engine, item)
        assert (found.state, found.reason) == (AttemptState.ENDED, "no controller was heard for 1 s")
        assert found.node_fault == found.reason
        assert not found.is_success
        if says_goodbye:
            await until_said(engine, item, "saved")

    asyncio.run(scene())


@pytest.mark.parametrize(
    "text",
    [
        # As if there were contact all the time; a fence that was switched off; nothing that can be read.
        json.dumps({"contact_s": 1e12, "fence_after_s": 0.5}),
        json.dumps({"contact_s": 0.0, "fence_after_s": 0.0}),
        "{",
        json.dumps({"contact_s": "x", "fence_after_s": 0.1}),
    ],
)
def test_a_process_runs_on_while_there_is_contact_or_no_fence_or_nothing_can_be_read(tmp_path, text):
    item = shell("sleep 1")

    async def scene():
        engine, contact = engine_of(tmp_path)
        contact.path.write_text(text)
        engine.start(item)
        assert (await ended(engine, item)).is_success

    asyncio.run(scene())


def test_a_file_that_disappears_keeps_no_process_alive(tmp_path):
    item = shell("echo begun; sleep 600")

    async def scene():
        engine, contact = engine_of(tmp_path)
        contact.fence_after_s = 1.0
        contact.note_opening()
        contact.note_welcome()
        engine.start(item)
        await until_said(engine, item, "begun")
        contact.path.unlink()
        assert (await ended(engine, item)).node_fault

    asyncio.run(scene())


def test_a_process_is_not_even_started_by_an_order_that_waited_for_too_long(tmp_path):
    item = shell(f"touch {tmp_path}/begun; sleep 600")

    async def scene():
        engine, contact = engine_of(tmp_path)
        contact.path.write_text(json.dumps({"contact_s": 0.0, "fence_after_s": 0.1}))
        engine.start(item)
        found = await ended(engine, item)
        assert (found.reason, found.exit_code) == ("no controller was heard for 0.1 s", 126)
        assert found.node_fault == found.reason
        assert not (tmp_path / "begun").exists()

    asyncio.run(scene())


class HangingCgroups(AttemptCgroups):
    """A process waits at its start until somebody reads the pipe, as at a folder on a disk that is away."""

    def __init__(self, folder):
        super().__init__(None)
        self.pipe = folder / "cgroup.procs"
        os.mkfifo(self.pipe)

    def create(self, name, *, cpu_milli, memory_bytes):
        return str(self.pipe.parent)


async def keep_contact(contact):
    """The controller is heard again and again."""
    while True:
        contact.note_opening()
        contact.note_welcome()
        await asyncio.sleep(0.05)


def test_a_process_whose_start_hung_longer_than_the_fence_does_not_begin(tmp_path):
    item = shell(f"touch {tmp_path}/begun; sleep 600")

    async def scene():
        contact = LeaderContact(tmp_path / "contact.json", 1.0)
        cgroups = HangingCgroups(tmp_path)
        engine = LocalEngine(tmp_path / "engine", contact=contact, cgroups=cgroups)
        engine.adopt()
        heard = asyncio.create_task(keep_contact(contact))
        await asyncio.sleep(0.1)
        engine.start(item)
        await asyncio.sleep(1.5)
        pipe = os.open(cgroups.pipe, os.O_RDONLY | os.O_NONBLOCK)
        try:
            found = await ended(engine, item)
        finally:
            os.close(pipe)
            heard.cancel()
        assert found.node_fault == found.reason == "no controller was heard while it started"
        assert not (tmp_path / "begun").exists()

    asyncio.run(scene())


def test_a_launcher_that_was_stopped_longer_than_the_fence_stops_its_process(tmp_path):
    item = shell("echo begun; sleep 600")

    async def scene():
        contact = LeaderContact(tmp_path / "contact.json", 1.0)
        engine = LocalEngine(tmp_path / "engine", contact=contact)
        engine.adopt()
        heard = asyncio.create_task(keep_contact(contact))
        await asyncio.sleep(0.1)
        engine.start(item)
        await until_said(engine, item, "begun")
        (folder,) = (tmp_path / "engine" / "attempts").iterdir()
        launcher = read_records(folder)["running"]["pid"]
        os.kill(launcher, signal.SIGSTOP)
        await asyncio.sleep(1.5)
        os.kill(launcher, signal.SIGCONT)
        await wait_until(lambda: status(engine, item).is_over, within_s=10.0)
        heard.cancel()
        assert status(engine, item).node_fault == "no controller was heard for 1 s"

    asyncio.run(scene())


def test_attempts_of_an_agent_without_a_fence_are_known(tmp_path):
    async def scene():
        before = LocalEngine(tmp_path / "engine")
        item = shell("sleep 600")
        before.start(item)
        assert has_unfenced_attempts(tmp_path / "engine")
        before.stop(next(iter(before.list_attempts())))
        await ended(before, item)
        assert not has_unfenced_attempts(tmp_path / "engine")
        engine, _ = engine_of(tmp_path)
        engine.start(other := shell("sleep 600", key="w-2"))
        assert not has_unfenced_attempts(tmp_path / "engine")
        engine.stop(next(key for key in engine.list_attempts() if key.workload_id == "w-2"))
        await ended(engine, other)

    asyncio.run(scene())
