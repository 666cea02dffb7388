"""An attempt that has ended is not run again by a plan of a controller whose database lost the end."""

import asyncio

from tests.builders.attempts import ended, run_one, shell, status

from eelgrid_agent.engine import local
from eelgrid_agent.engine.local import LocalEngine
from eelgrid_agent.engine.port import attempt_key
from eelgrid_protos.plain_messages import digest_plain, to_plain


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


def test_what_ended_by_itself_and_is_forgotten_is_listed_also_after_a_restart(tmp_path):
    """With the digest of its process; not what was told to end, was refused, or is known again."""
    kept = [shell("exit 0", key="a"), shell("exit 3", key="b")]
    stopped, refused, running = shell("sleep 60", key="c"), shell("exit 0", key="d"), shell("exit 0", key="e")

    async def scene():
        engine = LocalEngine(tmp_path)
        for item in (*kept, running):
            await run_one(engine, item)
            assert engine.list_ended() == (), "a plan may still name it"
        for item in kept:
            engine.forget(attempt_key(item))
        engine.start(stopped)
        engine.stop(attempt_key(stopped))
        await ended(engine, stopped)
        engine.refuse(refused, "its GPU is held", gpu_held=True)
        for item in (stopped, refused):
            engine.forget(attempt_key(item))
        return engine.list_ended()

    async def restarted():
        engine = LocalEngine(tmp_path)
        engine.adopt()
        return engine.list_ended()

    found = asyncio.run(scene())
    assert [(one.workload_id, one.exit_code) for one in found] == [("b", 3), ("a", 0)]
    assert [one.process_digest for one in found] == [
        digest_plain(to_plain(item.process, brief=True)) for item in reversed(kept)
    ]
    assert all(one.is_over and one.started_ns <= one.ended_ns for one in found)
    assert asyncio.run(restarted()) == found
