"""Launchers that are forked before their attempt is known: how many, and what becomes of them."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
from tests.builders.attempts import ended, shell
from tests.waiting import wait_until

from eelgrid_agent.engine.local import LocalEngine


@pytest.fixture
def engine(tmp_path):
    found = LocalEngine(tmp_path)
    found.adopt()
    yield found
    found.fork_server.close()


def list_children(pid):
    """Lists the children of a process that have not ended."""
    found = set()
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        try:
            state = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state not in "ZX":
            found.add(int(child))
    return found


def until_spares(engine, count):
    return wait_until(lambda: len(list_children(engine.fork_server.pid)) == count)


async def run_jobs(engine, keys):
    items = [shell("exit 3", key=key) for key in keys]
    engine.start(*items)
    return [(await ended(engine, item)).exit_code for item in items]


def test_one_waits_at_first_and_then_as_many_as_were_started_up_to_a_bound(engine):
    async def scene():
        await until_spares(engine, 1)
        assert await run_jobs(engine, ["a", "b", "c"]) == [3, 3, 3]
        await until_spares(engine, 3)
        assert await run_jobs(engine, [f"k-{n}" for n in range(20)]) == [3] * 20
        await until_spares(engine, 8)

    asyncio.run(scene())


def test_one_that_was_killed_costs_no_attempt_and_is_replaced(engine):
    async def scene():
        await run_jobs(engine, ["a", "b", "c"])
        await until_spares(engine, 3)
        server = engine.fork_server.pid
        # It is not there to notice until the next request.
        os.kill(server, signal.SIGSTOP)
        killed = list_children(server)
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        await wait_until(lambda: not list_children(server))
        os.kill(server, signal.SIGCONT)
        assert await run_jobs(engine, ["d", "e", "f", "g"]) == [3] * 4
        assert engine.fork_server.pid == server
        await wait_until(lambda: len(list_children(server)) >= 3)
        assert not list_children(server) & killed

    asyncio.run(scene())


@pytest.mark.parametrize("is_killed", [True, False])
def test_those_that_wait_end_with_the_server_and_those_that_run_go_on(engine, is_killed):
    async def scene():
        item = shell("read line < /dev/null; sleep 0.3; exit 5")
        engine.start(item)
        await until_spares(engine, 2)
        server, children = engine.fork_server.pid, list_children(engine.fork_server.pid)
        if is_killed:
            os.kill(server, signal.SIGKILL)
        engine.fork_server.close()
        assert (await ended(engine, item)).exit_code == 5
        await wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children))

    asyncio.run(scene())


def test_one_that_is_asked_to_stop_without_an_attempt_ends_and_stops_no_later_one(engine):
    async def scene():
        await until_spares(engine, 1)
        server = engine.fork_server.pid
        (spare,) = list_children(server)
        await wait_until(lambda: handles_term(spare))
        os.kill(spare, signal.SIGTERM)
        await wait_until(lambda: spare not in list_children(server))
        assert await run_jobs(engine, ["a"]) == [3]

    asyncio.run(scene())


def handles_term(pid):
    status = dict(line.split(":\t") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return bool(int(status["SigCgt"], 16) >> (signal.SIGTERM - 1) & 1)
