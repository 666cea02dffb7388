"""Calls about arrays over a real server: listings, changes of all elements in bounded steps, watches, and who may do it."""

from pathlib import Path

import pytest
from tests.builders.cluster import build_node, build_request
from tests.builders.server import run_controller

from eelgrid_controller.runtime import array_changes
from eelgrid_protos.faults import FailedPrecondition, InvalidArgument, NotFound
from eelgrid_protos.messages import (
    CancelWorkloadRequest,
    ExplainWorkloadRequest,
    GetWorkloadRequest,
    HoldWorkloadRequest,
    JobArrayRequest,
    ListWorkloadsRequest,
    Mobility,
    MoveToQueueRequest,
    Policy,
    ProcessSpec,
    Queue,
    ReadLogsRequest,
    ReleaseWorkloadRequest,
    RequeueWorkloadRequest,
    ScaleWorkloadRequest,
    SubmitWorkloadRequest,
    UpdatePolicyRequest,
    WatchWorkloadsRequest,
    WorkloadPhase,
)


def submission(key="", indexes="0-9", **spec):
    request = build_request(key, gpus=1, **spec)
    return SubmitWorkloadRequest(spec=request.spec, workload_id=key, array=JobArrayRequest(indexes=indexes))


async def list_ids(rig, **filters):
    found, token = [], ""
    while True:
        page = await rig.operators.list_workloads(ListWorkloadsRequest(page_size=2, page_token=token, **filters))
        found += page.workloads
        token = page.next_page_token
        if not token:
            assert page.total == len(found)
            return [one.workload_id for one in found]


async def test_an_array_is_listed_once_in_its_place_or_by_its_elements_in_order(tmp_path: Path) -> None:
    async with run_controller(tmp_path) as rig:
        await rig.operators.submit_workload(build_request("first"))
        await rig.operators.submit_workload(submission("a", "0-11"))
        await rig.operators.submit_workload(build_request("last"))
        elements = [f"a_{number}" for number in range(12)]
        assert await list_ids(rig) == ["first", *elements, "last"]
        assert await list_ids(rig, whole_arrays=True) == ["first", "a", "last"]
        assert await list_ids(rig, array_id="a") == elements
        assert await list_ids(rig, array_id="b") == []
        await rig.operators.cancel_workload(CancelWorkloadRequest(workload_id="a_0"))
        cancelled = (WorkloadPhase.CANCELLED,)
        assert await list_ids(rig, array_id="a", phases=cancelled) == ["a_0"]
        assert await list_ids(rig, whole_arrays=True, phases=cancelled) == ["a"]
        assert await list_ids(rig, whole_arrays=True, phases=(WorkloadPhase.PENDING,)) == ["first", "a", "last"]
        status = (await rig.operators.get_workload(GetWorkloadRequest(workload_id="a"))).workload.array
        assert (status.size, status.pending, status.cancelled) == (12, 11, 1)


async def test_all_elements_are_changed_by_one_call_in_steps(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(array_changes, "_ELEMENTS_A_STEP", 4)
    async with run_controller(tmp_path) as rig:
        api = rig.operators
        policy = Policy(queues=(Queue(name="default"), Queue(name="late")))
        await api.update_policy(UpdatePolicyRequest(policy=policy))
        await rig.join(build_node(gpus=2))
        await api.submit_workload(submission("a", "0-9%2"))
        held = (await api.hold_workload(HoldWorkloadRequest(workload_id="a"))).workload
        assert (held.array.placed, held.array.pending) == (2, 8)
        waiting = [f"a_{number}" for number in range(2, 10)]
        found = await api.list_workloads(ListWorkloadsRequest(array_id="a"))
        assert [one.workload_id for one in found.workloads if one.held_by] == waiting
        moved = await api.move_to_queue(MoveToQueueRequest(workload_id="a", queue="late"))
        assert moved.workload.workload_id == "a"
        found = await api.list_workloads(ListWorkloadsRequest(array_id="a", queue="late"))
        assert [one.workload_id for one in found.workloads] == waiting
        with pytest.raises(InvalidArgument):
            await api.move_to_queue(MoveToQueueRequest(workload_id="a", queue="none"))
        released = (await api.release_workload(ReleaseWorkloadRequest(workload_id="a"))).workload
        assert released.reason.startswith("array: ")
        explained = await api.explain_workload(ExplainWorkloadRequest(workload_id="a"))
        assert explained.explanation.workload.workload_id == "a_2"
        ended = (await api.cancel_workload(CancelWorkloadRequest(workload_id="a"))).workload
        assert (ended.phase, ended.array.cancelled) == (WorkloadPhase.CANCELLED, 10)
        with pytest.raises(FailedPrecondition, match="no element of a waits"):
            await api.hold_workload(HoldWorkloadRequest(workload_id="a"))
        assert (await api.cancel_workload(CancelWorkloadRequest(workload_id="a"))).workload == ended
        with pytest.raises(NotFound):
            await api.cancel_workload(CancelWorkloadRequest(workload_id="b"))


async def test_the_elements_that_run_are_requeued_by_one_call(tmp_path: Path) -> None:
    async with run_controller(tmp_path) as rig:
        api = rig.operators
        await rig.join(build_node(gpus=2, runs_processes=True))
        jobs = {"process": ProcessSpec(argv=("true",), working_directory="/"), "mobility": Mobility.FIXED}
        await api.submit_workload(submission("a", "0-4%2", **jobs))
        request = RequeueWorkloadRequest(workload_id="a", reason="new data")
        whole = (await api.requeue_workload(request)).workload
        assert (whole.array.placed, whole.array.pending) == (2, 3)
        found = (await api.list_workloads(ListWorkloadsRequest(array_id="a"))).workloads
        assert [one.requeuing for one in found] == [True, True, False, False, False]
        assert found[0].reason == "evicted: it was requeued: new data"
        assert (await api.requeue_workload(request)).workload.array == whole.array
        one = (await api.requeue_workload(RequeueWorkloadRequest(workload_id="a_3", hold=True))).workload
        assert (one.phase, one.held_by) == (WorkloadPhase.PENDING, "an operator")
        await api.requeue_workload(RequeueWorkloadRequest(workload_id="a", hold=True))
        found = (await api.list_workloads(ListWorkloadsRequest(array_id="a"))).workloads
        assert {one.held_by for one in found} == {"an operator"}
        await api.cancel_workload(CancelWorkloadRequest(workload_id="a"))
        await api.submit_workload(submission("b", "0-4"))
        with pytest.raises(FailedPrecondition, match="no element of b runs"):
            await api.requeue_workload(RequeueWorkloadRequest(workload_id="b"))
        with pytest.raises(NotFound):
            await api.requeue_workload(RequeueWorkloadRequest(workload_id="c"))


async def test_what_is_of_one_process_names_an_element(tmp_path: Path) -> None:
    async with run_controller(tmp_path) as rig:
        await rig.operators.submit_workload(submission("a", "3-5"))
        with pytest.raises(FailedPrecondition, match="a is an array; name an element of it, such as a_3"):
            await rig.operators.scale_workload(ScaleWorkloadRequest(workload_id="a", replicas=2))
        with pytest.raises(FailedPrecondition, match="such as a_3"):
            async for _ in rig.operators.read_logs(ReadLogsRequest(workload_id="a")):
                pass


async def test_a_watch_sends_every_element_of_an_array(tmp_path: Path) -> None:
    async with run_controller(tmp_path) as rig:
        await rig.operators.submit_workload(build_request("first"))
        watch = rig.operators.watch_workloads(WatchWorkloadsRequest())
        seen = [(await anext(aiter(watch))).workload.workload_id]
        await rig.operators.submit_workload(submission("a", "0-4"))
        async for change in watch:
            seen.append(change.workload.workload_id)
            if len(set(seen)) == 6:
                break
        assert set(seen) == {"first", *(f"a_{number}" for number in range(5))}


async def test_the_elements_come_back_after_a_restart_and_a_repeated_call_finds_them(tmp_path: Path) -> None:
    async with run_controller(tmp_path) as rig:
        await rig.join(build_node(gpus=2))
        await rig.operators.submit_workload(submission("a", "0-9%2"))
        before = (await rig.operators.get_workload(GetWorkloadRequest(workload_id="a"))).workload
    async with run_controller(tmp_path) as rig:
        again = (await rig.operators.submit_workload(submission("a", "0-9%2"))).workload
        assert (again.array, again.submitted_ns) == (before.array, before.submitted_ns)
        assert len(await list_ids(rig)) == 10
