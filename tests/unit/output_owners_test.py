"""Output of jobs that have ended is their owners' alone, also where the controller has forgotten a job and another took its id."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

from tests.builders.attempts import output, run_one, shell
from tests.builders.cluster import build_core
from tests.unit.attempts_test import ended, job, node, report

from eelgrid_agent.engine.local import LocalEngine
from eelgrid_agent.engine.port import attempt_key
from eelgrid_controller.runtime.audit_log import AuditedCall
from eelgrid_controller.server.grpc.job_streams import JobStreamService
from eelgrid_protos.messages import LogChunk, LogRequest, ReadLogsRequest, WorkloadPhase


def test_an_agent_answers_no_output_of_another_owners_job(tmp_path):
    engine = LocalEngine(tmp_path / "p")
    item = replace(shell("echo secret"), run_as="ann")

    async def scene():
        await run_one(engine, item)
        engine.forget(attempt_key(item))

    asyncio.run(scene())
    engine.fork_server.close()
    asked = LogRequest(request_id=7, workload_id=item.workload_id, attempt=item.attempt)
    for owner in ("ann", ""):
        assert engine.read_output(replace(asked, owner=owner)).text == "secret\n"
    refused = engine.read_output(replace(asked, owner="bob"))
    assert (refused.text, refused.problem) == ("", "the node keeps none of it")
    assert output(engine, item).text == "secret\n"


async def test_agents_are_told_for_whose_job_output_is_read():
    core, asked = build_core(node()), []
    core.submit(job("w"), now_ns=3, owner="bob")
    report(core, ended("w"), now_ns=50)
    assert core.workload("w").phase is WorkloadPhase.SUCCEEDED

    async def read_log(_name, request):
        asked.append(request)
        return LogChunk(request_id=0, text="", next_offset=0, is_end=True)

    async def read(view):
        return view(core)

    service = JobStreamService(
        loop=SimpleNamespace(read=read, check_owner=lambda *_: None),
        agents=SimpleNamespace(read_log=read_log, is_connected=lambda _: True),
        changes=None,
        call_of=lambda method, *_: AuditedCall(method, None, "peer"),
        on_attach=None,
    )
    assert [one async for one in service.read_logs(ReadLogsRequest(workload_id="w"), None)] == []
    assert [one.owner for one in asked] == ["bob"]
