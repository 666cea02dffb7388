"""What pods' people want: promises, and refusals that name the annotation and the remedy."""

import pytest
from tests.builders.kubernetes import build_pod_model

from eelgrid_controller.engines.kubernetes.model.pod_group import IntentRefusal
from eelgrid_controller.engines.kubernetes.pods.intent import WorkloadIntent, parse_intent
from eelgrid_protos.messages import (
    LatencyMetric,
    LatencyObjective,
    Locality,
    MetricsServer,
    MetricsSource,
    Mobility,
    ResourceRequest,
    ServicePromise,
    TrainingPromise,
    WorkloadKind,
)
from eelgrid_protos.schema import check_message

DEPLOYED = ("apps/v1", "ReplicaSet", "llm-7d9f", "r1")
JOB = ("batch/v1", "Job", "etl", "j1")
BY = "eelgrid.io/"


def ours(**said):
    return {BY + key.replace("_", "-"): value for key, value in said.items()}


def wanted(**fields):
    found = parse_intent(build_pod_model(**fields), {})
    assert isinstance(found, WorkloadIntent), found
    check_message(found.spec)
    return found


def refused(**fields):
    found = parse_intent(build_pod_model(**fields), {})
    assert isinstance(found, IntentRefusal)
    assert found.problem
    assert found.remedy
    return found


def test_a_pod_of_a_deployment_serves_and_may_be_moved():
    found = wanted(owner=DEPLOYED, name="llm-7d9f-x2k", priority=7, labels={"kueue.x-k8s.io/queue-name": "team-a"})
    assert (found.unit.startswith("pod-uid-"), found.size) == (True, 1)
    assert found.spec.request == ResourceRequest(cpu_milli=4000, memory_bytes=16 * 1024**3, gpu_count=1, gpu_milli=1000)
    assert (found.spec.kind, found.spec.mobility) == (WorkloadKind.INFERENCE_SERVICE, Mobility.MOVABLE)
    assert (found.spec.name, found.spec.namespace) == ("llm-7d9f-x2k", "ml")
    assert (found.spec.priority, found.spec.queue, found.spec.locality) == (7, "team-a", Locality.UNSPECIFIED)
    assert found.spec.labels == {"owner": "Deployment/llm"}
    assert len(found.spec.required_traits) == 1
    assert found.spec.service is None


def test_the_queue_of_a_job_stands_on_its_pods_under_another_name():
    assert wanted(owner=JOB, labels={"kueue.x-k8s.io/local-queue-name": "team-a"}).spec.queue == "team-a"


@pytest.mark.parametrize(
    ("owner", "said", "kind", "mobility"),
    [
        (None, {}, WorkloadKind.BATCH_JOB, Mobility.FIXED),
        (JOB, {}, WorkloadKind.BATCH_JOB, Mobility.FIXED),
        (JOB, {"checkpoint_grace": "90s"}, WorkloadKind.BATCH_JOB, Mobility.RESTARTABLE),
        (("apps/v1", "StatefulSet", "db", "s"), {}, WorkloadKind.INFERENCE_SERVICE, Mobility.RESTARTABLE),
        (("ray.io/v1", "RayCluster", "ray", "y"), {}, WorkloadKind.BATCH_JOB, Mobility.FIXED),
        (DEPLOYED, {"kind": "batch-job"}, WorkloadKind.BATCH_JOB, Mobility.MOVABLE),
        (None, {"kind": "inference-service"}, WorkloadKind.INFERENCE_SERVICE, Mobility.FIXED),
    ],
)
def test_the_owner_says_the_kind_unless_the_people_do(owner, said, kind, mobility):
    found = wanted(owner=owner, annotations=ours(**said))
    assert (found.spec.kind, found.spec.mobility) == (kind, mobility)


def test_a_service_is_promised_its_latencies():
    found = wanted(
        owner=DEPLOYED,
        annotations=ours(
            rate="750/min",
            objective="p95 first_token 1s, p99 inter-token 50ms",
            output_tokens="250",
            profile="llama-70b",
            priority="-5",
            gpu_models="NVIDIA-H100-80GB-HBM3, H200",
            metrics="vllm http://{pod_ip}:8000/metrics model=llama",
        ),
    )
    assert found.spec.service == ServicePromise(
        profile="llama-70b",
        objectives=(
            LatencyObjective(metric=LatencyMetric.FIRST_TOKEN, latency_s=1.0, quantile=0.95),
            LatencyObjective(metric=LatencyMetric.INTER_TOKEN, latency_s=0.05, quantile=0.99),
        ),
        rate_hz=12.5,
        replicas_least=1,
        replicas_most=1,
        output_tokens=250.0,
    )
    assert found.spec.priority == -5
    assert found.spec.request.gpu_models == ("H100-80GB-HBM3", "H200")


def test_a_pod_says_who_is_charged():
    assert wanted(annotations=ours(user="ann@example.org")).spec.user == "ann@example.org"
    assert wanted(annotations=ours(kind="batch-job")).spec.user == ""


def test_metrics_by_node_stand_in_the_promise_itself():
    said = ours(objective="p95 response 200ms", profile="bert", metrics="triton http://{node}:8002/metrics")
    found = wanted(owner=DEPLOYED, annotations=said)
    assert found.spec.service.metrics.url == "http://{node}:8002/metrics"


def test_a_training_job_is_promised_a_slowdown():
    metrics = "generic http://{node}:9/metrics work=steps_total"
    found = wanted(annotations=ours(kind="training-job", slowdown="5%", metrics=metrics, work_unit="step"))
    assert found.spec.training == TrainingPromise(
        slowdown_most=0.05,
        metrics=MetricsSource(server=MetricsServer.GENERIC, url="http://{node}:9/metrics", work_counter="steps_total"),
        work_unit="step",
    )


@pytest.mark.parametrize("deadline", ["2026-11-22T10:00:00Z", "2026-11-22T11:00:00+01:00", "6h", "5h59m60s"])
def test_a_training_job_is_promised_a_deadline(deadline):
    found = wanted(annotations=ours(kind="training-job", deadline=deadline, work="10000", profile="gpt"))
    assert found.spec.training == TrainingPromise(profile="gpt", deadline_ns=1795341600 * 10**9, work=10000.0)


def test_gates_of_others_are_waited_for():
    gates = [
        {"name": "kueue.x-k8s.io/admission"},
        {"name": "eelgrid.io/placement"},
        {"name": "kueue.x-k8s.io/topology"},
    ]
    assert wanted(schedulingGates=gates).waits_for == ("kueue.x-k8s.io/admission", "kueue.x-k8s.io/topology")
    assert wanted().waits_for == ()


def test_priorities_of_kubernetes_are_bounded_by_the_contracts():
    assert wanted(priority=2_000_000_000).spec.priority == 1_000_000


def test_other_vendors_gpus_are_gpus_and_the_node_has_to_have_them():
    found = build_pod_model(gpus=0, requests={"amd.com/gpu": "4"})
    assert parse_intent(found, {}).spec.request.gpu_count == 4
    assert found.constraint.devices == (("amd.com/gpu", 4),)


@pytest.mark.parametrize(
    ("said", "field", "words"),
    [
        ({"kind": "service"}, "kind", "inference-service, training-job, batch-job"),
        ({"rate": "fast", "objective": "p95 response 1s"}, "rate", "750/min"),
        ({"rate": "5"}, "rate", "p95 response 200ms"),
        ({"output_tokens": "250"}, "output-tokens", "p95 response 200ms"),
        ({"objective": "fast"}, "objective", "p95 response 200ms"),
        ({"objective": "p95 latency 5ms", "profile": "x"}, "objective", "response, first_token, inter_token"),
        ({"objective": "p95 response soon", "profile": "x"}, "objective", "50ms, 90s or 1h30m"),
        ({"objective": "p95 response 1s,", "profile": "x"}, "objective", "such as"),
        ({"objective": "p20 response 1s", "profile": "x"}, "objective", ""),
        ({"objective": "p95 response 1s, p99 response 2s", "profile": "x"}, "objective", "one objective"),
        ({"objective": "p95 inter_token 50ms", "profile": "x"}, "output-tokens", "tokens of a usual answer"),
        ({"objective": "p95 response 200ms"}, "profile", "eelctl profile list"),
        ({"objective": "p95 response 1s", "profile": "x", "kind": "batch-job"}, "objective", "inference-service"),
        ({"slowdown": "5%"}, "slowdown", "training-job"),
        ({"kind": "training-job", "slowdown": "5"}, "slowdown", "write 5% if per cent are meant"),
        ({"kind": "training-job", "slowdown": "five"}, "slowdown", "5% or 0.05"),
        ({"kind": "training-job", "slowdown": "1%", "deadline": "1h", "work": "5"}, "slowdown", "one of"),
        ({"kind": "training-job", "deadline": "1h"}, "work", "amount of work"),
        ({"kind": "training-job", "slowdown": "1%", "work-unit": "Steps"}, "work-unit", "such as step or image"),
        ({"kind": "training-job", "work": "7"}, "deadline", "amount of work"),
        ({"kind": "training-job", "work": "7", "deadline": "tomorrow"}, "deadline", "2026-11-23T08:00:00Z"),
        ({"kind": "training-job", "work": "7", "deadline": "2026-11-23T08:00:00"}, "deadline", "00Z if UTC"),
        ({"kind": "training-job", "work": "7", "deadline": "1x0h"}, "deadline", "1h30m"),
        ({"priority": "high"}, "priority", "whole number"),
        ({"priority": "2000000"}, "priority", "inside"),
        ({"checkpoint_grace": "long"}, "checkpoint-grace", "90s"),
        ({"checkpoint_grace": ""}, "checkpoint-grace", "90s"),
        ({"metrics": "http://x"}, "metrics", "vllm http://{pod_ip}:8000/metrics"),
        ({"metrics": "vllm x:8000"}, "metrics", ""),
        ({"metrics": "vllm http://{pod_ip}/{job}"}, "metrics", "{node} and {replica} only"),
        ({"metrics": "vllm http://{pod_ip}/ loss=x"}, "metrics", "work=NAME"),
        ({"gpu_models": "a,,b"}, "gpu-models", "H100-80GB-HBM3"),
        ({"group": "g"}, "group-size", '"4"'),
        ({"group_size": "4"}, "group", "train-7"),
        ({"group": "g", "group_size": "0"}, "group-size", '"4"'),
        ({"group": "g", "group_size": "20000"}, "metadata", "10000"),
        ({"on_error": "retry"}, "on-error", "wait, schedule"),
        ({"slowdwon": "5%"}, "slowdwon", "is eelgrid.io/slowdown meant?"),
    ],
)
def test_what_is_wrong_is_named_with_its_remedy(said, field, words):
    found = refused(owner=DEPLOYED, annotations=ours(**said))
    assert found.field == (field if field == "metadata" else BY + field)
    assert words in found.remedy
    assert str(found) == f"{found.field}: {found.problem}; {found.remedy}"
    assert (found.is_released, found.needs) == (False, None)


def test_a_pod_with_a_fault_may_be_left_to_the_default_scheduler():
    assert refused(annotations=ours(kind="x", on_error="schedule")).is_released
    assert not refused(annotations=ours(kind="x", on_error="wait")).is_released


def test_annotations_that_resemble_none_of_ours_are_let_be():
    assert wanted(annotations=ours(note="hello", plan="{}")).spec.kind is WorkloadKind.BATCH_JOB


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        (
            {"gpus": 0, "requests": {"nvidia.com/mig-1g.10gb": "1"}},
            "resources[nvidia.com/mig-1g.10gb]",
            "--kubernetes-abilities slices",
        ),
        ({"gpus": 0, "requests": {"nvidia.com/gpu.shared": "1"}}, "resources[nvidia.com/gpu.shared]", "nvidia.com/gpu"),
        ({"gpus": 0, "resourceClaims": [{"name": "g"}]}, "spec.resourceClaims[g]", "mode dra"),
        ({"gpus": 65}, "spec.containers.resources", ""),
        ({"gpus": 0, "requests": {"cpu": "0", "memory": "0"}}, "spec.containers.resources", "ask for"),
        ({"gpus": 0, "annotations": ours(gpu_models="A100")}, "eelgrid.io/gpu-models", "gpu_count"),
    ],
)
def test_requests_that_this_mode_cannot_serve(fields, field, words):
    found = refused(**fields)
    assert found.field == field
    assert words in found.remedy


@pytest.mark.parametrize(
    "fields",
    [
        {"owner": ("apps/v1", "DaemonSet", "exporter", "d")},
        {"owner": ("v1", "Node", "n1", "n")},
        {"annotations": {"kubernetes.io/config.mirror": "x"}},
    ],
)
def test_daemonsets_and_static_pods_are_let_go_at_once(fields):
    assert refused(**fields).is_released


@pytest.mark.parametrize(
    ("owner", "said", "is_evicted"),
    [
        (JOB, None, True),
        (DEPLOYED, None, True),
        (("jobs.example/v1", "OwnJob", "x", "o1"), None, False),
        (("jobs.example/v1", "OwnJob", "x", "o1"), "true", True),
        (JOB, "false", False),
        (None, None, False),
        (None, "true", False),
    ],
)
def test_only_what_its_controller_makes_anew_may_have_to_make_room(owner, said, is_evicted):
    annotations = ours(preemptible=said) if said else None
    assert wanted(owner=owner, annotations=annotations).spec.evicted_by_engine is is_evicted


def test_a_word_on_preemption_that_is_none_is_refused():
    assert str(refused(owner=JOB, annotations=ours(preemptible="yes"))) == (
        "eelgrid.io/preemptible: is 'yes'; write true or false"
    )


def test_a_priority_class_that_never_preempts_is_read():
    assert wanted(owner=JOB, preemptionPolicy="Never").spec.never_preempts
    assert not wanted(owner=JOB, preemptionPolicy="PreemptLowerPriority").spec.never_preempts
