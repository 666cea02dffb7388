"""Pods that get their nodes at admission: a real controller and its webhook, at the fake API server and at a real one.

At the fake the test does the API server's part: it asks the webhook, and creates the pod as it was answered.
"""

import asyncio
import base64
import contextlib
import io
import json
import os
import secrets
import ssl
import time
from pathlib import Path

import aiohttp
import pytest
import trustme
from bench.kubernetes.webhook import WEBHOOK_CONFIGURATIONS, build_registration
from tests.admission_rig import patched, review_of
from tests.builders.kubernetes import build_node, build_pod
from tests.builders.server import run_controller
from tests.e2e.kubernetes_gate_test import config, until
from tests.fakes.kubernetes.cluster import FakeCluster

from eelgrid_controller.engines.kubernetes.api.client import ApiRequest, HttpClusterClient
from eelgrid_controller.engines.kubernetes.api.errors import ClusterError
from eelgrid_controller.engines.kubernetes.api.kubeconfig import find_access
from eelgrid_controller.engines.kubernetes.api.port import EVENTS, NAMESPACES, NODES, PODS, Resource
from eelgrid_controller.engines.kubernetes.model.well_known import ANNOTATION_PLAN, LABEL_MANAGED, SCHEDULER
from eelgrid_controller.engines.kubernetes.pods import admission_pins
from eelgrid_controller.engines.kubernetes.pods.admission_review import GateRules
from eelgrid_controller.runtime.config import KubernetesConfig, WebhookConfig
from eelgrid_protos.messages import WorkloadPhase

KUBECONFIG = os.environ.get("EELGRID_KUBECONFIG", "")
on_a_real_server = pytest.mark.skipif(not KUBECONFIG, reason="EELGRID_KUBECONFIG names no cluster")
MANAGED = {LABEL_MANAGED: "true"}
_QUOTAS = Resource("", "v1", "resourcequotas", "ResourceQuota")
_ACCOUNTS = Resource("", "v1", "serviceaccounts", "ServiceAccount")


class Webhook:
    """The certificate and the address of a controller's webhook."""

    def __init__(self, folder):
        self.authority = trustme.CA()
        leaf = self.authority.issue_cert("127.0.0.1")
        certificate, key = folder / "tls.crt", folder / "tls.key"
        certificate.write_bytes(leaf.cert_chain_pems[0].bytes())
        key.write_bytes(leaf.private_key_pem.bytes())
        rules = GateRules(binds=True)
        self.settings = WebhookConfig(listen="127.0.0.1:0", certificate=certificate, key=key, rules=rules)

    async def ask(self, controller, pod, **request):
        """The pod as it is answered."""
        context = ssl.create_default_context()
        self.authority.configure_trust(context)
        url = f"https://127.0.0.1:{controller.webhook.port}/place/pods"
        body = io.BytesIO(json.dumps(review_of(pod, **request)).encode())
        async with aiohttp.ClientSession() as session, session.post(url, data=body, ssl=context) as answer:
            told = (await answer.json())["response"]
        assert told["allowed"] is True
        return patched(pod, json.loads(base64.b64decode(told["patch"]))) if "patch" in told else pod

    def registration(self, controller, name, space):
        """What the API server is told of it."""
        selector = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": space}}}
        address, authority = f"127.0.0.1:{controller.webhook.port}", self.authority.cert_pem.bytes()
        return build_registration(name, address, authority, timeout_s=5, selector=selector)


def managed_pod(name, **spec):
    """One that the webhook is asked about; the API server's defaults are there already."""
    found = build_pod(name, gates=(), schedulerName="default-scheduler", **spec)
    found["metadata"].setdefault("labels", {}).update(MANAGED)
    return found


def placed(controller):
    state = controller.loop.core.state
    return {one.workload_id for one in state.workloads.values() if one.phase is WorkloadPhase.PLACED}


async def reached(check, *, within_s=60.0):
    async with asyncio.timeout(within_s):
        while not check():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def leads(controller, nodes, space="default"):
    """Until it would place a pod of this namespace at its admission, on any of so many nodes."""
    await reached(
        lambda: (
            controller.placing is not None
            and controller.placing.engine.gate.may_pin_admitted(space, time.monotonic())
            and len(controller.loop.core.state.nodes) >= nodes
        )
    )


async def asked_until_pinned(webhook, controller, pod):
    """Ask as an owner does that creates pod after pod: on a busy machine an answer may come without a node."""
    async with asyncio.timeout(60.0):
        while True:
            found = await webhook.ask(controller, pod)
            if found["spec"].get("nodeName"):
                return found
            await asyncio.sleep(0.1)


def test_a_pod_is_created_at_its_place_by_one_write(tmp_path):
    async def play():
        webhook = Webhook(tmp_path)
        async with FakeCluster() as fake:
            cluster = fake.client()
            for name in ("a", "b"):
                await cluster.create(NODES, build_node(name))
            settings = config(fake, tmp_path, mode="scheduler", pins_at_admission=True, webhook=webhook.settings)
            async with run_controller(tmp_path / "data", kubernetes=settings) as rig:
                controller = rig.controller
                await leads(controller, 2)
                found = await asked_until_pinned(webhook, controller, managed_pod("p"))
                plan = json.loads(found["metadata"]["annotations"][ANNOTATION_PLAN])
                assert found["spec"]["schedulerName"] == SCHEDULER
                assert found["spec"]["nodeName"] == plan["node"]
                assert plan["workload"] in placed(controller), "in the journal before it is answered"
                made = await cluster.create(PODS, found)
                admissions = controller.placing.engine.gate.admissions
                await reached(lambda: admissions.counts.confirmed == 1)
                (pod,) = await until(cluster, lambda pods: len(pods) == 1)
                assert pod["metadata"]["resourceVersion"] == made["metadata"]["resourceVersion"], "written once"
                notes = [one["reason"] for one in (await cluster.list(EVENTS, namespace="default")).items]
                assert "FailedScheduling" not in notes
                dry = await webhook.ask(controller, managed_pod("dry"), dryRun=True)
                assert dry["spec"]["schedulerName"] == SCHEDULER
                assert "nodeName" not in dry["spec"]
                again = await webhook.ask(controller, found)
                assert again == found, "a webhook that is asked again answers the same"
                await cluster.delete(PODS, "p", namespace="default", grace_s=0)
                await reached(lambda: placed(controller) == set())

    asyncio.run(play())


def test_a_pod_whose_creation_failed_gives_its_place_back(tmp_path, monkeypatch):
    monkeypatch.setattr(admission_pins, "RESERVED_S", 3.0)

    async def play():
        webhook = Webhook(tmp_path)
        async with FakeCluster() as fake:
            cluster = fake.client()
            await cluster.create(NODES, build_node("a", gpus=1))
            settings = config(fake, tmp_path, mode="scheduler", pins_at_admission=True, webhook=webhook.settings)
            async with run_controller(tmp_path / "data", kubernetes=settings) as rig:
                controller = rig.controller
                await leads(controller, 1)
                await asked_until_pinned(webhook, controller, managed_pod("never"))
                # The next waits for the place in the usual way, and gets it.
                late = await webhook.ask(controller, managed_pod("late"))
                await cluster.create(PODS, late)
                (pod,) = await until(cluster, lambda pods: bool(pods and pods[0]["spec"].get("nodeName")))
                assert pod["metadata"]["name"] == "late"
                assert len(placed(controller)) == 1

    asyncio.run(play())


def test_a_pod_that_comes_after_its_leader_went_is_taken_over_where_it_is(tmp_path):
    async def play():
        webhook = Webhook(tmp_path)
        async with FakeCluster() as fake:
            cluster = fake.client()
            await cluster.create(NODES, build_node("a"))
            settings = config(fake, tmp_path, mode="scheduler", pins_at_admission=True, webhook=webhook.settings)
            async with run_controller(tmp_path / "one", kubernetes=settings) as rig:
                await leads(rig.controller, 1)
                found = await asked_until_pinned(webhook, rig.controller, managed_pod("p"))
            async with run_controller(tmp_path / "two", kubernetes=settings) as rig:
                controller = rig.controller
                await leads(controller, 1)
                assert placed(controller) == set(), "a journal of its own"
                await cluster.create(PODS, found)
                plan = json.loads(found["metadata"]["annotations"][ANNOTATION_PLAN])
                await reached(lambda: placed(controller) == {plan["workload"]})
                workload = controller.loop.core.state.workloads[plan["workload"]]
                (place,) = workload.placements
                assert (place.node_name, list(place.gpu_indexes)) == ("a", plan["devices"])

    asyncio.run(play())


@contextlib.asynccontextmanager
async def real_cluster(*, nodes, gpus):
    """A real API server with a namespace and nodes of this test's own."""
    cluster = HttpClusterClient(find_access({}, kubeconfig=KUBECONFIG))
    space = f"t-{secrets.token_hex(4)}"
    made = [(NAMESPACES, space)]
    try:
        await cluster.create(NAMESPACES, {"metadata": {"name": space}})
        with contextlib.suppress(ClusterError):
            await cluster.create(_ACCOUNTS, {"metadata": {"name": "default"}}, namespace=space)
        for index in range(nodes):
            body = build_node(f"{space}-{index}", gpus=gpus, labels={"test": space})
            status = body.pop("status")
            ready = {"lastHeartbeatTime": "2026-01-01T00:00:00Z", "lastTransitionTime": "2026-01-01T00:00:00Z"}
            status["conditions"] = [one | ready for one in status["conditions"]]
            await cluster.create(NODES, body)
            made.append((NODES, body["metadata"]["name"]))
            await cluster.patch(NODES, body["metadata"]["name"], {"status": status}, subresource="status")
        yield cluster, space
    finally:
        for one in (await cluster.list(PODS, namespace=space)).items:
            with contextlib.suppress(ClusterError):
                await cluster.delete(PODS, one["metadata"]["name"], namespace=space, grace_s=0)
        for resource, name in reversed(made):
            with contextlib.suppress(ClusterError):
                await cluster.delete(resource, name)
        await cluster.close()


async def create_pod(cluster, space, name, **query):
    """Create a pod as a client does, and return it; None where the API server refuses it."""
    body = managed_pod(name, nodeSelector={"test": space}) | {"apiVersion": "v1", "kind": "Pod"}
    del body["spec"]["schedulerName"]
    body["metadata"]["namespace"] = space
    body.pop("status", None)
    try:
        return await cluster.exchange.call(ApiRequest("POST", PODS.path(space), query=query, body=body))
    except ClusterError:
        return None


@on_a_real_server
def test_a_burst_of_which_a_quota_refuses_a_third_overbooks_no_node(tmp_path, monkeypatch):
    monkeypatch.setattr(admission_pins, "RESERVED_S", 5.0)
    webhook = Webhook(Path(tmp_path))

    async def play():
        async with real_cluster(nodes=5, gpus=8) as (cluster, space):
            settings = KubernetesConfig(
                kubeconfig=KUBECONFIG,
                namespace=space,
                lease_s=3.0,
                mode="scheduler",
                pins_at_admission=True,
                webhook=webhook.settings,
            )
            async with run_controller(tmp_path / "data", kubernetes=settings) as rig:
                controller = rig.controller
                await leads(controller, 5, space)
                await cluster.create(WEBHOOK_CONFIGURATIONS, webhook.registration(controller, space, space))
                try:
                    await burst(controller, cluster, space)
                finally:
                    await cluster.delete(WEBHOOK_CONFIGURATIONS, space)

    async def burst(controller, cluster, space):
        admissions = controller.placing.engine.gate.admissions
        async with asyncio.timeout(120.0):
            # API servers hear of a webhook with a delay.
            while not ((await create_pod(cluster, space, "probe")) or {"spec": {}})["spec"].get("nodeName"):
                await cluster.delete(PODS, "probe", namespace=space, grace_s=0)
                await asyncio.sleep(0.2)
        await cluster.delete(PODS, "probe", namespace=space, grace_s=0)
        await reached(lambda: not admissions and placed(controller) == set())
        before = admissions.counts.pinned
        dry = await create_pod(cluster, space, "dry", dryRun="All")
        assert (dry["spec"]["schedulerName"], dry["spec"].get("nodeName")) == (SCHEDULER, None)
        assert (admissions.counts.pinned, placed(controller)) == (before, set())
        quota = {"metadata": {"name": "q"}, "spec": {"hard": {"requests.nvidia.com/gpu": "20"}}}
        await cluster.create(_QUOTAS, quota, namespace=space)
        await reached_quota(cluster, space)
        made = await asyncio.gather(*(create_pod(cluster, space, f"p{index:02d}") for index in range(30)))
        created = [one for one in made if one is not None]
        assert len(created) == 20
        assert any(one["spec"].get("nodeName") for one in created)

        def all_bound(pods):
            own = [one for one in pods if one["metadata"]["namespace"] == space]
            return len(own) == 20 and all(one["spec"].get("nodeName") for one in own)

        pods = [one for one in await until(cluster, all_bound, within_s=120.0) if one["metadata"]["namespace"] == space]
        devices = {}
        for one in pods:
            plan = json.loads(one["metadata"]["annotations"][ANNOTATION_PLAN])
            assert plan["node"] == one["spec"]["nodeName"]
            devices.setdefault(plan["node"], []).extend(plan["devices"])
        assert all(len(set(held)) == len(held) <= 8 for held in devices.values())
        # What the refused ones were given is given back, and nothing else is held.
        plans = {json.loads(one["metadata"]["annotations"][ANNOTATION_PLAN])["workload"] for one in pods}
        await reached(lambda: placed(controller) == plans and not admissions)

    asyncio.run(play())


async def reached_quota(cluster, space):
    """Until the quota is enforced: its status has what is used."""
    async with asyncio.timeout(60.0):
        while not (await cluster.get(_QUOTAS, "q", namespace=space)).get("status", {}).get("hard"):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
