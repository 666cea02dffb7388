"""What the Kubernetes part tells on the metrics page: every name that is listed, no others, and the right numbers."""

import asyncio

import trustme
from prometheus_client.parser import text_string_to_metric_families
from tests import admission_rig
from tests.builders.kubernetes import build_node, build_pod
from tests.builders.server import run_controller
from tests.fakes.kubernetes.cluster import FakeCluster
from tests.fakes.kubernetes.scheduler import Scheduler

from eelgrid_controller.engines.kubernetes.api.port import NODES, PODS
from eelgrid_controller.engines.kubernetes.model.well_known import (
    ANNOTATION_GROUP,
    ANNOTATION_GROUP_SIZE,
    ANNOTATION_RATE,
)
from eelgrid_controller.engines.kubernetes.pods.gate_events import WriteFailure
from eelgrid_controller.kubernetes_composition import WAIT_REASONS
from eelgrid_controller.runtime.config import KubernetesConfig, WebhookConfig
from eelgrid_controller.server.metrics.catalogue import METRICS

_KUBECONFIG = """
apiVersion: v1
kind: Config
clusters: [{{name: c, cluster: {{server: "{server}"}}}}]
users: [{{name: u, user: {{token: admin}}}}]
contexts: [{{name: x, context: {{cluster: c, user: u}}}}]
current-context: x
"""


def config(fake, folder):
    leaf = trustme.CA().issue_cert("localhost")
    (folder / "tls.crt").write_bytes(leaf.cert_chain_pems[0].bytes())
    (folder / "tls.key").write_bytes(leaf.private_key_pem.bytes())
    (folder / "kubeconfig").write_text(_KUBECONFIG.format(server=fake.url))
    webhook = WebhookConfig(
        listen="127.0.0.1:0", certificate=folder / "tls.crt", key=folder / "tls.key", rules=admission_rig.RULES
    )
    return KubernetesConfig(
        kubeconfig=str(folder / "kubeconfig"), lease_s=3.0, webhook=webhook, abilities=frozenset({"devices"})
    )


async def told(controller):
    """The page's values of Kubernetes by name and label."""
    text = (await controller.metrics.render_page()).decode()
    return {
        (sample.name, *sample.labels.values()): sample.value
        for one in text_string_to_metric_families(text)
        for sample in one.samples
        if sample.name.startswith("eelgrid_kubernetes")
    }


async def until(controller, wanted, *, within_s=30.0):
    """The values, when these are among them."""
    async with asyncio.timeout(within_s):
        while True:
            found = await told(controller)
            if wanted.items() <= found.items():
                return found
            await asyncio.sleep(0.1)


def waits(reason):
    return ("eelgrid_kubernetes_pods_waiting", reason)


def annotated(name, notes, **options):
    found = build_pod(name, **options)
    found["metadata"]["annotations"] = notes
    return found


async def test_a_page_reports_who_waits_and_why_and_what_became_of_writes(tmp_path):
    async with FakeCluster() as fake:
        cluster = fake.client()
        await cluster.create(NODES, build_node("n1"))
        await fake.add(Scheduler(fake))
        async with run_controller(tmp_path / "data", kubernetes=config(fake, tmp_path)) as rig:
            gang = {ANNOTATION_GROUP: "g", ANNOTATION_GROUP_SIZE: "2"}
            for one in (
                *(build_pod(f"fits-{index}") for index in range(3)),
                build_pod("large", gpus=8),
                annotated("half", gang),
                annotated("unread", {ANNOTATION_RATE: "many"}),
                build_pod("held", gates=("eelgrid.io/placement", "example.com/later")),
            ):
                await cluster.create(PODS, one)
            wanted = {
                ("eelgrid_kubernetes_leading",): 1.0,
                ("eelgrid_kubernetes_writes_total", "pinned"): 3.0,
                waits("room"): 1.0,
                waits("gang"): 1.0,
                waits("unreadable"): 1.0,
                waits("other_gate"): 1.0,
                ("eelgrid_kubernetes_objects", "pods"): 7.0,
                ("eelgrid_kubernetes_objects", "nodes"): 1.0,
            }
            found = await until(rig.controller, wanted)
    assert found["eelgrid_kubernetes_epoch",] >= 1.0
    assert found["eelgrid_kubernetes_rounds_total",] >= 1.0
    assert 0.0 < found["eelgrid_kubernetes_round_longest_seconds",] < 30.0
    assert found["eelgrid_kubernetes_lists_total", "pods"] >= 1.0
    names = {key[0] for key in found}
    assert names == {name for name in METRICS if name.startswith("eelgrid_kubernetes")}
    labels = {name: {key[1] for key in found if key[0] == name and len(key) > 1} for name in names}
    assert labels["eelgrid_kubernetes_pods_waiting"] == set(WAIT_REASONS)
    assert labels["eelgrid_kubernetes_writes_total"] == {
        "pinned",
        "bound",
        "opened",
        *(one.name.lower() for one in WriteFailure),
    }
    assert labels["eelgrid_kubernetes_flights_total"] == {"landed", "overdue"}
    assert labels["eelgrid_kubernetes_device_corrections_total"] == {"corrected", "refused", "recreated"}
    assert labels["eelgrid_kubernetes_reviews_total"] == {"gated", "pinned", "scheduled", "left", "unread", "refused"}


async def test_a_standby_says_that_it_does_not_lead(tmp_path):
    async with FakeCluster() as fake:
        one, two = tmp_path / "one", tmp_path / "two"
        one.mkdir()
        two.mkdir()
        async with run_controller(one / "data", kubernetes=config(fake, one)) as leader:
            await until(leader.controller, {("eelgrid_kubernetes_leading",): 1.0})
            async with run_controller(two / "data", kubernetes=config(fake, two)) as standby:
                found = await until(standby.controller, {("eelgrid_kubernetes_leading",): 0.0})
                assert ("eelgrid_kubernetes_epoch",) not in found
                assert (await told(leader.controller))["eelgrid_kubernetes_leading",] == 1.0
