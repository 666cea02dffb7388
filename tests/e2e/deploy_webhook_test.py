"""The webhook on a real API server: it decides as the policy does, and when it is away nobody waits for it.

The API server asks it by a URL on this machine, for there is no network of services; everything else of the
configuration is the chart's.
"""

import asyncio
import base64
import json
import logging
import socket
import subprocess
import threading
import time
from contextlib import contextmanager

import pytest
import trustme
from tests import deploy_rig
from tests.admission_rig import GATED, MANAGED, OPTED_IN, RULES, TRIAL, UNTOUCHED, pod
from tests.e2e.installed import KUBECONFIG, VALIDATE, apply, kubectl, needs_cluster, remove
from tests.waiting import poll_until

from eelgrid_controller.engines.kubernetes.pods.admission_review import ReviewOutcome
from eelgrid_controller.server.http.admission_webhook import AdmissionWebhook
from eelgrid_protos.transport import KeyPairFiles

pytestmark = needs_cluster
GATE = "eelgrid.io/placement"
TIMEOUT_S = 2


class Server:
    """The webhook in a thread of its own, so that kubectl may be waited for."""

    def __init__(self, files):
        self.hook = AdmissionWebhook(RULES, files, log=logging.getLogger("test.webhook"))
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.port = self._done(self.hook.start("127.0.0.1:0"))

    def _done(self, work):
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30.0)

    def stop(self):
        if self.thread.is_alive():
            self._done(self.hook.stop())
            # Connections end their TLS by themselves.
            self._done(asyncio.sleep(0.5))
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.thread.join()
            self.loop.close()


def configuration(port, authority):
    """The chart's, for a server on this machine."""
    options = ("--set", "gate.policyVersion=webhook", "--set", f"gate.webhook.timeoutSeconds={TIMEOUT_S}")
    found = deploy_rig.pick(deploy_rig.objects_of("default", options=options), "MutatingWebhookConfiguration")
    told = base64.b64encode(authority.cert_pem.bytes()).decode()
    for hook in found["webhooks"]:
        path = hook["clientConfig"]["service"]["path"]
        hook["clientConfig"] = {"url": f"https://127.0.0.1:{port}{path}", "caBundle": told}
    return found


@pytest.fixture(scope="module")
def authority():
    return trustme.CA()


@pytest.fixture(scope="module")
def files(authority, tmp_path_factory):
    folder = tmp_path_factory.mktemp("webhook")
    leaf = authority.issue_cert("127.0.0.1")
    found = KeyPairFiles(folder / "tls.crt", folder / "tls.key")
    found.certificate.write_bytes(leaf.cert_chain_pems[0].bytes())
    found.key.write_bytes(leaf.private_key_pem.bytes())
    return found


@pytest.fixture(scope="module")
def without_policy(deployed):
    """Nothing else gates pods."""
    bindings = [one for one in deployed if one["kind"] == "MutatingAdmissionPolicyBinding"]
    remove(bindings)
    poll_until(lambda: not _gates(pod(labels=MANAGED)))
    yield
    apply(bindings)


@contextmanager
def configured(port, authority, *, probe=None):
    """The API server asks this port; `probe` says when it has begun to."""
    found = configuration(port, authority)
    apply([found])
    try:
        if probe is not None:
            poll_until(probe)
        yield
    finally:
        remove([found])


@pytest.fixture(scope="module")
def served(without_policy, files, authority):
    server = Server(files)
    yield server
    remove([configuration(server.port, authority)])
    server.stop()


@pytest.fixture
def webhook(served, authority):
    """One server for all that need it; tests of webhooks that are away may have put another in its place since."""
    apply([configuration(served.port, authority)])
    poll_until(lambda: _asks(served))
    return served


def _asks(server):
    """Whether the API server gates a pod, and by this one: of what it was told it hears a little later."""
    before = sum(server.hook.answers.values())
    return _gates(pod(labels=MANAGED)) and sum(server.hook.answers.values()) > before


def _create(one, *options):
    done = kubectl("create", f"--validate={VALIDATE}", *options, "-o", "json", "-f", "-", given=one)
    return json.loads(done.stdout)["spec"]


def _gates(one):
    return [gate["name"] for gate in _create(one, "--dry-run=server").get("schedulingGates", ())]


@pytest.mark.parametrize("name", GATED)
def test_a_pod_that_opted_in_gets_the_gate_once(webhook, name):
    made = _create(GATED[name], "--dry-run=server")
    gates = [gate["name"] for gate in made["schedulingGates"]]
    assert gates.count(GATE) == 1
    assert {gate["name"] for gate in GATED[name]["spec"].get("schedulingGates", ())} <= set(gates)
    assert [one.get("key") for one in made["tolerations"]].count("eelgrid.io/managed") == 1


@pytest.mark.parametrize("name", UNTOUCHED)
def test_every_other_pod_is_left_alone(webhook, name):
    asked = sum(webhook.hook.answers.values())
    made = _create(UNTOUCHED[name], "--dry-run=server")
    assert "schedulingGates" not in made
    assert "eelgrid.io/managed" not in [one.get("key") for one in made.get("tolerations", ())]
    assert sum(webhook.hook.answers.values()) == asked, "the API server need not have asked"


def test_what_is_made_is_gated_as_what_is_tried(webhook):
    made = _create(pod("kept", labels=MANAGED))
    assert [gate["name"] for gate in made["schedulingGates"]] == [GATE]
    assert webhook.hook.answers[ReviewOutcome.UNREAD] == webhook.hook.refused == 0
    kubectl("delete", "pod", "kept", "-n", TRIAL, "--force", "--grace-period=0")


def _goes_by(most_s):
    """Opted-in pods come without a gate, all others as ever; how long the slowest creation took."""
    slowest_s = 0.0
    for one in (pod(labels=MANAGED, gpus=1), pod(where=OPTED_IN, gpus=1), pod(gpus=1), pod(where=OPTED_IN)):
        begin_s = time.monotonic()
        made = _create(one, "--dry-run=server")
        slowest_s = max(slowest_s, time.monotonic() - begin_s)
        assert "schedulingGates" not in made
    assert slowest_s < most_s


def test_a_webhook_that_is_away_lets_everything_by(without_policy, files, authority):
    server = Server(files)
    with configured(server.port, authority, probe=lambda: _asks(server)):
        server.stop()
        _goes_by(TIMEOUT_S + 8.0)


def test_a_webhook_that_never_answers_lets_everything_by_after_its_time(without_policy, authority):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with configured(silent.getsockname()[1], authority):
            time.sleep(2.0)
            _goes_by(2 * TIMEOUT_S + 8.0)


def test_a_webhook_of_another_authority_lets_everything_by(without_policy, files):
    server = Server(files)
    try:
        with configured(server.port, trustme.CA()):
            time.sleep(2.0)
            _goes_by(TIMEOUT_S + 8.0)
            assert sum(server.hook.answers.values()) == 0
    finally:
        server.stop()


def _helm(*arguments):
    chart = (str(deploy_rig.CHART), "--namespace", TRIAL, "--kubeconfig", KUBECONFIG)
    given = ("--set", "nameOverride=trial,crds.install=false,controller.podDisruptionBudget.enabled=false")
    command = [str(deploy_rig.helm_program.find()), "upgrade", "--install", "trial", *chart, *given, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr


def _known():
    """What API servers trust, and the secret that replicas have."""
    found = json.loads(kubectl("get", "mutatingwebhookconfiguration", "trial-gate", "-o", "json").stdout)
    secret = json.loads(kubectl("get", "secret", "eelgrid-webhook-tls", "-n", TRIAL, "-o", "json").stdout)
    return {hook["clientConfig"]["caBundle"] for hook in found["webhooks"]}, secret["data"]


def test_an_upgrade_keeps_the_certificate_and_a_newer_cluster_has_no_webhook(deployed):
    webhook = ("--set", "gate.policyVersion=webhook")
    try:
        _helm(*webhook)
        bundles, secret = _known()
        assert bundles == {secret["ca.crt"]}
        _helm(*webhook, "--set", "gate.webhook.timeoutSeconds=5")
        assert _known() == (bundles, secret)
        kubectl("delete", "secret", "eelgrid-webhook-tls", "-n", TRIAL)
        _helm(*webhook)
        renewed, made = _known()
        assert renewed == {made["ca.crt"]} != bundles
        _helm()
        kubectl("get", "mutatingadmissionpolicy", "trial-gate")
        for kind in ("mutatingwebhookconfiguration/trial-gate", "service/trial-webhook", "secret/eelgrid-webhook-tls"):
            assert "NotFound" in kubectl("get", kind, "-n", TRIAL, fine=False).stderr
    finally:
        command = [str(deploy_rig.helm_program.find()), "uninstall", "trial", "--namespace", TRIAL]
        subprocess.run([*command, "--kubeconfig", KUBECONFIG], capture_output=True, check=False, timeout=120)
