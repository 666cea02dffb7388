"""slurmrestd as 22.05 answers, recorded, behind a server of ours on a socket: versions, tokens, bounds, and commands instead.

`slurm_answers/slurmrestd-v0.0.38.json` has its paths and its answers of jobs and nodes, cut down to the fields that are read, and
what it says of a job that is not there. tests/e2e/slurm_rest_test.py has a real one.
"""

import asyncio
import json
import logging
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from eelgrid_controller.engines.slurm.answers import parse_jobs, parse_nodes
from eelgrid_controller.engines.slurm.commands import SlurmCommandLine, SlurmFailed
from eelgrid_controller.engines.slurm.rest import READ_VERSIONS, SlurmRest, SlurmRestReader

RECORDED = json.loads((Path(__file__).parent / "slurm_answers" / "slurmrestd-v0.0.38.json").read_text())
JOBS, NODES = json.dumps(RECORDED["jobs"]), json.dumps(RECORDED["nodes"])
BY_COMMAND = b'{"jobs": [], "nodes": []}'


class Slurmrestd:
    """Serves what is recorded under some versions."""

    def __init__(self, *versions, token=""):
        self.versions, self.token = versions or (38,), token
        self.answers = {"jobs": JOBS, "nodes": NODES}
        self.status, self.delay_s, self.asked = 200, 0.0, []

    async def answer(self, request):
        self.asked.append(request.path)
        if self.token and request.headers.get("X-SLURM-USER-TOKEN") != self.token:
            return web.Response(status=401)
        if request.path == "/openapi/v3":
            paths = dict.fromkeys(RECORDED["paths"] if self.versions == (38,) else ())
            for version in self.versions:
                paths |= {f"/slurm/v0.0.{version}/jobs": {}, f"/slurmdb/v0.0.{version}/jobs/": {}}
            return web.json_response({"paths": paths})
        _, _, version, kind = request.path.split("/")
        if version not in {f"v0.0.{one}" for one in self.versions}:
            return web.Response(status=404, text="Unable find requested URL.")
        await asyncio.sleep(self.delay_s)
        return web.Response(status=self.status, text=self.answers[kind])

    @asynccontextmanager
    async def serve(self, path):
        app = web.Application()
        app.router.add_get("/{rest:.*}", self.answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.UnixSite(runner, str(path)).start()
        try:
            yield f"unix:{path}"
        finally:
            await runner.cleanup()


class HandClock:
    now_s = 0.0

    def monotonic_s(self):
        return self.now_s


@asynccontextmanager
async def opened(server, path, **settings):
    async with server.serve(path) as address:
        rest = SlurmRest(address, **settings)
        try:
            yield rest
        finally:
            await rest.close()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "rest"


@pytest.fixture
def reader(monkeypatch):
    async def run(self, program, *arguments, text=None):
        return b"slurm 22.05.8" if "--version" in arguments else BY_COMMAND

    monkeypatch.setattr(SlurmCommandLine, "_run", run)

    def make(rest):
        found = SlurmRestReader(rest, clock=HandClock(), log=logging.getLogger("test.rest"))
        return found, found._clock

    return make


async def test_jobs_and_nodes_are_what_the_real_one_answered(path):
    async with opened(Slurmrestd(), path) as rest:
        jobs, nodes = parse_jobs(await rest.read("jobs")), parse_nodes(await rest.read("nodes"))
    assert [(job.state, job.is_held, job.node_count) for job in jobs.jobs] == [
        ("RUNNING", False, 1),
        ("PENDING", True, 2),
    ]
    assert [one.count for one in jobs.jobs[0].gpus] == [2]
    assert jobs.jobs[0].gpu_indexes == {jobs.jobs[0].nodes[0]: (0, 1)}
    assert [node.name for node in nodes.nodes] == ["n0", "n1", "n2"]
    assert (jobs.unreadable, nodes.unreadable) == ((), ())


async def test_the_newest_version_that_is_read_is_asked_for_once_and_again_when_it_is_gone(path):
    server = Slurmrestd(38, 41, READ_VERSIONS[-1] + 1)
    async with opened(server, path) as rest:
        await rest.read("jobs")
        await rest.read("nodes")
        assert server.asked == ["/openapi/v3", "/slurm/v0.0.41/jobs", "/slurm/v0.0.41/nodes"]
        server.versions = (38, 42)
        with pytest.raises(SlurmFailed, match=r"/slurm/v0\.0\.41/jobs: slurmrestd answers 404: Unable find"):
            await rest.read("jobs")
        await rest.read("jobs")
        assert server.asked[-1] == "/slurm/v0.0.42/jobs"


async def test_versions_that_are_not_read_are_refused_with_those_that_are(path):
    async with opened(Slurmrestd(37, 99), path) as rest:
        with pytest.raises(
            SlurmFailed, match=r"has v0\.0\.37, v0\.0\.99, and v0\.0\.38 to v0\.0\.45 are read; start it"
        ):
            await rest.read("jobs")


async def test_a_token_is_read_for_each_request_and_a_wrong_one_is_named_and_not_shown(path, tmp_path):
    server, token = Slurmrestd(token="secret-2"), tmp_path / "token"
    token.write_text("secret-1\n")
    async with opened(server, path, token_file=token, user="eelgrid") as rest:
        with pytest.raises(SlurmFailed, match="has refused the token of --slurm-rest-token-file") as refused:
            await rest.read("jobs")
        assert "secret" not in str(refused.value)
        token.write_text("secret-2\n")
        assert await rest.read("jobs")
        token.unlink()
        with pytest.raises(SlurmFailed, match="cannot be read"):
            await rest.read("jobs")
    async with opened(server, path) as rest:
        with pytest.raises(SlurmFailed, match="asks for a token: give --slurm-rest-token-file"):
            await rest.read("jobs")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ('{"jobs": [], "errors": [{"error": "Unable to contact slurm controller"}]}', "no error"),
        ('{"jobs": []}', "no error"),
    ],
)
async def test_no_jobs_beside_an_error_is_no_answer(path, answer, words):
    server = Slurmrestd()
    server.answers["jobs"] = answer
    async with opened(server, path) as rest:
        with pytest.raises(SlurmFailed, match=words):
            await rest.read("jobs")
        # As 22.05 has it.
        nobody = RECORDED["job_of_nobody"]
        server.status, server.answers["jobs"] = nobody["status"], json.dumps(nobody["body"])
        with pytest.raises(SlurmFailed, match="answers 500: "):
            await rest.read("jobs")


async def test_a_socket_without_slurmrestd_and_one_that_is_silent_are_told_apart(path):
    rest = SlurmRest(f"unix:{path}")
    with pytest.raises(SlurmFailed, match=r"is not reached: .*; correct --slurm-rest"):
        await rest.read("jobs")
    await rest.close()
    server = Slurmrestd()
    server.delay_s = 30.0
    async with opened(server, path, timeout_s=0.2) as rest:
        with pytest.raises(SlurmFailed, match=r"did not answer in 0\.2 s"):
            await rest.read("jobs")


async def test_commands_answer_while_slurmrestd_does_not_and_the_reason_is_told_once(path, reader, caplog):
    server = Slurmrestd()
    with caplog.at_level(logging.INFO, "test.rest"):
        async with opened(server, path) as rest:
            found, clock = reader(rest)
            assert await found.read_jobs() == JOBS.encode()
            assert await found.read_nodes() == NODES.encode()
            server.status = 500
            assert await found.read_jobs() == BY_COMMAND
            asked = len(server.asked)
            server.status = 200
            # Not asked again at once.
            clock.now_s = 59.0
            assert await found.read_nodes() == BY_COMMAND
            assert len(server.asked) == asked
            clock.now_s = 61.0
            assert await found.read_nodes() == NODES.encode()
        clock.now_s = 130.0
        for _ in range(3):
            assert await found.read_jobs() == BY_COMMAND
            clock.now_s += 61.0
        await rest.close()
    told = [record.message.split(" error=")[0] for record in caplog.records]
    assert told == ["slurm=rest read=no", "slurm=rest read=yes", "slurm=rest read=no"]


@pytest.mark.parametrize("answer", ['{"errors": []}', '{"errors": [], "jobs": [{"job_id": "x"}]}', '["errors": []]'])
async def test_answers_of_another_form_are_found_out_before_they_are_relied_on(path, reader, answer):
    server = Slurmrestd()
    server.answers["jobs"] = answer
    async with opened(server, path) as rest:
        found, _ = reader(rest)
        assert await found.read_jobs() == BY_COMMAND


async def test_one_job_that_cannot_be_read_is_no_reason_to_use_commands(path, reader):
    server, jobs = Slurmrestd(), json.loads(JOBS)
    jobs["jobs"].append({"job_id": 7, "job_state": 3})
    server.answers["jobs"] = json.dumps(jobs)
    async with opened(server, path) as rest:
        found, _ = reader(rest)
        assert len(parse_jobs(await found.read_jobs()).unreadable) == 1
