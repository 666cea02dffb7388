"""RBAC, the kustomize base, the page and the alerts say what the chart and the daemons say."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from tests.deploy_rig import CHART, ROOT, VALUES, helm_program, needs_helm, objects_of, pick, render

READ = {"get", "list", "watch"}
# What the controller may write, and nothing beside it.
WRITES = {
    "pods": {"patch", "delete"}, "pods/eviction": {"create"}, "events": {"create", "patch"}, "nodes": {"patch"},
    "jobs": {"patch"}, "deployments": {"patch"}, "deployments/scale": {"patch"}, "statefulsets/scale": {"patch"},
    "inferenceservices/status": {"patch", "update"}, "powerpolicies/status": {"patch", "update"},
    "resourceclaims/status": {"patch", "update"}, "resourceclaims/binding": {"patch", "update"},
}  # fmt: skip


@needs_helm
def test_the_controller_writes_only_what_is_listed_here():
    found = {}
    for rule in pick(objects_of("enforce"), "ClusterRole", "eelgrid-controller")["rules"]:
        assert "*" not in {*rule["apiGroups"], *rule["resources"], *rule["verbs"]}
        for resource in rule["resources"]:
            found.setdefault(resource, set()).update(set(rule["verbs"]) - READ)
    assert {resource: verbs for resource, verbs in found.items() if verbs} == WRITES


@needs_helm
def test_switched_off_abilities_take_their_rules_along():
    rules = pick(objects_of("single"), "ClusterRole", "grid-controller")["rules"]
    writes = {resource for rule in rules for resource in rule["resources"] if set(rule["verbs"]) - READ}
    assert writes == {"pods", "events", "inferenceservices/status", "powerpolicies/status"}
    assert not [one for one in objects_of("single") if one["metadata"]["name"].endswith(("-view", "-edit"))]


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


def _rules():
    groups = yaml.safe_load((CHART / "files" / "rules.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def _known_metrics():
    """Names in the agents' page, and those of the controller as its collector spells them."""
    agent = set(re.findall(r"^\| `(\w+)`", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE))
    source = (ROOT / "controller" / "eelgrid_controller" / "adapters" / "prometheus.py").read_text()
    named = set(re.findall(r'"(eelgrid_[a-z_]+)"', source))
    return agent | named | {f"{name}_total" for name in named}


def test_rules_ask_for_metrics_that_exist():
    known = _known_metrics()
    for rule in _rules():
        asked = set(re.findall(r"(?<![:\w])(eelgrid_\w+)", rule["expr"]))
        assert asked, rule
        assert asked <= known, asked - known


def test_alerts_say_what_to_do():
    for rule in _rules():
        if "alert" in rule:
            assert rule["labels"]["severity"] in {"critical", "warning", "info"}
            assert {"summary", "description"} == set(rule["annotations"])
            for page in re.findall(r"docs/[\w-]+\.md", rule["annotations"]["description"]):
                assert (ROOT / page).is_file()


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool")
def test_promtool_takes_the_rules():
    path = CHART / "files" / "rules.yaml"
    done = subprocess.run(["promtool", "check", "rules", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_symptoms_that_alerts_name_are_on_the_page():
    page = (ROOT / "docs" / "kubernetes-install.md").read_text()
    told = " ".join(rule.get("annotations", {}).get("description", "") for rule in _rules())
    for symptom in re.findall(r'See "([^"]+)" in docs/kubernetes-install.md', told):
        assert f"### {symptom}" in page


def test_links_of_the_page_lead_to_files():
    for target in re.findall(r"`(deploy/[\w./-]+)`", (ROOT / "docs" / "kubernetes-install.md").read_text()):
        assert Path(ROOT, target).exists(), target
