"""The chart on a real API server: whenever EELGRID_KUBECONFIG names a cluster of 1.36 or later that may be used up.

It makes the namespaces eelgrid and eelgrid-trial-*, the chart's objects and objects of our kinds, and
takes all of them away again, the CRDs too. Never point it at a cluster that people use.
"""

import copy
import json

import pytest
from tests import deploy_rig as rig
from tests.admission_rig import GATED, MANAGED, TRIAL, UNTOUCHED, pod
from tests.e2e.installed import ACCOUNT, OTHERS, VALIDATE, apply, kubectl, needs_cluster

pytestmark = needs_cluster


@pytest.mark.parametrize("name", rig.VALUES)
def test_the_server_takes_every_object(deployed, name):
    objects = [one for one in rig.objects_of(name) if one["apiVersion"] not in OTHERS]
    told = apply(objects, "--dry-run=server").stdout
    assert told.count("(server dry run)") == len(objects)


def _ours(found, name):
    one = {"apiVersion": "eelgrid.io/v1alpha1", **copy.deepcopy(found)}
    is_policy = one["kind"] == "PowerPolicy"
    one["metadata"] = {"name": name} if is_policy else {"name": name, "namespace": TRIAL}
    return one


def _create(one, fine=True):
    return kubectl(
        "create", f"--validate={VALIDATE}", "--dry-run=server", "-o", "json", "-f", "-", given=one, fine=fine
    )


@pytest.mark.parametrize("name", rig.GOOD)
def test_our_kinds_take_what_is_good(deployed, name):
    made = json.loads(_create(_ours(rig.GOOD[name], "trial")).stdout)
    if made["kind"] == "InferenceService":
        assert made["spec"]["mode"] in {"Recommend", "Enforce"}
        assert made["spec"]["replicas"]["least"] <= made["spec"]["replicas"]["most"]
    else:
        assert made["spec"] == rig.GOOD[name]["spec"] | made["spec"]
        assert "placement" not in made["spec"], "what an object does not name stays the operator's"


@pytest.mark.parametrize("name", [*rig.BAD_BY_SCHEMA, *rig.BAD_BY_RULE])
def test_our_kinds_refuse_what_is_bad(deployed, name):
    bad = {**rig.BAD_BY_SCHEMA, **rig.BAD_BY_RULE}[name]
    done = _create(_ours(bad, "trial"), fine=False)
    assert done.returncode != 0
    assert "is invalid" in done.stderr, done.stderr


def test_a_target_stays_and_status_is_a_part_of_its_own(deployed):
    one = _ours(rig.GOOD["answers"], "stays")
    apply([one])
    one["spec"]["targetRef"]["name"] = "another"
    assert "the target cannot change" in apply([one], fine=False).stderr
    patch = json.dumps(
        {
            "status": {
                "replicas": 2,
                "conditions": [
                    {
                        "type": "PromiseKept",
                        "status": "True",
                        "reason": "Measured",
                        "message": "p99 is 1.2 s",
                        "lastTransitionTime": "2026-01-01T00:00:00Z",
                    }
                ],
            }
        }
    )
    where = ("patch", "inferenceservice", "stays", "-n", TRIAL, "--type=merge", "-p", patch)
    kubectl(*where)
    assert "PromiseKept" not in kubectl("get", "inferenceservice", "stays", "-n", TRIAL, "-o", "json").stdout
    kubectl(*where, "--subresource=status")
    line = kubectl("get", "inferenceservice", "stays", "-n", TRIAL).stdout.splitlines()[1].split()
    assert line[:4] == ["stays", "rank", "True", "2"]


@pytest.fixture(scope="module")
def policy(deployed):
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
    ("list", "nodes"),
    ("watch", "nodes"),
    ("list", "pods"),
    ("watch", "pods"),
    ("patch", "pods"),
    ("delete", "pods"),
    ("create", "events.events.k8s.io"),
    ("get", "jobs.batch"),
    ("watch", "deployments.apps"),
    ("patch", "deployments.apps/scale"),
    ("patch", "statefulsets.apps/scale"),
    ("list", "inferenceservices.eelgrid.io"),
    ("patch", "inferenceservices.eelgrid.io/status"),
    ("watch", "powerpolicies.eelgrid.io"),
    ("update", "powerpolicies.eelgrid.io/status"),
]
MAY_NOT = [
    ("create", "pods"),
    ("update", "pods"),
    ("deletecollection", "pods"),
    ("create", "pods/exec"),
    ("create", "pods/binding"),
    ("get", "secrets"),
    ("list", "secrets"),
    ("get", "configmaps"),
    ("delete", "nodes"),
    ("patch", "nodes/status"),
    ("create", "deployments.apps"),
    ("delete", "jobs.batch"),
    ("delete", "namespaces"),
    ("patch", "inferenceservices.eelgrid.io"),
    ("patch", "powerpolicies.eelgrid.io"),
    ("create", "serviceaccounts/token"),
    ("create", "clusterrolebindings.rbac.authorization.k8s.io"),
    ("get", "leases.coordination.k8s.io"),
    ("patch", "resourceclaims.resource.k8s.io"),
    ("patch", "customresourcedefinitions.apiextensions.k8s.io"),
    # Of abilities that are off by default.
    ("create", "pods/eviction"),
    ("patch", "nodes"),
    ("patch", "jobs.batch"),
    ("patch", "deployments.apps"),
    ("list", "resourceclaims.resource.k8s.io"),
    ("patch", "resourceclaims.resource.k8s.io/status"),
    ("update", "resourceclaims.resource.k8s.io/binding"),
    ("list", "horizontalpodautoscalers.autoscaling"),
]


def _can(verb, resource, *options, account=ACCOUNT):
    name, _, part = resource.partition("/")
    more = [f"--subresource={part}"] if part else []
    # can-i answers no with exit code 1.
    return kubectl("auth", "can-i", verb, name, *more, *options, f"--as={account}", fine=False).stdout.strip()


@pytest.mark.parametrize(("verb", "resource"), MAY)
def test_the_controller_may_what_it_needs(deployed, verb, resource):
    assert _can(verb, resource, "-n", TRIAL) == "yes"


@pytest.mark.parametrize(("verb", "resource"), MAY_NOT)
def test_the_controller_may_not_more(deployed, verb, resource):
    assert _can(verb, resource, "-n", TRIAL) == "no"


def test_it_holds_one_lease_of_its_own_namespace(deployed):
    assert _can("create", "leases.coordination.k8s.io", "-n", "eelgrid") == "yes"
    assert _can("update", ["leases.coordination.k8s.io", "eelgrid-controller"][0], "-n", "eelgrid") == "no"
    named = kubectl(
        "auth",
        "can-i",
        "update",
        "leases.coordination.k8s.io/eelgrid-controller",
        "-n",
        "eelgrid",
        f"--as={ACCOUNT}",
        fine=False,
    )
    assert named.stdout.strip() == "yes"


def test_the_agents_account_may_nothing(deployed):
    agent = "system:serviceaccount:eelgrid:eelgrid-agent"
    for verb, resource in [
        ("list", "pods"),
        ("get", "nodes"),
        ("get", "secrets"),
        ("list", "inferenceservices.eelgrid.io"),
    ]:
        assert _can(verb, resource, "-n", "eelgrid", account=agent) == "no"
