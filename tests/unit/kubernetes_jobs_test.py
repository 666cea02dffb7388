"""Suspended jobs: who is dealt with, what is written, and what is left alone."""

import json

import pytest
from tests.builders.kubernetes import (
    build_candidate,
    build_measurements,
    build_sizing_inputs,
    build_suspended_job,
    build_training_template,
    gate_job,
)
from tests.fakes.kubernetes.patches import json_patched

from eelgrid_controller.engines.kubernetes.model import well_known
from eelgrid_controller.engines.kubernetes.pods.gate_events import WriteFailure
from eelgrid_controller.engines.kubernetes.pods.suspended_job import (
    JobSize,
    parse_size_constraints,
    parse_suspended_job,
    record_text,
)
from eelgrid_controller.engines.kubernetes.reconcilers.jobs import (
    JobPatched,
    JobPatchFailed,
    JobRightSizer,
    PatchJob,
    RecordJobEvent,
    SuspendedJobDeleted,
    SuspendedJobUpdated,
)

LOOSE = {"slowdown": "95%"}


def one(found, *, kind="Job", at_s=0.0, jobs=None, **how):
    """The write that a job gets, or None."""
    jobs = JobRightSizer() if jobs is None else jobs
    told = jobs.on_events([SuspendedJobUpdated(kind, found)], build_sizing_inputs(**how), at_s, leads=True)
    assert len(told) <= 1
    return told[0] if told else None


def written(found, write):
    """The job after the patch, as far as the fields go that this looks at."""
    return json_patched(found, write.operations)


def record(found):
    return json.loads(found["metadata"]["annotations"][well_known.ANNOTATION_RIGHT_SIZED])


def gpus(found):
    return found["spec"]["template"]["spec"]["containers"][1]["resources"]


@pytest.mark.parametrize("text", ["[" * 100_000, "{", "[]", '{"job": "uid-other"}'])
def test_a_record_that_is_none_of_ours_keeps_nobody_from_its_turn(text):
    found = build_suspended_job(**LOOSE)
    found["metadata"]["annotations"][well_known.ANNOTATION_RIGHT_SIZED] = text
    assert one(found).outcome == "changed"


def test_four_gpus_become_two_and_nothing_else_changes():
    before = build_suspended_job(**LOOSE)
    write = one(before)
    after = written(before, write)
    assert gpus(after) == {"limits": {"nvidia.com/gpu": "2"}, "requests": {"nvidia.com/gpu": "2"}}
    assert after["spec"]["suspend"] is True
    assert record(after) == {
        "job": "uid-j",
        "outcome": "changed",
        "why": write.why.partition(": 2: ")[2],
        "before": {"pods": 1, "resource": "nvidia.com/gpu", "count": 4},
        "after": {"pods": 1, "resource": "nvidia.com/gpu", "count": 2},
        "energy": 0.8654,
        "speed": 0.52,
        "joules": {"H100-80GB-HBM3": [240.0, 207.7]},
        "basis": "measured",
    }
    for path in ("metadata/uid", "metadata/resourceVersion"):
        assert {
            "op": "replace",
            "path": f"/{path}",
            "value": before["metadata"][path.partition("/")[2]],
        } in write.operations
    container = after["spec"]["template"]["spec"]["containers"][1]
    assert container["env"] == [{"name": "A", "value": "b"}]


def test_who_ran_is_left_alone_whatever_it_says():
    for status in (
        {"startTime": "2026-11-22T05:00:00Z"},
        {"active": 1},
        {"succeeded": 1},
        {"conditions": [{"type": "Complete", "status": "True"}]},
        {"conditions": [{"type": "Suspended", "status": "False"}]},
    ):
        assert one(build_suspended_job(status=status, unsuspend="true", **LOOSE)) is None
    assert one(build_suspended_job(generation=3, **LOOSE)) is None
    assert one(build_suspended_job(spec={"suspend": False}, **LOOSE)) is None
    suspended = {"conditions": [{"type": "Suspended", "status": "True"}]}
    assert one(build_suspended_job(generation=2, status=suspended, **LOOSE)) is not None


def test_one_that_kueue_put_back_is_let_go_and_not_changed():
    before = gate_job(build_suspended_job(generation=5, queue="q", **LOOSE), "other.example/a")
    write = one(before)
    assert write.outcome == "released"
    assert written(before, write)["metadata"]["annotations"][well_known.KUEUE_GATED_BY] == "other.example/a"
    assert len(write.operations) == 3


def test_who_waits_for_us_and_asks_for_nothing_is_let_go():
    before = gate_job(build_suspended_job(right_size=None, queue="q", **LOOSE))
    write = one(before)
    assert write.outcome == "released"
    after = written(before, write)
    assert well_known.KUEUE_GATED_BY not in after["metadata"]["annotations"]
    assert after["spec"] == before["spec"]


def test_what_nobody_can_read_keeps_nobody_waiting():
    odd = gate_job(build_suspended_job("odd", queue="q"))
    del odd["spec"]["template"]["spec"]
    jobs = JobRightSizer()
    told = jobs.on_events(
        [SuspendedJobUpdated("Job", odd), SuspendedJobUpdated("Job", build_suspended_job(**LOOSE))],
        build_sizing_inputs(),
        0.0,
        leads=True,
    )
    assert [write.outcome for write in told] == ["kept", "changed"]
    assert "has no pods" in one(build_suspended_job(pods=0)).why
    assert "write one of true, recommend" in one(build_suspended_job(right_size="yes")).why


def test_who_does_not_ask_is_not_looked_at():
    assert parse_suspended_job("Job", build_suspended_job(right_size=None)) is None
    assert parse_suspended_job("Job", build_suspended_job(labels={well_known.LABEL_MANAGED: "false"})) is None


@pytest.mark.parametrize("notes", [LOOSE, {}, {"profile": None}, {"gpus": None}, {"slowdwon": "5%"}, {"gpus": "0-2"}])
def test_kueue_is_let_go_with_whatever_comes_of_it(notes):
    before = gate_job(build_suspended_job(queue="q", **notes))
    after = written(before, one(before))
    assert well_known.KUEUE_GATED_BY not in after["metadata"]["annotations"]
    assert record(after)["outcome"] == ("changed" if notes is LOOSE else "kept")
    assert after["spec"]["suspend"] is True  # Kueue starts it


def test_the_reason_names_field_and_remedy():
    assert "eelgrid.io/profile: is missing; name the profile" in one(build_suspended_job(profile=None)).why
    assert "say how many GPUs will do" in one(build_suspended_job(gpus=None)).why
    assert "is eelgrid.io/slowdown meant?" in one(build_suspended_job(slowdwon="5%")).why
    assert (
        "asks for no nvidia.com/gpu"
        in one(build_suspended_job(spec={"template": {"spec": {"containers": [{"name": "a"}]}}})).why
    )
    assert "was measured nowhere" in one(build_suspended_job(profile="other")).why
    assert "no node that it may come to" in one(build_suspended_job(), sites=()).why


def test_a_job_in_a_queue_that_nobody_holds_back_is_reported_and_not_changed():
    before = build_suspended_job(queue="q", **LOOSE)
    write = one(before)
    assert write.outcome == "recommended"
    assert "Kueue may start it at any moment" in write.why
    assert written(before, write)["spec"] == before["spec"]


def test_recommend_changes_nothing_and_starts_what_is_to_be_started():
    before = build_suspended_job(right_size="recommend", unsuspend="true", **LOOSE)
    after = written(before, one(before))
    assert record(after)["outcome"] == "recommended"
    assert record(after)["after"]["count"] == 2
    assert after["spec"] == {**before["spec"], "suspend": False}


def test_its_people_start_it_through_us_and_kueue_starts_its_own():
    assert (
        written(build_suspended_job(), one(build_suspended_job(unsuspend="true", **LOOSE)))["spec"]["suspend"] is False
    )
    assert written(build_suspended_job(), one(build_suspended_job(unsuspend="true")))["spec"]["suspend"] is False
    before = gate_job(build_suspended_job(unsuspend="true", queue="q"))
    assert written(before, one(before))["spec"]["suspend"] is True


def indexed(**notes):
    """Four workers of one GPU that train together."""
    found = build_suspended_job(asks=1, pods=4, spec={"completionMode": "Indexed"}, gpus=None, **LOOSE, **notes)
    found["spec"]["template"]["metadata"]["annotations"] = {well_known.ANNOTATION_KIND: "training-job"}
    return found


def test_workers_of_an_indexed_job_only_where_its_people_say_so():
    points = {"bert": build_measurements({4: (10.0, 2_400.0), 2: (5.2, 1_080.0)})}
    before = indexed(workers="2-4")
    after = written(before, one(before, points=points))
    assert (after["spec"]["parallelism"], after["spec"]["completions"]) == (2, 2)
    assert gpus(after)["limits"] == {"nvidia.com/gpu": "1"}
    apart = indexed(workers="2-4")
    del apart["spec"]["completionMode"]
    assert "asks for another number of pods" in one(apart, points=points).why
    grouped = indexed(workers="2-4")
    grouped["spec"]["template"]["spec"]["schedulingGroup"] = {"podGroupName": "g"}
    assert "without a PodGroup" in one(grouped, points=points).why


def test_a_slice_where_nodes_offer_it_and_mode_gate_does_not_place_the_pods():
    points = {"bert": (*build_measurements(), *build_measurements({1: (2.55, 300.0)}, mig="2g.20gb"))}
    sites = (build_candidate(), build_candidate("n1", gpus=4, **{"nvidia.com/mig-2g.20gb": "3"}))
    how = {"gpus": None, "slices": "2g.20gb", "slowdown": "5%"}
    before = build_suspended_job(asks=1, **how)
    after = written(before, one(before, points=points, sites=sites))
    assert gpus(after)["limits"] == {"nvidia.com/mig-2g.20gb": "1"}
    assert one(build_suspended_job(asks=1, **how), points=points).outcome == "kept"  # no node has any
    managed = build_suspended_job(
        asks=1, spec={"template": build_training_template(gpus=1, labels={well_known.LABEL_MANAGED: "true"})}, **how
    )
    assert "mode gate does not place" in one(managed, points=points, sites=sites).why


def test_nodes_that_it_cannot_come_to_do_not_count():
    elsewhere = build_candidate("n1", model="L40S", gpus=8, labels={"pool": "b"})
    assert one(build_suspended_job(**LOOSE), sites=(build_candidate(), elsewhere)).outcome == "kept"
    assert (
        one(build_suspended_job(gpu_models="H100-80GB-HBM3", **LOOSE), sites=(build_candidate(), elsewhere)).outcome
        == "changed"
    )
    chosen = build_suspended_job(**LOOSE)
    chosen["spec"]["template"]["spec"]["nodeSelector"] = {"pool": "a"}
    assert one(chosen, sites=(build_candidate(labels={"pool": "a"}), elsewhere)).outcome == "changed"


def test_a_deadline_is_the_work_over_the_time_left():
    wish = parse_size_constraints("Job", build_suspended_job(deadline="1h", work="36000"), now_s=5.0)
    assert wish.need_hz == pytest.approx(10.0)
    wish = parse_size_constraints("Job", build_suspended_job(deadline="1970-01-01T01:00:05Z", work="36000"), now_s=5.0)
    assert wish.need_hz == pytest.approx(10.0)
    assert parse_size_constraints(
        "Job", build_suspended_job(deadline="1970-01-01T00:00:05Z", work="1"), now_s=5.0
    ).need_hz == float("inf")
    assert "is missing" in one(build_suspended_job(deadline="1h")).why


def test_before_136_it_is_recommended_once():
    jobs, before = JobRightSizer(), build_suspended_job(unsuspend="true", **LOOSE)
    assert one(before, jobs=jobs).outcome == "changed"
    assert (
        jobs.on_events(
            [JobPatchFailed("uid-j", WriteFailure.INVALID, "field is immutable")],
            build_sizing_inputs(),
            1.0,
            leads=False,
        )
        == []
    )
    (again,) = jobs.on_events((), build_sizing_inputs(), 1.0, leads=True)
    assert again.outcome == "recommended"
    assert "field is immutable" in again.why
    after = written(before, again)
    assert after["spec"] == {**before["spec"], "suspend": False}
    (told,) = jobs.on_events([JobPatched("uid-j")], build_sizing_inputs(), 2.0, leads=True)
    assert isinstance(told, RecordJobEvent)
    assert jobs.on_events([SuspendedJobUpdated("Job", after)], build_sizing_inputs(), 900.0, leads=True) == []
    assert jobs.is_wasteful("uid-j")


def test_failures_wait_longer_each_time_and_are_reported_once():
    jobs = JobRightSizer()
    assert isinstance(one(build_suspended_job(), jobs=jobs), PatchJob)
    tells, at_s, waits = 0, 0.0, []
    for _ in range(12):
        tells += len(
            jobs.on_events(
                [JobPatchFailed("uid-j", WriteFailure.FORBIDDEN, "no")], build_sizing_inputs(), at_s, leads=False
            )
        )
        begin_s = at_s
        while not jobs.on_events((), build_sizing_inputs(), at_s, leads=True):
            at_s += 1.0
        waits.append(at_s - begin_s)
    assert tells == 1
    assert waits == sorted(waits)
    assert waits[-1] == 600.0


def test_a_conflict_is_looked_at_again_and_a_job_that_went_is_forgotten():
    jobs = JobRightSizer()
    one(build_suspended_job(), jobs=jobs)
    assert (
        jobs.on_events([JobPatchFailed("uid-j", WriteFailure.CONFLICT)], build_sizing_inputs(), 0.0, leads=True) == []
    )
    (again,) = jobs.on_events(
        [SuspendedJobUpdated("Job", build_suspended_job(version="8"))], build_sizing_inputs(), 1.0, leads=True
    )
    assert again.job.version == "8"
    jobs.on_events([SuspendedJobDeleted("uid-j")], build_sizing_inputs(), 2.0, leads=True)
    assert not len(jobs)


def test_a_prediction_is_waited_for_and_not_for_long():
    jobs, coming = JobRightSizer(), frozenset({"bert"})
    assert one(build_suspended_job(profile="bert"), jobs=jobs, coming=coming, points={}) is None
    assert jobs.is_waiting(0.0)
    assert jobs.pending_profiles() == {"bert"}
    assert jobs.on_events((), build_sizing_inputs(coming=coming, points={}), 59.0, leads=True) == []
    (write,) = jobs.on_events((), build_sizing_inputs(coming=coming, points={}), 60.0, leads=True)
    assert write.outcome == "kept"
    # It did not come: the next job of the profile does not wait, nor does one of which all is known.
    assert one(build_suspended_job("k"), jobs=jobs, at_s=61.0, coming=coming, points={}).outcome == "kept"
    assert one(build_suspended_job(**LOOSE), coming=coming).outcome == "changed"
    assert one(build_suspended_job(gpus="1-8", **LOOSE), coming=coming) is None


def test_a_copied_record_is_of_another_job():
    copied = build_suspended_job(right_sized=record_text("uid-other", "changed", ""), **LOOSE)
    assert one(copied).outcome == "changed"
    assert one(build_suspended_job(right_sized="no json", **LOOSE)).outcome == "changed"
    assert one(build_suspended_job(right_sized=record_text("uid-j", "kept", ""), **LOOSE)) is None


def test_only_who_leads_writes():
    jobs = JobRightSizer()
    assert (
        jobs.on_events([SuspendedJobUpdated("Job", build_suspended_job())], build_sizing_inputs(), 0.0, leads=False)
        == []
    )
    assert len(jobs.on_events((), build_sizing_inputs(), 50.0, leads=True)) == 1


def pytorch_job(**notes):
    found = build_suspended_job(**notes)
    workers = {"replicas": 3, "template": build_training_template(gpus=2)}
    found["spec"] = {
        "runPolicy": {"suspend": True},
        "pytorchReplicaSpecs": {
            "Master": {"replicas": 1, "template": build_training_template(gpus=2)},
            "Worker": workers,
        },
    }
    return found


def test_a_pytorch_job_is_changed_in_all_its_parts():
    before = pytorch_job(unsuspend="true", **LOOSE)
    write = one(before, kind="PyTorchJob")
    after = written(before, write)
    counts = [
        part["template"]["spec"]["containers"][1]["resources"]["limits"]["nvidia.com/gpu"]
        for part in after["spec"]["pytorchReplicaSpecs"].values()
    ]
    assert counts == ["1", "1"]
    assert after["spec"]["runPolicy"]["suspend"] is False
    assert record(after)["before"] == {"pods": 4, "resource": "nvidia.com/gpu", "count": 2}
    running = pytorch_job(**LOOSE)
    running["status"] = {"conditions": [{"type": "Running", "status": "True"}]}
    assert one(running, kind="PyTorchJob") is None


def test_of_jobsets_and_trainjobs_a_size_is_recommended():
    jobset = build_suspended_job(**LOOSE)
    jobset["spec"] = {
        "suspend": True,
        "replicatedJobs": [
            {
                "name": "w",
                "replicas": 2,
                "template": {"spec": {"parallelism": 1, "template": build_training_template()}},
            }
        ],
    }
    train = build_suspended_job(**LOOSE)
    resources = {"limits": {"nvidia.com/gpu": 4}}
    train["spec"] = {"suspend": True, "trainer": {"numNodes": 2, "resourcesPerNode": resources}}
    for kind, found in (("JobSet", jobset), ("TrainJob", train)):
        write = one(found, kind=kind)
        assert write.outcome == "recommended"
        assert f"the requests of a {kind} are fixed" in write.why
        assert written(found, write)["spec"] == found["spec"]
        assert record(written(found, write))["after"] == {"pods": 2, "resource": "nvidia.com/gpu", "count": 2}
    del train["spec"]["trainer"]["numNodes"]
    assert "spec.trainer.numNodes: is missing" in one(train, kind="TrainJob").why


def test_claims_and_several_containers_are_sized_by_hand():
    claimed = build_suspended_job(**LOOSE)
    claimed["spec"]["template"]["spec"]["resourceClaims"] = [{"name": "a"}]
    assert "by claim" in one(claimed).why
    two = build_suspended_job(**LOOSE)
    containers = two["spec"]["template"]["spec"]["containers"]
    containers.append(containers[1])
    assert "several containers" in one(two).why


def test_the_wish_is_read_from_the_template_and_the_job_goes_before():
    found = build_suspended_job(profile=None)
    notes = {
        well_known.ANNOTATION_PROFILE: "mine",
        well_known.ANNOTATION_GPUS: "1",
        well_known.ANNOTATION_SLOWDOWN: "10%",
    }
    found["spec"]["template"]["metadata"]["annotations"] = notes
    wish = parse_size_constraints("Job", found, now_s=0.0)
    assert (wish.profile, wish.gpus, wish.slowdown_most) == ("mine", (1, 2, 4, 8), 0.1)
    assert wish.asked == JobSize(1, 4)
    jobs = JobRightSizer()
    jobs.on_events([SuspendedJobUpdated("Job", found)], build_sizing_inputs(), 0.0, leads=False)
    assert jobs.pending_profiles() == {"mine"}
