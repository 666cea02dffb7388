"""What is told of a start whose answer from the fork server does not arrive."""

import asyncio
import os
import resource

import pytest
from tests.builders.attempts import ended, shell, status

from eelgrid_agent.engine.fork_server import ForkServerEnded
from eelgrid_agent.engine.local import LocalEngine

STARTS = 6


@pytest.fixture
def engine(tmp_path):
    found = LocalEngine(tmp_path / "p")
    yield found
    found.fork_server.close()


def build_items(tmp_path):
    return [shell(f"echo x >> {tmp_path}/s{n}; exit {n}", key=f"w-{n}") for n in range(STARTS)]


@pytest.mark.parametrize("room", range(1, STARTS))
def test_no_process_runs_of_an_attempt_that_could_not_start_for_want_of_descriptors(engine, tmp_path, room):
    items = build_items(tmp_path)

    async def scene():
        engine.adopt()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        # The next one that is opened has the least free number.
        least = os.open("/", os.O_RDONLY)
        os.close(least)
        resource.setrlimit(resource.RLIMIT_NOFILE, (least + room, hard))
        try:
            engine.start(*items)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for item in items:
            await ended(engine, item)

    asyncio.run(scene())
    begun = {item.workload_id for n, item in enumerate(items) if (tmp_path / f"s{n}").exists()}
    assert begun == {item.workload_id for item in items if status(engine, item).exit_code is not None}
    assert len(begun) < STARTS


def test_a_launcher_that_the_last_of_several_fork_servers_has_forked_is_found(engine, tmp_path, monkeypatch):
    item = shell(f"echo x >> {tmp_path}/s; exit 3")
    request, receive, asked = engine.fork_server.request, engine.fork_server.receive, []

    def request_of_the_last(folder, records):
        asked.append(folder)
        if len(asked) < 4:
            os.close(records)
            raise ForkServerEnded("killed before it was asked")
        request(folder, records)

    def receive_too_late():
        os.close(receive())
        engine.fork_server.close()
        raise ForkServerEnded("killed after it had forked")

    monkeypatch.setattr(engine.fork_server, "request", request_of_the_last)
    monkeypatch.setattr(engine.fork_server, "receive", receive_too_late)

    async def scene():
        engine.adopt()
        engine.start(item)
        return await ended(engine, item)

    assert asyncio.run(scene()).exit_code == 3
    assert (tmp_path / "s").read_text() == "x\n"
