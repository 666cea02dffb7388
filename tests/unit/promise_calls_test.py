"""The calls about promises over a real server: scale, points and measured pairs page by page, progress, and refusals."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from tests.builders.cluster import build_node, build_request
from tests.builders.server import run_controller

from eelgrid_controller.core import interference_estimates
from eelgrid_protos.faults import FailedPrecondition, InvalidArgument, NotFound
from eelgrid_protos.messages import (
    AttemptState,
    AttemptStatus,
    GpuSharing,
    JobProgress,
    LatencyMetric,
    LatencyObjective,
    ListInterferenceRequest,
    ListPointsRequest,
    ListPromisesRequest,
    MeasuredPoint,
    Mobility,
    ProcessSpec,
    QuantileLatency,
    RecordPointsRequest,
    ReportProgressRequest,
    ScaleWorkloadRequest,
    ServicePromise,
    SubmitWorkloadRequest,
    TrainingPromise,
    WorkloadKind,
)


def service(key: str = "s") -> SubmitWorkloadRequest:
    objective = LatencyObjective(metric=LatencyMetric.RESPONSE, latency_s=0.5)
    promise = ServicePromise(profile="chat", objectives=(objective,), replicas_most=3)
    return build_request(key, kind=WorkloadKind.INFERENCE_SERVICE, service=promise)


def job(key: str = "j") -> SubmitWorkloadRequest:
    return build_request(key, kind=WorkloadKind.TRAINING_JOB, training=TrainingPromise(slowdown_most=0.05))


def point(batch: int, profile: str = "chat") -> MeasuredPoint:
    latencies = (QuantileLatency(quantile=0.95, latency_s=0.01 * batch),)
    return MeasuredPoint(profile=profile, gpu_model="G2", throughput_hz=10.0 * batch, batch=batch, latencies=latencies)


async def test_scale(tmp_path: Path) -> None:
    async with run_controller(tmp_path) as rig:
        await rig.join(build_node(gpus=2))
        await rig.operators.submit_workload(service())
        more = (await rig.operators.scale_workload(ScaleWorkloadRequest(workload_id="s", replicas=3))).workload
        assert (more.spec.replicas, len(more.placements)) == (2, 2), "there is room for two"
        fewer = (await rig.operators.scale_workload(ScaleWorkloadRequest(workload_id="s", replicas=1))).workload
        assert len(fewer.placements) == 1
        # Repeating the submission that began it is harmless still.
        assert (await rig.operators.submit_workload(service())).workload.workload_id == "s"
        with pytest.raises(InvalidArgument) as caught:
            await rig.operators.scale_workload(ScaleWorkloadRequest(workload_id="s", replicas=4))
        assert caught.value.violations[0].field == "replicas"
        with pytest.raises(NotFound):
            await rig.operators.scale_workload(ScaleWorkloadRequest(workload_id="nobody", replicas=1))


async def test_points_come_back_in_order_and_survive_a_restart(tmp_path: Path) -> None:
    told = tuple(point(batch, profile) for profile in ("b", "a") for batch in (8, 1, 4))
    async with run_controller(tmp_path) as rig:
        assert (await rig.operators.record_points(RecordPointsRequest(points=told))).recorded == 6
        assert (await rig.operators.record_points(RecordPointsRequest(points=told[:2]))).recorded == 0
    async with run_controller(tmp_path) as rig:
        pages, token = [], ""
        while True:
            page = await rig.operators.list_points(ListPointsRequest(page_size=4, page_token=token))
            pages.append([(one.profile, one.batch) for one in page.points])
            token = page.next_page_token
            if not token:
                break
        assert pages == [[("a", 1), ("a", 4), ("a", 8), ("b", 1)], [("b", 4), ("b", 8)]]
        one = await rig.operators.list_points(ListPointsRequest(profile="b"))
        assert (one.total, one.points[0]) == (3, point(1, "b"))


async def test_measured_pairs_come_page_by_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Jobs are as fast at once as after their first minutes.
    monkeypatch.setattr(interference_estimates, "WARM_UP_NS", 0)
    steps, time_s = 0, 0.0
    async with run_controller(tmp_path) as rig:

        async def submit(key: str) -> None:
            process = ProcessSpec(argv=("true",), working_directory="/")
            sharing = GpuSharing(load=key)
            request = build_request(key, milli=300, process=process, mobility=Mobility.FIXED, gpu_sharing=sharing)
            assert (await rig.operators.submit_workload(request)).workload.placements
            begun = AttemptStatus(workload_id=key, replica=0, attempt=1, state=AttemptState.RUNNING, started_ns=1)
            await rig.controller.loop.command(lambda core, now_ns: core.record_attempts("n1", (begun,), now_ns=now_ns))

        async def report(key: str, step_s: float = 1.0, *, is_over: bool = False) -> None:
            """A hundred steps of a job, or its end."""
            nonlocal steps, time_s
            statuses = []
            for _ in range(1 if is_over else 100):
                steps, time_s = steps + 1, time_s + step_s
                status = AttemptStatus(workload_id=key, replica=0, attempt=1, state=AttemptState.RUNNING, started_ns=1)
                changes = {"state": AttemptState.ENDED, "exit_code": 0} if is_over else {}
                progress = JobProgress(step=steps, time_ns=int(time_s * 1e9))
                statuses.append(replace(status, progress=progress, **changes))
            await rig.controller.loop.command(lambda core, now_ns: core.record_attempts("n1", statuses, now_ns=now_ns))

        await rig.join(build_node(gpus=1, runs_processes=True))
        await submit("a")
        await report("a")
        for key, step_s in (("b", 1.25), ("c", 1.5)):
            await submit(key)
            await report("a", step_s)
            await report(key, is_over=True)
        first = await rig.operators.list_interference(ListInterferenceRequest(page_size=1))
        second = await rig.operators.list_interference(
            ListInterferenceRequest(page_size=1, page_token=first.next_page_token)
        )
        assert [(one.load, one.beside, one.jobs) for one in (*first.pairs, *second.pairs)] == [
            ("a", "b", 1),
            ("a", "c", 1),
        ]
        assert [one.slowdown for one in (*first.pairs, *second.pairs)] == pytest.approx([0.25, 0.5])
        assert (first.total, second.next_page_token) == (2, "")


async def test_progress_is_of_jobs_that_run_and_were_promised_anything(tmp_path: Path) -> None:
    async with run_controller(tmp_path) as rig:
        await rig.operators.submit_workload(job("waits"))
        await rig.join(build_node(gpus=4))
        await rig.operators.submit_workload(job())
        await rig.operators.submit_workload(service())
        await rig.operators.report_progress(ReportProgressRequest(workload_id="j", work_done=3.0))
        with pytest.raises(FailedPrecondition, match="training promise"):
            await rig.operators.report_progress(ReportProgressRequest(workload_id="s", work_done=3.0))
        with pytest.raises(NotFound):
            await rig.operators.report_progress(ReportProgressRequest(workload_id="nobody", work_done=3.0))


async def test_what_lacks_a_profile_says_so(tmp_path: Path) -> None:
    async with run_controller(tmp_path, steer_s=0.1) as rig:
        await rig.join(build_node(gpus=4))
        await rig.operators.submit_workload(service())
        await rig.operators.submit_workload(job())
        async with asyncio.timeout(60.0):
            found = await rig.operators.list_promises(ListPromisesRequest())
            while not (found.services and found.jobs):
                await asyncio.sleep(0.02)
                found = await rig.operators.list_promises(ListPromisesRequest())
        (status,) = found.services
        assert "eelctl profile import" in status.reason
        assert [one.workload_id for one in found.jobs] == ["j"]
