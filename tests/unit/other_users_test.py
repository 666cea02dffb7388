"""Jobs of other users than the agent's: their standard streams, and their checkpoints."""

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.builders.attempts import output, run_one, shell

from eelgrid_agent.engine.local import LocalEngine
from eelgrid_agent.engine.port import attempt_key
from eelgrid_agent.engine.users import JobUsers
from eelgrid_protos.messages import StandardInput

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root starts processes of others")
OPENS_ALL = "echo out > /dev/stdout; echo err > /dev/stderr; : < /dev/stdin && echo in"
NUMBERS = {"ann": 54_321, "bob": 54_322}


def find(name):
    return SimpleNamespace(pw_name=name, pw_uid=NUMBERS[name], pw_gid=NUMBERS[name], pw_dir="/")


@pytest.fixture
def engine(tmp_path):
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.geteuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o011)
    users = JobUsers(own_uid=0, find=find, list_groups=lambda _, gid: [gid])
    found = LocalEngine(tmp_path / "p", users=users)
    yield found
    found.fork_server.close()


@pytest.mark.parametrize("standard_input", list(StandardInput))
def test_a_job_opens_its_streams_by_name(engine, standard_input):
    item = replace(shell(OPENS_ALL, standard_input=standard_input), run_as="ann")

    async def scene():
        end = await run_one(engine, item)
        return end.reason, output(engine, item).text.split()

    assert asyncio.run(scene()) == ("", ["out", "err", "in"])


def test_the_checkpoints_of_a_user_are_not_given_to_anothers_job_of_the_same_id(engine):
    save, load = "echo mine > $EELGRID_CHECKPOINT_DIR/model", "cat $EELGRID_CHECKPOINT_DIR/model"
    first, other, again = (
        replace(shell(text, attempt=number), run_as=name)
        for number, (text, name) in enumerate([(save, "ann"), (load, "bob"), (load, "ann")], start=1)
    )

    async def scene():
        ends = []
        for item in (first, other, again):
            end = await run_one(engine, item)
            ends.append((end.exit_code, end.reason.partition(" /")[0], end.reason.partition(" is ")[2]))
            engine.forget(attempt_key(item))
        return ends

    good = 0, "", ""
    remedy = "another user's; submit the job under another id, or remove the folder"
    assert asyncio.run(scene()) == [good, (126, "cannot prepare its start:", remedy), good]
    assert output(engine, other).text == ""
    assert output(engine, again).text == "mine\n"
