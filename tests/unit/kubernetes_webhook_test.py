"""The webhook: what it answers to reviews that are none of ours, bad or too much, and its certificates."""

import asyncio
import base64
import io
import json
import logging
import ssl
from contextlib import asynccontextmanager
from dataclasses import replace

import aiohttp
import pytest
import trustme
from tests import admission_rig as rig
from tests.builders.server import run_controller
from tests.fakes.kubernetes.cluster import FakeCluster

from eelgrid_controller.engines.kubernetes.model.quantities import KubernetesUnreadable
from eelgrid_controller.engines.kubernetes.model.well_known import ANNOTATION_PLAN
from eelgrid_controller.engines.kubernetes.pods.admission_review import (
    AdmissionPin,
    GateRules,
    ReviewOutcome,
    pin_candidate,
    review_pod,
)
from eelgrid_controller.errors import ControllerConfigError
from eelgrid_controller.runtime.config import KubernetesConfig, WebhookConfig
from eelgrid_controller.server.http.admission_webhook import AdmissionWebhook
from eelgrid_protos.transport import KeyPairFiles

LOG = logging.getLogger("test.webhook")
OURS = rig.GATED["a pod with the label"]


def decided(review, *, is_opted_in=False, rules=rig.RULES):
    found = review_pod(review, rules, is_opted_in=is_opted_in)
    assert found.review["apiVersion"] == "admission.k8s.io/v1"
    assert found.review["response"]["allowed"] is True
    assert found.review["response"]["uid"] == review["request"]["uid"]
    return found


@pytest.mark.parametrize(
    "request_",
    [
        {"operation": "UPDATE"},
        {"operation": "DELETE", "object": None},
        {"subResource": "ephemeralcontainers"},
        {"kind": {"group": "apps", "version": "v1", "kind": "Deployment"}},
        {"namespace": "kube-system"},
    ],
)
def test_only_the_creation_of_pods_is_changed(request_):
    assert decided(rig.review_of(OURS, **request_)).answer is ReviewOutcome.LEFT


def test_a_dry_run_is_answered_alike():
    wet, dry = (decided(rig.review_of(OURS, dryRun=dry)).review["response"] for dry in (False, True))
    assert {**wet, "uid": ""} == {**dry, "uid": ""}


def test_without_the_taint_only_the_gate_comes():
    rules = GateRules(tolerates=False)
    assert "tolerations" not in rig.by_webhook(_hooks(), OURS, rules=rules)["spec"]


BINDS = replace(rig.RULES, binds=True)


def spec_by_webhook(found):
    return rig.by_webhook(_hooks(), found, rules=BINDS)["spec"]


def test_a_pod_that_needs_nothing_of_kube_scheduler_gets_our_scheduler_and_no_gate():
    spec = spec_by_webhook(OURS)
    assert spec["schedulerName"] == "eelgrid"
    assert "schedulingGates" not in spec
    assert decided(rig.review_of(OURS), rules=BINDS).answer is ReviewOutcome.SCHEDULED


NEEDS_KUBE_SCHEDULER = {
    "a claimed volume": {"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}]},
    "an ephemeral volume": {"volumes": [{"name": "v", "ephemeral": {}}]},
    "a disk": {"volumes": [{"name": "v", "awsElasticBlockStore": {"volumeID": "x"}}]},
    "a device claim": {"resourceClaims": [{"name": "g", "resourceClaimTemplateName": "t"}]},
    "a port of the host": {"containers": [{"name": "c", "image": "x", "ports": [{"hostPort": 80}]}]},
    "the host's network": {
        "hostNetwork": True,
        "containers": [{"name": "c", "image": "x", "ports": [{"containerPort": 80}]}],
    },
    "a PodGroup": {"schedulingGroup": {"podGroupName": "g"}},
    "domains at least": {"topologySpreadConstraints": [{"minDomains": 2, "topologyKey": "zone"}]},
    "ephemeral storage": {
        "containers": [{"name": "c", "image": "x", "resources": {"requests": {"ephemeral-storage": "1Gi"}}}]
    },
    "a slice": {
        "initContainers": [{"name": "i", "image": "x", "resources": {"limits": {"nvidia.com/mig-1g.10gb": 1}}}]
    },
    "rules for restarts": {"containers": [{"name": "c", "image": "x", "restartPolicyRules": [{"action": "Restart"}]}]},
    "a field of tomorrow": {"placementPolicy": {"x": 1}},
    "our gate, written by hand": {"schedulingGates": [{"name": "eelgrid.io/placement"}]},
    "another scheduler": {"schedulerName": "volcano"},
}


@pytest.mark.parametrize("what", sorted(NEEDS_KUBE_SCHEDULER))
def test_all_other_managed_pods_take_the_gate(what):
    spec = spec_by_webhook(rig.pod(labels=rig.MANAGED, **NEEDS_KUBE_SCHEDULER[what]))
    assert spec["schedulingGates"] == [{"name": "eelgrid.io/placement"}]
    assert spec.get("schedulerName") == NEEDS_KUBE_SCHEDULER[what].get("schedulerName")


def test_a_pod_that_is_to_be_released_on_errors_takes_the_gate_since_a_schedulers_name_is_for_ever():
    found = rig.pod(labels=rig.MANAGED, metadata={"annotations": {"eelgrid.io/on-error": "schedule"}})
    assert "schedulerName" not in spec_by_webhook(found)


def test_a_pod_that_names_our_scheduler_itself_gets_no_gate_beside_it():
    spec = spec_by_webhook(rig.pod(labels=rig.MANAGED, schedulerName="eelgrid"))
    assert "schedulingGates" not in spec


PIN = AdmissionPin("n1", '{"node":"n1"}')


@pytest.mark.parametrize("annotations", [None, {}, {"a": "b"}, {ANNOTATION_PLAN: "of another"}])
def test_a_candidate_is_answered_with_its_node_and_its_plan(annotations):
    pod = rig.pod(labels=rig.MANAGED, metadata={"generateName": "p-", "annotations": annotations})
    found = decided(rig.review_of(pod), rules=BINDS)
    assert found.candidate["spec"]["schedulerName"] == "eelgrid"
    assert [one["key"] for one in found.candidate["spec"]["tolerations"]] == ["eelgrid.io/managed"]
    pinned = pin_candidate(found, PIN)
    assert pinned.answer is ReviewOutcome.PINNED
    made = rig.patched(pod, json.loads(base64.b64decode(pinned.review["response"]["patch"])))
    assert made["spec"] == found.candidate["spec"] | {"nodeName": "n1"}
    assert made["metadata"]["annotations"] == (annotations or {}) | {ANNOTATION_PLAN: PIN.plan}


NO_CANDIDATES = {
    "a dry run": ({}, {"dryRun": True}),
    "a pod that others hold back": (rig.OTHER_GATE, {}),
    "a pod that has a node": ({"nodeName": "n1"}, {}),
    "a pod of another scheduler": ({"schedulerName": "volcano"}, {}),
    **{what: (spec, {}) for what, spec in NEEDS_KUBE_SCHEDULER.items()},
}


@pytest.mark.parametrize("what", sorted(NO_CANDIDATES))
def test_nobody_else_is_a_candidate(what):
    spec, request = NO_CANDIDATES[what]
    found = rig.review_of(rig.pod(labels=rig.MANAGED, **spec), **request)
    assert decided(found, rules=BINDS).candidate is None


def test_in_mode_gate_there_are_no_candidates():
    assert decided(rig.review_of(OURS)).candidate is None


def test_a_pod_that_names_our_scheduler_itself_is_a_candidate():
    found = decided(rig.review_of(rig.pod(labels=rig.MANAGED, schedulerName="eelgrid")), rules=BINDS)
    assert found.candidate is not None


async def test_places_are_looked_for_where_they_are_asked_for_and_nowhere_else(tmp_path):
    authority, asked = trustme.CA(), []

    async def find_pin(candidate):
        asked.append(candidate["metadata"]["name"])
        return PIN if candidate["metadata"]["name"] == "certain" else None

    async with serving(tmp_path, authority, rules=BINDS) as (hook, _, port):
        hook.find_pin = find_pin
        for name, path, is_pinned in (
            ("certain", "/place/pods", True),
            ("uncertain", "/place/pods", False),
            ("other", "/gate/pods", False),
        ):
            found = rig.pod(name, labels=rig.MANAGED)
            _, body = await post(port, authority, _review(found), path=path)
            made = rig.patched(found, json.loads(base64.b64decode(json.loads(body)["response"]["patch"])))
            assert made["spec"].get("nodeName") == ("n1" if is_pinned else None)
            assert made["spec"]["schedulerName"] == "eelgrid"
        assert asked == ["certain", "uncertain"]
        assert (hook.answers[ReviewOutcome.PINNED], hook.answers[ReviewOutcome.SCHEDULED]) == (1, 2)


@pytest.mark.parametrize("more", [{"mode": "gate"}, {"webhook": None}])
def test_places_at_admission_need_mode_scheduler_and_the_webhook(tmp_path, more):
    hook = WebhookConfig(listen="127.0.0.1:0", certificate=tmp_path / "c", key=tmp_path / "k")
    options = {"mode": "scheduler", "webhook": hook, "pins_at_admission": True}
    KubernetesConfig(**options)
    with pytest.raises(ControllerConfigError, match="pins_at_admission"):
        KubernetesConfig(**options | more)


def _hooks():
    everything = {"objectSelector": {}, "namespaceSelector": {}, "matchConditions": []}
    hook = {"clientConfig": {"service": {"path": "/gate/pods"}}, **everything}
    return [{"kind": "MutatingWebhookConfiguration", "webhooks": [hook]}]


@pytest.mark.parametrize(
    "pod",
    [
        None,
        [],
        {},
        {"metadata": {}},
        {"metadata": {"labels": {"eelgrid.io/managed": "true"}}, "spec": {"schedulingGates": [1]}},
        {"metadata": {"labels": 7}, "spec": {"containers": []}},
        {"metadata": {}, "spec": {"containers": [{"resources": 3}]}},
    ],
)
def test_a_pod_that_cannot_be_read_goes_by_with_a_warning(pod):
    found = decided(rig.review_of(OURS, object=pod), is_opted_in=True)
    assert found.answer is ReviewOutcome.UNREAD
    assert "patch" not in found.review["response"]
    assert "without a scheduling gate" in found.review["response"]["warnings"][0]


@pytest.mark.parametrize(
    ("review", "field"),
    [
        (None, "kind"),
        ([], "kind"),
        ({"kind": "Pod"}, "kind"),
        ({"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1beta1"}, "apiVersion"),
        ({"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1"}, "request.uid"),
        (
            {"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1", "request": {"uid": "u" * 300}},
            "request.uid",
        ),
    ],
)
def test_what_is_no_review_is_said_to_be_none(review, field):
    with pytest.raises(KubernetesUnreadable) as told:
        review_pod(review, rig.RULES, is_opted_in=False)
    assert told.value.field == field


def _review(pod):
    return json.dumps(rig.review_of(pod)).encode()


def write(files, authority, *names):
    """A certificate of this authority, put where the server looks."""
    leaf = authority.issue_cert(*names)
    for path, blob in ((files.key, leaf.private_key_pem), (files.certificate, leaf.cert_chain_pems[0])):
        aside = path.with_suffix(".new")
        aside.write_bytes(blob.bytes())
        aside.replace(path)


@asynccontextmanager
async def serving(folder, authority, *, rules=rig.RULES):
    files = KeyPairFiles(folder / "tls.crt", folder / "tls.key")
    write(files, authority, "localhost", "127.0.0.1")
    hook = AdmissionWebhook(rules, files, log=LOG)
    port = await hook.start("127.0.0.1:0")
    try:
        yield hook, files, port
    finally:
        await hook.stop()


async def post(port, authority, body, *, path="/gate/pods", host="localhost"):
    """Status and body; a connection of its own each time."""
    context = ssl.create_default_context()
    authority.configure_trust(context)
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"https://{host}:{port}{path}", data=io.BytesIO(body), ssl=context) as answer,
    ):
        return answer.status, await answer.read()


async def test_both_paths_are_served_and_bad_input_is_reported(tmp_path):
    authority = trustme.CA()
    in_namespace = rig.GATED["a pod with GPUs in an opted-in namespace"]
    async with serving(tmp_path, authority) as (hook, _, port):
        for pod, path, is_gated in (
            (OURS, "/gate/pods", True),
            (in_namespace, "/gate/namespaces", True),
            (in_namespace, "/gate/pods", False),
        ):
            status, body = await post(port, authority, _review(pod), path=path)
            assert status == 200
            assert ("patch" in json.loads(body)["response"]) is is_gated
        refusals = {
            b"": 400,
            b"{": 400,
            b"[" * 100_000: 400,
            b"null": 400,
            b'{"kind": "Pod"}': 400,
            b" " * (4 * 1024 * 1024 + 1): 413,
        }
        for body, wanted in refusals.items():
            status, told = await post(port, authority, body)
            assert (status, told.count(b"\n")) == (wanted, 1), body[:20]
        assert (await post(port, authority, b"{}", path="/gate/others"))[0] == 404
        assert hook.refused == len(refusals)
        assert hook.answers == dict.fromkeys(ReviewOutcome, 0) | {ReviewOutcome.GATED: 2, ReviewOutcome.LEFT: 1}


async def test_certificates_are_taken_up_again_and_half_of_one_is_not(tmp_path):
    first, second = trustme.CA(), trustme.CA()
    review = _review(OURS)
    async with serving(tmp_path, first) as (hook, files, port):
        # By an address, so without a name in the handshake, too.
        for host in ("localhost", "127.0.0.1"):
            assert (await post(port, first, review, host=host))[0] == 200
        key = files.key.read_bytes()
        write(files, second, "localhost", "127.0.0.1")
        renewed = files.key.read_bytes()
        files.key.write_bytes(key)
        assert (await post(port, first, review))[0] == 200, "a key of another certificate"
        assert hook.certificates.reloads == 0
        files.key.write_bytes(renewed)
        for host in ("localhost", "127.0.0.1"):
            assert (await post(port, second, review, host=host))[0] == 200
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await post(port, first, review)
        files.key.unlink()
        assert (await post(port, second, review))[0] == 200
        assert hook.certificates.reloads == 1


async def test_too_many_at_once_are_sent_away(tmp_path):
    authority = trustme.CA()
    context = ssl.create_default_context()
    authority.configure_trust(context)
    head = b"POST /gate/pods HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"
    async with serving(tmp_path, authority) as (hook, _, port):
        writers = []
        for _ in range(64):
            _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
            writer.write(head)
            writers.append(writer)
        async with asyncio.timeout(10.0):
            while hook._at_once < 64:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert (await post(port, authority, _review(OURS)))[0] == 503
        for writer in writers:
            writer.close()
        async with asyncio.timeout(10.0):
            while hook._at_once:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert (await post(port, authority, _review(OURS)))[0] == 200


@pytest.mark.parametrize(("address", "told"), [("9443", "is no address"), ("127.0.0.1:x", "is no address")])
async def test_an_address_that_is_none_is_reported(tmp_path, address, told):
    files = KeyPairFiles(tmp_path / "tls.crt", tmp_path / "tls.key")
    write(files, trustme.CA(), "localhost")
    with pytest.raises(ControllerConfigError, match=told):
        await AdmissionWebhook(rig.RULES, files, log=LOG).start(address)


async def test_a_certificate_that_is_not_there_and_a_port_that_is_taken_are_reported(tmp_path):
    files = KeyPairFiles(tmp_path / "tls.crt", tmp_path / "tls.key")
    with pytest.raises(ControllerConfigError, match="certificate cannot be used"):
        await AdmissionWebhook(rig.RULES, files, log=LOG).start("127.0.0.1:0")
    async with serving(tmp_path, trustme.CA()) as (_, files, port):
        with pytest.raises(ControllerConfigError, match="cannot serve the webhook"):
            await AdmissionWebhook(rig.RULES, files, log=LOG).start(f"127.0.0.1:{port}")


_KUBECONFIG = """
apiVersion: v1
kind: Config
clusters: [{{name: c, cluster: {{server: "{server}"}}}}]
users: [{{name: u, user: {{token: admin}}}}]
contexts: [{{name: x, context: {{cluster: c, user: u}}}}]
current-context: x
"""


async def test_every_controller_serves_it_whoever_leads(tmp_path):
    authority = trustme.CA()
    files = KeyPairFiles(tmp_path / "tls.crt", tmp_path / "tls.key")
    write(files, authority, "localhost")
    path = tmp_path / "kubeconfig"
    async with FakeCluster() as fake:
        path.write_text(_KUBECONFIG.format(server=fake.url))
        hook = WebhookConfig(listen="127.0.0.1:0", certificate=files.certificate, key=files.key)
        config = KubernetesConfig(kubeconfig=str(path), webhook=hook)
        async with (
            run_controller(tmp_path / "one", kubernetes=config) as one,
            run_controller(tmp_path / "two", kubernetes=config) as two,
        ):
            for rig_ in (one, two):
                port = rig_.controller.webhook.port
                status, _ = await post(port, authority, _review(OURS))
                assert (status, rig_.controller.webhook.answers[ReviewOutcome.GATED]) == (200, 1)
