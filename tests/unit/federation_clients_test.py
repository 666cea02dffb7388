"""One cluster as a front calls it: what answers wrongly or slowly is a fault of that cluster, and questions are shared."""

import asyncio
import contextlib

import grpc
import grpc.aio
import pytest
from tests.builders.cluster import build_request

from eelgrid_controller.clock import Clock
from eelgrid_controller.federation.cluster_clients import MemberCluster, ask_all
from eelgrid_controller.federation.dispatch import Dispatch, Verb
from eelgrid_protos import codec
from eelgrid_protos.faults import DeadlineExceeded, Fault, Unavailable
from eelgrid_protos.messages import (
    GetPolicyResponse,
    GetSummaryResponse,
    Policy,
    SubmitWorkloadResponse,
    Summary,
    Workload,
    WorkloadPhase,
)

SPEC = build_request().spec


def answer_of(key):
    workload = Workload(workload_id=key, spec=SPEC, phase=WorkloadPhase.PENDING, submitted_ns=1)
    return codec.encode_message(SubmitWorkloadResponse(workload=workload))


class Wire(grpc.GenericRpcHandler):
    """A controller that answers each call with given bytes, and counts the calls."""

    def __init__(self, **answers):
        self.answers, self.calls = answers, []
        self.gate = asyncio.Event()
        self.gate.set()

    def service(self, details):
        name = details.method.rpartition("/")[2]

        async def answer(_request, _context):
            self.calls.append(name)
            await self.gate.wait()
            return self.answers[name]

        return grpc.unary_unary_rpc_method_handler(answer)


@contextlib.asynccontextmanager
async def member(wire, *, timeout_s=10.0):
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((wire,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    addresses = (f"127.0.0.1:{port}",)
    found = MemberCluster("north", addresses, tls=None, insecure=False, timeout_s=timeout_s, now_ns=Clock().now_ns)
    try:
        yield found
    finally:
        wire.gate.set()
        await found.close()
        await server.stop(0)


@pytest.mark.parametrize("data", [b"\xff\xff\xff", answer_of("w-other")], ids=["garbage", "about another workload"])
async def test_a_wrong_answer_counts_as_none(data):
    async with member(Wire(SubmitWorkload=data), timeout_s=1.0) as cluster:
        with pytest.raises(Unavailable, match="north"):
            await cluster.call(Verb.SUBMIT, Dispatch(workload_id="w-x", request=build_request()))


async def test_a_right_answer_is_taken():
    async with member(Wire(SubmitWorkload=answer_of("w-x"))) as cluster:
        found = await cluster.call(Verb.SUBMIT, Dispatch(workload_id="w-x", request=build_request()))
        assert found.workload_id == "w-x"


async def test_a_cluster_that_takes_no_work_is_up_while_it_answers():
    async with member(build_wire(SubmitWorkload=b"\xff"), timeout_s=1.0) as cluster:
        assert cluster.is_up is None
        await cluster.read_report()
        with pytest.raises(Unavailable):
            await cluster.call(Verb.SUBMIT, Dispatch(workload_id="w-x", request=build_request()))
        assert cluster.is_up is True


def build_wire(**answers):
    right = {
        "SubmitWorkload": answer_of("w-preview"),
        "GetSummary": codec.encode_message(GetSummaryResponse(summary=Summary(time_ns=1, pending=7))),
        "GetPolicy": codec.encode_message(GetPolicyResponse(policy=Policy())),
    }
    return Wire(**right | answers)


async def test_equal_work_that_is_submitted_at_once_is_asked_for_once_and_other_work_by_itself():
    wire = build_wire()
    wire.gate.clear()
    async with member(wire) as cluster:
        asked = [asyncio.create_task(cluster.ask_offer(build_request(f"w-{number}"))) for number in range(20)]
        other = asyncio.create_task(cluster.ask_offer(build_request(gpus=2)))
        gone = asked.pop()
        await asyncio.sleep(0)
        gone.cancel()
        wire.gate.set()
        offers = await asyncio.gather(*asked, other)
        assert {offer.pending for offer in offers} == {7}
        assert (wire.calls.count("SubmitWorkload"), wire.calls.count("GetSummary")) == (2, 1)
        await cluster.ask_offer(build_request())
        assert wire.calls.count("SubmitWorkload") == 3


async def test_a_question_that_failed_is_asked_anew():
    wire = build_wire()
    right, wire.answers["GetPolicy"] = wire.answers["GetPolicy"], b"\xff\xff"
    async with member(wire, timeout_s=1.0) as cluster:
        with pytest.raises(Unavailable):
            await cluster.read_recent_report()
        wire.answers["GetPolicy"] = right
        assert (await cluster.read_recent_report()).summary.pending == 7


async def test_a_cluster_that_never_answers_does_not_keep_the_answers_of_others():
    silent, wire = build_wire(), build_wire()
    silent.gate.clear()
    async with member(silent, timeout_s=0.5) as slow, member(wire) as fast:
        found = await ask_all({"slow": slow, "fast": fast}, MemberCluster.read_recent_report)
        assert isinstance(found["slow"], Unavailable | DeadlineExceeded)
        assert not isinstance(found["fast"], Fault)
        assert slow.is_up is False
