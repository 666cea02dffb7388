"""Cgroups of attempts that never began, in a folder instead of the kernel's."""

import asyncio

import pytest
from tests.builders.attempts import run_one, shell

from eelgrid_agent.engine import cgroups
from eelgrid_agent.engine.cgroups import AttemptCgroups
from eelgrid_agent.engine.local import LocalEngine


@pytest.fixture
def parent(tmp_path, monkeypatch):
    # A folder has no attributes.
    monkeypatch.setattr(cgroups, "_write", lambda *_: None)
    found = tmp_path / "cgroups"
    found.mkdir()
    return found


def test_an_attempt_that_cannot_start_leaves_no_cgroup(tmp_path, parent):
    engine = LocalEngine(tmp_path / "p", cgroups=AttemptCgroups(parent))
    (tmp_path / "p" / "attempts" / "w-1.0.1" / "records.jsonl").mkdir(parents=True)
    assert asyncio.run(run_one(engine, shell("true"))).reason == "cannot start: Is a directory"
    assert list(parent.iterdir()) == []


def test_a_start_that_a_crash_cut_short_leaves_no_cgroup(tmp_path, parent):
    engine = LocalEngine(tmp_path / "p", cgroups=AttemptCgroups(parent))
    (tmp_path / "p" / "attempts" / "w-1.0.1").mkdir()
    (parent / "attempt-w-1.0.1").mkdir()

    async def scene():
        engine.adopt()

    asyncio.run(scene())
    engine.fork_server.close()
    assert list(parent.iterdir()) == []
