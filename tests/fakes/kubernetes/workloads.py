"""Small controllers: Deployments, ReplicaSets, StatefulSets and Jobs make their pods, and recreate them.

Owns how many pods there are and which go first. Each owner is looked at again when it, or
what it owns, has changed. No surge and no ordering beyond what a test of Eelgrid needs.
`Budgets` keeps the status of PodDisruptionBudgets, `Claims` makes claims from templates.
"""

import zlib

from eelgrid_controller.engines.kubernetes.api.port import (
    DEPLOYMENTS,
    JOBS,
    POD_DISRUPTION_BUDGETS,
    PODS,
    REPLICA_SETS,
    RESOURCE_CLAIMS,
    STATEFUL_SETS,
)
from tests.fakes.kubernetes.parts import Part
from tests.fakes.kubernetes.pods import condition
from tests.fakes.kubernetes.resources import RESOURCE_CLAIM_TEMPLATES
from tests.fakes.kubernetes.selectors import matches
from tests.fakes.kubernetes.store import copied, encode

_COST = "controller.kubernetes.io/pod-deletion-cost"
_OWNERS = {one.plural: one for one in (DEPLOYMENTS, REPLICA_SETS, STATEFUL_SETS, JOBS)}
_BY_KIND = {one.kind: one for one in _OWNERS.values()}


def is_ready(pod):
    return any(one["type"] == "Ready" and one["status"] == "True" for one in pod["status"].get("conditions") or ())


def is_active(pod):
    return pod["status"].get("phase") not in {"Succeeded", "Failed"} and not pod["metadata"].get("deletionTimestamp")


class Workloads(Part):
    """The controllers; a part."""

    def begin(self):
        self.dirty = {}
        for plural, resource in _OWNERS.items():
            for key in self.store.of(self.kind(resource)):
                self.dirty[plural, key] = None

    def heard(self, kind, event):
        some = (event.after or event.before).object
        its = some["metadata"]
        if kind.plural in _OWNERS:
            self.dirty[kind.plural, (its["namespace"], its["name"])] = None
        if kind.plural in {"pods", "replicasets"}:
            for owner in its.get("ownerReferences") or ():
                if owner["kind"] in _BY_KIND:
                    self.dirty[_BY_KIND[owner["kind"]].plural, (its["namespace"], owner["name"])] = None
        return bool(self.dirty)

    def work(self):
        dirty, self.dirty = self.dirty, {}
        looks = {
            "deployments": self._deployment,
            "replicasets": self._replicas,
            "statefulsets": self._stateful,
            "jobs": self._job,
        }
        for plural, key in dirty:
            record = self.store.find(self.kind(_OWNERS[plural]), *key)
            if record is not None and not record.object["metadata"].get("deletionTimestamp"):
                looks[plural](record.object)

    def _owned(self, owner, resource):
        its = owner["metadata"]
        found = []
        for kind, namespace, name in sorted(self.api.garbage.dependents(its["uid"]), key=lambda one: one[1:]):
            if kind.plural == resource.plural and (record := self.store.find(kind, namespace, name)) is not None:
                found.append(record.object)
        return found

    def _reference(self, owner, resource):
        return {
            "apiVersion": resource.api_version,
            "kind": resource.kind,
            "name": owner["metadata"]["name"],
            "uid": owner["metadata"]["uid"],
            "controller": True,
            "blockOwnerDeletion": True,
        }

    def _pod(self, owner, resource, name=None):
        template = copied(owner["spec"]["template"])
        metadata = template.setdefault("metadata", {})
        metadata |= {"name": name} if name else {"generateName": owner["metadata"]["name"] + "-"}
        metadata["ownerReferences"] = [self._reference(owner, resource)]
        return self.api.create(self.kind(PODS), owner["metadata"]["namespace"], template)

    def _drop(self, pods):
        for pod in pods:
            self.api.delete(self.kind(PODS), pod["metadata"]["namespace"], pod["metadata"]["name"])

    def _status(self, owner, resource, status):
        found = copied(owner)
        found["status"] = {**found.get("status", {}), **status, "observedGeneration": owner["metadata"]["generation"]}
        if found.get("status") != owner.get("status"):
            self.store.put(self.kind(resource), found)

    def _deployment(self, owner):
        digest = f"{zlib.crc32(encode(owner['spec']['template'])):08x}"
        sets = self._owned(owner, REPLICA_SETS)
        current = next((one for one in sets if one["metadata"]["labels"].get("pod-template-hash") == digest), None)
        replicas = owner["spec"]["replicas"]
        if current is None:
            template = copied(owner["spec"]["template"])
            labels = template["metadata"].setdefault("labels", {})
            labels["pod-template-hash"] = digest
            body = {
                "metadata": {
                    "name": f"{owner['metadata']['name']}-{digest}",
                    "labels": dict(labels),
                    "ownerReferences": [self._reference(owner, DEPLOYMENTS)],
                },
                "spec": {"replicas": replicas, "selector": {"matchLabels": dict(labels)}, "template": template},
            }
            self.api.create(self.kind(REPLICA_SETS), owner["metadata"]["namespace"], body)
            return
        self._scale(current, replicas)
        if (current.get("status") or {}).get("readyReplicas", 0) >= replicas:
            for old in sets:
                if old is not current:
                    self._scale(old, 0)
        ready = sum((one.get("status") or {}).get("readyReplicas", 0) for one in sets)
        counted = {
            "replicas": sum((one.get("status") or {}).get("replicas", 0) for one in sets),
            "updatedReplicas": (current.get("status") or {}).get("replicas", 0),
        }
        self._status(owner, DEPLOYMENTS, {**counted, "readyReplicas": ready, "availableReplicas": ready})

    def _scale(self, found, replicas):
        if found["spec"]["replicas"] != replicas:
            self.api.patch(
                self.kind(REPLICA_SETS),
                found["metadata"]["namespace"],
                found["metadata"]["name"],
                "",
                {"spec": {"replicas": replicas}},
                "application/merge-patch+json",
            )

    def _replicas(self, owner):
        pods = [pod for pod in self._owned(owner, PODS) if is_active(pod)]
        wanted = owner["spec"]["replicas"]
        for _ in range(wanted - len(pods)):
            self._pod(owner, REPLICA_SETS)
        if len(pods) > wanted:
            pods.sort(key=_last_to_go)
            self._drop(pods[: len(pods) - wanted])
        counted = {"replicas": len(pods), "readyReplicas": sum(map(is_ready, pods))}
        self._status(owner, REPLICA_SETS, counted)

    def _stateful(self, owner):
        name, wanted = owner["metadata"]["name"], owner["spec"]["replicas"]
        pods = {pod["metadata"]["name"]: pod for pod in self._owned(owner, PODS)}
        for index in range(wanted):
            if f"{name}-{index}" not in pods:
                self._pod(owner, STATEFUL_SETS, f"{name}-{index}")
        self._drop([pod for one, pod in pods.items() if is_active(pod) and int(one.rpartition("-")[2]) >= wanted])
        self._drop([pod for pod in pods.values() if pod["status"].get("phase") in {"Failed", "Succeeded"}])
        self._status(owner, STATEFUL_SETS, {"replicas": len(pods), "readyReplicas": sum(map(is_ready, pods.values()))})

    def _job(self, owner):
        spec, before = owner["spec"], owner.get("status") or {}
        pods = self._owned(owner, PODS)
        active = [pod for pod in pods if is_active(pod)]
        done = sum(pod["status"].get("phase") == "Succeeded" for pod in pods)
        failed = sum(pod["status"].get("phase") == "Failed" for pod in pods)
        if any(
            one["type"] in {"Complete", "Failed"} and one["status"] == "True" for one in before.get("conditions") or ()
        ):
            return
        found = {"status": copied(before)}
        if spec["suspend"]:
            self._drop(active)
            active = []
            condition(found, "Suspended", "True", self.api.stamps.time(), "JobSuspended")
            found["status"].pop("startTime", None)
        else:
            found["status"].setdefault("startTime", self.api.stamps.time())
            if done >= spec["completions"]:
                condition(found, "Complete", "True", self.api.stamps.time())
            elif failed > spec["backoffLimit"]:
                condition(found, "Failed", "True", self.api.stamps.time(), "BackoffLimitExceeded")
                self._drop(active)
            else:
                for _ in range(min(spec["parallelism"], spec["completions"] - done) - len(active)):
                    self._pod(owner, JOBS)
            if any(one["type"] == "Suspended" for one in found["status"].get("conditions") or ()):
                condition(found, "Suspended", "False", self.api.stamps.time(), "JobResumed")
        found["status"] |= {"active": len(active), "succeeded": done, "failed": failed}
        whole = {**copied(owner), "status": found["status"]}
        if whole["status"] != before:
            self.store.put(self.kind(JOBS), whole)


def _last_to_go(pod):
    """Who goes first when there are too many: unbound, not ready, cheap to delete, young."""
    cost = int((pod["metadata"].get("annotations") or {}).get(_COST, "0"))
    return (bool(pod["spec"].get("nodeName")), is_ready(pod), cost, -int(pod["metadata"]["resourceVersion"]))


def _least(spec, count):
    """How many must stay healthy."""
    if "minAvailable" in spec:
        wanted = spec["minAvailable"]
        return -(-count * int(wanted[:-1]) // 100) if isinstance(wanted, str) else wanted
    wanted = spec.get("maxUnavailable", 0)
    return count - (-(-count * int(wanted[:-1]) // 100) if isinstance(wanted, str) else wanted)


class Budgets(Part):
    """The disruption controller; a part."""

    def heard(self, kind, event):
        return kind.plural in {"pods", "poddisruptionbudgets"}

    def work(self):
        kind = self.kind(POD_DISRUPTION_BUDGETS)
        for (namespace, _), record in list(self.store.of(kind).items()):
            selector = record.object["spec"].get("selector") or {}
            pods = [
                one.object
                for (at, _), one in self.store.of(self.kind(PODS)).items()
                if at == namespace and matches(selector, one.object["metadata"].get("labels") or {})
            ]
            counted = [pod for pod in pods if is_active(pod)]
            healthy = sum(map(is_ready, counted))
            least = _least(record.object["spec"], len(counted))
            found = copied(record.object)
            found["status"] = {
                "observedGeneration": found["metadata"]["generation"],
                "currentHealthy": healthy,
                "desiredHealthy": least,
                "disruptionsAllowed": max(0, healthy - least),
                "expectedPods": len(counted),
            }
            if found["status"] != record.object.get("status"):
                self.store.put(kind, found)


class Claims(Part):
    """The resource claim controller: a claim for each template that a pod names, gated or not; a part."""

    def begin(self):
        self.dirty = set(self.store.of(self.kind(PODS)))

    def heard(self, kind, event):
        if kind.plural == "pods" and event.after is not None and event.before is None:
            self.dirty.add((event.after.object["metadata"]["namespace"], event.after.object["metadata"]["name"]))
        if kind.plural == "resourceclaimtemplates":
            self.dirty |= set(self.store.of(self.kind(PODS)))
        return bool(self.dirty)

    def work(self):
        dirty, self.dirty = self.dirty, set()
        for key in sorted(dirty):
            record = self.store.find(self.kind(PODS), *key)
            if record is not None:
                self._make(record.object)

    def _make(self, pod):
        its = pod["metadata"]
        told = list(pod["status"].get("resourceClaimStatuses") or ())
        for one in pod["spec"].get("resourceClaims") or ():
            template = one.get("resourceClaimTemplateName")
            if not template or any(made["name"] == one["name"] for made in told):
                continue
            found = self.store.find(self.kind(RESOURCE_CLAIM_TEMPLATES), its["namespace"], template)
            if found is None:
                continue
            owner = {"apiVersion": "v1", "kind": "Pod", "name": its["name"], "uid": its["uid"], "controller": True}
            body = {
                "metadata": {
                    "generateName": f"{its['name']}-{one['name']}-",
                    "annotations": {"resource.kubernetes.io/pod-claim-name": one["name"]},
                    "ownerReferences": [owner],
                },
                "spec": copied(found.object["spec"]["spec"]),
            }
            made = self.api.create(self.kind(RESOURCE_CLAIMS), its["namespace"], body)
            told.append({"name": one["name"], "resourceClaimName": made.object["metadata"]["name"]})
        if told != (pod["status"].get("resourceClaimStatuses") or []):
            changed = copied(pod)
            changed["status"]["resourceClaimStatuses"] = told
            self.store.put(self.kind(PODS), changed)
