"""The authorizer before real servers: every kind of call, dates, changed certificates, the page, and what it says."""

import asyncio
import datetime as dt
import logging
import ssl
from contextlib import asynccontextmanager
from dataclasses import replace

import aiohttp
import grpc.aio
import pytest
from bench.page_fleet import PageFleet
from tests.certificates_rig import Authority
from tests.fakes.operators import FakeOperators

from eelgrid_controller.clock import Clock
from eelgrid_controller.runtime.access_control import parse_user_grants
from eelgrid_controller.server.grpc.authorization import Authorizer, CallerService
from eelgrid_protos import codec, messages, rpc, transport
from eelgrid_protos.certificate import read_certificate
from eelgrid_protos.faults import NotFound, PermissionDenied, Unavailable
from eelgrid_protos.roles import RoleRules, build_caller

LOG = logging.getLogger("test.roles")
REQUIRE = RoleRules(demanded=True)


@pytest.fixture(scope="module")
def authority():
    return Authority()


class Agents:
    """Welcomes whoever comes."""

    async def connect(self, requests, context):
        async for _ in requests:
            yield messages.ConnectResponse(message=messages.Acknowledgement(sequence=7))


@asynccontextmanager
async def serving(tls, authorizer, operators=None):
    server = grpc.aio.server(options=transport.server_options())
    operators = operators or FakeOperators()
    server.add_generic_rpc_handlers(
        (
            rpc.build_handler(rpc.AGENT_SERVICE, Agents(), admit=authorizer.authorize_call),
            rpc.build_handler(rpc.OPERATOR_SERVICE, *operators.parts, admit=authorizer.authorize_call),
        )
    )
    port = await transport.listen_on_address(server, "127.0.0.1:0", tls=tls, insecure=False, log=LOG)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@asynccontextmanager
async def calling(service, address, tls):
    # Each with a connection of its own, or a changed certificate would never be shown.
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with transport.open_channel(address, tls=tls, options=options) as channel:
        yield rpc.build_client(service, channel)


async def outcome(answers):
    """How one call of any kind ends: the first answer's class, or the fault."""
    try:
        if hasattr(answers, "__aiter__"):
            async for answer in answers:
                return type(answer).__name__
            return "nothing"
        return type(await answers).__name__
    except (PermissionDenied, Unavailable, NotFound) as fault:
        return fault


async def hello():
    """As agents do: Hello, and then nothing until there is something to say."""
    inventory = messages.Inventory(node_name="n", cpu_milli=1, memory_bytes=1)
    yield messages.ConnectRequest(message=messages.Hello(incarnation=1, inventory=inventory))
    await asyncio.Event().wait()


async def tried(address, tls):
    """One call of each kind: unary that reads, unary that changes, a server's stream, a stream both ways."""
    async with (
        calling(rpc.OPERATOR_SERVICE, address, tls) as operators,
        calling(rpc.AGENT_SERVICE, address, tls) as agents,
    ):
        return {
            "read": await outcome(operators.get_summary(messages.GetSummaryRequest(), timeout=20.0)),
            "change": await outcome(
                operators.cancel_workload(messages.CancelWorkloadRequest(workload_id="w"), timeout=20.0)
            ),
            "watch": await outcome(operators.watch_summary(messages.WatchSummaryRequest(), timeout=20.0)),
            "agent": await outcome(agents.connect(hello(), timeout=20.0)),
        }


def refused(found):
    return {kind for kind, end in found.items() if isinstance(end, PermissionDenied)}


def build_authorizer(rules=REQUIRE, clock=None):
    return Authorizer(rules, clock=clock or Clock(), log=LOG)


@pytest.mark.parametrize(
    ("subject", "rules", "wanted"),
    [
        ([("O", "eelgrid:agent")], REQUIRE, {"read", "change", "watch"}),
        ([("O", "eelgrid:viewer")], REQUIRE, {"change", "agent"}),
        ([("O", "eelgrid:submitter")], REQUIRE, {"agent"}),
        ([("O", "eelgrid:admin")], REQUIRE, {"agent"}),
        ([("CN", "somebody")], REQUIRE, {"read", "change", "watch", "agent"}),
        ([("CN", "somebody")], RoleRules(), set()),
        ([("O", "eelgrid:viewer")], RoleRules(), {"change", "agent"}),
        ([("CN", "somebody")], RoleRules(True, parse_user_grants(["viewer=CN:somebody"])), {"change", "agent"}),
    ],
)
async def test_each_kind_of_call_is_open_to_its_role_alone(authority, tmp_path, subject, rules, wanted):
    server = authority.write(tmp_path / "server", names=("127.0.0.1",))
    client = authority.write(tmp_path / "client", *subject)
    operators = FakeOperators()
    async with serving(server, build_authorizer(rules), operators) as address:
        found = await tried(address, client)
    assert refused(found) == wanted, found
    assert not any(isinstance(end, Unavailable) for end in found.values())
    # What is refused never reached the service.
    assert ("get_summary" in operators.calls) is ("read" not in wanted)
    assert ("watch_summary" in operators.calls) is ("watch" not in wanted)


async def test_the_refusal_crosses_the_wire_with_its_remedy(authority, tmp_path):
    server = authority.write(tmp_path / "server", names=("127.0.0.1",))
    client = authority.write(tmp_path / "client", ("O", "eelgrid:viewer"), ("CN", "alice"))
    authorizer = build_authorizer()
    async with serving(server, authorizer) as address:
        found = (await tried(address, client))["change"]
    assert found.message == "CancelWorkload needs the role submitter"
    (violation,) = found.violations
    assert violation.field == "certificate"
    assert violation.problem == "O=eelgrid:viewer,CN=alice has the role viewer"
    assert "eelgrid:submitter" in violation.remedy
    (counted, roleless) = authorizer.families()
    assert counted.values == {("viewer", "submitter"): 1, ("viewer", "agent"): 1}
    assert roleless.values == {}


async def test_an_expired_certificate_and_a_strangers_do_not_come_in(authority, tmp_path):
    server = authority.write(tmp_path / "server", names=("127.0.0.1",))
    over = authority.write(tmp_path / "over", ("O", "eelgrid:admin"), lasts=dt.timedelta(hours=-1))
    stranger = Authority().write(tmp_path / "stranger", ("O", "eelgrid:admin"))
    stranger = replace(stranger, authority=server.authority)
    operators = FakeOperators()
    async with serving(server, build_authorizer(), operators) as address:
        for client in (over, stranger):
            async with calling(rpc.OPERATOR_SERVICE, address, client) as asking:
                assert isinstance(
                    await outcome(asking.get_summary(messages.GetSummaryRequest(), timeout=20.0)), Unavailable
                )
    assert operators.calls == []


async def test_a_connection_that_stays_open_ends_with_its_certificate(authority, tmp_path):
    server = authority.write(tmp_path / "server", names=("127.0.0.1",))
    client = authority.write(tmp_path / "client", ("O", "eelgrid:viewer"))
    late_ns = [0]
    real = Clock()
    authorizer = build_authorizer(clock=replace(real, now_ns=lambda: real.now_ns() + late_ns[0]))
    async with serving(server, authorizer) as address, calling(rpc.OPERATOR_SERVICE, address, client) as asking:
        assert await outcome(asking.get_summary(messages.GetSummaryRequest(), timeout=20.0)) == "GetSummaryResponse"
        late_ns[0] = 2 * 24 * 3600 * 10**9
        found = await outcome(asking.get_summary(messages.GetSummaryRequest(), timeout=20.0))
    assert "has expired; renew it" in str(found)


async def test_another_role_takes_effect_with_the_next_connection(authority, tmp_path):
    server = authority.write(tmp_path / "server", names=("127.0.0.1",))
    client = authority.write(tmp_path / "client", ("O", "eelgrid:viewer"))
    async with serving(server, build_authorizer()) as address:
        assert "change" in refused(await tried(address, client))
        authority.write(tmp_path / "client", ("O", "eelgrid:submitter"))
        assert refused(await tried(address, client)) == {"agent"}
        authority.write(tmp_path / "client", ("O", "eelgrid:agent"))
        assert "read" in refused(await tried(address, client))


async def test_an_agents_certificate_cannot_pose_as_the_controller(authority, tmp_path):
    """Clients ask for the name that they were told, and a certificate of another name is not it."""
    posing = authority.write(tmp_path / "agent", ("O", "eelgrid:agent"), names=("eelgrid-agent",))
    client = authority.write(tmp_path / "client", ("O", "eelgrid:admin"))
    async with serving(posing, build_authorizer()) as address, calling(rpc.OPERATOR_SERVICE, address, client) as asking:
        assert isinstance(await outcome(asking.get_summary(messages.GetSummaryRequest(), timeout=20.0)), Unavailable)


@pytest.mark.parametrize(
    ("subject", "status"), [([("O", "eelgrid:viewer")], 200), ([("O", "eelgrid:agent")], 403), ([("CN", "x")], 403)]
)
async def test_the_page_is_for_whoever_may_look(authority, tmp_path, subject, status):
    server = authority.write(tmp_path / "server", names=("127.0.0.1",))
    client = authority.write(tmp_path / "client", *subject)
    context = ssl.create_default_context(cafile=client.authority)
    context.load_cert_chain(client.certificate, client.key)
    authorizer = build_authorizer()
    door = await PageFleet(1).open(tls=server, admit=authorizer.authorize_viewer)
    try:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as session:
            for path in ("/", "/main.js", "/events", "/data/gpu?node=node-0000&index=0"):
                async with session.get(f"https://127.0.0.1:{door.port}{path}") as response:
                    assert response.status == status, path
                    text = "" if path == "/events" else await response.text()
                    assert ("page needs the role viewer" in text) is (status == 403 and path != "/events")
                    assert "default-src 'none'" in response.headers["Content-Security-Policy"]
    finally:
        await door.stop()
    (counted, _) = authorizer.families()
    assert sum(counted.values.values()) == (0 if status == 200 else 4)


class Connection:
    """A call's context, as far as the authorizer looks: what TLS says of the other side."""

    def __init__(self, pem):
        self._pem = pem

    def auth_context(self):
        return {} if self._pem is None else {"x509_pem_cert": [self._pem]}


@pytest.mark.parametrize("pem", [None, b"", b"no certificate", b"-----BEGIN CERTIFICATE-----\nAA==\n", b"\xff"])
def test_a_certificate_that_cannot_be_read_names_nobody_even_where_roles_are_not_demanded(pem):
    with pytest.raises(PermissionDenied, match="nothing that can be read"):
        build_authorizer(RoleRules()).authorize_call("/eelgrid.v1.OperatorService/GetSummary", Connection(pem))


def test_who_knocks_in_a_loop_is_counted_and_does_not_fill_the_log(authority, tmp_path, caplog):
    pems = [authority.write(tmp_path / "c", ("O", "eelgrid:viewer")).certificate.read_bytes() for _ in range(30)]
    moment_s = [0.0]
    authorizer = build_authorizer(clock=replace(Clock(), monotonic_s=lambda: moment_s[0]))

    def knock():
        for pem in pems:
            with pytest.raises(PermissionDenied):
                authorizer.authorize_call("/eelgrid.v1.OperatorService/UpdatePolicy", Connection(pem))

    with caplog.at_level(logging.WARNING):
        knock()
        assert len(caplog.records) == 1
        assert "call=UpdatePolicy certificate='O=eelgrid:viewer' roles=viewer needs=admin" in caplog.text
        moment_s[0] = 61.0
        knock()
    assert len(caplog.records) == 2
    assert caplog.records[1].getMessage().endswith("more_since_last_line=29")
    (counted, _) = authorizer.families()
    assert counted.values == {("viewer", "admin"): 60}


def test_a_node_of_others_is_counted_apart(authority, tmp_path):
    files = authority.write(tmp_path / "c", ("CN", "eelgrid:node:gpu-1"))
    authorizer = build_authorizer(RoleRules())
    caller = Connection(files.certificate.read_bytes())
    authorizer.authorize_node("gpu-1", caller)
    with pytest.raises(PermissionDenied, match="Connect as gpu-2 needs that node's certificate"):
        authorizer.authorize_node("gpu-2", caller)
    assert next(iter(authorizer.families())).values == {("agent", "node"): 1}


def test_what_is_let_in_without_a_role_is_reported(authority, tmp_path, caplog):
    pem = authority.write(tmp_path / "c", ("CN", "old")).certificate.read_bytes()
    authorizer = build_authorizer(RoleRules())
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            authorizer.authorize_call("/eelgrid.v1.OperatorService/UpdatePolicy", Connection(pem))
            authorizer.authorize_call("/eelgrid.v1.OperatorService/GetSummary", Connection(pem))
    (refusals, roleless) = authorizer.families()
    assert (refusals.values, roleless.values) == ({}, {("admin",): 3, ("viewer",): 3})
    assert len(caplog.records) == 2
    assert "call=UpdatePolicy certificate='CN=old' role=none action=let_in" in caplog.text


async def test_callers_hear_who_they_are_whatever_their_certificate_holds(authority):
    """The answer keeps the contract for a certificate that never ends and one of more nodes than an answer has."""
    nodes = tuple(f"eelgrid:node:n{number:04d}" for number in range(1500))
    ever = dt.datetime(9999, 12, 31, 23, 59, 59, tzinfo=dt.UTC) - dt.datetime.now(dt.UTC)
    der = authority.der(("CN", "Jürgen\n" * 8), names=nodes, lasts=ever)
    caller = build_caller(read_certificate(der), {})
    answer = await CallerService(lambda _: caller, demanded=True).who_am_i(messages.WhoAmIRequest(), None)
    told = codec.decode_message(messages.WhoAmIResponse, codec.encode_message(answer))
    assert (told.roles, told.roles_demanded, told.not_after_ns) == (("agent",), True, 2**63 - 1)
    assert told.node_names[:2] == ("n0000", "n0001")
    assert len(told.node_names) == messages.CALLER_NODES_MOST
    everybody = await CallerService(None, demanded=False).who_am_i(messages.WhoAmIRequest(), None)
    assert (everybody.subject, everybody.not_after_ns, len(everybody.roles)) == ("", 0, 5)


def test_the_memory_of_callers_is_bounded_and_goes_by_the_certificate(authority):
    authorizer = build_authorizer()
    ders = [authority.der(("O", "eelgrid:viewer"))]
    for number in range(1100):
        # Not one that any authority signed; only what is kept of it matters.
        with pytest.raises(PermissionDenied):
            authorizer.authorize_viewer(b"%d" % number)
    authorizer.authorize_viewer(ders[0])
    assert len(authorizer._callers) <= 1024
