"""Transport: who may listen and connect where, certificates taken up anew, health and reflection for real."""

import logging
import socket
import threading
from contextlib import asynccontextmanager

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tests.waiting import poll_until

from eelgrid_protos import messages, rpc, transport
from eelgrid_protos.faults import Internal, InvalidArgument, NotFound, Unavailable

LOG = logging.getLogger("eelgrid.test")


class Node:
    """Answers one call, fails the others in three ways."""

    async def get_inventory(self, request, context):
        inventory = messages.Inventory(node_name=request.node_name or "only", cpu_milli=1, memory_bytes=1)
        return messages.GetInventoryResponse(inventory=inventory)

    async def get_samples(self, request, context):
        raise NotFound(f"no node {request.node_name!r}; see get_inventory")

    async def get_node_plan(self, request, context):
        if request.node_name == "broken":
            return messages.GetNodePlanResponse(lease_left_s=float("nan"))
        raise RuntimeError("secret detail")

    async def get_node_energy(self, request, context):
        return messages.GetNodeEnergyResponse(status=messages.EnergyStatus.NOT_KEPT)


@asynccontextmanager
async def serving(tls=None):
    server = grpc.aio.server(options=transport.server_options())
    server.add_generic_rpc_handlers((rpc.build_handler(rpc.NODE_SERVICE, Node()),))
    health = await transport.standard_services(server, (rpc.NODE_SERVICE,))
    port = await transport.listen_on_address(server, "127.0.0.1:0", tls=tls, insecure=False, log=LOG)
    await server.start()
    try:
        yield port, health
    finally:
        await server.stop(None)


def write_tls(folder, authority, name):
    leaf = authority.issue_cert("localhost", "127.0.0.1", common_name=name)
    leaf.private_key_pem.write_to_path(str(folder / "key.pem"))
    leaf.cert_chain_pems[0].write_to_path(str(folder / "certificate.pem"))
    authority.cert_pem.write_to_path(str(folder / "authority.pem"))
    return transport.TlsFiles(folder / "certificate.pem", folder / "key.pem", folder / "authority.pem")


async def ask(port, tls=None):
    async with transport.open_channel(f"localhost:{port}", tls=tls) as channel:
        answer = await rpc.build_client(rpc.NODE_SERVICE, channel).get_inventory(
            messages.GetInventoryRequest(), timeout=5
        )
        return answer.inventory.node_name


async def test_calls_and_faults():
    async with serving() as (port, _), transport.open_channel(f"127.0.0.1:{port}", tls=None) as channel:
        node = rpc.build_client(rpc.NODE_SERVICE, channel)
        answer = await node.get_inventory(messages.GetInventoryRequest(node_name="n-1"))
        assert answer.inventory.node_name == "n-1"
        with pytest.raises(NotFound, match="see get_inventory"):
            await node.get_samples(messages.GetSamplesRequest(node_name="x"))
        raw = channel.unary_unary("/eelgrid.v1.NodeService/GetInventory")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await raw(b"\xff\xff")
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_fault_of_ours_hides_its_detail(caplog):
    async with serving() as (port, _), transport.open_channel(f"127.0.0.1:{port}", tls=None) as channel:
        node = rpc.build_client(rpc.NODE_SERVICE, channel)
        for name in ("", "broken"):
            with pytest.raises(Internal) as caught:
                await node.get_node_plan(messages.GetNodePlanRequest(node_name=name))
            assert "secret" not in str(caught.value)
    assert "secret detail" in caplog.text


async def test_violations_cross_the_wire():
    class Operators:
        def __getattr__(self, name):
            async def call(request, context):
                return None

            return call

    server = grpc.aio.server()
    server.add_generic_rpc_handlers((rpc.build_handler(rpc.OPERATOR_SERVICE, Operators()),))
    port = await transport.listen_on_address(server, "127.0.0.1:0", tls=None, insecure=False, log=LOG)
    await server.start()
    async with transport.open_channel(f"127.0.0.1:{port}", tls=None) as channel:
        raw = channel.unary_unary("/eelgrid.v1.OperatorService/SubmitWorkload")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await raw(b"")
    await server.stop(None)
    from eelgrid_protos.faults import fault_from

    fault = fault_from(caught.value)
    assert isinstance(fault, InvalidArgument)
    assert [(v.field, v.problem, v.remedy) for v in fault.violations] == [("spec", "is missing", "set it")]


def test_a_blocking_channel_asks_the_same():
    import asyncio
    import threading

    ready, done = threading.Event(), threading.Event()
    port = []

    async def serve():
        async with serving() as (number, _):
            port.append(number)
            ready.set()
            await asyncio.to_thread(done.wait, 30)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert ready.wait(10)
        with transport.open_blocking_channel(f"127.0.0.1:{port[0]}", tls=None) as channel:
            node = rpc.build_client(rpc.NODE_SERVICE, channel)
            assert node.get_inventory(messages.GetInventoryRequest()).inventory.node_name == "only"
            with pytest.raises(NotFound):
                node.get_samples(messages.GetSamplesRequest())
    finally:
        done.set()
        thread.join()


async def test_health_and_reflection_answer_any_client():
    async with serving() as (port, health), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for serving_now, status in ((False, 2), (True, 1)):
            await health.set_serving(serving_now)
            for name in ("", "eelgrid.v1.NodeService"):
                assert (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status == status
        reflect = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
        requests = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol="eelgrid.v1.NodeService"),
        ]
        answers = [answer async for answer in reflect(iter(requests))]
    names = {service.name for service in answers[0].list_services_response.service}
    assert {"eelgrid.v1.NodeService", "grpc.health.v1.Health"} <= names
    assert answers[1].file_descriptor_response.file_descriptor_proto


async def test_only_loopback_is_open_without_tls(caplog):
    server = grpc.aio.server()
    for address in ("0.0.0.0:0", "[::]:0"):
        with pytest.raises(transport.BindRefused, match="--tls-certificate"):
            await transport.listen_on_address(server, address, tls=None, insecure=False, log=LOG)
    with caplog.at_level("WARNING"):
        assert await transport.listen_on_address(server, "0.0.0.0:0", tls=None, insecure=True, log=LOG) > 0
    assert "tls=off" in caplog.text
    with pytest.raises(transport.BindRefused, match="another machine"):
        transport.open_channel("192.0.2.1:7443", tls=None)
    await server.stop(None)


@pytest.mark.parametrize("address", ["7443", "127.0.0.1:", "127.0.0.1:http", "127.0.0.1:70000"])
async def test_an_address_is_host_and_port(address):
    with pytest.raises(transport.BindRefused, match="HOST:PORT"):
        await transport.listen_on_address(grpc.aio.server(), address, tls=None, insecure=False, log=LOG)


async def test_a_port_in_use_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(transport.AddressInUse, match="choose another"):
            await transport.listen_on_address(grpc.aio.server(), address, tls=None, insecure=False, log=LOG)


async def test_mutual_tls_lets_in_only_the_authority(tmp_path):
    authority, stranger = trustme.CA(), trustme.CA()
    for name in ("server", "client", "stranger"):
        (tmp_path / name).mkdir()
    ours = write_tls(tmp_path / "server", authority, "server")
    friend = write_tls(tmp_path / "client", authority, "client")
    foreign = write_tls(tmp_path / "stranger", stranger, "stranger")
    half = transport.TlsFiles(foreign.certificate, foreign.key, friend.authority)
    async with serving(ours) as (port, _):
        assert await ask(port, friend) == "only"
        for refused in (foreign, half):
            with pytest.raises(Unavailable):
                await ask(port, refused)
        with pytest.raises(Unavailable):
            await ask(port)


async def test_certificates_are_taken_up_again(tmp_path):
    """A rotated authority: old clients are refused at the next handshake, and a broken file keeps the last good one."""
    old, new = trustme.CA(), trustme.CA()
    for name in ("server", "old", "new"):
        (tmp_path / name).mkdir()
    ours = write_tls(tmp_path / "server", old, "server")
    old_client = write_tls(tmp_path / "old", old, "old")
    new_client = write_tls(tmp_path / "new", new, "new")
    async with serving(ours) as (port, _):
        assert await ask(port, old_client) == "only"
        ours.key.unlink()
        assert await ask(port, old_client) == "only"
        write_tls(tmp_path / "server", new, "server")
        assert await ask(port, new_client) == "only"
        with pytest.raises(Unavailable):
            await ask(port, old_client)


async def test_a_certificate_that_cannot_be_read_is_named(tmp_path):
    missing = transport.TlsFiles(tmp_path / "a.pem", tmp_path / "b.pem", tmp_path / "c.pem")
    with pytest.raises(transport.CertificateUnusable, match=r"b\.pem"):
        await transport.listen_on_address(grpc.aio.server(), "127.0.0.1:0", tls=missing, insecure=False, log=LOG)


def test_closing_channels_does_not_wait_for_a_call_that_never_ends(monkeypatch):
    """As one that Ctrl-C cut short while it was being made: eelctl hung then, until Ctrl-C was pressed once more."""
    monkeypatch.setattr(transport, "_CLOSE_S", 0.01)
    ended, closed = threading.Event(), []

    class Channel:
        def __init__(self, waits):
            self._waits = waits

        def close(self):
            if self._waits:
                ended.wait()
            closed.append(self)

    quick, hung = Channel(waits=False), Channel(waits=True)
    transport.close_channels((quick, hung))
    ended.set()
    poll_until(lambda: closed == [quick, hung])
