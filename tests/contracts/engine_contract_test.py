"""The port of engines that run processes: every promise, with real processes.

An agent that is killed is a process of its own that starts attempts and is then killed by SIGKILL.
"""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from tests.builders.attempts import (
    GRACE_S,
    assignment,
    ended,
    output,
    python,
    run_one,
    shell,
    status,
    until_said,
)
from tests.waiting import wait_until

from eelgrid_agent.engine.attempt_records import read_records
from eelgrid_agent.engine.cgroups import AttemptCgroups
from eelgrid_agent.engine.local import LocalEngine
from eelgrid_agent.engine.port import AttemptKey, attempt_key, plan_actions
from eelgrid_protos.messages import AttemptState


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.fixture
def engine(tmp_path):
    return LocalEngine(tmp_path)


def test_an_attempt_ends_with_the_exit_code_of_its_process(engine):
    async def scene():
        good = await run_one(engine, shell("exit 0"))
        bad = await run_one(engine, shell("exit 37", key="w-2"))
        return good, bad

    good, bad = asyncio.run(scene())
    assert good.is_success
    assert (good.state, good.exit_code, good.signal, good.reason) == (AttemptState.ENDED, 0, 0, "")
    assert 0 < good.started_ns <= good.ended_ns
    assert (bad.exit_code, bad.is_success) == (37, False)


def test_an_attempt_ends_with_the_signal_that_killed_its_process(engine):
    found = asyncio.run(run_one(engine, shell("kill -SEGV $$")))
    assert (found.exit_code, found.signal) == (None, signal.SIGSEGV)


@pytest.mark.parametrize(
    ("argv", "code", "reason"),
    [
        (("no-such-program-here",), 127, "cannot run 'no-such-program-here': not found"),
        (("/etc/passwd",), 126, "cannot run '/etc/passwd': Permission denied"),
        (("/",), 126, "cannot run '/': Permission denied"),
    ],
)
def test_a_command_that_cannot_be_run_is_a_failure_that_names_it(engine, argv, code, reason):
    found = asyncio.run(run_one(engine, assignment(*argv)))
    assert (found.exit_code, found.reason) == (code, reason)
    assert not found.is_success


def test_a_working_directory_that_is_gone_is_a_failure_that_names_it(engine, tmp_path):
    found = asyncio.run(run_one(engine, shell("true", folder=tmp_path / "gone")))
    assert found.reason == f"cannot enter {tmp_path}/gone: No such file or directory"
    assert not found.is_success


def test_a_process_has_its_variables_its_directory_and_its_devices_and_nothing_of_the_agent(engine, tmp_path):
    os.environ["OF_THE_AGENT"] = "secret"
    text = "pwd; env | sort; ls /proc/self/fd | wc -l; umask; grep SigIgn /proc/self/status"
    with_gpus = shell(text, folder=tmp_path, gpus=("GPU-b", "GPU-a"), environment={"MINE": "yes", "HOME": "/h"})
    without = shell("echo [$CUDA_VISIBLE_DEVICES]", key="w-2")

    async def scene():
        old = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            await run_one(engine, with_gpus)
            await run_one(engine, without)
        finally:
            signal.signal(signal.SIGINT, old)
        return output(engine, with_gpus).text.splitlines(), output(engine, without).text

    lines, bare = asyncio.run(scene())
    del os.environ["OF_THE_AGENT"]
    assert lines[0] == str(tmp_path)
    variables = dict(line.split("=", 1) for line in lines if "=" in line)
    assert variables["CUDA_VISIBLE_DEVICES"] == "GPU-b,GPU-a"
    assert variables["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert (variables["MINE"], variables["HOME"], variables["PYTHONUNBUFFERED"]) == ("yes", "/h", "1")
    assert (variables["EELGRID_WORKLOAD_ID"], variables["EELGRID_ATTEMPT"]) == ("w-1", "1")
    assert (variables["EELGRID_REPLICA"], variables["EELGRID_REPLICAS"]) == ("0", "1")
    assert Path(variables["EELGRID_CHECKPOINT_DIR"]).is_dir()
    assert "OF_THE_AGENT" not in variables
    # Standard input, output and error, and the folder that ls itself reads.
    assert lines[-3:-1] == ["4", "0022"]
    ignored = int(lines[-1].removeprefix("SigIgn:"), 16)
    # The C library keeps signals 32 and 33 to itself: who started the tests may have left them ignored.
    assert not [number for number in signal.valid_signals() if ignored >> (number - 1) & 1]
    assert bare == "[]\n"


def test_an_attempt_is_started_once_however_often_it_is_asked_for(engine, tmp_path):
    item = shell(f"echo x >> {tmp_path}/starts")

    async def scene():
        engine.start(item)
        engine.start(item)
        await ended(engine, item)
        engine.start(item)
        await asyncio.sleep(0)

    asyncio.run(scene())
    assert (tmp_path / "starts").read_text() == "x\n"


STUBBORN = """
import os, signal, sys, time
def child(level):
    if os.fork() == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("pid", os.getpid(), flush=True)
        if level:
            child(level - 1)
            os._exit(0)
        time.sleep(600)
child(1); child(0)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(600)
"""


def test_a_stopped_tree_with_a_double_fork_setsid_and_ignored_term_is_gone_within_its_grace_and_a_second(engine):
    item = python(STUBBORN)

    async def scene():
        engine.start(item)
        await until_said(engine, item, "ready")
        await wait_until(lambda: output(engine, item).text.count("pid") == 3)
        pids = [int(line.split()[1]) for line in output(engine, item).text.splitlines() if line.startswith("pid")]
        began = asyncio.get_running_loop().time()
        engine.stop(attempt_key(item))
        engine.stop(attempt_key(item))
        found = await ended(engine, item)
        return pids, asyncio.get_running_loop().time() - began, found

    pids, took_s, found = asyncio.run(scene())
    assert not any(map(is_alive, pids))
    assert GRACE_S * 0.9 <= took_s < GRACE_S + 1.0
    assert (found.signal, found.reason) == (signal.SIGKILL, "stopped")


def test_what_a_process_leaves_behind_is_killed_when_it_ends(engine):
    item = python(STUBBORN.replace('print("ready", flush=True)\ntime.sleep(600)', "time.sleep(0.3); sys.exit(5)"))

    async def scene():
        found = await run_one(engine, item)
        return found, [int(x.split()[1]) for x in output(engine, item).text.splitlines()]

    found, pids = asyncio.run(scene())
    assert found.exit_code == 5
    assert len(pids) == 3
    assert not any(map(is_alive, pids))


def test_a_process_may_end_in_its_own_way_when_it_is_stopped_by_the_signal_of_its_choice(engine):
    item = python(
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGUSR1, lambda *_: (os.write(1, b'saved\\n'), sys.exit(0)))\n"
        "print('ready', flush=True); time.sleep(600)",
        stop_signal="USR1",
        grace_s=30.0,
    )

    async def scene():
        engine.start(item)
        await until_said(engine, item, "ready")
        engine.stop(attempt_key(item))
        return await ended(engine, item), output(engine, item).text

    found, text = asyncio.run(scene())
    assert text == "ready\nsaved\n"
    # It exited with 0, but because it was stopped.
    assert (found.exit_code, found.reason, found.is_success) == (0, "stopped", False)


def test_a_stop_right_after_the_start_is_not_lost(engine):
    item = shell("sleep 600")

    async def scene():
        engine.start(item)
        engine.stop(attempt_key(item))
        return await ended(engine, item, within_s=10.0)

    assert asyncio.run(scene()).reason == "stopped"


def test_a_time_limit_stops_the_process_and_is_its_reason(engine):
    found = asyncio.run(run_one(engine, shell("sleep 600", time_limit_s=0.3)))
    assert (found.signal, found.reason) == (signal.SIGTERM, "time limit of 0.3 s")
    assert found.ended_ns - found.started_ns < 5e9


def test_an_attempt_that_was_refused_never_starts_even_after_a_restart(engine, tmp_path):
    item = shell(f"touch {tmp_path}/started")

    async def scene():
        engine.refuse(item, "stopped before it started")
        again = LocalEngine(tmp_path)
        again.adopt()
        again.start(item)
        return status(engine, item), status(again, item)

    before, after = asyncio.run(scene())
    assert before == after
    assert before.state is AttemptState.ENDED
    assert (before.reason, before.exit_code) == ("stopped before it started", None)
    assert not (tmp_path / "started").exists()


# Output


def test_output_of_both_streams_is_in_one_file_in_order(engine):
    item = shell("echo one; echo two >&2; echo three")
    asyncio.run(run_one(engine, item))
    chunk = output(engine, item)
    assert (chunk.text, chunk.is_end, chunk.next_offset) == ("one\ntwo\nthree\n", True, 14)


def test_output_is_read_in_parts_from_an_offset_or_from_lines_before_the_end(engine):
    item = python("for n in range(20000): print('zeile', n, 'ä')")
    asyncio.run(run_one(engine, item))
    parts, offset = [], 0
    while True:
        chunk = output(engine, item, offset)
        parts.append(chunk.text)
        offset = chunk.next_offset
        if chunk.is_end:
            break
    assert len(parts) > 10
    assert "".join(parts) == "".join(f"zeile {n} ä\n" for n in range(20000))
    assert output(engine, item, tail_lines=2).text == "zeile 19998 ä\nzeile 19999 ä\n"
    assert output(engine, item, tail_lines=0).text == ""
    assert output(engine, item, tail_lines=1_000_000).text.startswith("zeile 0 ä\n")


def test_output_beyond_its_limit_is_discarded_and_the_process_goes_on(engine, tmp_path):
    item = shell(f"head -c 3000000 /dev/zero | tr '\\0' x; touch {tmp_path}/done", log_bytes_most=10_000)
    found = asyncio.run(run_one(engine, item))
    assert found.is_success
    assert (tmp_path / "done").exists()
    text = (tmp_path / "attempts" / "w-1.0.1" / "output.log").read_text()
    assert text == "x" * 10_000 + "\n[eelgrid: output beyond 10000 bytes is discarded]\n"


@contextmanager
def full_disk(tmp_path):
    """A file system of 200 kB, or a skipped test where none may be mounted."""
    place = tmp_path / "small"
    place.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=200k", "none", place], capture_output=True, check=False
    ).returncode:
        pytest.skip("no file system may be mounted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def test_a_full_disk_under_the_output_costs_output_and_not_the_process(tmp_path):
    with full_disk(tmp_path) as place:
        item = shell(f"head -c 1000000 /dev/zero | tr '\\0' x; rm {place}/ballast; touch {tmp_path}/done; exit 3")
        (place / "ballast").write_bytes(b"x" * 40_000)
        engine = LocalEngine(place)
        found = asyncio.run(run_one(engine, item))
        assert (found.exit_code, found.reason) == (3, "")
        assert (tmp_path / "done").exists()


def test_a_full_disk_before_the_start_is_a_failure_that_is_reported(tmp_path):
    with full_disk(tmp_path) as place:
        engine = LocalEngine(place)
        with pytest.raises(OSError, match="No space"):
            (place / "ballast").write_bytes(b"x" * 10_000_000)
        found = asyncio.run(run_one(engine, shell("true")))
        assert not found.is_success


def test_output_that_is_not_there_is_named_as_the_problem(engine):
    assert output(engine, shell("true")).problem == "the node keeps none of it"


# The agent's restart

AGENT = """
import asyncio, sys
from pathlib import Path
from tests.contracts.engine_contract_test import shell
from eelgrid_agent.engine.input import CHUNKS_MOST
from eelgrid_agent.engine.local import LocalEngine

async def main():
    engine = LocalEngine(Path(sys.argv[1]))
    for number, text in enumerate(sys.argv[2:], start=1):
        engine.start(shell(text, key=f"w-{number}"))
    print("started", flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


def killed_agent(folder, *commands, after=lambda: None):
    """Starts attempts in an agent of its own, and kills that when `after` has returned."""
    agent = subprocess.Popen([sys.executable, "-c", AGENT, str(folder), *commands], stdout=subprocess.PIPE, text=True)
    with agent:
        assert agent.stdout.readline() == "started\n"
        after()
        agent.kill()


def test_processes_survive_the_agent_and_are_adopted_and_never_started_a_second_time(tmp_path):
    commands = [f"echo x >> {tmp_path}/s{n}; sleep 1; exit {n}" for n in range(1, 4)]
    killed_agent(tmp_path, *commands, f"echo x >> {tmp_path}/s4; exit 4")
    items = [shell(text, key=f"w-{n}") for n, text in enumerate(commands, start=1)]
    items.append(shell("exit 9", key="w-4"))

    async def scene():
        engine = LocalEngine(tmp_path)
        engine.adopt()
        for item in items:
            engine.start(item)
        return [(await ended(engine, item)).exit_code for item in items]

    assert asyncio.run(scene()) == [1, 2, 3, 4]
    assert [(tmp_path / f"s{n}").read_text() for n in range(1, 5)] == ["x\n"] * 4


def test_an_adopted_process_can_be_stopped_and_its_output_read(tmp_path):
    item = shell("echo before; sleep 600")
    killed_agent(tmp_path, "echo before; sleep 600")

    async def scene():
        engine = LocalEngine(tmp_path)
        engine.adopt()
        await until_said(engine, item, "before")
        engine.stop(attempt_key(item))
        return await ended(engine, item), output(engine, item)

    found, chunk = asyncio.run(scene())
    assert (found.reason, chunk.text, chunk.is_end) == ("stopped", "before\n", True)


def test_an_end_is_reported_again_until_it_is_forgotten_and_its_output_stays(engine, tmp_path):
    item = shell("echo kept; exit 2")

    async def scene():
        first = await run_one(engine, item)
        again = LocalEngine(tmp_path)
        again.adopt()
        second = status(again, item)
        again.forget(attempt_key(item))
        third = LocalEngine(tmp_path)
        third.adopt()
        return first, second, dict(third.list_attempts()), output(third, item)

    first, second, left, chunk = asyncio.run(scene())
    assert first == second
    assert left == {}
    assert (chunk.text, chunk.is_end) == ("kept\n", True)


@pytest.mark.parametrize("is_watched", [True, False])
def test_a_killed_launcher_is_a_lost_attempt_and_nothing_of_it_is_left(tmp_path, is_watched):
    text = f"sleep 600 & echo $! > {tmp_path}/pid.new; mv {tmp_path}/pid.new {tmp_path}/pid; setsid sleep 601; true"
    item = shell(text)

    def kill_launcher():
        os.kill(launcher_pid(tmp_path, "w-1"), signal.SIGKILL)

    async def scene():
        engine = LocalEngine(tmp_path)
        if is_watched:
            engine.start(item)
            await wait_until((tmp_path / "pid").exists)
            kill_launcher()
        else:
            engine.adopt()
        return await ended(engine, item)

    def began():
        asyncio.run(wait_until((tmp_path / "pid").exists))

    if not is_watched:
        killed_agent(tmp_path, text, after=began)
        kill_launcher()
    found = asyncio.run(scene())
    assert found.state is AttemptState.LOST
    assert found.reason == "its launcher was killed"
    assert not is_alive(int((tmp_path / "pid").read_text()))


def launcher_pid(folder, key):
    return read_records(folder / "attempts" / f"{key}.0.1")["running"]["pid"]


@pytest.mark.parametrize("when", ["before", "during", "after"])
def test_a_killed_fork_server_costs_no_attempt_and_starts_none_twice(engine, tmp_path, when):
    first, second = (shell(f"echo x >> {tmp_path}/s{n}; sleep 0.3; exit {n}", key=f"w-{n}") for n in (1, 2))

    async def scene():
        engine.adopt()
        if when == "after":
            engine.start(first)
        number = signal.SIGSTOP if when == "during" else signal.SIGKILL
        os.kill(engine.fork_server.pid, number)
        if when == "during":
            # It takes the request, and is killed at some moment of its work on it.
            server = engine.fork_server.pid
            killer = threading.Timer(0.002, os.kill, (server, signal.SIGKILL))
            killer.start()
            os.kill(server, signal.SIGCONT)
            engine.start(first)
            killer.join()
        engine.start(first)
        engine.start(second)
        return [(await ended(engine, item)).exit_code for item in (first, second)]

    assert asyncio.run(scene()) == [1, 2]
    assert [(tmp_path / f"s{n}").read_text() for n in (1, 2)] == ["x\n"] * 2


def test_the_fork_server_ends_with_its_agent_and_leaves_the_attempts_alone(tmp_path):
    item = shell("sleep 600")
    servers = []

    def find_server():
        folder = tmp_path / "attempts" / "w-1.0.1"
        asyncio.run(wait_until(lambda: "running" in read_records(folder)))
        launcher = launcher_pid(tmp_path, "w-1")
        servers.append(int(Path(f"/proc/{launcher}/stat").read_text().rpartition(")")[2].split()[1]))

    killed_agent(tmp_path, "sleep 600", after=find_server)

    async def scene():
        await wait_until(lambda: not is_alive(servers[0]))
        assert is_alive(launcher_pid(tmp_path, "w-1"))
        engine = LocalEngine(tmp_path)
        engine.adopt()
        engine.stop(attempt_key(item))
        return await ended(engine, item)

    assert asyncio.run(scene()).reason == "stopped"


def test_attempts_that_start_together_all_start_though_the_fork_server_is_killed_meanwhile(engine, tmp_path):
    items = [shell(f"echo x >> {tmp_path}/s{n}; exit {n}", key=f"w-{n}") for n in range(40)]

    async def scene():
        engine.adopt()
        server = engine.fork_server.pid
        killer = threading.Timer(0.01, os.kill, (server, signal.SIGKILL))
        killer.start()
        engine.start(*items)
        killer.join()
        return [(await ended(engine, item)).exit_code for item in items]

    assert asyncio.run(scene()) == list(range(40))
    assert [(tmp_path / f"s{n}").read_text() for n in range(40)] == ["x\n"] * 40


def test_one_that_cannot_start_does_not_keep_those_beside_it_from_starting(engine, tmp_path):
    (tmp_path / "attempts" / "w-1.0.1").write_text("in the way")
    items = [shell(f"exit {n}", key=f"w-{n}") for n in range(3)]

    async def scene():
        engine.start(*items)
        return [await ended(engine, item) for item in items]

    found = asyncio.run(scene())
    assert [one.exit_code for one in found] == [0, None, 2]
    assert found[1].reason.startswith("cannot start: ")


def test_hundreds_of_processes_that_left_the_session_are_ended_by_the_time_limit(engine):
    text = "import os, time\nfor _ in range(300):\n    if os.fork() == 0: os.setsid()\n    if _ > 6: time.sleep(600)\n"
    found = asyncio.run(run_one(engine, python(text, time_limit_s=0.5, grace_s=0.2)))
    assert found.reason == "time limit of 0.5 s"


@contextmanager
def delegated_cgroup(tmp_path):
    """A cgroup of version 2, or a skipped test where none may be mounted."""
    place = tmp_path / "cgroup"
    place.mkdir()
    if subprocess.run(["mount", "-t", "cgroup2", "none", place], capture_output=True, check=False).returncode:
        pytest.skip("cgroups of version 2 may not be mounted here")
    own = place / f"eelgrid-test-{os.getpid()}"
    try:
        own.mkdir()
        yield own
    finally:
        if own.exists():
            own.rmdir()
        subprocess.run(["umount", "-l", place], check=True)


def test_in_a_cgroup_of_its_own_a_tree_is_killed_and_the_cgroup_removed(tmp_path):
    with delegated_cgroup(tmp_path) as parent:
        engine = LocalEngine(tmp_path, cgroups=AttemptCgroups(parent))
        item = python(STUBBORN)

        async def scene():
            engine.start(item)
            await until_said(engine, item, "ready")
            inside = (parent / "attempt-w-1.0.1" / "cgroup.procs").read_text().split()
            engine.stop(attempt_key(item))
            await ended(engine, item)
            return inside

        inside = asyncio.run(scene())
        assert len(inside) >= 3
        assert not any(map(is_alive, map(int, inside)))
        assert list(parent.glob("attempt-*")) == []


# Checkpoints

CLIENT = Path(__file__).resolve().parents[2] / "client" / "eelgrid" / "checkpoint.py"
# A training loop; the file is used by itself, as a project may copy it. It says what it has saved, and saves when it must stop.
TRAINING = (
    "import importlib.util, sys, time\n"
    "spec = importlib.util.spec_from_file_location('checkpoint', sys.argv[1])\n"
    "checkpoint = importlib.util.module_from_spec(spec); spec.loader.exec_module(checkpoint)\n"
    "path = checkpoint.latest(); step = int(path.read_text()) if path else 0\n"
    "with checkpoint.on_preempt() as stop:\n"
    "    print('from', step, flush=True)\n"
    "    while step < int(sys.argv[2]) and not stop:\n"
    "        step += 1; time.sleep(0.01)\n"
    "    checkpoint.save(lambda path: path.write_text(str(step)))\n"
    "print('saved', step, round(stop.grace_s), flush=True)\n"
)


def test_a_stopped_job_saves_its_steps_says_so_and_goes_on_from_there(engine):
    def item(attempt, steps):
        argv = (sys.executable, "-I", "-S", "-c", TRAINING, str(CLIENT), str(steps))
        return assignment(*argv, attempt=attempt, stop_signal="USR1", grace_s=20.0)

    async def run():
        first = item(1, 100_000)
        engine.start(first)
        await until_said(engine, first, "from 0")
        engine.stop(attempt_key(first))
        stopped = await ended(engine, first)
        saved = int(output(engine, first).text.split()[-2])
        second = item(2, saved + 3)
        done = await run_one(engine, second)
        return stopped, saved, done, output(engine, second).text

    stopped, saved, done, text = asyncio.run(run())
    assert (stopped.exit_code, stopped.reason) == (0, "stopped")
    assert stopped.started_ns < stopped.checkpointed_ns <= stopped.ended_ns
    assert saved >= 0
    assert done.is_success
    assert text == f"from {saved}\nsaved {saved + 3} 20\n"


def test_a_checkpoint_is_reported_while_the_job_runs_and_what_is_no_note_is_ignored(tmp_path):
    engine = LocalEngine(tmp_path, checkpoints_read_s=0.02)
    note = "$EELGRID_CHECKPOINT_DIR/.eelgrid-checkpoint"

    async def run():
        item = shell(
            f"echo '[1' > {note}; echo up; read x < $EELGRID_CHECKPOINT_DIR/go; "
            f'echo \'{{"time_ns": 1700000000000000000, "seconds": 2.5}}\' > {note}.new; mv {note}.new {note}; '
            "sleep 60"
        )
        folder = engine._checkpoint_folder(attempt_key(item))
        folder.mkdir(parents=True)
        os.mkfifo(folder / "go")
        engine.start(item)
        await until_said(engine, item, "up")
        await asyncio.sleep(0.1)
        assert status(engine, item).checkpointed_ns == 0
        (folder / "go").write_text("now\n")
        await wait_until(lambda: status(engine, item).checkpointed_ns == 1_700_000_000_000_000_000)
        engine.stop(attempt_key(item))
        return await ended(engine, item)

    found = asyncio.run(run())
    assert (found.checkpointed_ns, found.checkpoint_s) == (1_700_000_000_000_000_000, 2.5)


@pytest.mark.parametrize("noted", ["-1", "1e400", '"2"', "true", "[]", "1e6"])
def test_a_cost_of_a_checkpoint_that_is_none_is_left_out(noted, tmp_path):
    engine = LocalEngine(tmp_path, checkpoints_read_s=0.02)
    item = shell(f'echo \'{{"time_ns": 5, "seconds": {noted}}}\' > $EELGRID_CHECKPOINT_DIR/.eelgrid-checkpoint')

    async def run():
        return await run_one(engine, item)

    found = asyncio.run(run())
    assert (found.checkpointed_ns, found.checkpoint_s) == (5, 0.0)


def test_a_process_is_told_how_often_to_save_as_far_as_that_is_known(tmp_path):
    engine = LocalEngine(tmp_path)
    says = 'echo "[$EELGRID_CHECKPOINT_INTERVAL] [$EELGRID_INTERRUPTED_EVERY_S]"'
    known = replace(shell(says, key="known"), checkpoint_interval_s=1320.4, interrupted_every_s=21_600.0)

    async def run():
        for item in (known, shell(says, key="unknown")):
            await run_one(engine, item)
            yield output(engine, item).text

    async def collect():
        return [text async for text in run()]

    assert asyncio.run(collect()) == ["[1320] [21600]\n", "[] []\n"]


WARNED = (
    "import os, signal, time\n"
    "began = time.monotonic()\n"
    "def tell(number, _):\n"
    "    os.write(1, f'{signal.Signals(number).name} {time.monotonic() - began:.2f}\\n'.encode())\n"
    "    if number == signal.SIGTERM: os._exit(0)\n"
    "for number in (signal.SIGUSR1, signal.SIGTERM): signal.signal(number, tell)\n"
    "print('ready', flush=True)\n"
    "while True: time.sleep(1)\n"
)


def signals_of(text):
    return [(line.split()[0], float(line.split()[1])) for line in text.splitlines() if line.startswith("SIG")]


def test_a_warning_comes_before_the_time_limit_once_and_then_the_stop_signal(engine):
    item = python(WARNED, time_limit_s=2.0, warn_signal="USR1", warn_before_s=1.0)
    found = asyncio.run(run_one(engine, item))
    (first, second) = signals_of(output(engine, item).text)
    assert (first[0], second[0]) == ("SIGUSR1", "SIGTERM")
    assert 0.8 <= second[1] - first[1] <= 1.6
    assert found.reason == "time limit of 2 s"


def test_a_job_that_must_stop_is_warned_first_and_may_end_before_its_stop_signal(engine):
    item = python(WARNED, warn_signal="USR1", warn_before_s=0.7, environment={"A": "b"})
    quick = shell(
        "trap 'echo $EELGRID_WARN_SIGNAL $EELGRID_WARN_S; exit 3' USR1; echo ready; while :; do sleep 0.05; done",
        key="w-2",
        warn_signal="USR1",
        warn_before_s=600.0,
    )

    async def scene():
        for one in (item, quick):
            engine.start(one)
            await until_said(engine, one, "ready")
            engine.stop(attempt_key(one))
            await ended(engine, one)
        return status(engine, quick)

    found = asyncio.run(scene())
    (first, second) = signals_of(output(engine, item).text)
    assert (first[0], second[0]) == ("SIGUSR1", "SIGTERM")
    assert 0.6 <= second[1] - first[1] <= 1.3
    assert (found.exit_code, found.reason) == (3, "stopped")
    # The signal goes to the group, of which the shell tells.
    assert output(engine, quick).text.endswith("USR1 600\n")


PROGRESS = CLIENT.with_name("progress.py")


def test_what_a_job_says_of_its_progress_is_reported_and_anything_else_in_its_place_is_not(tmp_path):
    engine = LocalEngine(tmp_path, checkpoints_read_s=0.02)
    said = python(
        "import importlib.util, time\n"
        f"spec = importlib.util.spec_from_file_location('progress', {str(PROGRESS)!r})\n"
        "progress = importlib.util.module_from_spec(spec); spec.loader.exec_module(progress)\n"
        "for step in range(1, 2001): progress.report(step=step, total=2000, metric=1 / step)\n"
        "time.sleep(60)"
    )
    place = "$EELGRID_CHECKPOINT_DIR/.eelgrid-progress"
    tricks = [
        shell(f"{command}; echo done; sleep 60", key=f"w-{number}")
        for number, command in enumerate(
            (
                f"mkfifo {place}",
                f"ln -s /dev/zero {place}",
                f'echo \'{{"step": -1, "time_ns": 5}}\' > {place}',
                f'echo \'{{"step": 1e999, "time_ns": 1}}\' > {place}',
                f"head -c 100000 /dev/zero > {place}",
                f"mkdir {place}",
            ),
            start=2,
        )
    ]

    async def scene():
        for item in (said, *tricks):
            engine.start(item)
        for item in tricks:
            await until_said(engine, item, "done")
        await wait_until(lambda: (found := status(engine, said).progress) is not None and found.step == 2000)
        await asyncio.sleep(0.1)
        found = [status(engine, item).progress for item in (said, *tricks)]
        for item in (said, *tricks):
            engine.stop(attempt_key(item))
        for item in (said, *tricks):
            await ended(engine, item)
            engine.forget(attempt_key(item))
        return found

    first, *others = asyncio.run(scene())
    assert (first.step, first.total, first.metric) == (2000, 2000, 1 / 2000)
    assert others == [None] * len(tricks)
    # Reports of progress keep no folder.
    assert not engine._checkpoint_folder(attempt_key(said)).exists()


# Plans


def test_a_plan_starts_what_is_new_stops_what_it_does_not_name_and_forgets_what_has_ended():
    new, running, ended_one, gone, impossible, cancelled = (
        shell("true", key=key) for key in ("new", "running", "ended", "gone", "impossible", "cancelled")
    )
    stopped = replace(running, workload_id="stopped", stop=True)
    cancelled = replace(cancelled, stop=True)

    def known(item, state):
        key = attempt_key(item)
        return key, _status(key, state)

    attempts = dict(
        [
            known(running, AttemptState.RUNNING),
            known(stopped, AttemptState.RUNNING),
            known(ended_one, AttemptState.ENDED),
            known(gone, AttemptState.RUNNING),
            (AttemptKey("old", 0, 1), _status(AttemptKey("old", 0, 1), AttemptState.ENDED)),
        ]
    )
    plan = (new, running, stopped, ended_one, impossible, cancelled)
    actions = plan_actions(plan, [item for item in plan if item is not impossible], attempts)
    assert actions.start == (new,)
    assert actions.refuse == (cancelled,)
    assert sorted(key.workload_id for key in actions.stop) == ["gone", "stopped"]
    assert actions.forget == (AttemptKey("old", 0, 1),)


def _status(key, state):
    from eelgrid_protos.messages import AttemptStatus

    return AttemptStatus(workload_id=key.workload_id, replica=key.replica, attempt=key.attempt, state=state)
