"""What is recorded of KubeRay's schema is what its CustomResourceDefinition says, where one is given.

    EELGRID_KUBERAY_CRD    helm-chart/kuberay-operator/crds/ray.io_rayclusters.yaml of a checkout of KubeRay

`tests/fakes/kuberay.py` holds every write against the recorded schema.
"""

import os
from pathlib import Path

import pytest
import yaml
from tests.fakes.kuberay import SCHEMA, build_group, list_violations

CRD = os.environ.get("EELGRID_KUBERAY_CRD", "")


def trim(schema):
    """A schema without what is said in words, and without formats and defaults."""
    found = {"type": schema["type"]}
    if "items" in schema:
        found["items"] = trim(schema["items"])
    if "properties" in schema:
        found["properties"] = {name: trim(one) for name, one in schema["properties"].items()}
    if "required" in schema:
        found["required"] = schema["required"]
    return found


@pytest.mark.skipif(not CRD, reason="EELGRID_KUBERAY_CRD names no file of KubeRay")
def test_the_recorded_schema_is_that_of_kuberay():
    definition = yaml.safe_load(Path(CRD).read_text())
    (version,) = [one for one in definition["spec"]["versions"] if one["name"] == "v1"]
    spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    group = spec["workerGroupSpecs"]["items"]
    group["properties"]["template"] = {"type": "object"}
    assert SCHEMA["schema"] == trim(group)
    assert {"command", "args"} <= spec["autoscalerOptions"]["properties"].keys()


def test_what_is_against_the_schema_is_named():
    group = build_group(replicas="2", scaleStrategy={"workersToDelete": [1]}, strange=1)
    del group["groupName"]
    assert list_violations(group, SCHEMA["schema"]) == [
        "/groupName is missing",
        "/strange is not known",
        "/replicas is '2', no integer",
        "/scaleStrategy/workersToDelete/0 is 1, no string",
    ]
    assert list_violations(build_group(), SCHEMA["schema"]) == []
