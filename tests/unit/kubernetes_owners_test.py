"""Who stands or falls with whom, on objects as each project's controller makes them."""

import asyncio
import logging
from types import SimpleNamespace

import pytest
from tests.builders.kubernetes import build_owner_lookup, build_pod_model, parse_manifest

from eelgrid_controller.engines.kubernetes.model.pod_group import (
    GangMembership,
    IntentRefusal,
    ObjectRef,
    membership_of,
    parse_owner_template,
)
from eelgrid_controller.engines.kubernetes.model.queue_labels import QueueLabels, parse_local_queue
from eelgrid_controller.engines.kubernetes.pods.intent import WorkloadIntent, parse_intent
from eelgrid_controller.engines.kubernetes.reconcilers.reconciler import BackgroundTasks
from eelgrid_controller.engines.kubernetes.reconcilers.related_objects import OwnerLookups
from eelgrid_protos.messages import Locality, Mobility, WorkloadKind

GPU = "{spec: {containers: [{name: main, resources: {limits: {nvidia.com/gpu: 8}}}]}}"
CPU = "{spec: {containers: [{name: main, resources: {requests: {cpu: 1}}}]}}"

JOB_SET = f"""
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata: {{namespace: ml, name: pre, uid: js}}
spec:
  replicatedJobs:
  - name: driver
    template: {{spec: {{template: {CPU}}}}}
  - name: workers
    replicas: 2
    template: {{spec: {{parallelism: 4, completions: 4, template: {GPU}}}}}
  - name: spare
    replicas: 0
    template: {{spec: {{template: {GPU}}}}}
"""


def of_job_set(part, index, *, attempt=None):
    labels = {
        "jobset.sigs.k8s.io/jobset-name": "pre",
        "jobset.sigs.k8s.io/replicatedjob-name": part,
        "jobset.sigs.k8s.io/job-index": "0",
        "jobset.sigs.k8s.io/job-global-index": str(index),
        "batch.kubernetes.io/job-name": f"pre-{part}-0",
        **({"jobset.sigs.k8s.io/restart-attempt": attempt} if attempt else {}),
    }
    return build_pod_model(labels=labels, owner=("batch/v1", "Job", f"pre-{part}-0", "job-uid"))


def test_the_workers_of_a_job_set_are_one_gang_and_its_driver_is_beside_it():
    holders = build_owner_lookup("jobset.x-k8s.io", JOB_SET)
    workers = membership_of(of_job_set("workers", 1), holders)
    assert workers == GangMembership("gang-js-workers", 8, "JobSet", "pre")
    driver = membership_of(of_job_set("driver", 0), holders)
    assert driver == GangMembership("gang-js-driver", 1, "JobSet", "pre")
    assert membership_of(of_job_set("workers", 1, attempt="2"), holders).unit == "gang-js-r2-workers"
    assert membership_of(of_job_set("workers", 1, attempt="0"), holders).unit == "gang-js-workers"


def test_a_gang_is_packed_and_named_by_its_owner():
    found = parse_intent(of_job_set("workers", 1), build_owner_lookup("jobset.x-k8s.io", JOB_SET))
    assert isinstance(found, WorkloadIntent)
    assert (found.spec.name, found.spec.replicas, found.size) == ("pre", 8, 8)
    assert (found.spec.locality, found.spec.mobility) == (Locality.PACK, Mobility.FIXED)
    assert found.spec.kind is WorkloadKind.BATCH_JOB


@pytest.mark.parametrize("order", ["dependsOn", "InOrder"])
def test_parts_that_start_one_after_another_are_gangs_of_their_own(order):
    text = JOB_SET.replace(CPU, GPU)
    both = membership_of(of_job_set("workers", 1), build_owner_lookup("jobset.x-k8s.io", text))
    assert (both.unit, both.size) == ("gang-js", 9)
    if order == "InOrder":
        text += "  startupPolicy: {startupPolicyOrder: InOrder}\n"
    else:
        text = text.replace(
            "  - name: workers\n", "  - name: workers\n    dependsOn: [{name: driver, status: Ready}]\n"
        )
    one = membership_of(of_job_set("workers", 1), build_owner_lookup("jobset.x-k8s.io", text))
    assert (one.unit, one.size) == ("gang-js-workers", 8)


def test_a_train_job_stands_above_its_job_set():
    text = JOB_SET.replace(
        "uid: js",
        "uid: js, ownerReferences: [{apiVersion: trainer.kubeflow.org/v1alpha1, kind: TrainJob, name: tj, uid: t, controller: true}]",
    )
    found = parse_intent(of_job_set("workers", 0), build_owner_lookup("jobset.x-k8s.io", text))
    assert (found.spec.labels, found.unit) == ({"owner": "TrainJob/tj"}, "gang-js-workers")
    assert found.spec.kind is WorkloadKind.TRAINING_JOB


LWS = f"""
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
metadata: {{namespace: ml, name: llm, uid: lw}}
spec:
  replicas: 2
  startupPolicy: LeaderCreated
  leaderWorkerTemplate:
    size: 4
    workerTemplate: {GPU}
"""


def of_lws(worker, *, size="4"):
    return build_pod_model(
        labels={
            "leaderworkerset.sigs.k8s.io/name": "llm",
            "leaderworkerset.sigs.k8s.io/group-index": "1",
            "leaderworkerset.sigs.k8s.io/worker-index": str(worker),
            "leaderworkerset.sigs.k8s.io/group-key": "8d5f",
        },
        annotations={"leaderworkerset.sigs.k8s.io/size": size} if size else None,
        owner=("apps/v1", "StatefulSet", "llm-1" if worker else "llm", "sts"),
    )


def test_a_group_of_a_leader_worker_set_is_a_gang():
    holders = build_owner_lookup("leaderworkerset.x-k8s.io", LWS)
    assert membership_of(of_lws(0), holders) == GangMembership("gang-lw-1", 4, "LeaderWorkerSet", "llm")
    assert membership_of(of_lws(3), holders) == GangMembership("gang-lw-1", 4, "LeaderWorkerSet", "llm")
    found = parse_intent(of_lws(0), holders)
    assert (found.spec.kind, found.spec.mobility) == (WorkloadKind.INFERENCE_SERVICE, Mobility.RESTARTABLE)
    # A group that was made before the set was changed says so itself.
    assert membership_of(of_lws(3, size="6"), holders).size == 6


def test_a_leader_of_its_own_template_is_a_unit_of_its_own():
    holders = build_owner_lookup("leaderworkerset.x-k8s.io", LWS + f"    leaderTemplate: {CPU}\n")
    assert membership_of(of_lws(0), holders)[:2] == ("gang-lw-1-leader", 1)
    assert membership_of(of_lws(2), holders)[:2] == ("gang-lw-1-worker", 3)


def test_workers_that_come_when_the_leader_is_ready_are_not_waited_for():
    holders = build_owner_lookup("leaderworkerset.x-k8s.io", LWS.replace("LeaderCreated", "LeaderReady"))
    assert membership_of(of_lws(0), holders)[:2] == ("gang-lw-1-leader", 1)
    assert membership_of(of_lws(2), holders)[:2] == ("gang-lw-1-worker", 3)


def test_a_set_that_may_not_be_read_still_has_the_size_on_its_pods():
    missing = {ObjectRef("leaderworkerset.x-k8s.io", "LeaderWorkerSet", "ml", "llm"): None}
    assert membership_of(of_lws(2), missing)[:2] == ("gang-ml/llm-1", 4)
    assert membership_of(of_lws(2, size=None), missing).field == "leaderworkerset.sigs.k8s.io/size"


PYTORCH = f"""
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {{namespace: ml, name: ddp, uid: pt}}
spec:
  pytorchReplicaSpecs:
    Master: {{template: {GPU}}}
    Worker: {{replicas: 3, template: {GPU}}}
"""


def of_pytorch(part, index, *, uid="pt", kind="PyTorchJob"):
    labels = {
        "training.kubeflow.org/job-name": "ddp",
        "training.kubeflow.org/operator-name": "pytorchjob-controller",
        "training.kubeflow.org/replica-type": part,
        "training.kubeflow.org/replica-index": str(index),
    }
    return build_pod_model(labels=labels, owner=("kubeflow.org/v1", kind, "ddp", uid))


def test_master_and_workers_of_one_template_are_one_gang_that_trains():
    holders = build_owner_lookup("kubeflow.org", PYTORCH)
    assert membership_of(of_pytorch("master", 0), holders) == GangMembership("gang-pt", 4, "PyTorchJob", "ddp")
    assert membership_of(of_pytorch("worker", 2), holders) == GangMembership("gang-pt", 4, "PyTorchJob", "ddp")
    assert parse_intent(of_pytorch("worker", 2), holders).spec.kind is WorkloadKind.TRAINING_JOB


def test_a_job_of_the_same_name_is_not_the_pods_own():
    found = membership_of(of_pytorch("worker", 0, uid="older"), build_owner_lookup("kubeflow.org", PYTORCH))
    assert isinstance(found, IntentRefusal)
    assert found.needs is None


def test_a_launcher_is_not_of_the_gang_that_it_starts():
    text = PYTORCH.replace("PyTorchJob", "MPIJob").replace("pytorch", "mpi").replace("Master", "Launcher")
    holders = build_owner_lookup("kubeflow.org", text)
    assert membership_of(of_pytorch("worker", 0, kind="MPIJob"), holders)[:2] == ("gang-pt", 3)
    assert membership_of(of_pytorch("launcher", 0, kind="MPIJob"), holders)[:2] == ("gang-pt-launcher", 1)


def test_what_is_not_known_yet_is_asked_for():
    for one, ref in (
        (of_job_set("workers", 0), ObjectRef("jobset.x-k8s.io", "JobSet", "ml", "pre")),
        (of_lws(0), ObjectRef("leaderworkerset.x-k8s.io", "LeaderWorkerSet", "ml", "llm")),
        (of_pytorch("worker", 0), ObjectRef("kubeflow.org", "PyTorchJob", "ml", "ddp")),
        (build_pod_model(schedulingGroup={"podGroupName": "g"}), ObjectRef("scheduling.k8s.io", "PodGroup", "ml", "g")),
    ):
        found = parse_intent(one, {})
        assert (found.needs, found.is_released) == (ref, False)
    # Nobody is at fault, so nobody's word on faults counts.
    trusting = build_pod_model(schedulingGroup={"podGroupName": "g"}, annotations={"eelgrid.io/on-error": "schedule"})
    assert not parse_intent(trusting, {}).is_released


def test_a_job_that_cannot_be_read_is_refused_with_both_ways_out():
    found = parse_intent(of_job_set("workers", 0), {ObjectRef("jobset.x-k8s.io", "JobSet", "ml", "pre"): None})
    assert found.needs is None
    assert "eelgrid.io/group-size" in found.remedy
    assert "grant get and watch" in found.remedy


@pytest.mark.parametrize(
    ("policy", "unit", "size"), [("{gang: {minCount: 4}}", "gang-pg", 4), ("{basic: {}}", "pod-", 1)]
)
def test_a_pod_group_says_how_many_go_together(policy, unit, size):
    text = f"{{kind: PodGroup, metadata: {{namespace: ml, name: g, uid: pg}}, spec: {{schedulingPolicy: {policy}}}}}"
    found = membership_of(
        build_pod_model(schedulingGroup={"podGroupName": "g"}), build_owner_lookup("scheduling.k8s.io", text)
    )
    assert found.unit.startswith(unit)
    assert found.size == size


def test_a_pod_group_of_kueue_is_a_gang_unless_it_serves():
    labels = {
        "kueue.x-k8s.io/queue-name": "q",
        "kueue.x-k8s.io/pod-group-name": "sample",
        "kueue.x-k8s.io/pod-group-pod-index": "1",
    }
    total = {"kueue.x-k8s.io/pod-group-total-count": "2"}
    found = membership_of(build_pod_model(labels=labels, annotations=total), {})
    assert found == GangMembership("gang-ml/sample", 2, "PodGroup", "sample")
    serving = {**total, "kueue.x-k8s.io/pod-group-serving": "true"}
    assert membership_of(build_pod_model(labels=labels, annotations=serving), {}).size == 1
    assert membership_of(build_pod_model(labels=labels), {}).field == "kueue.x-k8s.io/pod-group-total-count"


JOB = f"""
apiVersion: batch/v1
kind: Job
metadata: {{namespace: ml, name: sweep, uid: j1}}
spec: {{parallelism: 4, completions: 4, completionMode: Indexed, template: {GPU}}}
"""


def of_job(**annotations):
    return build_pod_model(
        labels={"batch.kubernetes.io/job-name": "sweep"},
        annotations={"batch.kubernetes.io/job-completion-index": "3", **annotations},
        owner=("batch/v1", "Job", "sweep", "j1"),
    )


@pytest.mark.parametrize(
    ("text", "said", "size"),
    [
        (JOB, {"eelgrid.io/kind": "training-job"}, 4),
        # Completions in waves, or none at all, are no gang.
        (JOB.replace("completions: 4", "completions: 8"), {"eelgrid.io/kind": "training-job"}, 1),
        (JOB.replace("Indexed", "NonIndexed"), {"eelgrid.io/kind": "training-job"}, 1),
        # Nobody says that these pods need each other.
        (JOB, {}, 1),
    ],
)
def test_an_indexed_job_is_a_gang_where_it_trains(text, said, size):
    found = parse_intent(of_job(**said), build_owner_lookup("batch", text))
    assert found.size == size
    assert found.unit.startswith("gang-j1" if size > 1 else "pod-uid-")


def test_the_peoples_own_word_goes_before_all_else():
    said = {"eelgrid.io/group": "pair", "eelgrid.io/group-size": "2"}
    found = membership_of(of_job(**said), build_owner_lookup("batch", JOB))
    assert found == GangMembership("gang-ml/pair", 2, "Job", "pair")
    long = {"eelgrid.io/group": "x" * 200, "eelgrid.io/group-size": "2"}
    assert len(membership_of(of_job(**long), {}).unit) <= 128


def test_pods_of_ray_and_of_stateful_sets_are_placed_one_by_one():
    labels = {"ray.io/cluster": "rc", "ray.io/group": "workers", "ray.io/node-type": "worker"}
    ray = membership_of(build_pod_model(labels=labels, owner=("ray.io/v1", "RayCluster", "rc", "r")), {})
    assert ray[1:] == (1, "RayCluster", "rc")
    stateful = build_pod_model(
        labels={"apps.kubernetes.io/pod-index": "2"}, owner=("apps/v1", "StatefulSet", "db", "s")
    )
    assert membership_of(stateful, {})[1:] == (1, "StatefulSet", "db")


def test_a_holder_of_a_bare_object_says_nothing():
    for kind in ("Job", "JobSet", "LeaderWorkerSet", "PyTorchJob", "PodGroup", "RayCluster"):
        found = parse_owner_template(
            ObjectRef("", kind, "ml", "x"), parse_manifest("{metadata: {name: x}, spec: null}")
        )
        assert (found.uid, found.owner, found.least) == ("", None, None)
        assert sum(part.pods for part in found.parts) <= 1


# Queues

LABELLED = """
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata: {namespace: ml, name: pre, uid: js, labels: {kueue.x-k8s.io/queue-name: vision}}
spec: {replicatedJobs: []}
"""
CHILD = """
apiVersion: batch/v1
kind: Job
metadata:
  namespace: ml
  name: pre-0
  uid: job-uid
  ownerReferences: [{apiVersion: jobset.x-k8s.io/v1alpha2, kind: JobSet, name: pre, uid: js, controller: true}]
spec: {}
"""
BY_JOB = ("batch/v1", "Job", "pre-0", "job-uid")


def find_queue(pod, holders=(), **said):
    return QueueLabels(**{"reads_owners": True, **said}).find_queue(pod, dict(holders))


def test_the_queue_of_a_pod_is_that_of_its_job_or_of_the_job_set_above_it():
    pod = build_pod_model(owner=BY_JOB)
    job_set, child = build_owner_lookup("jobset.x-k8s.io", LABELLED), build_owner_lookup("batch", CHILD)
    assert find_queue(pod).needs == ObjectRef("batch", "Job", "ml", "pre-0")
    assert find_queue(pod, child).needs == ObjectRef("jobset.x-k8s.io", "JobSet", "ml", "pre")
    assert find_queue(pod, child | job_set) == "vision"
    assert find_queue(pod, child | dict.fromkeys(job_set)) == ""
    assert find_queue(pod, reads_owners=False) == ""


def test_the_label_of_a_pod_goes_before_that_of_its_job_and_another_job_of_that_name_does_not_count():
    own = build_owner_lookup(
        "batch", "{kind: Job, metadata: {namespace: ml, name: pre-0, uid: job-uid, labels: "
        "{kueue.x-k8s.io/queue-name: speech}}, spec: {}}"
    )  # fmt: skip
    assert find_queue(build_pod_model(owner=BY_JOB), own) == "speech"
    assert find_queue(build_pod_model(owner=("batch/v1", "Job", "pre-0", "another")), own) == ""
    pod = build_pod_model(owner=BY_JOB, labels={"kueue.x-k8s.io/queue-name": "vision"})
    assert find_queue(pod, own) == "vision"


def test_a_pod_of_a_deployment_or_without_an_owner_waits_for_no_lookup():
    assert find_queue(build_pod_model(owner=("apps/v1", "ReplicaSet", "llm-7d9f", "r1"))) == ""
    assert find_queue(build_pod_model()) == ""


def test_a_name_stands_for_the_cluster_queue_of_the_local_queue_in_the_namespace_of_the_pod():
    pod = build_pod_model(labels={"kueue.x-k8s.io/queue-name": "team"})
    assert find_queue(pod, cluster_queues={("ml", "team"): "research"}) == "research"
    assert find_queue(pod, cluster_queues={("other", "team"): "research"}) == "team"
    assert parse_local_queue({"spec": {"clusterQueue": "research"}}) == "research"
    assert parse_local_queue({}) == ""


@pytest.mark.parametrize(
    "template", [{"spec": {"containers": [{"resources": {"requests": {"cpu": "1" * 200}}}]}}, ["x"]]
)
async def test_an_owner_that_cannot_be_read_keeps_nobody_waiting(template):
    """Schemas of operators take what the API server does not."""
    ref = ObjectRef("kubeflow.org", "PyTorchJob", "ml", "ddp")
    found = {
        "metadata": {"uid": "pt"},
        "spec": {"pytorchReplicaSpecs": {"Worker": {"replicas": 2, "template": template}}},
    }

    async def get(*_, **__):
        return found

    async def discover():
        return SimpleNamespace(find_served=lambda kind, _: kind)

    cluster = SimpleNamespace(get=get, discover=discover)
    told, tasks, log = [], BackgroundTasks(logging.getLogger("test"), "test"), logging.getLogger("test")
    around = SimpleNamespace(cluster=cluster, tasks=tasks, log=log, clock=SimpleNamespace(monotonic_s=lambda: 0.0))
    lookups = OwnerLookups(around, pods=lambda: {"key": "pod"}, done=lambda key, pod: told.append((key, pod)))
    lookups.wait_for(ref, "key")
    for _ in range(10):
        await asyncio.sleep(0)
    assert told == [("key", "pod")]
    assert not lookups.is_waiting
    assert lookups.found == {ref: None}
