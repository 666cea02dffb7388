"""What tests of deploy/ share: the chart rendered once for each question, and where helm is."""

import copy
import functools
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "deploy"))

import build  # noqa: E402
import helm_program  # noqa: E402
import render  # noqa: E402

__all__ = [
    "BAD_BY_RULE",
    "BAD_BY_SCHEMA",
    "CHART",
    "GOOD",
    "ROOT",
    "V1BETA1",
    "VALUES",
    "build",
    "container",
    "crd_files",
    "helm_program",
    "needs_helm",
    "objects_of",
    "pick",
    "render",
    "text_of",
]

CHART = render.CHART
VALUES = {
    "default": (),
    "agents": (CHART / "ci" / "agents-values.yaml",),
    **{path.stem.removesuffix("-values"): (str(path),) for path in sorted(CHART.glob("ci/*.yaml"))},
}

# What an API server of 1.34 or 1.35 says where its administrator switched the policy on.
V1BETA1 = ("--api-versions", "admissionregistration.k8s.io/v1beta1/MutatingAdmissionPolicy")

needs_helm = pytest.mark.skipif(
    helm_program.find() is None, reason="no helm: python deploy/helm_program.py --fetch brings it"
)


@functools.cache
def text_of(name, version=render.BASE_VERSION, options=()):
    """The chart's manifests with the values file of this name."""
    return render.rendered(*VALUES[name], version=version, options=options)


@functools.cache
def _loaded(name, version, options):
    return [found for found in yaml.load_all(text_of(name, version, options), render.LOADER) if found]


def objects_of(name, version=render.BASE_VERSION, options=()):
    """The same as values, new ones each time."""
    return copy.deepcopy(_loaded(name, version, options))


def pick(objects, kind, name=None):
    """The one object of this kind (and name)."""
    found = [one for one in objects if one["kind"] == kind and (name is None or one["metadata"]["name"] == name)]
    (only,) = found
    return only


def container(found):
    """The one container of a Deployment's or DaemonSet's pods."""
    (only,) = found["spec"]["template"]["spec"]["containers"]
    return only


def crd_files():
    """Our CRDs by kind."""
    found = [yaml.safe_load(path.read_text()) for path in sorted((CHART / "files" / "crds").glob("*.yaml"))]
    return {crd["spec"]["names"]["kind"]: crd for crd in found}


# Objects of our kinds that a cluster takes.
GOOD = {
    "service": {
        "kind": "InferenceService",
        "spec": {
            "targetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "chat"},
            "objectives": [{"metric": "InterToken", "percentile": 95, "atMost": "50ms"}],
            "outputTokens": 200,
            "requestsPerSecond": "2.5",
            "slices": {"allowed": ["1g.10gb", "1g.10gb+me", "Whole"], "gpuModels": ["NVIDIA-H100-80GB-HBM3"]},
            "metrics": {"server": "vllm", "port": 8000},
        },
    },
    "answers": {
        "kind": "InferenceService",
        "spec": {
            "targetRef": {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "rank"},
            "objectives": [{"metric": "Response", "percentile": 99, "atMost": "1.5s"}],
            "replicas": {"least": 2, "most": 4},
            "mode": "Enforce",
        },
    },
    "summaries": {
        "kind": "InferenceService",
        "spec": {
            "targetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "summaries"},
            "loadTarget": {"metric": "Tokens", "perReplica": "2.5k"},
            "metrics": {"server": "vllm", "port": 8000},
        },
    },
    "policy": {
        "kind": "PowerPolicy",
        "spec": {
            "objective": "energy",
            "pools": [{"name": "default", "mode": "Enforce", "partitioned": True}],
            "budgets": [{"scope": "Cluster", "limitWatts": 50000}, {"scope": "Rack", "name": "r1", "limitWatts": 9000}],
        },
    },
    "policy by labels": {
        "kind": "PowerPolicy",
        "spec": {
            "budgets": [
                {"scope": "Node", "nodeSelector": {"matchLabels": {"rack": "r1"}}, "limitWatts": 5600},
                {
                    "scope": "Node",
                    "nodeSelector": {"matchExpressions": [{"key": "gen", "operator": "In", "values": ["a", "b"]}]},
                    "limitWatts": 3000,
                },
            ],
            "prices": {
                "currency": "EUR",
                "pue": 1.3,
                "carbonPricePerKg": 0.08,
                "utcOffsetMinutes": 60,
                "periods": [
                    {"from": "07:00", "pricePerKwh": 0.3, "carbonKgPerKwh": 0.4},
                    {"from": "sat 07:00", "pricePerKwh": 0.15},
                ],
            },
        },
    },
    "bare policy": {"kind": "PowerPolicy", "spec": {}},
}


def _without(good, *path):
    found = copy.deepcopy(GOOD[good])
    inner = found["spec"]
    for part in path[:-1]:
        inner = inner[part]
    del inner[path[-1]]
    return found


def _with(good, value, *path):
    found = copy.deepcopy(GOOD[good])
    inner = found["spec"]
    for part in path[:-1]:
        inner = inner[part]
    inner[path[-1]] = value
    return found


# Objects that a cluster refuses: by the schema alone, and by a rule in CEL.
BAD_BY_SCHEMA = {
    "no target": _without("service", "targetRef"),
    "empty objectives": _with("service", [], "objectives"),
    "a percentile of 100": _with("service", 100, "objectives", 0, "percentile"),
    "a latency without a unit": _with("service", "50", "objectives", 0, "atMost"),
    "an unknown metric": _with("service", "Fast", "objectives", 0, "metric"),
    "another kind of target": _with("service", "Job", "targetRef", "kind"),
    "an unknown load": _with("summaries", "Bytes", "loadTarget", "metric"),
    "a load of nothing said": _without("summaries", "loadTarget", "perReplica"),
    "no MIG profile": _with("service", ["9g.10gb"], "slices", "allowed"),
    "an unknown server": _with("service", "nginx", "metrics", "server"),
    "no replica at least": _with("answers", {"least": 0}, "replicas"),
    "an unknown mode": _with("answers", "Force", "mode"),
    "an unknown objective": _with("policy", "speed", "objective"),
    "a budget of nothing": _with("policy", 0, "budgets", 0, "limitWatts"),
    "a time of no day": _with("policy by labels", "24:00", "prices", "periods", 0, "from"),
    "a PUE below one": _with("policy by labels", 0.9, "prices", "pue"),
    "an operator of no selector": _with(
        "policy by labels", "Gt", "budgets", 1, "nodeSelector", "matchExpressions", 0, "operator"
    ),
    "a pool without a mode": _without("policy", "pools", 0, "mode"),
}
BAD_BY_RULE = {
    "least over most": _with("answers", {"least": 5, "most": 4}, "replicas"),
    "no objectives": _without("service", "objectives"),
    "objectives beside a load": _with("service", {"metric": "Requests", "perReplica": 4}, "loadTarget"),
    "a load without metrics": _without("summaries", "metrics"),
    "tokens without outputTokens": _without("service", "outputTokens"),
    "an objective of nothing": _with("service", "0ms", "objectives", 0, "atMost"),
    "an objective of hours": _with("service", "90m", "objectives", 0, "atMost"),
    "generic without a histogram": _with("service", "generic", "metrics", "server"),
    "the same objective twice": _with(
        "answers", [{"metric": "Response", "percentile": 95, "atMost": "1s"}] * 2, "objectives"
    ),
    "a cluster with a name": _with("policy", "all", "budgets", 0, "name"),
    "a rack without a name": _without("policy", "budgets", 1, "name"),
    "a name beside a selector": _with("policy by labels", "n1", "budgets", 0, "name"),
    "a rack by labels": _with("policy by labels", "Rack", "budgets", 0, "scope"),
    "two budgets of the cluster": _with("policy", [{"scope": "Cluster", "limitWatts": 1}] * 2, "budgets"),
}
