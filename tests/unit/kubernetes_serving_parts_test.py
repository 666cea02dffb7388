"""InferenceServices as values: what is read, how many replicas follow, what the status says, what the core takes over."""

import pytest
from tests.serving_rig import inference_service

from eelgrid_controller.engines.kubernetes.model.inference_service import (
    InferenceService,
    ServiceIndex,
    ServiceRejection,
    metrics_url,
    parse_service,
)
from eelgrid_controller.engines.kubernetes.model.pod_group import PodKey
from eelgrid_controller.engines.kubernetes.model.status_reporting import ConditionSet
from eelgrid_controller.engines.kubernetes.reconcilers.inference_services import (
    LOWEST_DELETION_COST,
    ReplicaCounts,
    ScaleSubresourceWriter,
    ServiceFacts,
    SetDeletionCost,
    SetReplicas,
    build_service_status,
    format_duration,
    is_same_status,
    max_surge,
    rejected_status,
)
from eelgrid_protos.messages import LatencyMetric, LoadMetric, LoadTarget, ServiceStatus


def read(**spec):
    found = parse_service(inference_service(**spec))
    assert isinstance(found, InferenceService), found
    return found


def test_a_service_is_read_whole():
    objectives = [
        {"metric": "FirstToken", "percentile": 90, "atMost": "1m1.5s"},
        {"metric": "InterToken", "percentile": 95, "atMost": "50ms"},
    ]
    metrics = {"server": "ray_serve", "port": 8000, "path": "/m"}
    models = {"gpuModels": ["NVIDIA-H100-80GB-HBM3", "H200"], "allowed": ["Whole", "1g.10gb"]}
    found = read(
        objectives=objectives, outputTokens=200, requestsPerSecond="500m", metrics=metrics, slices=models, profile=""
    )
    first, inter = found.promise.objectives
    assert (first.metric, first.latency_s, first.quantile) == (LatencyMetric.FIRST_TOKEN, 61.5, 0.9)
    assert (inter.latency_s, found.promise.rate_hz, found.promise.output_tokens) == (0.05, 0.5, 200.0)
    assert found.promise.profile == "x.chat"
    assert found.gpu_models == ("H100-80GB-HBM3", "H200")
    assert metrics_url(found.pages, "fd00::1") == "http://[fd00::1]:8000/m"
    assert (found.least, found.most, found.mode) == (1, 8, "Enforce")


def test_a_service_may_follow_a_load_without_a_profile():
    metrics = {"server": "vllm", "port": 8000}
    follows = {"objectives": [], "profile": "", "requestsPerSecond": None}
    found = read(loadTarget={"metric": "Tokens", "perReplica": "2.5k"}, metrics=metrics, **follows)
    assert found.promise.load_target == LoadTarget(metric=LoadMetric.TOKENS, per_replica=2500.0)
    assert (found.promise.profile, found.promise.objectives) == ("", ())
    metrics = {"server": "generic", "port": 1, "latencyHistogram": "app_seconds", "waitingGauge": "app_inside"}
    found = read(loadTarget={"metric": "InFlight", "perReplica": 8}, metrics=metrics, **follows)
    assert found.promise.metrics.waiting_gauge == "app_inside"


@pytest.mark.parametrize(
    ("spec", "reason", "field"),
    [
        ({"slices": {"allowed": ["1g.10gb"]}}, "SlicesNotServed", "spec.slices.allowed"),
        (
            {"objectives": [{"metric": "FirstToken", "percentile": 95, "atMost": "1s"}]},
            "PromiseNotKept",
            "spec.objectives",
        ),
        ({"objectives": [{"metric": "Response", "percentile": 95, "atMost": "soon"}]}, "Unreadable", "spec.objectives"),
        ({"objectives": []}, "PromiseNotKept", "spec.objectives"),
        ({"loadTarget": {"metric": "Tokens", "perReplica": 1}}, "PromiseNotKept", "spec.objectives"),
        (
            {
                "objectives": [],
                "profile": "",
                "loadTarget": {"metric": "InFlight", "perReplica": 1},
                "requestsPerSecond": None,
                "metrics": {"server": "generic", "port": 1, "latencyHistogram": "app_seconds"},
            },
            "PromiseNotKept",
            "spec.metrics.waitingGauge",
        ),
        (
            {"objectives": [], "profile": "", "loadTarget": {"metric": "Requests", "perReplica": 1}},
            "PromiseNotKept",
            "spec.requestsPerSecond",
        ),
        (
            {
                "objectives": [],
                "profile": "",
                "loadTarget": {"metric": "Tokens", "perReplica": 1},
                "requestsPerSecond": None,
                "metrics": {"server": "triton", "port": 1},
            },
            "PromiseNotKept",
            "spec.loadTarget.metric",
        ),
        (
            {"objectives": [], "loadTarget": {"metric": "Requests", "perReplica": 0}, "requestsPerSecond": None},
            "PromiseNotKept",
            "spec.loadTarget.perReplica",
        ),
        ({"targetRef": None}, "Unreadable", "spec"),
        ({"replicas": {"least": 3, "most": 2}}, "Unreadable", "spec.replicas"),
    ],
)
def test_what_cannot_be_kept_names_the_field(spec, reason, field):
    found = parse_service(inference_service(**spec))
    assert isinstance(found, ServiceRejection)
    assert (found.reason, found.field) == (reason, field)
    status, conditions = rejected_status(found, 3, ConditionSet(), 10**18)
    assert status["replicas"] is None
    assert [(one.type, one.status, one.reason) for one in conditions] == [("Accepted", False, reason)]


def test_of_two_services_with_one_target_the_older_has_it():
    old = read()
    new = InferenceService(
        **{name: getattr(old, name) for name in old.__slots__} | {"uid": "t", "created": "2026-11-23T00:00:00Z"}
    )
    services = ServiceIndex()
    assert services.replace_services([new, old]) == {old.target}
    assert services.find_rival("t") == old
    assert services.find_rival("s") is None
    assert services.replace_services([new]) == {old.target}
    assert services.replace_services([new]) == frozenset()


def wanted(service, replicas, **others):
    return InferenceService(
        **{name: getattr(service, name) for name in service.__slots__} | {"wanted": replicas} | others
    )


def test_pods_that_go_are_marked_before_the_number_is_lowered():
    service, scaling = wanted(read(), 3), ScaleSubresourceWriter()
    gone = (PodKey("x", "p"), "u", "")
    seen = ReplicaCounts(places=2, lasting=2, pods=3, placed=2, let_go=(gone,))
    assert scaling.reconcile_replicas(service, "7", seen, 0.0) == [
        SetDeletionCost(PodKey("x", "p"), "u", LOWEST_DELETION_COST)
    ]
    marked = ReplicaCounts(
        places=2, lasting=2, pods=3, placed=2, let_go=((PodKey("x", "p"), "u", LOWEST_DELETION_COST),)
    )
    assert scaling.reconcile_replicas(service, "8", marked, 1.0) == [SetReplicas(service.target, "8", 2)]
    scaling.on_written(2, "9", 1.5)
    # The informer has not heard of it yet: an older target says nothing.
    assert scaling.reconcile_replicas(service, "8", marked, 2.0) == []
    assert scaling.reconcile_replicas(wanted(read(), 2), "9", marked, 3.0) == []
    assert scaling.advice_reason == "RollingOver"


def test_a_number_is_never_lowered_for_pods_that_are_yet_to_come():
    service = wanted(read(), 3)
    for seen in (
        ReplicaCounts(),
        ReplicaCounts(places=1, lasting=1, pods=1, placed=1),
        ReplicaCounts(pods=3, waiting=3),
        ReplicaCounts(pods=3, beside=3),
    ):
        assert ScaleSubresourceWriter().reconcile_replicas(service, "1", seen, 0.0) == []


def test_a_write_without_an_answer_is_not_the_word_of_others():
    service, scaling = wanted(read(), 2), ScaleSubresourceWriter()
    seen = ReplicaCounts(places=3, lasting=3, vacant=1, pods=2, placed=2)
    assert scaling.reconcile_replicas(service, "7", seen, 0.0) == [SetReplicas(service.target, "7", 3)]
    assert scaling.reconcile_replicas(wanted(read(), 3), "8", seen, 1.0) == []
    assert (scaling.agreed, scaling.advice) == (3, "")
    scaling.reconcile_replicas(wanted(read(), 5), "9", seen, 2.0)
    assert scaling.advice_reason == "ScaledByOthers"


def test_a_lost_write_is_ours_also_where_another_number_was_wanted_since():
    service, scaling = wanted(read(), 1), ScaleSubresourceWriter()
    two = ReplicaCounts(places=2, lasting=2, vacant=1, pods=1, placed=1)
    assert scaling.reconcile_replicas(service, "7", two, 0.0) == [SetReplicas(service.target, "7", 2)]
    # It was written and the answer lost; the load rises on before the target is heard of again.
    three = ReplicaCounts(places=3, lasting=3, vacant=2, pods=1, placed=1)
    assert scaling.reconcile_replicas(service, "7", three, 1.0) == [SetReplicas(service.target, "7", 3)]
    came = ReplicaCounts(places=3, lasting=3, vacant=1, pods=2, placed=2)
    assert scaling.reconcile_replicas(wanted(read(), 2), "8", came, 2.0) == [SetReplicas(service.target, "8", 3)]
    assert (scaling.agreed, scaling.advice) == (2, "")
    # What was asked of an older target did not come about: now that number is the word of others.
    scaling.reconcile_replicas(wanted(read(), 2), "9", came, 3.0)
    scaling.reconcile_replicas(wanted(read(), 1), "10", came, 4.0)
    assert scaling.advice_reason == "ScaledByOthers"


def test_who_scales_again_and_again_is_left_alone_for_longer():
    service, scaling = read(), ScaleSubresourceWriter()
    at_s, spans = 0.0, []
    for replicas in (2, 3, 4, 5):
        seen = ReplicaCounts(places=replicas, lasting=replicas, pods=replicas, placed=replicas)
        scaling.reconcile_replicas(wanted(service, replicas), "1", seen, at_s)
        begun_s = at_s
        while scaling.advice_reason == "ScaledByOthers":
            at_s += 10.0
            scaling.reconcile_replicas(wanted(service, replicas), "1", seen, at_s)
        spans.append(at_s - begun_s)
    assert spans == [0.0, 300.0, 600.0, 1200.0]


def test_a_status_says_what_is_kept_and_changes_only_when_something_did():
    service, scaling = wanted(read(metrics={"server": "vllm", "port": 8000}), 2), ScaleSubresourceWriter(agreed=2)
    standing = ServiceStatus(
        workload_id="w", name="chat", objective_s=1.0, live_s=0.5, modelled_s=0.4321, reason="steady"
    )
    facts = ServiceFacts(
        seen=ReplicaCounts(places=2, lasting=2, pods=2, placed=2),
        is_begun=True,
        gpu_models=("H", "H"),
        power_w=1399.6,
        standing=standing,
    )
    status, conditions = build_service_status(service, scaling, facts, ConditionSet(), 10**18)
    assert (status["replicas"], status["desiredReplicas"], status["powerWatts"], status["gpuModel"]) == (
        2,
        2,
        1400,
        "H",
    )
    assert status["latency"][0]["measured"] == "500ms"
    assert status["latency"][0]["modelled"] == "432ms"
    assert all(conditions.is_true(one) for one in ("Accepted", "Placed", "PromiseKept", "ScalingActive"))
    later, again = build_service_status(service, scaling, facts, conditions, 2 * 10**18)
    assert is_same_status(status, later)
    assert again == conditions
    late = ServiceStatus(workload_id="w", name="chat", objective_s=1.0, live_s=2.0, reason="rising")
    broken, turned = build_service_status(
        service, scaling, ServiceFacts(seen=facts.seen, is_begun=True, standing=late), conditions, 3 * 10**18
    )
    assert not is_same_status(status, broken, is_rough=True)
    assert turned.get("PromiseKept").since_s == 3 * 10**9
    assert turned.get("Placed").since_s == 10**9


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0431, "43ms"), (1.25, "1.2s"), (61.0, "61s"), (2e-5, "20us"), (0.0, "0.0us")]
)
def test_times_are_written_as_people_read_them(seconds, text):
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("strategy", "surge"),
    [
        ({}, 2),
        ({"type": "Recreate"}, 0),
        ({"rollingUpdate": {"maxSurge": 3}}, 3),
        ({"rollingUpdate": {"maxSurge": "100%"}}, 5),
    ],
)
def test_pods_beside_others_in_a_rollover(strategy, surge):
    assert max_surge("Deployment", {"replicas": 5, "strategy": strategy}) == surge
    assert max_surge("StatefulSet", {"replicas": 5}) == 0
