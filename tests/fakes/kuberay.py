"""KubeRay's operator without KubeRay: it makes and deletes the pods of the worker groups of RayClusters, as the real one decides.

Written after reconcilePods of 1.7: pods that have ended go first, and nothing is made in the same pass; then those named in
workersToDelete, which it never clears; then as many are made as are missing. A pod that is being deleted counts until it has
gone. None is deleted because there are too many, as with in-tree autoscaling. `violations` names what was written against the
schema of the real CustomResourceDefinition (tests/contracts/kuberay/worker_groups.json).
"""

import json
from pathlib import Path

from eelgrid_controller.engines.kubernetes.api.port import PODS, Resource
from tests.fakes.kubernetes.parts import Part
from tests.fakes.kubernetes.resources import CUSTOM_RESOURCE_DEFINITIONS
from tests.fakes.kubernetes.store import copied

RAY_CLUSTERS = Resource("ray.io", "v1", "rayclusters", "RayCluster")
SCHEMA = json.loads((Path(__file__).parents[1] / "contracts/kuberay/worker_groups.json").read_text())
_TYPES = {"integer": int, "string": str, "boolean": bool, "array": list, "object": dict}


def list_violations(found, schema, at=""):
    """What of a value is against a schema, by its path."""
    wanted = _TYPES[schema["type"]]
    if not isinstance(found, wanted) or (wanted is int and isinstance(found, bool)):
        return [f"{at} is {found!r}, no {schema['type']}"]
    if wanted is list:
        return [
            one
            for at_index, value in enumerate(found)
            for one in list_violations(value, schema["items"], f"{at}/{at_index}")
        ]
    if wanted is dict and "properties" in schema:
        known = schema["properties"]
        missing = [f"{at}/{name} is missing" for name in schema.get("required", ()) if name not in found]
        strange = [f"{at}/{name} is not known" for name in found if name not in known]
        below = [list_violations(value, known[name], f"{at}/{name}") for name, value in found.items() if name in known]
        return [*missing, *strange, *(one for several in below for one in several)]
    return []


def build_group(name="gpu", *, replicas=0, most=4, least=0, labels=None, **fields):
    """A worker group of pods with a GPU."""
    container = {"name": "ray", "image": "ray", "resources": {"limits": {"cpu": "2", "nvidia.com/gpu": "1"}}}
    metadata = {"labels": labels or {}}
    return {
        "groupName": name, "replicas": replicas, "minReplicas": least, "maxReplicas": most, "rayStartParams": {},
        "template": {"metadata": metadata, "spec": {"containers": [container], "terminationGracePeriodSeconds": 15}},
        **fields,
    }  # fmt: skip


def build_ray_cluster(*groups, name="train", **spec):
    """A RayCluster whose head has no GPU."""
    head = {
        "rayStartParams": {"num-cpus": "0"},
        "template": {"spec": {"containers": [{"name": "ray", "image": "ray"}]}},
    }
    return {
        "metadata": {"name": name},
        "spec": {"enableInTreeAutoscaling": True, "headGroupSpec": head, "workerGroupSpecs": list(groups), **spec},
    }


async def define_ray_clusters(cluster):
    """Serves RayClusters from now on."""
    names = {"plural": "rayclusters", "singular": "raycluster", "kind": "RayCluster", "listKind": "RayClusterList"}
    versions = [{"name": "v1", "served": True, "storage": True, "subresources": {"status": {}}}]
    spec = {"group": "ray.io", "names": names, "scope": "Namespaced", "versions": versions}
    body = {"metadata": {"name": "rayclusters.ray.io"}, "spec": spec}
    await cluster.create(CUSTOM_RESOURCE_DEFINITIONS, body)


class KubeRay(Part):
    """The operator; a part."""

    def __init__(self, fake, **settings):
        super().__init__(fake, **settings)
        self.violations = []

    def begin(self):
        """Has all RayClusters to look at."""

    def heard(self, kind, event):
        if kind.plural == "rayclusters" and event.after is not None:
            groups = event.after.object["spec"]["workerGroupSpecs"]
            self.violations += list_violations(groups, {"type": "array", "items": SCHEMA["schema"]}, "workerGroupSpecs")
        return kind.plural in ("rayclusters", "pods")

    def work(self):
        for record in list(self.store.of(self.kind(RAY_CLUSTERS)).values()):
            for group in record.object["spec"]["workerGroupSpecs"]:
                self._reconcile(record.object, group)

    def _reconcile(self, cluster, group):
        pods = [
            pod for pod in self._list_pods(cluster) if pod["metadata"]["labels"]["ray.io/group"] == group["groupName"]
        ]
        ended = [pod for pod in pods if pod["status"].get("phase") in ("Succeeded", "Failed")]
        for pod in ended:
            self._delete(pod)
        if ended:
            return
        named = group.get("scaleStrategy", {}).get("workersToDelete", ())
        for pod in pods:
            if pod["metadata"]["name"] in named:
                self._delete(pod)
        wanted = 0 if group.get("suspend") else max(group["minReplicas"], min(group["replicas"], group["maxReplicas"]))
        for _ in range(wanted - sum(pod["metadata"]["name"] not in named for pod in pods)):
            self._create(cluster, group)

    def _list_pods(self, cluster):
        its = cluster["metadata"]
        return [
            record.object for (namespace, _), record in self.store.of(self.kind(PODS)).items()
            if namespace == its["namespace"]
            and (record.object["metadata"].get("labels") or {}).get("ray.io/cluster") == its["name"]
        ]  # fmt: skip

    def _delete(self, pod):
        self.api.delete(self.kind(PODS), pod["metadata"]["namespace"], pod["metadata"]["name"])

    def _create(self, cluster, group):
        template, its = copied(group["template"]), cluster["metadata"]
        metadata = template.setdefault("metadata", {})
        metadata["labels"] = {
            **metadata.get("labels", {}), "ray.io/cluster": its["name"], "ray.io/group": group["groupName"],
            "ray.io/node-type": "worker",
        }  # fmt: skip
        metadata["generateName"] = f"{its['name']}-{group['groupName']}-worker-"
        metadata["ownerReferences"] = [
            {
                "apiVersion": "ray.io/v1", "kind": "RayCluster", "name": its["name"], "uid": its["uid"],
                "controller": True, "blockOwnerDeletion": True,
            }
        ]  # fmt: skip
        self.api.create(self.kind(PODS), its["namespace"], template)
