"""Small controllers beside the workloads: budgets are judged, claims are made from their templates."""

from eelgrid_controller.engines.kubernetes.api.port import (
    POD_DISRUPTION_BUDGETS,
    PODS,
    RESOURCE_CLAIM_TEMPLATES,
    RESOURCE_CLAIMS,
)
from tests.fakes.kubernetes.parts import Part
from tests.fakes.kubernetes.selectors import matches
from tests.fakes.kubernetes.store import copied
from tests.fakes.kubernetes.workloads import is_active, is_ready


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
