"""An attempt that has ended is not run again by a plan of a controller whose database lost the end."""

import asyncio

from tests.builders.attempts import ended, run_one, shell, status

from eelgrid_agent.engine import local
from eelgrid_agent.engine.local import LocalEngine
from eelgrid_agent.engine.port import attempt_key


def test_an_attempt_that_is_named_again_is_reported_and_not_run_again(tmp_path):
    item = shell(f"echo x >> {tmp_path}/starts; exit 3")
    other = shell(f"echo y >> {tmp_path}/starts; exit 0")

    async def scene():
        engine = LocalEngine(tmp_path)
        first = await run_one(engine, item)
        for _ in range(2):
            engine.forget(attempt_key(item))
            assert not engine.list_attempts()
            engine.start(item)
            assert status(engine, item) == first
        # The same name with another command is other work.
        engine.forget(attempt_key(item))
        engine.start(other)
        assert (await ended(engine, other)).exit_code == 0

    asyncio.run(scene())
    assert (tmp_path / "starts").read_text() == "x\ny\n"


def test_ends_are_remembered_up_to_a_bound(tmp_path, monkeypatch):
    monkeypatch.setattr(local, "_ENDED_MOST", 2)

    async def scene():
        engine = LocalEngine(tmp_path)
        items = [shell("exit 0", key=f"w-{number}") for number in range(3)]
        for item in items:
            await run_one(engine, item)
            engine.forget(attempt_key(item))
        return [key.workload_id for key in engine._ended]

    assert asyncio.run(scene()) == ["w-1", "w-2"]
