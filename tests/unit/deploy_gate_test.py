"""Who gates pods on which cluster, and that a webhook fails open and is believed by API servers."""

import base64
import ssl
from dataclasses import replace

from cryptography import x509
from tests import admission_rig as rig
from tests.deploy_rig import V1BETA1, container, needs_helm, objects_of, pick

from eelgrid_controller.__main__ import main as controller

pytestmark = needs_helm
WEBHOOK = ("--set", "gate.policyVersion=webhook")
AUTHORITY = (*WEBHOOK, "--set", "gate.webhook.caBundle=PEM")
NO_TLS = ("--set", "tls.mode=none")
GATING = {"MutatingAdmissionPolicy", "MutatingWebhookConfiguration"}


def _gating(name, version, options=()):
    found = [one for one in objects_of(name, version, options) if one["kind"] in GATING]
    return [(one["kind"], one["apiVersion"].rpartition("/")[2]) for one in found]


def test_gates_are_put_on_in_the_best_way_that_the_cluster_has():
    policy, webhook = "MutatingAdmissionPolicy", ("MutatingWebhookConfiguration", "v1")
    for name in ("default", "enforce"):
        assert _gating(name, "1.30.0") == _gating(name, "1.35.0") == [webhook]
        assert _gating(name, "1.35.0", V1BETA1) == [(policy, "v1beta1")]
        assert _gating(name, "1.36.0") == _gating(name, "1.37.0") == [(policy, "v1")]
        assert _gating(name, "1.36.0", WEBHOOK) == [webhook]
    # With certificates of people's own only they know the authority.
    assert _gating("kubernetes", "1.30.0") == []
    assert _gating("kubernetes", "1.30.0", AUTHORITY) == [webhook]


def test_the_webhook_fails_open_and_is_known_by_its_certificate():
    for name, options in (("default", ()), ("enforce", ()), ("kubernetes", AUTHORITY), ("default", NO_TLS)):
        objects = objects_of(name, "1.30.0", options)
        found = pick(objects, "MutatingWebhookConfiguration")
        service = pick(objects, "Service", "eelgrid-webhook")
        host = f"{service['metadata']['name']}.{service['metadata']['namespace']}.svc"
        for hook in found["webhooks"]:
            assert hook["failurePolicy"] == "Ignore"
            assert 2 <= hook["timeoutSeconds"] <= 5
            assert hook["sideEffects"] == "None"
            asked = hook["clientConfig"]["service"]
            assert (asked["name"], asked["namespace"]) == (service["metadata"]["name"], "eelgrid")
            assert {rule["resources"][0] for rule in hook["rules"]} == {"pods"}
            told = hook["clientConfig"].get("caBundle")
            match name:
                case "default":
                    secret = pick(objects, "Secret", "eelgrid-webhook-tls")["data"]
                    assert told == secret["ca.crt"]
                    context = ssl.create_default_context(cadata=base64.b64decode(told).decode())
                    leaf = x509.load_pem_x509_certificate(base64.b64decode(secret["tls.crt"]))
                    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
                    assert host in names.get_values_for_type(x509.DNSName)
                    assert context.cert_store_stats()["x509_ca"] == 1
                case "enforce":
                    certificate = pick(objects, "Certificate", "eelgrid-webhook-tls")
                    injected = found["metadata"]["annotations"]["cert-manager.io/inject-ca-from"]
                    assert injected == f"eelgrid/{certificate['metadata']['name']}"
                    assert host in certificate["spec"]["dnsNames"]
                case "kubernetes":
                    assert base64.b64decode(told) == b"PEM"


def test_the_controller_serves_the_webhook_by_the_same_rules():
    arguments = container(pick(objects_of("default", "1.30.0"), "Deployment"))["args"]
    with controller.make_context("eelgrid-controller", list(arguments)) as context:
        found = context.params
    assert found["webhook_listen"] == "0.0.0.0:9443"
    assert found["webhook_resources"].split(",") == ["nvidia.com/gpu", "nvidia.com/mig-", "amd.com/gpu"]
    assert found["webhook_excluded"].split(",") == ["kube-system", "kube-public", "kube-node-lease", "eelgrid"]
    assert found["webhook_toleration"] is True
    assert not [one for one in container(pick(objects_of("default"), "Deployment"))["args"] if "webhook" in one]


def test_the_leader_is_asked_first_where_pods_are_placed_at_admission():
    objects = objects_of("pinning")
    hooks = pick(objects, "MutatingWebhookConfiguration")["webhooks"]
    assert [hook["name"].partition(".")[::2] for hook in hooks] == [
        ("pods", "place.eelgrid.io"),
        ("namespaces", "place.eelgrid.io"),
        ("pods", "gate.eelgrid.io"),
        ("namespaces", "gate.eelgrid.io"),
    ]
    leader = pick(objects, "Service", "eelgrid-webhook-leader")
    assert leader["spec"]["selector"]["eelgrid.io/role"] == "leader"
    secret = pick(objects, "Secret", "eelgrid-webhook-tls")["data"]
    leaf = x509.load_pem_x509_certificate(base64.b64decode(secret["tls.crt"]))
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    for hook in hooks:
        service = hook["clientConfig"]["service"]
        places = ".place." in hook["name"]
        assert hook["failurePolicy"] == "Ignore"
        assert hook["sideEffects"] == ("NoneOnDryRun" if places else "None")
        assert service["path"].startswith("/place/" if places else "/gate/")
        assert (service["name"] == leader["metadata"]["name"]) is places
        assert f"{service['name']}.eelgrid.svc" in names.get_values_for_type(x509.DNSName)
    arguments = container(pick(objects, "Deployment"))["args"]
    assert "--kubernetes-pin-at-admission" in arguments
    assert "--kubernetes-mode=scheduler" in arguments


def test_who_was_answered_by_the_leader_is_not_asked_about_again():
    objects = objects_of("pinning")
    rules = replace(rig.RULES, binds=True)
    found = rig.pod(labels=rig.MANAGED, gpus=1)
    asked = []
    made = rig.by_webhook(objects, found, rules=rules, asked=asked)
    assert asked == ["/place/pods"]
    assert made["spec"]["schedulerName"] == "eelgrid"
    asked.clear()
    made = rig.by_webhook(objects, found, rules=rules, asked=asked, is_leader_away=True)
    assert asked == ["/gate/pods"]
    assert made["spec"]["schedulerName"] == "eelgrid"


def test_nothing_is_gated_where_no_controller_takes_gates_off():
    objects = objects_of("agents")
    assert not [one for one in objects if one["kind"].startswith("Mutating")]
    assert pick(objects, "Deployment")["spec"]["replicas"] == 1
    assert pick(objects, "ClusterRole", "eelgrid-controller")["rules"] == []
