"""The one patch that a suspended Job gets, as the fake and a real API server take it."""

import pytest
from tests.builders.kubernetes import build_sizing_inputs, build_suspended_job
from tests.kubernetes_api_rig import WAYS, open_rig
from tests.waiting import wait_for

from eelgrid_controller.engines.kubernetes.api.errors import Conflict, Invalid
from eelgrid_controller.engines.kubernetes.api.port import JOBS, PatchKind
from eelgrid_controller.engines.kubernetes.model import well_known
from eelgrid_controller.engines.kubernetes.reconcilers.jobs import JobRightSizer, SuspendedJobUpdated


@pytest.fixture(params=WAYS)
async def rig(request):
    async with open_rig(request.param) as made:
        if (await made.cluster.discover()).minor < 36:
            pytest.skip("resources of suspended Jobs are mutable from 1.36 on")
        yield made


def applied(name, **how):
    """As its people would apply it."""
    found = build_suspended_job(name, **how)
    for key in ("uid", "resourceVersion", "generation", "namespace"):
        del found["metadata"][key]
    del found["status"]
    return found


async def suspended(rig, body):
    """A Job that its controller, where one runs, has looked at: that changes its version."""
    await rig.add(JOBS, body)

    async def seen():
        found = await rig.cluster.get(JOBS, "a", namespace=rig.space)
        return found if rig.fake is not None or not rig.has_controllers or found["status"].get("conditions") else None

    return await wait_for(seen)


def dealt_with(found):
    """The patch that it gets."""
    (write,) = JobRightSizer().on_events([SuspendedJobUpdated("Job", found)], build_sizing_inputs(), 0.0, leads=True)
    assert write.outcome == "changed"
    return write.operations


async def patched(rig, name, operations):
    return await rig.cluster.patch(JOBS, name, operations, PatchKind.JSON, namespace=rig.space)


async def test_request_record_and_start_go_in_one_patch(rig):
    made = await suspended(rig, applied("a", slowdown="95%", unsuspend="true"))
    assert made["metadata"]["generation"] == 1
    found = await patched(rig, "a", dealt_with(made))
    (container,) = [one for one in found["spec"]["template"]["spec"]["containers"] if one.get("resources")]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": "2"}, "requests": {"nvidia.com/gpu": "2"}}
    assert found["spec"]["suspend"] is False
    assert found["metadata"]["generation"] == 2
    assert well_known.ANNOTATION_RIGHT_SIZED in found["metadata"]["annotations"]


async def test_workers_and_completions_of_an_indexed_job_change_together(rig):
    body = applied("a", asks=1, pods=4, gpus=None, workers="2-4", slowdown="95%", spec={"completionMode": "Indexed"})
    body["spec"]["template"]["metadata"]["annotations"] = {well_known.ANNOTATION_KIND: "training-job"}
    found = await patched(rig, "a", dealt_with(await suspended(rig, body)))
    assert (found["spec"]["parallelism"], found["spec"]["completions"]) == (2, 2)


async def test_a_patch_of_another_version_or_another_job_is_a_conflict(rig):
    made = await suspended(rig, applied("a", slowdown="95%"))
    operations = dealt_with(made)
    note = {"metadata": {"annotations": {"example.org/a": "b"}}}
    await rig.cluster.patch(JOBS, "a", note, namespace=rig.space)
    with pytest.raises(Conflict):
        await patched(rig, "a", operations)
    await rig.cluster.delete(JOBS, "a", namespace=rig.space)

    async def is_gone():
        return not (await rig.cluster.list(JOBS, namespace=rig.space)).items

    await wait_for(is_gone)
    again = await suspended(rig, applied("a", slowdown="95%"))
    with pytest.raises(Conflict):
        await patched(rig, "a", operations)
    kept = await rig.cluster.get(JOBS, "a", namespace=rig.space)
    assert kept["spec"] == again["spec"]


async def test_one_that_started_takes_no_other_request(rig):
    made = await suspended(rig, applied("a", slowdown="95%"))
    operations = [one for one in dealt_with(made) if not one["path"].startswith("/metadata/")]
    await rig.cluster.patch(JOBS, "a", {"spec": {"suspend": False}}, namespace=rig.space)

    async def started():
        return (await rig.cluster.get(JOBS, "a", namespace=rig.space)).get("status", {}).get("startTime")

    if rig.has_controllers and rig.fake is None:
        await wait_for(started)
    with pytest.raises(Invalid):
        await patched(rig, "a", operations)
