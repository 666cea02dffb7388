"""The Python client against operators' calls that a fake answers: signatures, pages, repeated calls, errors."""

import asyncio
import dataclasses
import enum
import inspect
import pickle
import re
import threading
import types
import typing
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest
from tests.client_rig import KINDS, QUICK, collect
from tests.fakes.operators import FakeOperators, a_node, serving

import eelgrid
from eelgrid import AsyncClient, Client, ResourceRequest, Retries, TlsFiles, WorkloadPhase, WorkloadSpec, errors
from eelgrid.connection import CallAttempts, ConnectionSettings, WatchAttempts, WatchPosition
from eelgrid_protos import faults, messages, rpc
from eelgrid_protos.messages import Workload
from eelgrid_protos.operator_calls import PageCursor

SPEC = WorkloadSpec(name="train", request=ResourceRequest(cpu_milli=1000))
METHODS = rpc.OPERATOR_SERVICE.methods


@pytest.fixture(params=KINDS)
def kind(request, monkeypatch):
    for name in ("EELGRID_CONTROLLER", "EELGRID_TLS_CERTIFICATE", "EELGRID_TLS_KEY", "EELGRID_TLS_AUTHORITY"):
        monkeypatch.delenv(name, raising=False)
    return KINDS[request.param]


@pytest.fixture
def connect(kind):
    return lambda address, **settings: kind(address, **({"retries": QUICK} | settings))


def as_blocking(annotation):
    """What the blocking client returns where the other returns this."""
    return re.sub(r"\bAsync(Iterator|Generator)\b", r"\1", annotation)


def signature(method):
    """Parameters by name with kind, default and annotation; and what is returned, as the blocking client says it."""
    found = inspect.signature(method)
    parameters = {
        name: (one.kind, one.default, as_blocking(str(one.annotation))) for name, one in found.parameters.items()
    }
    return parameters, as_blocking(str(found.return_annotation))


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_every_call_of_the_service_has_a_typed_method_in_both_clients(method):
    blocking, waiting = getattr(Client, method.attribute), getattr(AsyncClient, method.attribute)
    assert signature(blocking) == signature(waiting)
    assert inspect.getdoc(blocking)
    # What can be asked for in the contract can be asked for here.
    request = messages.AttachOpening if method.request_streaming else method.request
    # A view is a method of its own, since it yields other messages.
    asked = {field.name for field in dataclasses.fields(request)} - {"page_size", "page_token", "view"}
    assert asked <= set(inspect.signature(blocking).parameters)
    hints = typing.get_type_hints(blocking)
    assert "return" in hints
    assert typing.Any not in hints.values()


def test_summaries_take_the_filters_of_workloads():
    whole, brief = (
        inspect.signature(one).parameters for one in (Client.list_workloads, Client.list_workload_summaries)
    )
    assert list(brief) == list(whole)


def test_both_clients_have_the_same_methods():
    names = [{name for name in vars(cls) if not name.startswith("_")} for cls in (Client, AsyncClient)]
    assert names[0] == names[1]
    assert {name for name in names[0] if signature_differs(name)} == set()


def signature_differs(name):
    one, other = getattr(Client, name), getattr(AsyncClient, name)
    return callable(one) and signature(one) != signature(other)


def parts_of(annotation, found):
    """Messages and enumerations that a type is made of."""
    if isinstance(annotation, typing.ForwardRef):
        annotation = getattr(messages, annotation.__forward_arg__)
    if typing.get_origin(annotation) is not None or isinstance(annotation, types.UnionType):
        for part in typing.get_args(annotation):
            parts_of(part, found)
    elif isinstance(annotation, type) and annotation not in found:
        if dataclasses.is_dataclass(annotation):
            found.add(annotation)
            for hint in typing.get_type_hints(annotation, include_extras=False).values():
                parts_of(hint, found)
        elif issubclass(annotation, enum.Enum):
            found.add(annotation)


def test_whatever_a_caller_must_create_is_exported():
    needed = set()
    for method in METHODS:
        for hint in typing.get_type_hints(method.request).values():
            parts_of(hint, needed)
    # Which view is asked for is said by the method.
    assert {one.__name__ for one in needed} - set(eelgrid.__all__) == {"WorkloadView"}
    assert all(hasattr(eelgrid, name) for name in eelgrid.__all__)


# Pages


async def test_pages_are_fetched_when_they_are_needed(connect, fake):
    fake.nodes = [a_node(f"n-{number:04d}", gpus=0) for number in range(2500)]
    with serving(fake) as address:
        async with connect(address) as client:
            first = await collect(client.list_nodes(), 10)
            assert ([node.inventory.node_name for node in first], fake.calls) == (
                [f"n-{number:04d}" for number in range(10)],
                ["list_nodes"],
            )
            assert len(await collect(client.list_nodes(name_contains="n-"))) == 2500
            assert fake.calls == ["list_nodes"] * 4


def test_a_cursor_stops_at_its_limit_and_at_a_token_that_repeats():
    def page(token, *points):
        return messages.ListPointsResponse(points=points, next_page_token=token)

    cursor = PageCursor(messages.ListPointsRequest(profile="a"), limit=3)
    assert (cursor.next_request().page_size, cursor.next_request().profile) == (3, "a")
    assert list(cursor.take_items(page("x"), (1, 2))) == [1, 2]
    assert (cursor.next_request().page_size, cursor.next_request().page_token) == (1, "x")
    assert list(cursor.take_items(page("y"), (3, 4))) == [3]
    assert cursor.is_done
    endless = PageCursor(messages.ListPointsRequest())
    endless.take_items(page("x"), ())
    assert not endless.is_done
    endless.take_items(page("x"), ())
    assert endless.is_done
    assert PageCursor(messages.ListPointsRequest(), limit=0).is_done


# Repeated calls


async def test_a_read_is_repeated_and_a_change_is_not(connect, fake):
    with serving(fake) as address:
        async with connect(address) as client:
            fake.failures = [faults.Unavailable("starting")] * 3
            assert (await client.get_summary()).nodes_ready == 1
            assert fake.calls == ["get_summary"] * 4
            fake.failures, fake.calls[:] = [faults.Unavailable("the journal is away; try later")] * 5, []
            with pytest.raises(errors.UnavailableError, match="the journal is away") as caught:
                await client.get_policy()
            assert (len(fake.calls), caught.value.remedy) == (5, "try later")
            fake.failures, fake.calls[:] = [faults.Unavailable("starting")], []
            with pytest.raises(errors.UnavailableError):
                await client.cancel_workload("w")
            assert fake.calls == ["cancel_workload"]
            fake.failures = [faults.ResourceExhausted("full")]
            with pytest.raises(errors.ResourceExhaustedError):
                await client.get_policy()


@pytest.mark.parametrize("given", ["", "mine"])
async def test_a_lost_answer_submits_nothing_twice(connect, fake, given):
    fake.lose_answers = [True, True]
    with serving(fake) as address:
        async with connect(address) as client:
            workload = await client.submit_workload(SPEC, workload_id=given)
            assert workload.phase is WorkloadPhase.PLACED
            assert fake.submitted == [workload.workload_id]
            assert fake.arrived == [workload.workload_id] * 3
            assert workload.workload_id == given or given == ""
            other = await client.submit_workload(SPEC)
            assert other.workload_id != workload.workload_id
            await client.submit_workload(SPEC, dry_run=True)
            assert len(fake.submitted) == 2


def settings(**changes):
    fields = {"address": "127.0.0.1:1", "tls": None, "insecure": False, "timeout_s": 10.0, "retries": Retries()}
    return ConnectionSettings(**(fields | changes))


def test_pauses_grow_up_to_a_limit_and_stay_within_the_time_of_the_call():
    retries = Retries(attempts=20, pause_first_s=0.1, pause_longest_s=2.0)
    assert [round(retries.pause_s(n, lambda: 0.0), 3) for n in range(1, 8)] == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    assert retries.pause_s(1, lambda: 1.0) == 0.05
    assert retries.pause_s(10_000) <= 2.0
    now_s = 0.0
    attempts = CallAttempts(settings(retries=retries), 5.0, is_repeatable=True, clock=lambda: now_s)

    def fail_until_the_end():
        nonlocal now_s
        while True:
            now_s += attempts.pause_after(faults.Unavailable("away"))

    with pytest.raises(errors.UnavailableError):
        fail_until_the_end()
    assert 3.0 <= now_s < 5.0
    assert attempts.left_s() == pytest.approx(5.0 - now_s)
    with pytest.raises(errors.InvalidSettingsError):
        Retries(attempts=0)


def test_a_watch_that_never_connected_gives_up_soon_and_a_lost_one_late():
    now_s = 0.0
    rules = settings(retries=Retries(attempts=3, reconnect_s=60.0))

    def failures(attempts):
        nonlocal now_s
        count = 0
        with suppress(errors.UnavailableError):
            while True:
                count += 1
                attempts.begin()
                now_s += attempts.pause_after(faults.Unavailable("away"))
        return count

    attempts = WatchAttempts(rules, clock=lambda: now_s)
    assert failures(attempts) == 3
    attempts = WatchAttempts(rules, clock=lambda: now_s)
    attempts.mark_connected()
    now_s += 3600.0
    begun_s = now_s
    assert failures(attempts) > 10
    assert 50.0 < now_s - begun_s <= 60.0
    # Nothing was sent in half an hour, but the stream stood: this is a new loss.
    attempts = WatchAttempts(rules, clock=lambda: now_s)
    attempts.begin()
    now_s += 1800.0
    assert attempts.pause_after(faults.Unavailable("away")) < 1.0
    with pytest.raises(errors.PermissionDeniedError):
        attempts.pause_after(faults.PermissionDenied("no"))


def test_a_watch_that_resumes_repeats_nothing_and_misses_nothing():
    def at(key, revision):
        return Workload(workload_id=key, spec=SPEC, phase=WorkloadPhase.PLACED, revision=revision)

    position = WatchPosition(4)
    assert position.resume_revision == 4
    assert position.accept(at("a", 6))
    # Several may have changed in revision 6; the connection is lost after the first of them.
    assert position.resume_revision == 5
    assert not position.accept(at("a", 6))
    assert position.accept(at("b", 6))
    assert position.accept(at("a", 7))
    assert not position.accept(at("b", 6))
    assert position.resume_revision == 6


async def test_a_watch_resumes_from_the_last_revision(connect, fake):
    class Recorded(FakeOperators):
        asked: typing.ClassVar[list[int]] = []

        async def watch_workloads(self, request, context) -> AsyncIterator[messages.WatchWorkloadsResponse]:
            self.asked.append(request.after_revision)
            async for change in super().watch_workloads(request, context):
                yield change
            await self.submit_workload(messages.SubmitWorkloadRequest(spec=SPEC), context)
            raise [faults.Unavailable("stopping"), faults.Aborted("no longer at hand")][len(self.asked) % 2]

    fake = Recorded()
    fake.asked.clear()
    with serving(fake) as address:
        async with connect(address) as client:
            seen = await collect(client.watch_workloads(), 4)
    assert [workload.revision for workload in seen] == [1, 2, 3, 4]
    assert fake.asked[:5] == [0, 0, 0, 1, 2]


async def test_output_goes_on_where_a_lost_connection_ended_it(connect, fake):
    # The connection is lost after the first part.
    fake.failures[:] = [None, faults.Unavailable("stopping")]
    with serving(fake) as address:
        async with connect(address) as client:
            assert await collect(client.read_logs("w-1", follow=True)) == ["one", "two"]


async def test_an_attached_client_sends_input_and_gets_output(fake):
    parts = (messages.AttachInput(data=b"one"), messages.AttachInput(data=b"two", is_end=True))

    async def inputs():
        for part in parts:
            yield part

    expected = [(b"w-1", 0), (b"one", 1), (b"two", 2)]
    with serving(fake) as address:
        async with AsyncClient(address, retries=QUICK) as client:
            found = [(one.data, one.inputs_taken) async for one in client.attach("w-1", inputs=inputs())]
            assert found == expected

        def block():
            with Client(address, retries=QUICK) as client:
                return [(one.data, one.inputs_taken) for one in client.attach("w-1", inputs=iter(parts))]

        assert await asyncio.to_thread(block) == expected


async def test_a_watch_of_the_summary_goes_on(connect, fake):
    with serving(fake) as address:
        async with connect(address) as client:
            assert len(await collect(client.watch_summary(interval_s=0.1), 3)) == 3
    assert fake.calls == ["watch_summary"] * 3


async def test_leaving_a_watch_ends_it_at_the_controller(connect):
    ended = threading.Event()

    class Counting(FakeOperators):
        async def watch_workloads(self, request, context) -> AsyncIterator[messages.WatchWorkloadsResponse]:
            try:
                async for change in super().watch_workloads(request, context):
                    yield change
            finally:
                ended.set()

    fake = Counting(watch_closes=False)
    with serving(fake) as address:
        async with connect(address) as client:
            await client.submit_workload(SPEC)
            assert len(await collect(client.watch_workloads(), 1)) == 1
            assert await asyncio.to_thread(ended.wait, 5)


# Errors


async def test_errors_have_the_text_and_the_remedy_of_the_controller(connect, fake):
    with serving(fake) as address:
        async with connect(address) as client:
            with pytest.raises(errors.NotFoundError, match="no workload w"):
                await client.get_workload("w")
            many = WorkloadSpec(name="train", request=ResourceRequest(cpu_milli=2_000_000))
            with pytest.raises(errors.InvalidArgumentError, match="ask for less") as caught:
                await client.submit_workload(many)
            assert [one.field for one in caught.value.violations] == ["spec.request.cpu_milli"]
            before = len(fake.calls)
            with pytest.raises(errors.InvalidArgumentError, match="nothing was sent") as caught:
                await client.submit_workload(WorkloadSpec(name="-", request=ResourceRequest()))
            assert {one.field for one in caught.value.violations} >= {"spec.name"}
            assert len(fake.calls) == before
            fake.caller = faults.PermissionDenied("viewer may not; ask for submitter")
            with pytest.raises(errors.PermissionDeniedError) as caught:
                await client.who_am_i()
            assert (caught.value.message, caught.value.remedy) == ("viewer may not", "ask for submitter")
            assert str(caught.value) == "viewer may not; ask for submitter"
            with pytest.raises(errors.EelgridError):
                await client.start_shadow(eelgrid.SetWeights(objective="energy"))
            again = pickle.loads(pickle.dumps(caught.value))
            assert (type(again), str(again)) == (errors.PermissionDeniedError, str(caught.value))


async def test_nobody_answers(connect):
    async with connect("127.0.0.1:1") as client:
        with pytest.raises(
            errors.UnavailableError, match=r"no controller answers at 127\.0\.0\.1:1 .*EELGRID_CONTROLLER"
        ):
            await client.get_summary()
        with pytest.raises(errors.UnavailableError):
            await collect(client.watch_workloads())


async def test_no_answer_in_time(connect, fake):
    fake.delay_s = 5.0
    with serving(fake) as address:
        async with connect(address) as client:
            slow = client.with_timeout(0.2)
            with pytest.raises(errors.DeadlineExceededError, match=r"in 0\.2 s; raise timeout_s"):
                await slow.submit_workload(SPEC)
            with pytest.raises(errors.InvalidSettingsError):
                client.with_timeout(0.0)


def test_every_fault_has_an_error_of_its_own():
    for cls in faults.Fault.__subclasses__():
        found = errors.error_from_fault(cls("what; how"), address="a:1", timeout_s=1.0)
        assert type(found).__name__ == f"{cls.__name__}Error"
        assert found.remedy


@pytest.mark.parametrize("cls", [Client, AsyncClient])
def test_settings_come_from_the_environment_as_for_eelctl(cls, monkeypatch, tmp_path):
    monkeypatch.delenv("EELGRID_CONTROLLER", raising=False)
    assert cls().address == "127.0.0.1:7443"
    monkeypatch.setenv("EELGRID_CONTROLLER", "localhost:7")
    assert cls().address == "localhost:7"
    assert cls("127.0.0.1:8").address == "127.0.0.1:8"
    with pytest.raises(errors.InvalidSettingsError, match=r"h:1 is another machine.*TlsFiles"):
        cls("h:1")
    assert cls("h:1", insecure=True).address == "h:1"
    with pytest.raises(errors.InvalidSettingsError, match="HOST:PORT"):
        cls("nonsense")
    with pytest.raises(errors.InvalidSettingsError, match="timeout_s"):
        cls(timeout_s=0.0)
    missing = tmp_path / "absent.pem"
    with pytest.raises(errors.InvalidSettingsError, match=r"absent\.pem"):
        cls("h:1", tls=TlsFiles(missing, missing, missing))
    monkeypatch.setenv("EELGRID_TLS_KEY", str(missing))
    with pytest.raises(errors.InvalidSettingsError, match="set all three"):
        cls()
