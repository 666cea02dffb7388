"""Shares of GPUs under MPS: whose daemon runs when, what a client gets, and what a failure or a restart leaves."""

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from tests.builders.agent import ManualClock, build_agent_node, build_devices
from tests.builders.attempts import ended, output, python, shell, status, until_said
from tests.mps_rig import SERVER_PID, MpsProgram
from tests.waiting import wait_until

from eelgrid_agent.enforce.device_leases import DeviceLeases
from eelgrid_agent.enforce.lease_table import LeaseTable
from eelgrid_agent.engine import mps
from eelgrid_agent.engine.local import LocalEngine
from eelgrid_agent.engine.mps import MpsDaemonFailed, MpsDaemons
from eelgrid_agent.engine.mps_control import PID_FILE, PROGRAM, find_daemon
from eelgrid_agent.engine.port import attempt_key
from eelgrid_agent.engine.users import JobUser
from eelgrid_agent.state_files import MemoryState
from eelgrid_protos.messages import AttemptState, Cadence, ConnectResponse, Gpu, NodePlan, Welcome
from eelgrid_protos.quantities import MIB

GPU = "GPU-5f1e2d3c-0000-0000-0000-000000000001"
OTHER_GPU = "GPU-6f1e2d3c-0000-0000-0000-000000000002"
WAITS = "echo began; read line < gate; echo done"
SHOWS = "env | grep -E '^CUDA_(MPS|VISIBLE)' | sort"


@pytest.fixture
def program(tmp_path, monkeypatch):
    folder = tmp_path / "bin"
    folder.mkdir()
    return MpsProgram(folder, monkeypatch)


def build_daemons(tmp_path, **options):
    # A path of a socket has a limit.
    return MpsDaemons(
        tmp_path / "m",
        list_gpus=lambda: (Gpu(index=0, uuid=GPU, product="A100", model="A100", memory_bytes=80_000 * MIB),),
        **options,
    )


def build_engine(tmp_path, users=None):
    return LocalEngine(tmp_path / "p", mps=build_daemons(tmp_path), users=users)


def share(text, key="w-1", milli=250, gpu=GPU, **known):
    return replace(shell(text, key=key, gpus=(gpu,), **known), gpu_milli=milli)


def pipes(tmp_path, gpu=GPU):
    return tmp_path / "m" / f"{gpu[4:12]}-{os.geteuid()}"


def play(scene, engine):
    async def run():
        try:
            return await scene()
        finally:
            await end_all(engine)

    return asyncio.run(run())


async def end_all(engine):
    """Stops what runs, and waits until no daemon is left."""
    for key, one in engine.list_attempts().items():
        if not one.is_over:
            engine.stop(key)
    await wait_until(lambda: all(one.is_over for one in engine.list_attempts().values()))
    folder = engine._mps._folder  # the engine has no use for it
    await wait_until(lambda: not any(find_daemon(str(one)) for one in folder.iterdir()))
    engine.fork_server.close()


def test_sharers_of_a_gpu_have_one_daemon_that_begins_with_the_first_and_ends_with_the_last(tmp_path, program):
    engine = build_engine(tmp_path)
    os.mkfifo(tmp_path / "gate")
    first = share(WAITS, "w-1", folder=tmp_path)
    second = share(SHOWS, "w-2", 333)

    async def scene():
        engine.start(first)
        engine.start(first)
        await wait_until(lambda: attempt_key(first) in engine.list_attempts())
        await until_said(engine, first, "began")
        engine.start(second)
        assert (await ended(engine, second)).exit_code == 0
        assert find_daemon(str(pipes(tmp_path)))
        (tmp_path / "gate").write_text("\n")
        assert (await ended(engine, first)).exit_code == 0
        await wait_until(lambda: not list((tmp_path / "m").iterdir()))
        return output(engine, second).text.splitlines()

    lines = play(scene, engine)
    assert program.commands == [f"start {GPU} as {os.geteuid()}", "quit"]
    assert lines == [
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=33",
        f"CUDA_MPS_LOG_DIRECTORY={pipes(tmp_path)}",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=26640M",
        f"CUDA_MPS_PIPE_DIRECTORY={pipes(tmp_path)}",
        f"CUDA_VISIBLE_DEVICES={GPU}",
    ]


def test_whole_gpus_and_work_without_any_have_no_daemon(tmp_path, program):
    engine = build_engine(tmp_path)
    whole, none = share(SHOWS, "w-1", 1000), shell(SHOWS, key="w-2")

    async def scene():
        engine.start(whole, none)
        for item in (whole, none):
            await ended(engine, item)
        return [output(engine, item).text for item in (whole, none)]

    assert play(scene, engine) == [f"CUDA_VISIBLE_DEVICES={GPU}\n", "CUDA_VISIBLE_DEVICES=\n"]
    assert program.commands == []


def test_each_gpu_has_a_daemon_of_its_own_and_memory_is_limited_where_it_is_known(tmp_path, program):
    engine = build_engine(tmp_path)
    items = [share(SHOWS, "w-1"), share(SHOWS, "w-2", gpu=OTHER_GPU)]

    async def scene():
        engine.start(*items)
        await wait_until(lambda: len(engine.list_attempts()) == len(items))
        for item in items:
            await ended(engine, item)
        return ["MEM_LIMIT" in output(engine, item).text for item in items]

    assert play(scene, engine) == [True, False]
    assert sorted(line for line in program.commands if line != "quit") == [
        f"start {gpu} as {os.geteuid()}" for gpu in (GPU, OTHER_GPU)
    ]


def test_without_a_daemon_an_attempt_returns_to_the_queue_and_the_next_one_tries_again(tmp_path, program, monkeypatch):
    monkeypatch.setattr(mps, "_GIVE_UP_S", 0.0)
    engine = build_engine(tmp_path)
    program.break_down()
    first, second = share("true", "w-1"), share("true", "w-2")

    async def scene():
        engine.start(first)
        await wait_until(lambda: attempt_key(first) in engine.list_attempts())
        refused = status(engine, first)
        program.repair()
        engine.start(second)
        await wait_until(lambda: attempt_key(second) in engine.list_attempts())
        return refused, await ended(engine, second)

    refused, good = play(scene, engine)
    assert (refused.state, refused.started_ns, refused.gpu_held) == (AttemptState.ENDED, 0, True)
    assert refused.reason == (f"its MPS daemon does not start: {PROGRAM} -d ended with 1: cannot find an NVIDIA driver")
    assert good.is_success


def test_a_daemon_that_does_not_start_at_first_is_tried_again_while_its_attempt_waits(tmp_path, program, monkeypatch):
    monkeypatch.setattr(mps, "_TRY_AGAIN_S", 0.01)
    engine = build_engine(tmp_path)
    program.break_down()
    item, stopped = share("true", "w-1"), share("true", "w-2")

    async def scene():
        engine.start(item, stopped)
        await wait_until((tmp_path / "m" / f"{pipes(tmp_path).name}.log").exists)
        engine.refuse(stopped, "stopped before it started")
        program.repair()
        await wait_until(lambda: attempt_key(item) in engine.list_attempts())
        return await ended(engine, item)

    assert play(scene, engine).is_success
    assert [line.split()[0] for line in program.commands] == ["start", "quit"]


def test_an_attempt_that_is_stopped_while_it_waits_for_its_daemon_never_begins(tmp_path, program):
    engine = build_engine(tmp_path)
    item, other = share(f"touch {tmp_path}/ran", "w-1"), share("true", "w-2")

    async def scene():
        engine.start(item, other)
        assert engine.list_attempts() == {}
        engine.refuse(item, "stopped before it started")
        await wait_until(lambda: attempt_key(other) in engine.list_attempts())
        await ended(engine, other)
        return status(engine, item)

    assert play(scene, engine).reason == "stopped before it started"
    assert not (tmp_path / "ran").exists()


def test_an_attempt_that_no_plan_names_any_more_never_begins_when_its_daemon_does(tmp_path, program):
    clock = ManualClock()
    devices = build_devices(clock)
    (gpu, *_) = devices.gpus()
    leases = DeviceLeases(MemoryState(LeaseTable()), boot_id="b", wall_ns=lambda: 1)
    leases.list_gpus = devices.gpus
    engine = LocalEngine(tmp_path / "p", mps=build_daemons(tmp_path), leases=leases)
    node = build_agent_node(devices, clock, processes=engine)
    dropped, kept = (share(f"touch {tmp_path}/{key}", key, gpu=gpu.uuid) for key in ("w-1", "w-2"))

    async def scene():
        node.adopt_processes()
        leases.finish_adoption()
        node.on_welcome(Welcome(acknowledged_sequence=0, cadence=Cadence()))
        for epoch, items in enumerate([(dropped, kept), (kept,)], start=1):
            plan = NodePlan(node_name=node.name, epoch=epoch, lease_s=60.0, assignments=items)
            node.on_message(ConnectResponse(message=plan))
        assert [lease.holder.owner for lease in leases.table.leases] == ["w-2/0/1"]
        await wait_until(lambda: attempt_key(kept) in engine.list_attempts())
        await ended(engine, kept)

    play(scene, engine)
    assert [one.workload_id for one in engine.list_attempts()] == ["w-2"]
    assert not (tmp_path / "w-1").exists()


def test_a_daemon_that_was_killed_is_started_again_for_the_next_one(tmp_path, program):
    engine = build_engine(tmp_path)
    first, second = share("sleep 60", "w-1"), share("true", "w-2")

    async def scene():
        engine.start(first)
        await wait_until(lambda: attempt_key(first) in engine.list_attempts())
        pid = find_daemon(str(pipes(tmp_path)))
        os.kill(pid, signal.SIGKILL)
        await wait_until(lambda: not find_daemon(str(pipes(tmp_path))))
        engine.start(second)
        await wait_until(lambda: attempt_key(second) in engine.list_attempts())
        assert (await ended(engine, second)).is_success
        assert find_daemon(str(pipes(tmp_path))) not in (0, pid)

    play(scene, engine)
    words = [line.split()[0] for line in program.commands]
    assert [word for word in words if word in ("start", "quit")] == ["start", "start", "quit"]


def test_a_restarted_agent_finds_the_daemons_in_use_and_ends_the_others(tmp_path, program):
    before = build_engine(tmp_path)
    long, short = share("exec sleep 60", "w-1"), share("echo $$.; exec sleep 60", "w-2", gpu=OTHER_GPU)

    async def first_agent():
        before.start(long, short)
        await wait_until(lambda: len(before.list_attempts()) == 2)
        # Its user ends while no agent runs, so nobody tells its daemon to quit.
        await until_said(before, short, ".")
        pid = int(output(before, short).text.partition(".")[0])
        before.fork_server.close()
        return pid

    pid = asyncio.run(first_agent())
    kept = find_daemon(str(pipes(tmp_path)))
    os.kill(pid, signal.SIGKILL)
    again = build_engine(tmp_path)

    async def second_agent():
        again.adopt()
        await wait_until(lambda: not find_daemon(str(pipes(tmp_path, OTHER_GPU))))
        assert find_daemon(str(pipes(tmp_path))) == kept
        assert not status(again, long).is_over

    play(second_agent, again)
    assert program.commands.count("quit") == 2


def test_an_agent_that_offers_mps_no_more_ends_the_daemons_of_jobs_that_still_have_one(tmp_path, program):
    before = build_engine(tmp_path)
    old, new = share("exec sleep 60", "w-1"), share(SHOWS, "w-2")

    async def first_agent():
        before.start(old)
        await wait_until(lambda: attempt_key(old) in before.list_attempts())
        await wait_until(lambda: all("running" in path.read_text() for path in tmp_path.glob("p/attempts/*/rec*")))
        before.fork_server.close()

    asyncio.run(first_agent())
    again = LocalEngine(tmp_path / "p", mps=build_daemons(tmp_path, is_offered=False))

    async def second_agent():
        again.adopt()
        again.start(new)
        await ended(again, new)
        assert find_daemon(str(pipes(tmp_path)))
        again.stop(attempt_key(old))
        await ended(again, old)
        return output(again, new).text

    assert play(second_agent, again) == f"CUDA_VISIBLE_DEVICES={GPU}\n"
    assert program.commands[-1] == "quit"


def test_the_work_of_a_client_on_the_gpu_is_ended_before_it_is_killed(tmp_path, program):
    engine = build_engine(tmp_path)
    stubborn = "import signal, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('began', flush=True)\ntime.sleep(60)"
    item = replace(python(stubborn, gpus=(GPU,), grace_s=0.1), gpu_milli=500)

    async def scene():
        engine.start(item)
        await wait_until(lambda: attempt_key(item) in engine.list_attempts())
        await until_said(engine, item, "began")
        engine.stop(attempt_key(item))
        return await ended(engine, item)

    assert play(scene, engine).signal == signal.SIGKILL
    start, asked, told, *_ = program.commands
    assert (start, asked) == (f"start {GPU} as {os.geteuid()}", "get_server_list")
    assert told.startswith(f"terminate_client {SERVER_PID} ")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root starts processes of others")
def test_users_of_a_gpu_have_daemons_of_their_own_which_run_as_they(tmp_path, program):
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.geteuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o011)
    daemons = build_daemons(tmp_path)
    for suffix in ("commands", "clients"):
        (tmp_path / "bin" / f"{PROGRAM}.{suffix}").touch()
        (tmp_path / "bin" / f"{PROGRAM}.{suffix}").chmod(0o666)
    found = {}
    daemons.on_settled = lambda waiting, problem: found.update(
        {item.workload_id: problem or daemons.admit(item, users[items.index(item)]) for item in waiting}
    )
    users = [JobUser(name, uid, uid, (), "/") for name, uid in (("ann", 54_321), ("bob", 54_322))]
    items = [share("true", f"w-{index}") for index in range(len(users))]

    async def scene():
        for item, user in zip(items, users, strict=True):
            assert daemons.admit(item, user) is None
        await wait_until(lambda: len(found) == len(users))
        for item in items:
            daemons.leave(attempt_key(item))
        await wait_until(lambda: not list((tmp_path / "m").iterdir()))

    asyncio.run(scene())
    assert len({one["CUDA_MPS_PIPE_DIRECTORY"] for one in found.values()}) == len(users)
    assert sorted(line for line in program.commands if line != "quit") == [
        f"start {GPU} as {user.uid}" for user in users
    ]
    # Each is spoken to with its user's rights: what stands for its pipe may be a link to any file of root's.
    assert program.clients == {f"{user.uid}" for user in users}


def test_a_process_id_of_another_users_daemon_is_none_of_this_directory(tmp_path):
    (tmp_path / PID_FILE).write_text(str(os.getpid()))
    assert find_daemon(str(tmp_path)) == 0
    (tmp_path / PID_FILE).write_text("many")
    assert find_daemon(str(tmp_path)) == 0
    # One that nobody writes into would hold up the agent.
    (tmp_path / PID_FILE).unlink()
    os.mkfifo(tmp_path / PID_FILE)
    assert find_daemon(str(tmp_path)) == 0


def test_without_the_program_or_with_a_path_too_long_for_a_socket_nothing_begins(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MpsDaemonFailed, match=f"{PROGRAM} is not on PATH"):
        build_daemons(tmp_path)
    (tmp_path / PROGRAM).touch(mode=0o755)
    with pytest.raises(MpsDaemonFailed, match="too long for its sockets"):
        build_daemons(tmp_path / ("x" * 90))
