"""The chart on a real API server: whenever EELGRID_KUBECONFIG names a cluster of 1.36 or later that may be used up.

It makes the namespaces eelgrid and eelgrid-trial-*, the chart's objects and objects of our kinds, and
takes all of them away again, the CRDs too. Never point it at a cluster that people use.
"""

import copy
import json
import os
import subprocess

import pytest
import yaml
from tests import deploy_rig as rig

KUBECONFIG = os.environ.get("EELGRID_KUBECONFIG", "")
KUBECTL = rig.helm_program.find("kubectl")
# Set where an API server cannot tell its schema; nothing else needs it.
VALIDATE = os.environ.get("EELGRID_KUBECTL_VALIDATE", "strict")
pytestmark = [
    rig.needs_helm,
    pytest.mark.skipif(not KUBECONFIG or KUBECTL is None, reason="EELGRID_KUBECONFIG names no cluster"),
]
TRIAL = "eelgrid-trial"
OPTED_IN = "eelgrid-trial-all"
ACCOUNT = "system:serviceaccount:eelgrid:eelgrid-controller"
OTHERS = {"monitoring.coreos.com/v1", "cert-manager.io/v1"}


def kubectl(*arguments, given=None, fine=True):
    command = [str(KUBECTL), "--kubeconfig", KUBECONFIG, *arguments]
    text = None if given is None else given if isinstance(given, str) else json.dumps(given)
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=120)
    if fine:
        assert done.returncode == 0, f"{arguments}: {done.stderr}"
    return done


def apply(objects, *options, fine=True):
    text = "---\n".join(yaml.safe_dump(one) for one in objects)
    return kubectl("apply", f"--validate={VALIDATE}", *options, "-f", "-", given=text, fine=fine)


def namespace(name, **labels):
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}


@pytest.fixture(scope="module")
def cluster():
    """The chart, installed; taken away at the end."""
    objects = rig.objects_of("kubernetes")
    namespaces = [
        namespace("eelgrid"), namespace(TRIAL), namespace(OPTED_IN, **{"eelgrid.io/managed": "true"})
    ]  # fmt: skip
    apply(namespaces)
    apply(objects)
    for crd in rig.crd_files().values():
        kubectl("wait", "--for=condition=Established", f"crd/{crd['metadata']['name']}", "--timeout=30s")
    yield objects
    text = "---\n".join(yaml.safe_dump(one) for one in (*objects, *namespaces))
    kubectl("delete", "--ignore-not-found", "--wait=false", "-f", "-", given=text)


@pytest.mark.parametrize("name", rig.VALUES)
def test_the_server_takes_every_object(cluster, name):
    objects = [one for one in rig.objects_of(name) if one["apiVersion"] not in OTHERS]
    told = apply(objects, "--dry-run=server").stdout
    assert told.count("(server dry run)") == len(objects)


def _ours(found, name):
    one = {"apiVersion": "eelgrid.io/v1alpha1", **copy.deepcopy(found)}
    is_policy = one["kind"] == "PowerPolicy"
    one["metadata"] = {"name": "default"} if is_policy else {"name": name, "namespace": TRIAL}
    return one


def _create(one, fine=True):
    return kubectl(
        "create", f"--validate={VALIDATE}", "--dry-run=server", "-o", "json", "-f", "-", given=one, fine=fine
    )


@pytest.mark.parametrize("name", rig.GOOD)
def test_our_kinds_take_what_is_good(cluster, name):
    made = json.loads(_create(_ours(rig.GOOD[name], "trial")).stdout)
    if made["kind"] == "InferenceService":
        assert made["spec"]["mode"] in {"Recommend", "Enforce"}
        assert made["spec"]["replicas"]["least"] <= made["spec"]["replicas"]["most"]
    else:
        assert made["spec"]["placement"] == "eelgrid"


@pytest.mark.parametrize("name", [*rig.BAD_BY_SCHEMA, *rig.BAD_BY_RULE])
def test_our_kinds_refuse_what_is_bad(cluster, name):
    bad = {**rig.BAD_BY_SCHEMA, **rig.BAD_BY_RULE}[name]
    done = _create(_ours(bad, "trial"), fine=False)
    assert done.returncode != 0
    assert "is invalid" in done.stderr, done.stderr


def test_there_is_one_policy_and_its_name_is_default(cluster):
    one = _ours(rig.GOOD["policy"], "trial")
    one["metadata"]["name"] = "another"
    assert "its name is default" in _create(one, fine=False).stderr


def test_a_target_stays_and_status_is_a_part_of_its_own(cluster):
    one = _ours(rig.GOOD["answers"], "stays")
    apply([one])
    one["spec"]["targetRef"]["name"] = "another"
    assert "the target cannot change" in apply([one], fine=False).stderr
    patch = json.dumps({"status": {"replicas": 2, "conditions": [
        {"type": "PromiseKept", "status": "True", "reason": "Measured", "message": "p99 is 1.2 s",
         "lastTransitionTime": "2026-01-01T00:00:00Z"}]}})  # fmt: skip
    where = ("patch", "inferenceservice", "stays", "-n", TRIAL, "--type=merge", "-p", patch)
    kubectl(*where)
    assert "PromiseKept" not in kubectl("get", "inferenceservice", "stays", "-n", TRIAL, "-o", "json").stdout
    kubectl(*where, "--subresource=status")
    line = kubectl("get", "inferenceservice", "stays", "-n", TRIAL).stdout.splitlines()[1].split()
    assert line[:4] == ["stays", "rank", "True", "2"]


def pod(name="p", where=TRIAL, gpus=0, labels=None, metadata=None, **spec):
    container = {"name": "c", "image": "none"}
    if gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": str(gpus)}}
    return {
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": where, "labels": labels or {}, **(metadata or {})},
        "spec": {"containers": [container], **spec},
    }  # fmt: skip


MANAGED, LEFT = {"eelgrid.io/managed": "true"}, {"eelgrid.io/managed": "false"}
SET = [{"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "d", "uid": "u-1", "controller": True}]
OTHER_GATE = {"schedulingGates": [{"name": "kueue.x-k8s.io/admission"}]}
TOLERATES = {"tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}]}
GATED = {
    "a pod with the label": pod(labels=MANAGED),
    "a pod with the label, with GPUs": pod(labels=MANAGED, gpus=1),
    "a pod with GPUs in an opted-in namespace": pod(where=OPTED_IN, gpus=2),
    "a pod with the label in an opted-in namespace": pod(where=OPTED_IN, labels=MANAGED, gpus=1),
    "a pod that another gate holds": pod(labels=MANAGED, **OTHER_GATE),
    "a pod that has our gate": pod(labels=MANAGED, schedulingGates=[{"name": "eelgrid.io/placement"}]),
    "a pod with tolerations": pod(labels=MANAGED, **TOLERATES),
    "a pod with a claim in an opted-in namespace": pod(
        where=OPTED_IN, resourceClaims=[{"name": "g", "resourceClaimTemplateName": "t"}]
    ),
}
UNTOUCHED = {
    "a pod of nobody": pod(gpus=1),
    "a pod without devices in an opted-in namespace": pod(where=OPTED_IN),
    "a pod that says no": pod(where=OPTED_IN, labels=LEFT, gpus=1),
    "a pod that has a node": pod(labels=MANAGED, nodeName="n1"),
    "a DaemonSet's pod": pod(labels=MANAGED, metadata={"ownerReferences": SET}),
    "a mirror pod": pod(labels=MANAGED, metadata={"annotations": {"kubernetes.io/config.source": "file"}}),
    "a pod of the system": pod(where="kube-system", labels=MANAGED, gpus=1),
    "a pod of our own namespace": pod(where="eelgrid", labels=MANAGED, gpus=1),
}


@pytest.fixture(scope="module")
def policy(cluster):
    """The policy in force: the API server's own cache takes a second or two."""
    import time

    for _ in range(60):
        if _gates(pod(labels=MANAGED)):
            return
        time.sleep(0.5)
    pytest.fail(kubectl("get", "mutatingadmissionpolicy", "eelgrid-gate", "-o", "yaml").stdout)


def _made(one):
    return json.loads(_create(one).stdout)["spec"]


def _gates(one):
    return [gate["name"] for gate in _made(one).get("schedulingGates", ())]


@pytest.mark.parametrize("name", GATED)
def test_a_pod_that_opted_in_gets_the_gate_once(policy, name):
    made = _made(GATED[name])
    gates = [gate["name"] for gate in made["schedulingGates"]]
    assert gates.count("eelgrid.io/placement") == 1
    assert {gate["name"] for gate in GATED[name]["spec"].get("schedulingGates", ())} <= set(gates)
    keys = [one.get("key") for one in made["tolerations"]]
    assert keys.count("eelgrid.io/managed") == 1
    assert {one["key"] for one in GATED[name]["spec"].get("tolerations", ())} <= set(keys)


@pytest.mark.parametrize("name", UNTOUCHED)
def test_every_other_pod_is_left_alone(policy, name):
    made = _made(UNTOUCHED[name])
    assert "schedulingGates" not in made
    assert "eelgrid.io/managed" not in [one.get("key") for one in made.get("tolerations", ())]


def test_the_controllers_account_ungates_and_pins_in_one_patch(policy):
    kubectl("create", f"--validate={VALIDATE}", "-f", "-", given=pod("pinned", labels=MANAGED))
    terms = [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]}]
    patch = {
        "metadata": {"annotations": {"eelgrid.io/plan": "{}"}},
        "spec": {
            "schedulingGates": None,
            "affinity": {
                "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
            },
        },
    }
    kubectl("patch", "pod", "pinned", "-n", TRIAL, "--type=merge", "-p", json.dumps(patch), f"--as={ACCOUNT}")
    made = json.loads(kubectl("get", "pod", "pinned", "-n", TRIAL, "-o", "json").stdout)["spec"]
    assert "schedulingGates" not in made
    assert made["affinity"]["nodeAffinity"]


MAY = [
    ("list", "nodes"), ("watch", "nodes"), ("patch", "nodes"), ("list", "pods"), ("watch", "pods"), ("patch", "pods"),
    ("delete", "pods"), ("create", "pods/eviction"), ("create", "events"), ("list", "namespaces"),
    ("watch", "deployments.apps"), ("patch", "deployments.apps/scale"), ("patch", "jobs.batch"),
    ("list", "poddisruptionbudgets.policy"), ("watch", "resourceclaims.resource.k8s.io"),
    ("patch", "resourceclaims.resource.k8s.io/status"), ("update", "resourceclaims.resource.k8s.io/binding"),
    ("list", "inferenceservices.eelgrid.io"), ("patch", "inferenceservices.eelgrid.io/status"),
    ("watch", "powerpolicies.eelgrid.io"),
]  # fmt: skip
MAY_NOT = [
    ("create", "pods"), ("update", "pods"), ("deletecollection", "pods"), ("create", "pods/exec"),
    ("create", "pods/binding"), ("get", "secrets"), ("list", "secrets"), ("get", "configmaps"), ("delete", "nodes"),
    ("patch", "nodes/status"), ("create", "deployments.apps"), ("delete", "jobs.batch"), ("delete", "namespaces"),
    ("patch", "inferenceservices.eelgrid.io"), ("patch", "powerpolicies.eelgrid.io"),
    ("create", "serviceaccounts/token"), ("create", "clusterrolebindings.rbac.authorization.k8s.io"),
    ("get", "leases.coordination.k8s.io"), ("patch", "resourceclaims.resource.k8s.io"),
    ("patch", "customresourcedefinitions.apiextensions.k8s.io"),
]  # fmt: skip


def _can(verb, resource, *options, account=ACCOUNT):
    name, _, part = resource.partition("/")
    more = [f"--subresource={part}"] if part else []
    # can-i answers no with exit code 1.
    return kubectl("auth", "can-i", verb, name, *more, *options, f"--as={account}", fine=False).stdout.strip()


@pytest.mark.parametrize(("verb", "resource"), MAY)
def test_the_controller_may_what_it_needs(cluster, verb, resource):
    assert _can(verb, resource, "-n", TRIAL) == "yes"


@pytest.mark.parametrize(("verb", "resource"), MAY_NOT)
def test_the_controller_may_not_more(cluster, verb, resource):
    assert _can(verb, resource, "-n", TRIAL) == "no"


def test_it_holds_one_lease_of_its_own_namespace(cluster):
    assert _can("create", "leases.coordination.k8s.io", "-n", "eelgrid") == "yes"
    assert _can("update", ["leases.coordination.k8s.io", "eelgrid-controller"][0], "-n", "eelgrid") == "no"
    named = kubectl(
        "auth", "can-i", "update", "leases.coordination.k8s.io/eelgrid-controller", "-n", "eelgrid", f"--as={ACCOUNT}",
        fine=False,
    )  # fmt: skip
    assert named.stdout.strip() == "yes"


def test_the_agents_account_may_nothing(cluster):
    agent = "system:serviceaccount:eelgrid:eelgrid-agent"
    for verb, resource in [
        ("list", "pods"),
        ("get", "nodes"),
        ("get", "secrets"),
        ("list", "inferenceservices.eelgrid.io"),
    ]:
        assert _can(verb, resource, "-n", "eelgrid", account=agent) == "no"
