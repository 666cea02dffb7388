"""Several addresses, one rule: agents, eelctl and the Python client go on to the controller that leads, and say why others did not do."""

import asyncio
import contextlib
import logging
from collections import Counter
from dataclasses import replace

import grpc.aio
import pytest
from click.testing import CliRunner
from tests.builders.cluster import build_request
from tests.e2e.processes import free_port
from tests.fake_controller import EACH_SECOND, FAST, Agent, acknowledge_all, running, serving
from tests.waiting import wait_until

from eelgrid.async_client import AsyncClient
from eelgrid.client import Client
from eelgrid.errors import InvalidSettingsError, UnavailableError
from eelgrid_controller.cli.__main__ import cli
from eelgrid_protos import faults
from eelgrid_protos.controller_addresses import ControllerAddresses, is_reachable_name, order_addresses
from eelgrid_protos.messages import (
    GetSummaryResponse,
    Hello,
    SampleBatch,
    SubmitWorkloadResponse,
    Summary,
    WatchSummaryResponse,
    Welcome,
    WhoAmIResponse,
    Workload,
    WorkloadPhase,
)
from eelgrid_protos.operator_calls import parse_addresses
from eelgrid_protos.rpc import OPERATOR_SERVICE, build_handler
from eelgrid_protos.transport import listen_on_address, server_options

# The rule


def search(*addresses, **options):
    return ControllerAddresses(addresses, **options).begin_search()


def always(value):
    return lambda: value


def test_each_address_is_tried_once_before_a_pause_that_grows():
    found = search("a:1", "b:1", "c:1")
    tried, pauses = [], []
    for _ in range(9):
        tried.append(found.address)
        pauses.append(found.move_on("refused", jitter=always(0.0)))
    assert tried == ["a:1", "b:1", "c:1"] * 3
    assert pauses == [0.0, 0.0, 0.2, 0.0, 0.0, 0.4, 0.0, 0.0, 0.8]
    assert search("a:1", "b:1").move_on("x", jitter=always(1.0)) == 0.0


def test_the_leader_that_a_follower_names_is_next_even_if_nobody_gave_it():
    found = search("a:1", "b:1", "c:1")
    assert found.move_on("follows", "c:1") == 0.0
    assert found.address == "c:1"
    # It has crashed since: the rest is tried, and the same name is not believed again in this round.
    assert found.move_on("refused") == 0.0
    assert found.address == "b:1"
    assert found.move_on("follows", "c:1") > 0.0
    lone = search("a:1")
    assert lone.move_on("follows", "d:1") == 0.0
    assert lone.address == "d:1"
    assert (lone.move_on("refused"), lone.address) == (None, "a:1")
    assert search("a:1", may_follow=lambda _: False).move_on("follows", "d:1") is None
    assert search("a:1").move_on("follows") is None


def test_the_one_that_led_last_is_asked_first():
    known = ControllerAddresses(("a:1", "b:1"))
    found = known.begin_search()
    found.move_on("refused")
    found.succeed()
    assert known.begin_search().address == "b:1"


def test_nodes_spread_evenly_over_addresses_and_those_of_a_lost_one_over_the_others():
    names, addresses = [f"node-{index}" for index in range(3000)], ("a:1", "b:1", "c:1")
    orders = Counter(order_addresses(addresses, name) for name in names)
    assert len(orders) == 6
    # A sixth of 3,000 each, within five standard deviations.
    assert all(abs(count - 500) < 105 for count in orders.values())
    # Neither the order of the list nor one more address moves a node that it does not concern.
    for name in names[:300]:
        before = order_addresses(addresses, name)
        assert order_addresses(addresses[::-1], name) == before
        assert [one for one in order_addresses((*addresses, "d:1"), name) if one != "d:1"] == list(before)


def test_an_equal_address_that_is_not_the_first_is_left_for_it_and_a_leader_is_not():
    known = ControllerAddresses(("a:1", "b:1")).order_for("n1")
    first, second = known.all
    assert known.seek_first() is None
    search = known.begin_search()
    search.move_on("connection refused")
    search.succeed()
    assert known.begin_search().address == second
    assert known.seek_first().address == first
    known.has_follower = True
    assert known.seek_first() is None


@pytest.mark.parametrize("name", ["0.0.0.0:7443", "[::]:7443", ":7443", "unix:/run/x", "host:0", ""])
def test_an_address_that_stands_for_all_is_no_name(name):
    assert not is_reachable_name(name)
    assert is_reachable_name("host-1:7443")


@pytest.mark.parametrize("text", ["", "a:1,,b:1", ",", ",".join(f"h{n}:1" for n in range(17))])
def test_addresses_that_are_none_are_refused(text):
    with pytest.raises(ValueError, match="address"):
        parse_addresses(text)
    with pytest.raises(InvalidSettingsError, match="address") if text else contextlib.nullcontext():
        Client(text)


def test_a_call_that_may_have_been_carried_out_is_not_made_elsewhere():
    found = search("a:1", "b:1")
    assert found.after_call(faults.Unavailable("Socket closed")) is None
    assert found.after_call(faults.DeadlineExceeded("late")) is None
    assert found.after_call(faults.NotFound("no such")) is None
    assert found.after_call(faults.Unavailable("failed to connect to all addresses; last error: x: refused")) == 0.0
    error = found.describe_failure(faults.Unavailable("gone"))
    assert isinstance(error, faults.NoLeader)
    assert "a:1: refused" in str(error)


def test_who_leads_survives_the_wire():
    fault = faults.NotLeader("follows", leader="h:1")
    assert faults._leader_of(faults.status_details(fault)) == "h:1"
    assert faults._leader_of(faults.status_details(faults.Unavailable("x"))) is None
    assert faults._leader_of(b"\xff") is None


# Over real connections


class Operators:
    """A controller that leads, or names who does."""

    def __init__(self, leader=None):
        self.leader = leader
        self.calls = []

    def __getattr__(self, name):
        if name not in {method.attribute for method in OPERATOR_SERVICE.methods}:
            raise AttributeError(name)
        streams = name in {m.attribute for m in OPERATOR_SERVICE.methods if m.response_streaming}

        async def unary(request, context):
            self._note(name)
            return {
                "submit_workload": lambda: SubmitWorkloadResponse(
                    workload=Workload(spec=request.spec, workload_id="w", phase=WorkloadPhase.PENDING)
                ),
                "get_summary": lambda: GetSummaryResponse(summary=Summary(time_ns=1)),
                "who_am_i": WhoAmIResponse,
            }[name]()

        async def stream(request, context):
            self._note(name)
            yield WatchSummaryResponse(summary=Summary(time_ns=1))

        return stream if streams else unary

    def _note(self, name):
        self.calls.append(name)
        if self.leader is not None:
            raise faults.NotLeader("this one follows", leader=self.leader)


@contextlib.asynccontextmanager
async def serve_operators(operators):
    server = grpc.aio.server(options=server_options())
    server.add_generic_rpc_handlers((build_handler(OPERATOR_SERVICE, operators),))
    log = logging.getLogger("test")
    port = await listen_on_address(server, "127.0.0.1:0", tls=None, insecure=False, log=log)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


SPEC = build_request().spec


async def test_the_python_client_goes_on_to_the_leader_for_changes_and_reads_and_watches():
    leading, following = Operators(), Operators(leader="")
    async with serve_operators(leading) as there, serve_operators(following) as here:
        nobody = f"127.0.0.1:{free_port()}"
        for addresses in (f"{nobody},{here},{there}", [here, nobody, there]):
            async with AsyncClient(addresses) as client:
                await client.submit_workload(SPEC)
                assert client.address == there
                await client.get_summary()
                async for summary in client.watch_summary():
                    assert summary.time_ns == 1
                    break

                def block(addresses=addresses):
                    with Client(addresses) as blocking:
                        blocking.submit_workload(SPEC)
                        return blocking.address

                assert await asyncio.to_thread(block) == there
        # Four clients asked the follower once each.
        assert following.calls == ["submit_workload"] * 4
        assert leading.calls.count("submit_workload") == 4


async def test_a_client_of_one_address_follows_whom_it_names():
    leading = Operators()
    async with serve_operators(leading) as there, serve_operators(Operators(leader=there)) as here:
        async with AsyncClient(here) as client:
            await client.submit_workload(SPEC)
            assert client.address == there
        done = await asyncio.to_thread(CliRunner().invoke, cli, ["--controller", here, "whoami"])
        assert done.exit_code == 0, done.output


async def test_an_error_names_all_that_were_tried_and_why_each_failed():
    async with serve_operators(Operators(leader="")) as here:
        nobody = f"127.0.0.1:{free_port()}"
        async with AsyncClient(f"{here},{nobody}", timeout_s=1.0) as client:
            with pytest.raises(UnavailableError) as caught:
                await client.submit_workload(SPEC)
        arguments = ["--controller", f"{here},{nobody}", "--timeout", "1", "whoami"]
        done = await asyncio.to_thread(CliRunner().invoke, cli, arguments)
        assert done.exit_code == 3
        for text in (str(caught.value), done.output):
            assert f"{here}: this one follows" in text
            assert f"{nobody}: " in text
            assert "refused" in text


async def test_an_agent_goes_on_to_the_leader_and_back():
    async def follow(number, messages, reply):
        raise faults.NotLeader("this one follows")

    async with serving(follow) as follower, serving(acknowledge_all) as leader:
        agent = Agent(free_port(), follower.port, leader.port, limits=FAST)
        async with running(agent):
            await wait_until(lambda: agent.node.connected)
            assert follower.streams == 1
            # It steps down, and the other takes over.
            follower.script, leader.script = acknowledge_all, follow
            agent.uplink.drop_connection("as if it had ended")
            await wait_until(lambda: agent.node.connected and follower.streams > 1)
            assert any("no controller leads of those that were tried" in report for report in agent.reports)


async def test_an_agent_returns_to_its_first_ingest_process_when_that_is_back_and_sends_on():
    limits = replace(FAST, return_s=0.2)
    port = free_port()
    async with serving(acknowledge_all) as second:
        agent = Agent(port, second.port, limits=limits)
        async with running(agent):
            await wait_until(lambda: agent.node.connected)
            agent.tick(3)
            await wait_until(lambda: second.of(SampleBatch))
            # Looked for in vain, and nothing is lost by it.
            await asyncio.sleep(3 * limits.return_s)
            assert second.streams == 1
            async with serving(acknowledge_all, port) as first:
                await wait_until(lambda: first.streams == 1 and not second.open)
                agent.tick(3)
                await wait_until(lambda: first.of(SampleBatch))
                assert agent.node.connected
                assert any("first ingest process is back" in report for report in agent.reports)
            await wait_until(lambda: second.streams == 2 and agent.node.connected)


async def test_an_agent_stays_with_the_leader_when_the_first_address_is_a_follower():
    asked = []

    async def follow(number, messages, reply):
        asked.append(number)
        raise faults.NotLeader("this one follows")

    port = free_port()
    async with serving(acknowledge_all) as leader:
        agent = Agent(port, leader.port, limits=replace(FAST, return_s=0.1))
        async with running(agent):
            await wait_until(lambda: agent.node.connected)
            async with serving(follow, port):
                await wait_until(lambda: asked)
                await wait_until(lambda: agent.uplink._controllers.has_follower)
                await asyncio.sleep(0.5)
            # Known once, it is not asked again.
            assert asked == [1]
            assert leader.streams == 1


async def test_agents_of_a_fleet_come_back_over_the_time_that_the_leader_asked_for():
    jitters = iter([0.001, 0.9, 0.9])

    async def welcome_once(number, messages, reply):
        async for message in messages:
            if isinstance(message, Hello):
                reply(Welcome(acknowledged_sequence=0, cadence=EACH_SECOND, reconnect_spread_s=50.0))
                if number == 1:
                    raise faults.NotLeader("the controller is stopping; connect again")

    async with serving(welcome_once) as first, serving(acknowledge_all) as second:
        agent = Agent(first.port, second.port, limits=FAST, jitter=lambda: next(jitters))
        async with running(agent):
            # 50 s at 0.001.
            await wait_until(lambda: second.streams == 1)
            assert agent.uplink._spread_s == 50.0
