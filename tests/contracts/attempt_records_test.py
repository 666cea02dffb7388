"""The records of attempts: what a crash, a loss of power, another version or another program finds in a folder."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack
from dataclasses import asdict

import pytest
from tests.builders.attempts import ended, output, run_one, shell, status
from tests.waiting import wait_until

from eelgrid_agent.enforce.device_leases import DeviceLeases
from eelgrid_agent.enforce.lease_table import LeaseDevice, LeaseTable
from eelgrid_agent.engine import local
from eelgrid_agent.engine.attempt_records import lock_records, read_records, record_exit, was_launcher_forked
from eelgrid_agent.engine.launcher import read_start_ticks
from eelgrid_agent.engine.local import LocalEngine, adopt_attempts
from eelgrid_agent.engine.port import attempt_key
from eelgrid_agent.state_files import MemoryState
from eelgrid_protos.messages import AttemptState


@pytest.fixture
def engine(tmp_path):
    return LocalEngine(tmp_path)


@pytest.fixture
def stack():
    with ExitStack() as found:
        yield found


def write_folder_of_before(folder, item, **records):
    """As versions before 0.3 left it: a file for each step, and one for the lock."""
    key = attempt_key(item)
    own = folder / "attempts" / f"{key.workload_id}.{key.replica}.{key.attempt}"
    own.mkdir(parents=True)
    (own / "lock").touch()
    spec = {"key": key, "environment": {}, "cgroup": ""}
    for name, content in ({"spec": spec} | records).items():
        (own / f"{name}.json").write_text(json.dumps(content))
    return own


def test_attempts_of_an_agent_before_0_3_are_adopted(tmp_path, stack):
    ended_before, collected, runs = (shell("exit 9", key=f"w-{n}") for n in range(3))
    code = {"exit_code": 4, "reason": "", "started_ns": 5, "ended_ns": 6}
    write_folder_of_before(tmp_path, ended_before, exit=code)
    folder = write_folder_of_before(tmp_path, collected, exit=code)
    (folder / "collected").touch()
    (folder / "output.log").write_text("said\n")
    folder = write_folder_of_before(tmp_path, runs)
    text = "import fcntl, sys, time; kept = open(sys.argv[1], 'w'); fcntl.flock(kept, fcntl.LOCK_EX); print(flush=True); time.sleep(600)"
    holder = stack.enter_context(
        subprocess.Popen([sys.executable, "-c", text, folder / "lock"], stdout=subprocess.PIPE)
    )
    stack.callback(holder.kill)
    holder.stdout.readline()
    running = {"pid": holder.pid, "start_ticks": read_start_ticks(holder.pid), "started_ns": 7}
    (folder / "running.json").write_text(json.dumps(running))

    async def scene():
        engine = LocalEngine(tmp_path)
        engine.adopt()
        engine.start(ended_before, runs)
        assert status(engine, ended_before).exit_code == 4
        assert not status(engine, runs).is_over
        assert attempt_key(collected) not in engine.list_attempts()
        assert output(engine, collected).text == "said\n"
        holder.kill()
        # Its launcher was killed, and says nothing.
        await asyncio.to_thread(holder.wait)
        return await ended(engine, runs)

    found = asyncio.run(scene())
    assert (found.state, found.started_ns) == (AttemptState.LOST, 7)


def test_an_attempt_whose_start_was_cut_short_is_started_by_the_next_plan(engine, tmp_path):
    item = shell("exit 6")
    folder = tmp_path / "attempts" / "w-1.0.1"
    folder.mkdir()

    async def scene():
        os.close(engine._write_spec(folder, item, ""))
        again = LocalEngine(tmp_path)
        again.adopt()
        assert not again.list_attempts()
        return await run_one(again, item)

    assert asyncio.run(scene()).exit_code == 6


@pytest.mark.parametrize("left", [b"", b'{"exit": {"exit_code": 0, "rea'])
def test_a_process_that_ran_before_a_loss_of_power_is_lost_and_not_started_again(tmp_path, left):
    """What was flushed before its start is left, and perhaps a part of what was not flushed yet."""
    item = shell(f"echo x >> {tmp_path}/starts; sleep 600")

    async def began():
        engine = LocalEngine(tmp_path)
        engine.start(item)
        await wait_until((tmp_path / "starts").exists)
        launcher = read_records(tmp_path / "attempts" / "w-1.0.1")["running"]["pid"]
        os.kill(launcher, signal.SIGKILL)
        await ended(engine, item)

    async def scene():
        folder = tmp_path / "attempts" / "w-1.0.1"
        spec, running, _ = (folder / "records.jsonl").read_bytes().split(b"\n\n")
        (folder / "records.jsonl").write_bytes(b"\n\n".join((spec, running, left)))
        engine = LocalEngine(tmp_path)
        engine.adopt()
        engine.start(item)
        return await ended(engine, item)

    asyncio.run(began())
    assert asyncio.run(scene()).state is AttemptState.LOST
    assert (tmp_path / "starts").read_text() == "x\n"


@pytest.mark.parametrize("cut", [b"", b'\n{"exit": {"exit_code": 3', b'\n{"exit": {"exit_code"\n\nnull\n"text"\n'])
def test_a_line_that_was_cut_short_is_not_read_and_what_follows_it_is(tmp_path, cut):
    path = tmp_path / "records.jsonl"
    path.write_bytes(b'\n{"spec": {"key": ["w", 0, 1]}}\n' + cut)
    assert read_records(tmp_path) == {"spec": {"key": ["w", 0, 1]}}
    record_exit(tmp_path, {"exit_code": 4})
    assert read_records(tmp_path) == {"spec": {"key": ["w", 0, 1]}, "exit": {"exit_code": 4}}


def test_an_end_is_flushed_unless_the_controller_has_taken_it(tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr(local, "_FLUSH_S", 0.2)
    monkeypatch.setattr(local, "flush_records", flushed.append)
    engine = LocalEngine(tmp_path)
    taken, left = (shell("exit 0", key=f"w-{n}") for n in range(2))

    async def scene():
        await run_one(engine, taken)
        engine.forget(attempt_key(taken))
        await run_one(engine, left)
        await wait_until(lambda: flushed)

    asyncio.run(scene())
    assert flushed == [tmp_path / "attempts" / "w-1.0.1"]


def test_a_program_without_the_engine_finds_what_its_attempts_hold_while_their_launchers_live(tmp_path):
    device = LeaseDevice(gpu_uuid="GPU-1", uuid="GPU-1")
    item = shell("sleep 600")

    async def scene():
        engine = LocalEngine(tmp_path)
        engine.start(item)
        folder = tmp_path / "attempts" / "w-1.0.1"
        await wait_until(lambda: "running" in read_records(folder))
        # As an agent with leases records them.
        spec, running = (folder / "records.jsonl").read_bytes().split(b"\n\n")
        spec = json.loads(spec)
        spec["spec"]["devices"] = [asdict(device)]
        (folder / "records.jsonl").write_bytes(b"\n" + json.dumps(spec).encode() + b"\n\n" + running)
        while_it_runs = adopted(tmp_path)
        engine.stop(attempt_key(item))
        await ended(engine, item)
        return while_it_runs, adopted(tmp_path), read_records(folder)

    (held,), after, records = asyncio.run(scene())
    assert (held.device, held.holder.owner) == (device, "w-1/0/1")
    assert held.since_ns == records["running"]["started_ns"]
    assert after == ()


def adopted(folder):
    leases = DeviceLeases(MemoryState(LeaseTable()), boot_id="b", wall_ns=lambda: 1)
    adopt_attempts(leases, folder)
    return leases.table.leases


def test_the_lock_of_what_a_killed_fork_server_was_sent_is_no_launcher(tmp_path):
    """The kernel closes it a moment after the server can be waited for."""
    assert not was_launcher_forked(tmp_path)
    closing = threading.Timer(0.01, os.close, (lock_records(tmp_path),))
    closing.start()
    assert not was_launcher_forked(tmp_path)
    closing.join()
    held = lock_records(tmp_path)
    assert was_launcher_forked(tmp_path)
    os.close(held)
