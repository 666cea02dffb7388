"""A Deployment under an InferenceService: it follows its load, the replica that the core released is the one that goes.

The test plays the servers, each at an address of its own on loopback, and the pods' addresses.
Everything else is real but the API server, which is in memory with its controllers.
"""

import asyncio
import contextlib
import json

from tests.builders.kubernetes import build_deployment, build_node
from tests.builders.profiles import build_engine_points
from tests.builders.server import run_controller
from tests.deploy_rig import crd_files
from tests.e2e.kubernetes_gate_test import bound, config, until
from tests.e2e.objectives_test import QUICK, Fleet
from tests.fakes.kubernetes.cluster import FakeCluster
from tests.fakes.kubernetes.kubelets import Kubelets
from tests.fakes.kubernetes.resources import CUSTOM_RESOURCE_DEFINITIONS
from tests.fakes.kubernetes.scheduler import Scheduler
from tests.fakes.kubernetes.workloads import Workloads
from tests.fakes.metrics_servers import Listener, Replica
from tests.state_invariants import check_invariants

from eelgrid_controller.engines.kubernetes.api.port import DEPLOYMENTS, INFERENCE_SERVICES, NODES, PODS, PatchKind
from eelgrid_controller.engines.kubernetes.model.well_known import ANNOTATION_PLAN
from eelgrid_protos.messages import EnforcementMode, GetPolicyRequest, PoolMode, UpdatePolicyRequest

WITHIN_S = 90.0
MODEL = "H100-80GB-HBM3"
LABELS = {"nvidia.com/gpu.product": f"NVIDIA-{MODEL}", "nvidia.com/gpu.memory": "81559", "eelgrid.io/pool": "g"}
SERVICE = {
    "metadata": {"name": "chat", "namespace": "default", "annotations": {"eelgrid.io/start": "1s"}},
    "spec": {
        "mode": "Enforce",
        "targetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "chat"},
        "profile": "llm",
        "requestsPerSecond": 2,
        "outputTokens": 100,
        "objectives": [{"metric": "InterToken", "percentile": 95, "atMost": "50ms"}],
        "replicas": {"least": 1, "most": 3},
    },
}


class Addresses(Fleet):
    """The pods' servers, each on an address of its own."""

    def __init__(self, cluster):
        super().__init__()
        self.cluster = cluster
        self.listeners = contextlib.ExitStack()
        self.by_uid = {}
        self.port = 0
        self.given = 10

    def _listen(self, uid):
        self.given += 1
        host = f"127.0.0.{self.given}"
        replica = self.replicas[uid] = Replica()
        listener = self.listeners.enter_context(Listener(lambda _: replica.reply(), self.port, host))
        self.port = listener.server_address[1]
        return host

    async def follow(self):
        """Pods that run have an address; those that are gone serve no more."""
        while True:
            pods = (await self.cluster.list(PODS)).items
            for one in pods:
                uid = one["metadata"]["uid"]
                if one["status"].get("phase") == "Running" and uid not in self.by_uid:
                    self.by_uid[uid] = self._listen(uid)
                    name, space = one["metadata"]["name"], one["metadata"]["namespace"]
                    body = {"metadata": {"uid": uid}, "status": {"podIP": self.by_uid[uid]}}
                    await self.cluster.patch(PODS, name, body, PatchKind.MERGE, namespace=space, subresource="status")
            self.keep({one["metadata"]["uid"] for one in pods})
            await asyncio.sleep(0.1)


async def enforce(rig):
    policy = (await rig.operators.get_policy(GetPolicyRequest())).policy
    pools = (PoolMode(pool="g", mode=EnforcementMode.ENFORCE),)
    changed = type(policy)(**{name: getattr(policy, name) for name in policy.__slots__} | {"pools": pools})
    await rig.operators.update_policy(UpdatePolicyRequest(policy=changed))


async def seen(cluster, check):
    """The pods, when they are as wanted."""
    return await until(cluster, check, within_s=WITHIN_S)


async def told(cluster, check):
    """The service's status, when it is as wanted."""
    async with asyncio.timeout(WITHIN_S):
        while True:
            status = (await cluster.get(INFERENCE_SERVICES, "chat", namespace="default")).get("status") or {}
            if check(status):
                return status
            await asyncio.sleep(0.1)


def condition(status, kind):
    return next((one for one in status.get("conditions") or () if one["type"] == kind), {"status": "", "reason": ""})


def planned(one):
    plan = json.loads(one["metadata"]["annotations"][ANNOTATION_PLAN])
    return plan["workload"], plan["replica"]


async def place_nodes(cluster):
    await cluster.create(CUSTOM_RESOURCE_DEFINITIONS, crd_files()["InferenceService"])
    for name in ("a", "b", "c"):
        await cluster.create(NODES, build_node(name, labels=LABELS, gpus=2))


def is_agreed(rig, pods):
    """Whether the core's places are where the pods are."""
    found = [one for one in rig.controller.loop.core.state.workloads.values() if one.phase.name == "PLACED"]
    held = [place.node_name for one in found for place in one.placements]
    return len(found) == 1 and sorted(held) == sorted(one["spec"].get("nodeName", "") for one in pods)


def held_once(rig):
    """The service as the core has it; each GPU is held once."""
    state = rig.controller.loop.core.state
    (service,) = [one for one in state.workloads.values() if one.phase.name == "PLACED"]
    assert service.workload_id.startswith("service-")
    check_invariants(state)
    return service


def test_a_deployment_follows_its_load(tmp_path):
    async def play():
        async with FakeCluster() as fake:
            cluster = fake.client()
            await place_nodes(cluster)
            for part in (Scheduler(fake), Workloads(fake), Kubelets(fake)):
                await fake.add(part)
            await cluster.create(DEPLOYMENTS, build_deployment("chat", gates=("eelgrid.io/placement",)))
            options = {"kubernetes": config(fake, tmp_path, abilities=frozenset({"services"})), **QUICK}
            with Addresses(cluster) as fleet, fleet.listeners:
                following = asyncio.create_task(fleet.follow())
                async with run_controller(tmp_path / "data", **options) as rig:
                    await enforce(rig)
                    await rig.controller.loop.record_measurements(build_engine_points(model=MODEL))
                    (first,) = await seen(cluster, lambda pods: len(bound(pods)) == 1)
                    while not fleet.port:  # noqa: ASYNC110
                        await asyncio.sleep(0.1)
                    body = {**SERVICE, "spec": {**SERVICE["spec"], "metrics": {"server": "vllm", "port": fleet.port}}}
                    await cluster.create(INFERENCE_SERVICES, body)
                    await told(cluster, lambda status: condition(status, "PromiseKept")["status"] == "True")
                    # The first answer to a scale is lost, and so is every watch.
                    fake.knobs.add("lose", times=1, verbs=("patch",), part="/scale")
                    fake.drop_watches()
                    fleet.rate_hz = 110.0
                    await seen(cluster, lambda pods: len(bound(pods)) == 3)
                    status = await told(
                        cluster,
                        lambda status: (
                            status.get("replicas") == status.get("desiredReplicas") == 3
                            and condition(status, "ScalingActive")["status"] == "True"
                        ),
                    )
                    assert (status["gpuModel"], status["slice"]) == (MODEL, "Whole")
                    pods = await seen(cluster, lambda pods: len(pods) == 3 and is_agreed(rig, pods))
                    assert first["metadata"]["uid"] in {one["metadata"]["uid"] for one in pods}, (
                        "taken over, not made anew"
                    )
                    held_once(rig)
                # Another process over the same journal, while the load falls.
                fleet.rate_hz = 2.0
                # Nobody asks for pods now; what the first one asked for last may have come while it ended.
                pods = await seen(cluster, lambda pods: len(bound(pods)) == len(pods))
                where = {one["metadata"]["uid"]: one["spec"]["nodeName"] for one in pods}
                async with run_controller(tmp_path / "data", **options) as rig:
                    pods = await seen(cluster, lambda pods: len(pods) == len(bound(pods)) <= 2)
                    left = {one["metadata"]["uid"]: one["spec"]["nodeName"] for one in pods}
                    assert left.items() <= where.items(), "a pod was made anew"
                    status = await told(cluster, lambda status: status.get("replicas", 9) <= 2)
                    assert status["observedGeneration"] == 1
                    assert rig.controller.placing.engine.failures == 0
                following.cancel()

    asyncio.run(play())


def test_nothing_is_changed_in_mode_recommend_and_others_are_heard(tmp_path):
    async def play():
        async with FakeCluster() as fake:
            cluster = fake.client()
            await place_nodes(cluster)
            for part in (Scheduler(fake), Workloads(fake), Kubelets(fake)):
                await fake.add(part)
            spec = {**SERVICE["spec"], "mode": "Recommend"}
            await cluster.create(INFERENCE_SERVICES, {**SERVICE, "spec": spec})
            await cluster.create(DEPLOYMENTS, build_deployment("chat", replicas=2, gates=("eelgrid.io/placement",)))
            options = {"kubernetes": config(fake, tmp_path, abilities=frozenset({"services"})), **QUICK}
            async with run_controller(tmp_path / "data", **options) as rig:
                pods = await seen(cluster, lambda pods: len(bound(pods)) == 2 and is_agreed(rig, pods))
                status = await told(cluster, lambda status: condition(status, "Placed")["status"] == "True")
                assert condition(status, "ScalingActive")["reason"] == "ModeRecommend"
                assert condition(status, "PromiseKept")["status"] == "Unknown"
                assert {planned(one) for one in pods} == {(held_once(rig).workload_id, at) for at in (0, 1)}
                body = {"spec": {"mode": "Enforce"}}
                await cluster.patch(INFERENCE_SERVICES, "chat", body, namespace="default")
                await told(cluster, lambda status: status.get("observedGeneration") == 2)
                five = {"spec": {"replicas": 5}}
                await cluster.patch(DEPLOYMENTS, "chat", five, namespace="default", subresource="scale")
                await seen(cluster, lambda pods: len(pods) == len(bound(pods)) == 3)
                status = await told(cluster, lambda status: condition(status, "ScaledByOthers")["status"] == "True")
                assert "5 replicas" in condition(status, "ScaledByOthers")["message"]
                await seen(cluster, lambda pods: len(pods) == 3 and is_agreed(rig, pods))
                held_once(rig)

    asyncio.run(play())
