"""RBAC, the kustomize base and the page say what the chart and the daemons say."""

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from tests.deploy_rig import CHART, ROOT, VALUES, helm_program, needs_helm, objects_of, pick, render

from eelgrid_controller.runtime.config import ABILITIES

READ = {"get", "list", "watch"}
ALWAYS = {"pods": {"patch", "delete"}, "pods/status": {"patch"}, "events": {"create"}}
# What the controller may write with each ability, and nothing beside it.
WRITES = {
    "policies": {"powerpolicies/status": {"patch", "update"}},
    "services": {
        "inferenceservices/status": {"patch", "update"},
        "deployments/scale": {"patch"},
        "statefulsets/scale": {"patch"},
    },
    "claims": {"resourceclaims/status": {"patch", "update"}, "resourceclaims/binding": {"patch", "update"}},
    "devices": {},
    "jobs": {
        "jobs": {"patch"},
        "jobsets": {"patch"},
        "pytorchjobs": {"patch"},
        "trainjobs": {"patch"},
        "workloads": {"patch"},
    },
    "moves": {"pods/eviction": {"create"}, "deployments": {"patch"}, "nodes": {"patch"}},
    "slices": {},
    "taints": {"nodes": {"patch"}},
}


def _writes(*abilities):
    options = ("--set-json", f"controller.kubernetes.abilities={json.dumps(abilities)}")
    found = {}
    for rule in pick(objects_of("kubernetes", options=options), "ClusterRole", "eelgrid-controller")["rules"]:
        assert "*" not in {*rule["apiGroups"], *rule["resources"], *rule["verbs"]}
        for resource in rule["resources"]:
            found.setdefault(resource, set()).update(set(rule["verbs"]) - READ)
    return {resource: verbs for resource, verbs in found.items() if verbs}


@needs_helm
@pytest.mark.parametrize("ability", [*WRITES, ""])
def test_an_ability_brings_its_own_rules_and_no_others(ability):
    assert _writes(*filter(None, [ability])) == ALWAYS | WRITES.get(ability, {})


@needs_helm
def test_the_controller_writes_only_what_is_listed_here():
    assert set(WRITES) >= ABILITIES
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]["controller"]["properties"]
    assert schema["kubernetes"]["properties"]["abilities"]["items"]["enum"] == sorted(WRITES)
    wanted = dict(ALWAYS)
    for found in WRITES.values():
        wanted |= {resource: wanted.get(resource, set()) | verbs for resource, verbs in found.items()}
    assert _writes(*WRITES) == wanted


@needs_helm
def test_the_controller_gets_the_abilities_that_it_has_rules_for():
    for name, wanted in (("default", {"policies", "services"}), ("enforce", set(WRITES)), ("single", set())):
        deployment = pick(objects_of(name), "Deployment")
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        told = {one.partition("=")[2] for one in container["args"] if one.startswith("--kubernetes-abilities")}
        assert {ability for one in told for ability in one.split(",")} == wanted
    assert not [one for one in objects_of("single") if one["metadata"]["name"].endswith(("-view", "-edit"))]


@needs_helm
def test_an_agent_that_is_a_driver_writes_slices_of_its_own_node_only():
    objects = objects_of("dra")
    rules = pick(objects, "ClusterRole", "eelgrid-agent-dra")["rules"]
    writes = {resource: set(rule["verbs"]) - READ for rule in rules for resource in rule["resources"]}
    assert writes == {"resourceslices": {"create", "update", "delete"}, "resourceclaims": set(), "nodes": set()}
    (subject,) = pick(objects, "ClusterRoleBinding", "eelgrid-agent-dra")["subjects"]
    policy = pick(objects, "ValidatingAdmissionPolicy", "eelgrid-agent-dra")["spec"]
    (condition,) = policy["matchConditions"]
    assert f"system:serviceaccount:eelgrid:{subject['name']}" in condition["expression"]
    assert policy["failurePolicy"] == "Fail"


@needs_helm
@pytest.mark.parametrize("name", VALUES)
def test_nobody_reads_secrets_and_agents_are_bound_to_nothing(name):
    objects = objects_of(name)
    rules = [rule for one in objects if one["kind"] in {"Role", "ClusterRole"} for rule in one["rules"]]
    assert not [rule for rule in rules if {"secrets", "pods/exec", "serviceaccounts/token"} & set(rule["resources"])]
    bound = {
        subject["name"] for one in objects if one["kind"].endswith("Binding") for subject in one.get("subjects", ())
    }
    assert not [account for account in bound if account.endswith("-agent")]


@needs_helm
def test_the_kustomize_base_is_fresh():
    wanted = render.base_files()
    assert {path.name: path.read_text() for path in render.BASE.glob("*.yaml")} == wanted


def _comparable(one):
    metadata = one["metadata"]
    for key in ("helm.sh/chart", "app.kubernetes.io/managed-by"):
        metadata.get("labels", {}).pop(key, None)
    metadata.get("annotations", {}).pop("helm.sh/resource-policy", None)
    if not metadata.get("annotations"):
        metadata.pop("annotations", None)
    template = one.get("spec", {}).get("template", {}).get("metadata", {}).get("labels", {})
    for key in ("helm.sh/chart", "app.kubernetes.io/managed-by"):
        template.pop(key, None)
    return one


def _by_name(objects):
    return {(one["kind"], one["metadata"]["name"]): _comparable(one) for one in objects if one["kind"] != "Namespace"}


@needs_helm
def test_the_base_and_the_chart_say_the_same():
    """Read back from its files, not compared as text."""
    kustomization = yaml.safe_load((render.BASE / "kustomization.yaml").read_text())
    documents = [
        one
        for name in kustomization["resources"]
        for one in yaml.safe_load_all((render.BASE / name).read_text())
        if one
    ]
    assert _by_name(documents) == _by_name(objects_of("kubernetes"))


@needs_helm
def test_kubectl_builds_the_base():
    kubectl = helm_program.find("kubectl")
    if kubectl is None:
        pytest.skip("no kubectl")
    done = subprocess.run([str(kubectl), "kustomize", str(render.BASE)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert _by_name(one for one in yaml.safe_load_all(done.stdout) if one) == _by_name(objects_of("kubernetes"))


@needs_helm
def test_the_table_of_permissions_is_fresh():
    page = render.PAGE.read_text()
    begin, end = render._MARKS
    assert page.partition(begin)[2].partition(end)[0] == render.table()


def test_links_of_the_page_lead_to_files():
    for target in re.findall(r"`(deploy/[\w./-]+)`", (ROOT / "docs" / "how-to" / "kubernetes-install.md").read_text()):
        assert Path(ROOT, target).exists(), target
