"""Standard streams of a job that runs as another user than the agent."""

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import pytest
from tests.builders.attempts import output, run_one, shell

from eelgrid_agent.engine.local import LocalEngine
from eelgrid_agent.engine.users import JobUsers
from eelgrid_protos.messages import StandardInput

OPENS_ALL = "echo out > /dev/stdout; echo err > /dev/stderr; : < /dev/stdin && echo in"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root starts processes of others")
@pytest.mark.parametrize("standard_input", list(StandardInput))
def test_a_job_of_another_user_opens_its_streams_by_name(tmp_path, standard_input):
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.geteuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o011)
    engine = LocalEngine(tmp_path / "p", users=JobUsers(own_uid=0))
    item = replace(shell(OPENS_ALL, standard_input=standard_input), run_as="nobody")

    async def scene():
        end = await run_one(engine, item)
        return end.reason, output(engine, item).text.split()

    try:
        assert asyncio.run(scene()) == ("", ["out", "err", "in"])
    finally:
        engine.fork_server.close()
