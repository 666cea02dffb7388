"""OperatorService over a real server: pages, filters, watches, refusals, and raw bad messages."""

import asyncio
import base64
import json
import time
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.builders.cluster import build_batch, build_node, build_request
from tests.builders.server import run_controller

from eelgrid_controller.server.grpc.operator_service import WorkloadChanges
from eelgrid_controller.server.grpc.pagination import PAGE_BYTES_MOST, build_page
from eelgrid_controller.server.grpc.resource_views import SummaryCache
from eelgrid_protos import codec, rpc
from eelgrid_protos.faults import Aborted, AlreadyExists, InvalidArgument, NotFound, Unavailable, fault_from
from eelgrid_protos.messages import (
    OBJECTIVES,
    PAGE_SIZE_MOST,
    SUMMARY_PAGE_SIZE_MOST,
    CancelWorkloadRequest,
    ExplainWorkloadRequest,
    GetPolicyRequest,
    GetSummaryRequest,
    GetWorkloadRequest,
    JobProgress,
    ListGpusRequest,
    ListNodesRequest,
    ListPlansRequest,
    ListWorkloadsRequest,
    ListWorkloadsResponse,
    NodeState,
    Policy,
    UpdatePolicyRequest,
    WatchSummaryRequest,
    WatchWorkloadsRequest,
    Workload,
    WorkloadPhase,
    WorkloadSummary,
    WorkloadView,
    summarize_workload,
)


async def every_page(call, request_type, field: str, **filters) -> tuple[list, int]:
    items, token, pages = [], "", 0
    while True:
        response = await call(request_type(page_token=token, **filters))
        items.extend(getattr(response, field))
        pages += 1
        token = response.next_page_token
        if not token:
            assert response.total == len(items)
            return items, pages


async def test_every_item_is_on_exactly_one_page(tmp_path: Path) -> None:
    async with run_controller(tmp_path) as rig:
        names = [f"n{number}" for number in (3, 1, 2, 10)]
        await rig.join(*(build_node(name, gpus=3) for name in names))
        for number in range(7):
            await rig.operators.submit_workload(build_request(f"w{number}"))
        api = rig.operators
        nodes, pages = await every_page(api.list_nodes, ListNodesRequest, "nodes", page_size=3)
        assert ([node.inventory.node_name for node in nodes], pages) == (sorted(names), 2)
        gpus, pages = await every_page(api.list_gpus, ListGpusRequest, "gpus", page_size=5)
        assert ([(gpu.node_name, gpu.gpu.index) for gpu in gpus], pages) == (
            [(name, index) for name in sorted(names) for index in range(3)],
            3,
        )
        workloads, pages = await every_page(api.list_workloads, ListWorkloadsRequest, "workloads", page_size=2)
        assert ([item.workload_id for item in workloads], pages) == ([f"w{number}" for number in range(7)], 4)
        plans, _ = await every_page(api.list_plans, ListPlansRequest, "plans", page_size=1)
        assert sum(len(status.plan.assignments) for status in plans) == 7


async def test_summaries_are_those_of_the_workloads_on_their_pages(tmp_path: Path) -> None:
    async with run_controller(tmp_path) as rig:
        await rig.join(build_node(gpus=3))
        api = rig.operators
        for number in range(7):
            await api.submit_workload(build_request(f"w{number}", user="ann" if number % 2 else ""))
        await api.cancel_workload(CancelWorkloadRequest(workload_id="w6"))
        for filters in ({}, {"user": "ann"}, {"phases": (WorkloadPhase.PENDING,)}, {"whole_arrays": True}):
            workloads, pages = await every_page(api.list_workloads, ListWorkloadsRequest, "workloads", **filters)
            summaries, also = await every_page(
                api.list_workloads, ListWorkloadsRequest, "summaries", view=WorkloadView.SUMMARY, **filters
            )
            assert pages == also
            # An answer of a controller that knows no summaries has the same rows.
            assert tuple(summaries) == ListWorkloadsResponse(workloads=tuple(workloads)).rows
        brief = await api.list_workloads(ListWorkloadsRequest(view=WorkloadView.SUMMARY))
        assert (brief.workloads, brief.total) == ((), 7)


async def test_a_summary_is_encoded_anew_when_what_it_is_made_of_changes(tmp_path: Path) -> None:
    async with run_controller(tmp_path) as rig:
        await rig.join(build_node(gpus=3))
        for number in range(3):
            await rig.operators.submit_workload(build_request(f"w{number}"))

        async def phases() -> list[WorkloadPhase]:
            request = ListWorkloadsRequest(view=WorkloadView.SUMMARY)
            return [row.phase for row in (await rig.operators.list_workloads(request)).summaries]

        before = await phases()
        assert await phases() == before == [WorkloadPhase.PLACED] * 3
        await rig.operators.cancel_workload(CancelWorkloadRequest(workload_id="w1"))
        assert await phases() == [WorkloadPhase.PLACED, WorkloadPhase.CANCELLED, WorkloadPhase.PLACED]


def test_a_kept_summary_has_the_newest_progress_and_place() -> None:
    cache, one = SummaryCache(), workload("w")

    def read(progress: JobProgress | None, place: int) -> WorkloadSummary:
        data = cache.encode(one, progress, place)
        assert isinstance(data, bytes)
        assert cache.encode(one, progress, place) is data
        (row,) = codec.decode_message(ListWorkloadsResponse, data).summaries
        return row

    first, second = JobProgress(step=1), JobProgress(step=2)
    for progress, place in ((None, 0), (first, 0), (second, 0), (second, 3), (None, 3)):
        assert read(progress, place) == summarize_workload(one, progress=progress, queue_position=place)


def test_a_summary_that_breaks_the_contract_is_left_out_and_counted() -> None:
    cache = SummaryCache()
    broken = replace(workload("broken"), reason="x" * 5000)
    encoded = build_page(
        ListWorkloadsRequest(view=WorkloadView.SUMMARY),
        ListWorkloadsResponse,
        enumerate((workload("a"), broken, workload("b"))),
        place_of=lambda item: (item[0],),
        element_of=lambda item: ("summaries", cache.encode(item[1], None, 0)),
    )
    page = codec.decode_message(ListWorkloadsResponse, encoded.data)
    assert [row.workload_id for row in page.summaries] == ["a", "b"]
    assert (page.omitted, encoded.omitted, page.total) == (1, 1, 3)


def test_a_page_holds_more_summaries_than_workloads() -> None:
    for view, name, most in (
        (WorkloadView.UNSPECIFIED, "workloads", PAGE_SIZE_MOST),
        (WorkloadView.SUMMARY, "summaries", SUMMARY_PAGE_SIZE_MOST),
    ):
        one = workload("w")
        element = summarize_workload(one, progress=None, queue_position=0) if name == "summaries" else one
        encoded = build_page(
            ListWorkloadsRequest(page_size=2**32 - 1, view=view),
            ListWorkloadsResponse,
            range(SUMMARY_PAGE_SIZE_MOST + 1),
            place_of=lambda number: (number,),
            element_of=lambda _, name=name, element=element: (name, element),
            most=most,
        )
        page = codec.decode_message(ListWorkloadsResponse, encoded.data)
        assert (len(getattr(page, name)), page.total) == (most, SUMMARY_PAGE_SIZE_MOST + 1)
        assert page.next_page_token


async def test_page_sizes_are_coerced(tmp_path: Path) -> None:
    async with run_controller(tmp_path) as rig:
        await rig.join(build_node(gpus=64), build_node("n2", gpus=64))
        assert len((await rig.operators.list_gpus(ListGpusRequest())).gpus) == 100
        assert len((await rig.operators.list_gpus(ListGpusRequest(page_size=2**32 - 1))).gpus) == 128


async def test_a_token_belongs_to_its_filters(tmp_path: Path) -> None:
    async with run_controller(tmp_path) as rig:
        await rig.join(build_node(gpus=3))
        token = (await rig.operators.list_gpus(ListGpusRequest(page_size=1))).next_page_token
        await rig.operators.list_gpus(ListGpusRequest(page_size=2, page_token=token))
        for request in (
            ListGpusRequest(page_token=token, gpu_model="G2"),
            ListGpusRequest(page_token="!!"),
            ListGpusRequest(page_token="é"),
            ListGpusRequest(page_token=base64.urlsafe_b64encode(b"[]").decode()),
            ListGpusRequest(page_token=base64.urlsafe_b64encode(b"7").decode()),
            ListGpusRequest(page_token=base64.urlsafe_b64encode(b'{"a":1}').decode()),
        ):
            with pytest.raises(InvalidArgument) as caught:
                await rig.operators.list_gpus(request)
            assert [violation.field for violation in caught.value.violations] == ["page_token"]
        with pytest.raises(InvalidArgument):
            await rig.operators.list_nodes(ListNodesRequest(page_token=token))


async def test_a_forged_place_is_refused(tmp_path: Path) -> None:
    async with run_controller(tmp_path) as rig:
        await rig.join(build_node(gpus=3))
        token = (await rig.operators.list_gpus(ListGpusRequest(page_size=1))).next_page_token
        digest = json.loads(base64.urlsafe_b64decode(token))[0]
        for place in ([1, 2], [None, 1], [], [[1], 2], ["n1", "x"]):
            forged = base64.urlsafe_b64encode(json.dumps([digest, *place]).encode()).decode()
            with pytest.raises(InvalidArgument):
                await rig.operators.list_gpus(ListGpusRequest(page_token=forged))


def listed(numbers: list[int], size: int, element) -> list[ListWorkloadsResponse]:
    """Every page of a listing."""
    pages, token = [], ""
    while True:
        encoded = build_page(
            ListWorkloadsRequest(page_size=size, page_token=token),
            ListWorkloadsResponse,
            numbers,
            place_of=lambda number: (number,),
            element_of=lambda number: ("workloads", element(number)),
        )
        pages.append(codec.decode_message(ListWorkloadsResponse, encoded.data))
        if not (token := pages[-1].next_page_token):
            return pages


def workload(workload_id: str, **changes) -> Workload:
    return Workload(workload_id=workload_id, spec=replace(build_request().spec, **changes), phase=WorkloadPhase.PENDING)


@given(st.lists(st.integers(0, 10**6), unique=True, max_size=40), st.integers(1, 7))
def test_pages_partition_any_listing(numbers: list[int], size: int) -> None:
    numbers = sorted(numbers)
    pages = listed(numbers, size, lambda number: workload(f"w{number}"))
    assert all(page.total == len(numbers) and len(page.workloads) <= size for page in pages)
    assert [item.workload_id for page in pages for item in page.workloads] == [f"w{number}" for number in numbers]


def test_a_page_ends_at_its_bytes_though_more_items_were_asked_for() -> None:
    labels = {f"{key:03}" + "k" * 250: "v" * 253 for key in range(64)}
    pages = listed(list(range(300)), 1000, lambda number: workload(f"w{number}", labels=labels))
    assert [item.workload_id for page in pages for item in page.workloads] == [f"w{number}" for number in range(300)]
    assert len(pages) > 1
    assert all(len(codec.encode_message(page)) <= PAGE_BYTES_MOST + 1024 for page in pages)


def test_a_page_goes_without_elements_that_break_the_contract_and_counts_them() -> None:
    pages = listed(list(range(10)), 3, lambda number: workload("my job" if number % 2 else f"w{number}"))
    assert [item.workload_id for page in pages for item in page.workloads] == ["w0", "w2", "w4", "w6", "w8"]
    assert sum(page.omitted for page in pages) == 5
    assert {page.total for page in pages} == {10}


async def test_filters_of_nodes_and_gpus(tmp_path: Path) -> None:
    async with run_controller(tmp_path, away_grace_s=0.0) as rig:
        await rig.join(build_node("alpha-1", pool="a"), build_node("beta-1", gpus=0, pool="b"), build_node("alpha-2"))
        await rig.operators.submit_workload(build_request("w1"))
        api = rig.operators

        async def names(**filters) -> list[str]:
            found = await api.list_nodes(ListNodesRequest(**filters))
            assert found.total == len(found.nodes)
            return [node.inventory.node_name for node in found.nodes]

        assert await names(pool="a") == ["alpha-1"]
        assert await names(gpu_model="G2") == ["alpha-1", "alpha-2"]
        assert await names(name_contains="ta-") == ["beta-1"]
        assert await names(states=(NodeState.LOST,)) == []
        assert await names(states=(NodeState.LOST, NodeState.READY), name_contains="1") == ["alpha-1", "beta-1"]
        free = (await api.list_gpus(ListGpusRequest(min_free_milli=1000))).gpus
        assert len(free) == 3
        assert {gpu.allocated_milli for gpu in free} == {0}
        assert (await api.list_gpus(ListGpusRequest(gpu_model="T4"))).total == 0
        assert (await api.list_gpus(ListGpusRequest(gpu_model="openb g2"))).total == 4
        with pytest.raises(InvalidArgument, match=r"gpu_model: is 'H10O'.*did you mean.*In use are G2"):
            await names(gpu_model="H10O")
        assert (await api.list_gpus(ListGpusRequest(node_name="alpha-1"))).total == 2
        with pytest.raises(NotFound, match="there is no node gamma"):
            await api.list_gpus(ListGpusRequest(node_name="gamma"))
        with pytest.raises(NotFound):
            await api.list_plans(ListPlansRequest(node_name="gamma"))


async def test_filters_of_workloads(tmp_path: Path) -> None:
    async with run_controller(tmp_path) as rig:
        await rig.join(build_node(gpus=1))
        api = rig.operators
        await api.submit_workload(build_request("w1", name="train-a", user="ann", queue="q"))
        await api.submit_workload(build_request("w2", name="train-b", namespace="lab"))
        await api.submit_workload(build_request("w3", name="serve", gpus=0))
        await api.cancel_workload(CancelWorkloadRequest(workload_id="w3"))

        async def ids(**filters) -> list[str]:
            return [item.workload_id for item in (await api.list_workloads(ListWorkloadsRequest(**filters))).workloads]

        assert await ids(phases=(WorkloadPhase.PENDING,)) == ["w2"]
        assert await ids(phases=(WorkloadPhase.PLACED, WorkloadPhase.CANCELLED)) == ["w1", "w3"]
        assert (
            await ids(user="ann") == await ids(queue="q") == await ids(node_name="n1", name_contains="rain") == ["w1"]
        )
        assert await ids(namespace="lab") == ["w2"]
        assert await ids(name_contains="nothing") == []


async def test_a_workload_is_submitted_shown_explained_and_cancelled(tmp_path: Path) -> None:
    async with run_controller(tmp_path) as rig:
        await rig.join(build_node())
        api = rig.operators
        drawn = (await api.submit_workload(build_request())).workload
        assert drawn.phase is WorkloadPhase.PLACED
        assert drawn.placements[0].node_name == "n1"
        got = await api.get_workload(GetWorkloadRequest(workload_id=drawn.workload_id))
        assert got.workload == drawn
        explanation = (await api.explain_workload(ExplainWorkloadRequest(workload_id=drawn.workload_id))).explanation
        assert explanation.workload == drawn
        assert explanation.replicas[0].candidates[0].node_name == "n1"
        cancelled = (await api.cancel_workload(CancelWorkloadRequest(workload_id=drawn.workload_id))).workload
        assert cancelled.phase is WorkloadPhase.CANCELLED
        for call, request in (
            (api.get_workload, GetWorkloadRequest(workload_id="nobody")),
            (api.cancel_workload, CancelWorkloadRequest(workload_id="nobody")),
            (api.explain_workload, ExplainWorkloadRequest(workload_id="nobody")),
        ):
            with pytest.raises(NotFound):
                await call(request)


async def test_refusals_are_counted_and_a_repeat_is_harmless(tmp_path: Path) -> None:
    async with run_controller(tmp_path) as rig:
        await rig.join(build_node())
        api = rig.operators
        first = await api.submit_workload(build_request("w1"))
        assert await api.submit_workload(build_request("w1")) == first
        with pytest.raises(AlreadyExists):
            await api.submit_workload(build_request("w1", name="another"))
        with pytest.raises(InvalidArgument) as caught:
            await api.submit_workload(build_request("w2", gpus=9))
        assert caught.value.violations
        summary = (await api.get_summary(GetSummaryRequest())).summary
        assert (summary.placed, summary.pending, summary.refused) == (1, 0, 2)


async def test_a_dry_run_leaves_nothing(tmp_path: Path) -> None:
    async with run_controller(tmp_path) as rig:
        await rig.join(build_node())
        request = build_request()
        await rig.operators.submit_workload(type(request)(spec=request.spec, dry_run=True))
        assert (await rig.operators.list_workloads(ListWorkloadsRequest())).total == 0


async def test_a_summary_adds_up(tmp_path: Path) -> None:
    async with run_controller(tmp_path) as rig:
        api = rig.operators
        agent = await rig.join(build_node(gpus=2))
        await api.submit_workload(build_request("w1", milli=500))
        await api.submit_workload(build_request("w2"))
        await api.submit_workload(build_request("w3"))
        await agent.say(build_batch(1, time_ns=time.time_ns()))
        await agent.hear()
        await asyncio.sleep(0.25)
        summary = (await api.get_summary(GetSummaryRequest())).summary
        assert (summary.nodes_ready, summary.nodes_lost, summary.gpus) == (1, 0, 2)
        assert (summary.allocated_gpu_milli, summary.allocated_cpu_milli) == (1500, 2000)
        assert (summary.placed, summary.pending) == (2, 1)
        assert sum(reason.workloads for reason in summary.pending_reasons) == 1
        assert (summary.measured_power_w, summary.measured_gpus, summary.samples_received) == (100.0, 2, 1)
        assert summary.modelled_power_w > 300.0
        assert [(model.model, model.gpus, model.allocated_gpu_milli) for model in summary.models] == [("G2", 2, 1500)]
        assert summary.decisions == 3
        assert 0.0 < summary.decision_p50_s <= summary.decision_p99_s < 5.0


async def test_watching_the_summary_goes_on_until_the_controller_stops(tmp_path: Path) -> None:
    async with run_controller(tmp_path) as rig:
        watch = rig.operators.watch_summary(WatchSummaryRequest(interval_s=0.1))
        assert (await anext(watch)).summary.nodes_ready == 0
        assert (await anext(watch)).summary.nodes_ready == 0
        await rig.join(build_node())
        while not (await anext(watch)).summary.nodes_ready:
            pass
        rig.controller.operators.close()
        with pytest.raises(Unavailable):
            await anext(watch)
        with pytest.raises(InvalidArgument) as caught:
            async for _ in rig.operators.watch_summary(WatchSummaryRequest(interval_s=0.01)):
                pass
        assert caught.value.violations[0].field == "interval_s"


async def test_watching_workloads_shows_what_is_and_then_every_change(tmp_path: Path) -> None:
    async with run_controller(tmp_path) as rig:
        await rig.join(build_node())
        api = rig.operators
        old = (await api.submit_workload(build_request("w1"))).workload
        watch = api.watch_workloads(WatchWorkloadsRequest())
        assert (await anext(watch)).workload == old
        await api.submit_workload(build_request("w2"))
        change = (await anext(watch)).workload
        assert (change.workload_id, change.phase) == ("w2", WorkloadPhase.PLACED)
        later = api.watch_workloads(WatchWorkloadsRequest(after_revision=old.revision))
        assert (await anext(later)).workload == change
        await api.cancel_workload(CancelWorkloadRequest(workload_id="w1"))
        for stream in (watch, later):
            assert (await anext(stream)).workload.phase is WorkloadPhase.CANCELLED
            await stream.aclose()
        with pytest.raises(InvalidArgument) as caught:
            await anext(api.watch_workloads(WatchWorkloadsRequest(after_revision=10**9)))
        assert caught.value.violations[0].field == "after_revision"


async def test_a_watcher_that_falls_behind_is_told_to_begin_again() -> None:
    spec = build_request().spec
    changes = WorkloadChanges(3, revision=10)

    def change(revision: int) -> Workload:
        return Workload(workload_id=f"w{revision}", spec=spec, phase=WorkloadPhase.PENDING, revision=revision)

    changes.publish([change(12), change(11)])
    assert [item.revision for item in changes.changes_after(10)] == [11, 12]
    changes.publish([change(13), change(14)])
    assert [item.revision for item in changes.changes_after(11)] == [12, 13, 14]
    with pytest.raises(Aborted, match="list the workloads and watch from"):
        changes.changes_after(10)
    waiting = asyncio.create_task(changes.wait_change())
    await asyncio.sleep(0)
    changes.close()
    await waiting
    with pytest.raises(Unavailable):
        changes.changes_after(14)


async def test_the_policy_changes_by_revision_only(tmp_path: Path) -> None:
    async with run_controller(tmp_path) as rig:
        api = rig.operators
        policy = (await api.get_policy(GetPolicyRequest())).policy
        wish = Policy(objective="energy", weights=OBJECTIVES["energy"], revision=policy.revision)
        accepted = (await api.update_policy(UpdatePolicyRequest(policy=wish))).policy
        assert accepted.revision > policy.revision
        assert (await api.get_policy(GetPolicyRequest())).policy == accepted
        with pytest.raises(Aborted):
            await api.update_policy(UpdatePolicyRequest(policy=policy))


@pytest.mark.parametrize("name", [method.name for method in rpc.OPERATOR_SERVICE.methods])
async def test_bytes_that_are_no_message_are_invalid(tmp_path: Path, name: str) -> None:
    async with run_controller(tmp_path) as rig:
        method = next(method for method in rpc.OPERATOR_SERVICE.methods if method.name == name)
        path = rpc.OPERATOR_SERVICE.path(method)
        call = rig.channel.unary_stream(path) if method.response_streaming else rig.channel.unary_unary(path)
        answer = call(b"\xff\xff\xff\xff")
        with pytest.raises(grpc.RpcError) as caught:
            await (answer.read() if method.response_streaming else answer)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_message_that_breaks_rules_names_the_field(tmp_path: Path) -> None:
    async with run_controller(tmp_path) as rig:
        path = "/eelgrid.v1.OperatorService/SubmitWorkload"
        good = codec.encode_message(build_request("w1", name="sound", user="ann"))
        bad = good.replace(b"sound", b"so nd")
        with pytest.raises(grpc.RpcError) as caught:
            await rig.channel.unary_unary(path)(bad)
        fault = fault_from(caught.value)
        assert isinstance(fault, InvalidArgument)
        assert [violation.field for violation in fault.violations] == ["spec.name"]
        assert fault.violations[0].remedy


async def test_restart_brings_everything_back(tmp_path: Path) -> None:
    async with run_controller(tmp_path) as rig:
        await rig.join(build_node())
        for number in range(4):
            await rig.operators.submit_workload(build_request(f"w{number}", milli=300))
        before = (await rig.operators.list_workloads(ListWorkloadsRequest())).workloads
        digest = rig.controller.loop.core.state.digest()
    async with run_controller(tmp_path) as rig:
        assert "nodes=1 workloads=4" in rig.line
        assert rig.controller.loop.core.state.digest() == digest
        assert (await rig.operators.list_workloads(ListWorkloadsRequest())).workloads == before


async def test_gpus_and_workloads_say_who_holds_what_and_what_it_draws(tmp_path: Path) -> None:
    async with run_controller(tmp_path) as rig:
        agent = await rig.join(build_node(gpus=2))
        api = rig.operators
        await api.submit_workload(build_request("half", name="serve", milli=500, user="ada"))
        await api.submit_workload(build_request("quarter", name="etl", milli=250, user="bob"))
        await api.submit_workload(build_request("whole", name="train"))
        await api.submit_workload(build_request("cpu", gpus=0))
        unread = (await api.list_workloads(ListWorkloadsRequest())).workloads
        assert [one.power_w for one in unread] == [None] * 4, "no reading, no figure"
        await agent.say(build_batch(1, time_ns=time.time_ns()))
        await agent.hear()
        listed = (await api.list_workloads(ListWorkloadsRequest())).workloads
        powers = {one.workload_id: one.power_w for one in listed}
        assert powers == {"half": pytest.approx(100 / 3), "quarter": pytest.approx(50 / 3), "whole": 50.0, "cpu": None}
        assert (await api.get_workload(GetWorkloadRequest(workload_id="whole"))).workload.power_w == 50.0
        gpus = (await api.list_gpus(ListGpusRequest())).gpus
        holders = {tuple((one.workload_id, one.name, one.user) for one in gpu.holders) for gpu in gpus}
        assert holders == {(("half", "serve", "ada"), ("quarter", "etl", "bob")), (("whole", "train", ""),)}
        assert all(gpu.workload_ids == tuple(one.workload_id for one in gpu.holders) for gpu in gpus)
