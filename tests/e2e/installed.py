"""A cluster that EELGRID_KUBECONFIG names and that may be used up, and kubectl for it."""

import json
import os
import subprocess

import pytest
import yaml
from tests import deploy_rig
from tests.admission_rig import OPTED_IN, TRIAL

KUBECONFIG = os.environ.get("EELGRID_KUBECONFIG", "")
KUBECTL = deploy_rig.helm_program.find("kubectl")
# Set where an API server cannot tell its schema; nothing else needs it.
VALIDATE = os.environ.get("EELGRID_KUBECTL_VALIDATE", "strict")
ACCOUNT = "system:serviceaccount:eelgrid:eelgrid-controller"
OTHERS = {"monitoring.coreos.com/v1", "cert-manager.io/v1"}
# Helm to render the chart, kubectl to apply it.
_IS_AWAY = deploy_rig.helm_program.find() is None or KUBECTL is None or not KUBECONFIG
needs_cluster = pytest.mark.skipif(_IS_AWAY, reason="EELGRID_KUBECONFIG names no cluster, or no helm")


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


def remove(objects):
    text = "---\n".join(yaml.safe_dump(one) for one in objects)
    kubectl("delete", "--ignore-not-found", "--wait=false", "-f", "-", given=text)


def namespace(name, **labels):
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}


def installed():
    """The chart as it is by default, applied until it is taken away: a generator for a fixture."""
    objects = deploy_rig.objects_of("kubernetes")
    namespaces = [namespace("eelgrid"), namespace(TRIAL), namespace(OPTED_IN, **{"eelgrid.io/managed": "true"})]
    # What an earlier run left may be on its way out still.
    for one in json.loads(kubectl("get", "namespaces", "-o", "json").stdout)["items"]:
        if "deletionTimestamp" in one["metadata"]:
            kubectl("wait", "--for=delete", f"ns/{one['metadata']['name']}", "--timeout=90s")
    apply(namespaces)
    apply(objects)
    for crd in deploy_rig.crd_files().values():
        kubectl("wait", "--for=condition=Established", f"crd/{crd['metadata']['name']}", "--timeout=30s")
    yield objects
    remove([*objects, *namespaces])
