"""The submitter: in order, bounded, each once, whatever the controller does meanwhile."""

import asyncio
from contextlib import asynccontextmanager

import grpc.aio
import pytest
from tests.fakes.operators import FakeOperators

from eelgrid_controller.replay.openb import TraceTask, submission_of_task
from eelgrid_controller.replay.submitter import ControllerSilent, SubmitLimits, Submitter
from eelgrid_protos import faults, rpc, transport
from eelgrid_protos.messages import ResourceRequest, SubmitWorkloadRequest, WorkloadSpec

REQUESTS = [
    submission_of_task(TraceTask(name=f"t{i:03d}", cpu_milli=1000, memory_bytes=0, gpu_count=1, gpu_milli=500))
    for i in range(60)
]
IDS = [request.workload_id for request in REQUESTS]


class Clock:
    """Time that passes only while the submitter sleeps."""

    def __init__(self):
        self.now_s = 0.0
        self.pauses = []

    def __call__(self):
        return self.now_s

    async def sleep(self, pause_s):
        self.pauses.append(pause_s)
        self.now_s += pause_s
        await asyncio.sleep(0)


@asynccontextmanager
async def served(fake, port=0):
    server = grpc.aio.server(options=transport.server_options())
    server.add_generic_rpc_handlers((rpc.build_handler(rpc.OPERATOR_SERVICE, *fake.parts),))
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield bound
    finally:
        await server.stop(grace=0.0)


class Recording:
    """A client that notes what is sent, in its order; a server may begin calls that are under way together in another."""

    def __init__(self, operators, sent):
        self.operators, self.sent = operators, sent

    def submit_workload(self, request, **options):
        self.sent.append(request.workload_id)
        return self.operators.submit_workload(request, **options)


@asynccontextmanager
async def submitting(fake, *, sent=None, **rules):
    clock = Clock()
    async with served(fake) as port, transport.open_channel(f"127.0.0.1:{port}", tls=None) as channel:
        operators = rpc.build_client(rpc.OPERATOR_SERVICE, channel)
        if sent is not None:
            operators = Recording(operators, sent)
        yield Submitter(
            operators=operators, clock=clock, sleep=clock.sleep, jitter=lambda: 0.5, rules=SubmitLimits(**rules)
        )


def ignore(report, workload):
    pass


async def test_in_order_and_bounded():
    fake, seen, sent = FakeOperators(delay_s=0.001), [], []
    async with submitting(fake, sent=sent, in_flight=5) as submitter:
        report = await submitter.run(
            REQUESTS, lambda report, workload: seen.append((report.done, workload.workload_id))
        )
    assert sent == IDS
    assert sorted(fake.submitted) == IDS
    assert 1 < fake.most_under_way <= 5
    assert (report.done, report.placed, report.pending, report.refused, report.repeats) == (60, 60, 0, 0, 0)
    assert [done for done, _ in seen] == list(range(1, 61))
    assert sorted(workload_id for _, workload_id in seen) == IDS
    assert report.latency.count == 60


async def test_one_at_a_time_is_strictly_in_order():
    fake = FakeOperators()
    async with submitting(fake, in_flight=1) as submitter:
        await submitter.run(REQUESTS[:10], ignore)
    assert fake.most_under_way == 1
    assert fake.submitted == IDS[:10]


@pytest.mark.parametrize(
    "fault", [faults.Unavailable("down"), faults.ResourceExhausted("queue full"), faults.DeadlineExceeded("slow")]
)
async def test_a_failed_call_is_repeated_with_the_same_id_and_keeps_the_order(fault):
    fake = FakeOperators(failures=[None, None, None, fault, fault, None, fault])
    async with submitting(fake, in_flight=1) as submitter:
        report = await submitter.run(REQUESTS[:10], ignore)
    assert fake.submitted == IDS[:10]
    assert report.done == 10
    assert report.repeats == 3


async def test_a_lost_answer_places_nothing_twice():
    fake = FakeOperators(lose_answers=[False, True, False, True, True])
    async with submitting(fake, in_flight=1) as submitter:
        report = await submitter.run(REQUESTS[:10], ignore)
    assert fake.submitted == IDS[:10]
    assert (report.done, report.placed) == (10, 10)
    assert fake.calls.count("submit_workload") == 13


async def test_across_a_restart_of_the_controller():
    """The server goes away for good in the middle; another on the same port goes on with the same memory."""
    fake, clock = FakeOperators(delay_s=0.002), Clock()
    halfway = asyncio.Event()

    def progress(report, workload):
        if report.done == 20:
            halfway.set()

    async def sleep(pause_s):
        clock.now_s += pause_s
        await asyncio.sleep(0.02)

    async with served(fake) as port:
        channel = transport.open_channel(f"127.0.0.1:{port}", tls=None)
        submitter = Submitter(
            operators=rpc.build_client(rpc.OPERATOR_SERVICE, channel), clock=clock, sleep=sleep, jitter=lambda: 0.0
        )
        work = asyncio.create_task(submitter.run(REQUESTS, progress))
        await halfway.wait()
    await asyncio.sleep(0.1)
    assert not work.done()
    async with served(fake, port):
        report = await asyncio.wait_for(work, 20)
        await channel.close()
    assert report.repeats > 0
    assert report.done == 60
    assert sorted(fake.submitted) == IDS
    assert fake.submitted[:10] == IDS[:10]


async def test_silence_ends_with_the_first_unanswered():
    fake = FakeOperators(failures=[None] * 3 + [faults.Unavailable("down")] * 10_000)
    async with submitting(fake, in_flight=1, silence_longest_s=20.0) as submitter:
        with pytest.raises(ControllerSilent, match="t003"):
            await submitter.run(REQUESTS[:10], ignore)
        clock = submitter.clock
    assert 20.0 < sum(clock.pauses) < 25.0
    assert max(clock.pauses) <= 1.0
    assert clock.pauses == sorted(clock.pauses)


async def test_a_refused_request_is_recorded_and_passed_over():
    huge = SubmitWorkloadRequest(
        workload_id="huge", spec=WorkloadSpec(name="huge", request=ResourceRequest(cpu_milli=5_000_000))
    )
    never_valid = SubmitWorkloadRequest(
        workload_id="x", spec=WorkloadSpec(name="bad name!", request=ResourceRequest(cpu_milli=1))
    )
    fake = FakeOperators()
    async with submitting(fake) as submitter:
        report = await submitter.run([REQUESTS[0], huge, never_valid, REQUESTS[1]], ignore)
    assert (report.done, report.placed, report.refused) == (4, 2, 2)
    assert {refusal.workload_id for refusal in report.refusals} == {"huge", "x"}
    assert "spec.request.cpu_milli" in str(report.refusals)


async def test_what_is_known_counts_and_what_differs_is_refused():
    fake = FakeOperators(failures=[faults.AlreadyExists("t000 is taken"), None, faults.AlreadyExists("t001 is taken")])
    fake._submit(REQUESTS[0])
    fake._submit(SubmitWorkloadRequest(workload_id="t001", spec=REQUESTS[2].spec))
    async with submitting(fake, in_flight=1) as submitter:
        report = await submitter.run(REQUESTS[:2], ignore)
    assert (report.placed, report.refused, report.done) == (1, 1, 2)


async def test_a_fault_that_no_repetition_mends_ends_the_run():
    fake = FakeOperators(failures=[None, faults.PermissionDenied("not you")])
    async with submitting(fake) as submitter:
        with pytest.raises(faults.PermissionDenied):
            await submitter.run(REQUESTS[:10], ignore)


async def test_waiting_work_is_counted():
    fake = FakeOperators(fits=lambda request: request.workload_id < "t005")
    async with submitting(fake) as submitter:
        report = await submitter.run(REQUESTS[:10], ignore)
    assert (report.placed, report.pending) == (5, 5)


async def test_a_request_without_an_id_is_a_mistake():
    async with submitting(FakeOperators()) as submitter:
        with pytest.raises(ValueError, match="workload_id"):
            await submitter.run([SubmitWorkloadRequest(spec=REQUESTS[0].spec)], ignore)
    with pytest.raises(ValueError, match="in_flight"):
        SubmitLimits(in_flight=0)
