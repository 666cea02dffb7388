"""Mode gate on a real control plane, by the account that the chart makes and the rights that it has there.

The chart's policy gates pods, our controller pins them, kube-scheduler binds; nobody here is an administrator
but the test.
"""

import asyncio
import json
import time
from contextlib import asynccontextmanager

import pytest
import yaml
from tests import deploy_rig
from tests.admission_rig import MANAGED, TRIAL, pod
from tests.builders.server import run_controller
from tests.e2e.installed import VALIDATE, apply, kubectl, needs_cluster, remove

from eelgrid_controller.engines.kubernetes.model.well_known import (
    ANNOTATION_GROUP,
    ANNOTATION_GROUP_SIZE,
    ANNOTATION_PLAN,
)
from eelgrid_controller.engines.kubernetes.pods.gate_events import WriteFailure
from eelgrid_controller.engines.kubernetes.pods.plan_annotation import pinned_node
from eelgrid_controller.engines.kubernetes.reconcilers.reconciler import ROLE_LABEL
from eelgrid_controller.runtime.config import ABILITIES, KubernetesConfig

pytestmark = needs_cluster
NODES = ("eelgrid-trial-a", "eelgrid-trial-b")
OURS = "eelgrid-controller-trial"
# In which a part has listed what it needs and written what it had to say.
SETTLED_S = 12.0


def _node(name):
    room = {"cpu": "64", "memory": "512Gi", "pods": "110", "nvidia.com/gpu": "8"}
    ready = {
        "type": "Ready",
        "status": "True",
        "reason": "Trial",
        "lastHeartbeatTime": "2026-01-01T00:00:00Z",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    metadata = {"name": name, "labels": {"kubernetes.io/hostname": name, "eelgrid-trial": "yes"}}
    apply([{"apiVersion": "v1", "kind": "Node", "metadata": metadata}])
    status = {"status": {"capacity": room, "allocatable": room, "conditions": [ready]}}
    kubectl("patch", "node", name, "--subresource=status", "--type=merge", "-p", json.dumps(status))


@pytest.fixture(scope="module")
def nodes(deployed):
    """Two nodes of eight GPUs, without kubelets."""
    for name in NODES:
        _node(name)
    yield
    kubectl("delete", "pods", "--all", "-n", TRIAL, "--force", "--grace-period=0")
    for name in NODES:
        kubectl("delete", "node", name, "--ignore-not-found")


@pytest.fixture
def access(nodes, tmp_path, monkeypatch):
    """A kubeconfig of the account, in a pod of its own as far as the API server sees."""
    token = kubectl("create", "token", "eelgrid-controller", "-n", "eelgrid").stdout.strip()
    found = yaml.safe_load(kubectl("config", "view", "--raw", "--flatten", "--minify").stdout)
    found["users"][0]["user"] = {"token": token}
    path = tmp_path / "kubeconfig"
    path.write_text(yaml.safe_dump(found))
    apply([{**pod(OURS, "eelgrid"), "spec": {"containers": [{"name": "c", "image": "none"}], "nodeName": NODES[0]}}])
    monkeypatch.setenv("POD_NAME", OURS)
    monkeypatch.setenv("POD_NAMESPACE", "eelgrid")
    yield str(path)
    kubectl("delete", "pod", OURS, "-n", "eelgrid", "--force", "--grace-period=0", "--ignore-not-found")


@asynccontextmanager
async def controlling(folder, access, **options):
    """A controller that leads, with what the chart has it do by default."""
    chosen = deploy_rig.pick(deploy_rig.objects_of("kubernetes"), "Deployment")
    flags = deploy_rig.container(chosen)["args"]
    abilities = next(one.partition("=")[2] for one in flags if one.startswith("--kubernetes-abilities"))
    options = {"abilities": frozenset(abilities.split(",")), **options}
    config = KubernetesConfig(kubeconfig=access, namespace="eelgrid", lease_s=5.0, **options)
    async with run_controller(folder, kubernetes=config) as rig:
        yield rig


async def until(check, *, within_s=60.0):
    """What a look at the cluster gives as soon as it is true."""
    until_s = time.monotonic() + within_s
    while not (found := await asyncio.to_thread(check)):
        assert time.monotonic() < until_s, "it did not come to pass"
        await asyncio.sleep(0.3)
    return found


def pods(label="", *, where=TRIAL):
    options = ("-l", label) if label else ()
    return json.loads(kubectl("get", "pods", "-n", where, "-o", "json", *options).stdout)["items"]


def bound(label, count):
    found = [one for one in pods(label) if one["spec"].get("nodeName")]
    return found if len(found) == count else None


def check_places(found):
    """Every pod is on the node that was planned, on devices that nobody else has."""
    held = []
    for one in found:
        plan = json.loads(one["metadata"]["annotations"][ANNOTATION_PLAN])
        assert one["spec"]["nodeName"] == pinned_node(one) == plan["node"]
        held += [(plan["node"], device) for device in plan["devices"]]
    assert len(set(held)) == len(held)


def check_rights(controller):
    """Nothing was asked for that the account may not have."""
    engine = controller.placing.engine
    assert engine.writes.failed[WriteFailure.FORBIDDEN] == 0
    assert engine.events.dropped == 0
    assert (engine.pods.failures, engine.nodes.failures, engine.failures) == (0, 0, 0)


def owner(kind, name, **spec):
    template = {
        "metadata": {"labels": {"app": name, **MANAGED}, "annotations": spec.pop("notes", {})},
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "containers": [
                {"name": "c", "image": "none", "resources": {"limits": {"nvidia.com/gpu": str(spec.pop("gpus", 1))}}}
            ],
        },
    }
    group = "batch/v1" if kind == "Job" else "apps/v1"
    if kind == "Job":
        template["spec"]["restartPolicy"] = "Never"
    else:
        spec["selector"] = {"matchLabels": {"app": name}}
    metadata = {"name": name, "namespace": TRIAL}
    return {"apiVersion": group, "kind": kind, "metadata": metadata, "spec": {**spec, "template": template}}


async def test_deployments_and_jobs_come_where_they_were_planned(nodes, access, tmp_path):
    made = [owner("Deployment", "serve", replicas=4, gpus=2), owner("Job", "train", parallelism=4, completions=4)]
    async with controlling(tmp_path / "data", access) as rig:
        apply(made)
        try:
            found = await until(lambda: bound("app=serve", 4)) + await until(lambda: bound("app=train", 4))
            check_places(found)
            leading = await until(lambda: pods(f"{ROLE_LABEL}=leader", where="eelgrid"))
            assert [one["metadata"]["name"] for one in leading] == [OURS]
            check_rights(rig.controller)
        finally:
            remove(made)
            kubectl("delete", "pods", "--all", "-n", TRIAL, "--force", "--grace-period=0")


async def test_a_stolen_place_is_found_again_and_people_are_informed(nodes, access, tmp_path):
    await until(lambda: not pods())
    notes = {ANNOTATION_GROUP: "g", ANNOTATION_GROUP_SIZE: "1"}
    made = owner("Deployment", "robbed", replicas=1, gpus=8, notes=notes)
    # Nobody schedules it until the thief is there: another scheduler's name, as if ours were slow.
    made["spec"]["template"]["spec"]["schedulerName"] = "nobody"
    async with controlling(tmp_path / "data", access, unbound_s=2.0) as rig:
        apply([made])
        try:
            (first,) = await until(lambda: [one for one in pods("app=robbed") if pinned_node(one)])
            where = pinned_node(first)
            thief = pod("thief", gpus=8, nodeName=where)
            kubectl("create", f"--validate={VALIDATE}", "-f", "-", given=thief)
            told = {
                "type": "PodScheduled",
                "status": "False",
                "reason": "Unschedulable",
                "message": "it was stolen",
                "lastTransitionTime": "2026-01-01T00:00:00Z",
            }
            status = json.dumps({"status": {"conditions": [told]}})
            name = first["metadata"]["name"]
            kubectl("patch", "pod", name, "-n", TRIAL, "--subresource=status", "--type=strategic", "-p", status)

            def elsewhere():
                found = [one for one in pods("app=robbed") if one["metadata"]["uid"] != first["metadata"]["uid"]]
                return [one for one in found if pinned_node(one) not in {"", where}]

            await until(elsewhere)
            assert rig.controller.placing.engine.writes.recreated >= 1

            def events():
                found = json.loads(kubectl("get", "events", "-n", TRIAL, "-o", "json").stdout)["items"]
                return [one for one in found if "recreated" in one["message"]]

            assert await until(events)
            check_rights(rig.controller)
        finally:
            remove([made])
            kubectl("delete", "pods", "--all", "-n", TRIAL, "--force", "--grace-period=0")


def wishes():
    """Something for each ability to look at."""
    service = {**deploy_rig.GOOD["answers"], "apiVersion": "eelgrid.io/v1alpha1"}
    target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "asked"}
    service = {
        **service,
        "metadata": {"name": "asked", "namespace": TRIAL},
        "spec": {**service["spec"], "targetRef": target},
    }
    policy = {"apiVersion": "eelgrid.io/v1alpha1", **deploy_rig.GOOD["bare policy"], "metadata": {"name": "default"}}
    job = owner("Job", "suspended", parallelism=1, completions=1, suspend=True)
    job["metadata"]["labels"] = MANAGED
    return [service, policy, job, owner("Deployment", "asked", replicas=1)]


@pytest.mark.parametrize("ability", sorted(ABILITIES))
async def test_an_ability_has_the_rights_that_it_needs(nodes, access, tmp_path, caplog, ability):
    options = ("--set-json", f'controller.kubernetes.abilities=["{ability}"]')
    role = [one for one in deploy_rig.objects_of("kubernetes", options=options) if one["kind"] == "ClusterRole"]
    usual = [one for one in deploy_rig.objects_of("kubernetes") if one["kind"] == "ClusterRole"]
    made = wishes()
    apply([*role, *made])
    caplog.set_level("DEBUG")
    try:
        async with controlling(tmp_path / "data", access, abilities=frozenset({ability})) as rig:
            await until(lambda: rig.controller.placing.elector.term() is not None)
            await asyncio.sleep(SETTLED_S)
            check_rights(rig.controller)
        said = [record.getMessage() for record in caplog.records if record.name.startswith("test.controller")]
        assert not [one for one in said if "forbidden" in one.lower()]
        assert not [one for one in said if "=failed action=restart" in one]
    finally:
        apply(usual)
        remove(made)
        kubectl("delete", "pods", "--all", "-n", TRIAL, "--force", "--grace-period=0")


def test_an_agent_writes_the_slices_of_its_own_node_only(nodes):
    """The policy of DRA agents, by tokens as their pods have them."""
    space = "eelgrid"
    objects = [one for one in deploy_rig.objects_of("dra") if one["metadata"]["name"] == "eelgrid-agent-dra"]
    apply(objects)
    agent = {
        **pod("agent-trial", space),
        "spec": {
            "nodeName": NODES[0],
            "serviceAccountName": "eelgrid-agent-dra",
            "containers": [{"name": "c", "image": "x"}],
        },
    }
    kubectl("create", f"--validate={VALIDATE}", "-f", "-", given=agent)
    bind = ("--bound-object-kind=Pod", "--bound-object-name=agent-trial")
    tokens = {
        held: kubectl("create", "token", "eelgrid-agent-dra", "-n", space, *(bind if held else ())).stdout.strip()
        for held in (True, False)
    }

    def publish(node, *, is_held=True):
        spec = {"driver": "gpu.eelgrid.io", "nodeName": node, "devices": [{"name": "gpu-0"}]}
        spec["pool"] = {"name": node, "generation": 1, "resourceSliceCount": 1}
        one = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": {"name": f"trial-{node}"}}
        # A token counts only where no other credential is shown.
        server = ("--kubeconfig=/dev/null", "--server", _server(), "--insecure-skip-tls-verify", "--token")
        return kubectl(
            "create", "--validate=false", *server, tokens[is_held], "-f", "-", given={**one, "spec": spec}, fine=False
        )

    try:
        # The policy is in force a moment after it was made.
        for _ in range(30):
            told = publish(NODES[1]).stderr
            if "may not write slices" in told:
                break
            kubectl("delete", "resourceslice", f"trial-{NODES[1]}", "--ignore-not-found")
            time.sleep(0.5)
        assert f"the agent of node {NODES[0]} may not write slices of {NODES[1]}" in told
        assert "names none" in publish(NODES[0], is_held=False).stderr
        own = publish(NODES[0])
        assert own.returncode == 0, own.stderr
    finally:
        kubectl("delete", "resourceslice", *(f"trial-{node}" for node in NODES), "--ignore-not-found")
        kubectl("delete", "pod", "agent-trial", "-n", space, "--force", "--grace-period=0")
        remove(objects)


def _server():
    return yaml.safe_load(kubectl("config", "view", "--raw", "--minify").stdout)["clusters"][0]["cluster"]["server"]
