"""The HTTP gateway: how calls end, what bounds them, and whose they are, with a handler in place of gRPC's."""

import asyncio
import json
import logging

import aiohttp
import grpc
import pytest

from eelgrid_controller.server.http.gateway import HTTP_STATUS, HttpGateway
from eelgrid_protos.connection_limits import PeerGuard, PeerLimits
from eelgrid_protos.errors import Violation
from eelgrid_protos.faults import Fault, NotFound
from eelgrid_protos.rpc import abort_call

SERVICE = "eelgrid.v1.OperatorService"
LOG = logging.getLogger("eelgrid.tests")


class Gateway:
    """A gateway on a free port, whose every call is `answer(path, context)`."""

    def __init__(self, answer, *, find_call=None, **settings):
        self._answer = answer
        self._gateway = HttpGateway(
            find_call or self._find, tls=None, insecure=False, now_ns=lambda: 0, log=LOG, **settings
        )

    def _find(self, path):
        async def call(_data, context):
            try:
                return await self._answer(path, context)
            except Fault as fault:
                await abort_call(context, fault, path)

        return call

    async def __aenter__(self):
        port = await self._gateway.start("127.0.0.1:0")
        self._session = aiohttp.ClientSession(f"http://127.0.0.1:{port}")
        return self

    async def __aexit__(self, *reason):
        await self._session.close()
        await self._gateway.stop()

    async def ask(self, path="/v1/summary", **options):
        """Status, headers and JSON."""
        async with self._session.get(path, **options) as answer:
            return answer.status, answer.headers, json.loads(await answer.read())


async def test_each_status_of_grpc_has_its_status_of_http():
    assert set(HTTP_STATUS) == set(grpc.StatusCode) - {grpc.StatusCode.OK}

    async def answer(_path, context):
        await context.abort(code, "why")

    async with Gateway(answer) as gateway:
        for code, wanted in HTTP_STATUS.items():
            status, _, body = await gateway.ask()
            assert (status, body) == (wanted, {"code": code.value[0], "message": "why"})


async def test_field_violations_of_a_fault_are_in_the_details():
    async def answer(_path, _context):
        raise NotFound("no such node", (Violation("node_name", "is 'x'", "name one of eelctl nodes"),))

    async with Gateway(answer) as gateway:
        status, headers, body = await gateway.ask("/v1/nodes/x/gpus")
    assert (status, headers["Content-Type"]) == (404, "application/json; charset=utf-8")
    (violation,) = body["details"][0]["fieldViolations"]
    assert violation == {"field": "node_name", "description": "is 'x'; name one of eelctl nodes"}


async def test_a_call_reaches_its_handler_with_the_callers_address():
    seen = []

    async def answer(path, context):
        seen.append((path, context.peer().rpartition(":")[0], context.auth_context(), context.invocation_metadata()))
        return b""

    async with Gateway(answer) as gateway:
        assert (await gateway.ask())[0] == 200
    assert seen == [("/eelgrid.v1.OperatorService/GetSummary", "ipv4:127.0.0.1", {}, ())]


async def test_an_answer_that_takes_too_long_or_is_too_long_is_given_up():
    never = asyncio.Event()

    async def answer(path, _context):
        if path.endswith("GetSummary"):
            await never.wait()
        return b"\0" * 100

    async with Gateway(answer, answer_within_s=0.05, answer_bytes_most=99) as gateway:
        status, _, body = await gateway.ask()
        assert (status, body["code"], "GetSummary took over 0.05 s" in body["message"]) == (504, 4, True)
        status, _, body = await gateway.ask("/v1/nodes")
        assert (status, body["code"], "page_size" in body["message"]) == (429, 8, True)


async def test_more_requests_than_may_be_under_way_are_refused_and_the_others_are_answered():
    under_way, may_end = asyncio.Semaphore(0), asyncio.Event()

    async def answer(_path, _context):
        under_way.release()
        await may_end.wait()
        return b""

    async with Gateway(answer) as gateway:
        waiting = [asyncio.create_task(gateway.ask()) for _ in range(64)]
        for _ in waiting:
            await under_way.acquire()
        status, _, body = await gateway.ask()
        assert (status, body) == (503, {"code": 14, "message": "too many connections"})
        may_end.set()
        assert {status for status, _, _ in await asyncio.gather(*waiting)} == {200}


async def test_calls_of_one_client_share_its_account_with_grpc():
    under_way, may_end = asyncio.Event(), asyncio.Event()

    async def answer(_data, _context):
        under_way.set()
        await may_end.wait()
        return b""

    async def watch(_data, _context):
        yield b""

    guard = PeerGuard(PeerLimits(calls_most=1), log=LOG)
    handlers = {
        "GetSummary": grpc.unary_unary_rpc_method_handler(answer),
        "WatchSummary": grpc.unary_stream_rpc_method_handler(watch),
    }
    find_call = guard.wrap_handlers(grpc.method_handlers_generic_handler(SERVICE, handlers)).find_call
    async with Gateway(answer, find_call=find_call) as gateway:
        first = asyncio.create_task(gateway.ask())
        await under_way.wait()
        status, _, body = await gateway.ask()
        assert (status, body["code"], "calls of yours are under way" in body["message"]) == (429, 8, True)
        may_end.set()
        assert (await first)[0] == 200
        assert (await gateway.ask())[0] == 200
    for path in (f"/{SERVICE}/WatchSummary", f"/{SERVICE}/Nothing"):
        with pytest.raises(LookupError):
            find_call(path)


async def test_a_fault_of_a_handler_is_logged_and_not_shown(caplog):
    async def answer(_path, _context):
        raise RuntimeError("a secret")

    async with Gateway(answer) as gateway:
        status, _, body = await gateway.ask()
    assert (status, body["code"], "secret" in body["message"]) == (500, 13, False)
    assert "call=GetSummary fault=internal" in caplog.text


async def test_a_foreign_host_and_a_wrong_method_are_refused_as_json():
    async def answer(_path, _context):
        raise AssertionError

    async with Gateway(answer) as gateway:
        status, _, body = await gateway.ask(headers={"Host": "evil.example"})
        assert (status, body["code"]) == (421, 3)
        async with gateway._session.post("/v1/summary", json={}) as refused:
            assert (refused.status, refused.headers["Allow"]) == (405, "GET")
            assert await refused.json() == {"code": 12, "message": "/v1/summary takes GET only"}
        async with gateway._session.head("/v1/summary") as refused:
            assert (refused.status, refused.headers["Allow"]) == (405, "GET")
