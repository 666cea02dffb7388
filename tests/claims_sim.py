"""A small cluster in memory for the machine of mode dra: claims by version, pods by gate, and a kube-scheduler.

What the API server does not check, it does not check either: two claims may hold one device.
"""

import copy
import json
from functools import cache

from eelgrid_controller.engines.kubernetes.claims import events as told
from eelgrid_controller.engines.kubernetes.claims.allocator import ClaimAllocator
from eelgrid_controller.engines.kubernetes.claims.demand import ClaimAllocatorSettings
from eelgrid_controller.engines.kubernetes.claims.requests import pod_event_of
from eelgrid_controller.engines.kubernetes.model.well_known import (
    ANNOTATION_GROUP,
    ANNOTATION_GROUP_SIZE,
    ANNOTATION_PLAN,
    GATE,
)
from eelgrid_controller.engines.kubernetes.pods.plan_annotation import pinned_node
from tests.builders.kubernetes import build_claim_spec, build_device_class, build_slices, find_overdrawn
from tests.builders.kubernetes import build_node_model as node_value

STAMP = "2026-11-22T08:00:00Z"
SETTINGS = ClaimAllocatorSettings(unbound_s=10.0)


@cache
def _published(name, gpus):
    return build_slices(name, gpus)


class Cluster:
    """Objects, and whoever watches them."""

    def __init__(self, nodes=()):
        self.version = 0
        self.sides = []
        self.pods, self.claims, self.nodes, self.slices, self.wants, self.bad = {}, {}, {}, {}, {}, {}
        self.classes = {"eelgrid": build_device_class(), "nv": build_device_class("nv", "gpu.nvidia.com")}
        self.writes = []  # (claim uid, epoch, leading)
        for name in nodes:
            self.node(name)

    def tell(self, event):
        # Objects are replaced, never changed in place.
        for side in self.sides:
            side.watch.append(event)

    def _stamp(self, found):
        self.version += 1
        found["metadata"]["resourceVersion"] = str(self.version)
        return found

    # Nodes and devices

    def node(self, name, *, gpus=2, cordoned=False):
        labels = {"kubernetes.io/hostname": name}
        value = node_value(name, gpus=0, labels=labels, **({"unschedulable": True} if cordoned else {}))
        self.nodes[name] = value
        for key in [key for key in self.slices if key.startswith(f"{name}-gpu.eelgrid")]:
            del self.slices[key]
            self.tell(told.ResourceSliceDeleted(key))
        self.version += 1
        for piece in _published(name, gpus):
            pool = {**piece["spec"]["pool"], "generation": self.version}
            piece = {**piece, "spec": {**piece["spec"], "pool": pool}}  # noqa: PLW2901  # never changed in place
            self.slices[piece["metadata"]["name"]] = piece
            self.tell(told.ResourceSliceUpdated(piece["metadata"]["name"], piece["spec"]))
        self.tell(told.ClaimNodeUpdated(value))

    def foreign(self, node, count):
        pool = {"name": f"{node}-nv", "generation": 1, "resourceSliceCount": 1}
        found = [{"name": f"gpu-{i}", "attributes": {}} for i in range(count)]
        spec = {"driver": "gpu.nvidia.com", "nodeName": node, "pool": pool, "devices": found}
        self.slices[f"{node}-nv"] = {"metadata": {"name": f"{node}-nv"}, "spec": spec}
        self.tell(told.ResourceSliceUpdated(f"{node}-nv", spec))

    # Pods and claims

    def pod(
        self,
        name,
        profile=None,
        *,
        claims=(),
        spec=None,
        group="",
        size=1,
        owner="",
        cpu="1",
        selector=None,
        annotations=None,
        is_made=True,
    ):
        notes = {ANNOTATION_GROUP: group, ANNOTATION_GROUP_SIZE: str(size)} if group else {}
        asked = [{"name": f"c{i}", "resourceClaimName": one} for i, one in enumerate(claims)]
        if profile is not None or spec is not None:
            asked.append({"name": "own", "resourceClaimTemplateName": "t"})
            self.wants[f"u-{name}"] = spec or build_claim_spec(profile)
        metadata = {"name": name, "namespace": "x", "uid": f"u-{name}", "annotations": {**notes, **(annotations or {})}}
        if owner:
            metadata["ownerReferences"] = [
                {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": owner, "uid": owner, "controller": True}
            ]
        body = {
            "containers": [{"name": "main", "resources": {"requests": {"cpu": cpu, "memory": "1Gi"}}}],
            "resourceClaims": asked,
            "schedulingGates": [{"name": GATE}],
            **({"nodeSelector": selector} if selector else {}),
        }
        self._put_pod({"metadata": metadata, "spec": body, "status": {"phase": "Pending"}})
        if is_made:
            self.make_claims()

    def _put_pod(self, found):
        self._stamp(found)
        self.pods[found["metadata"]["name"]] = found
        self.tell(pod_event_of(found, {}))

    def put_claim(self, found):
        self._stamp(found)
        self.claims[found["metadata"]["name"]] = found
        self.tell(told.ClaimUpdated(found))

    def shared(self, name, profile):
        metadata = {"namespace": "x", "name": name, "uid": f"u-{name}"}
        self.put_claim({"metadata": metadata, "spec": build_claim_spec(profile), "status": {}})

    def make_claims(self):
        """The claim controller's round."""
        for pod in list(self.pods.values()):
            own = [one for one in pod["spec"]["resourceClaims"] if "resourceClaimTemplateName" in one]
            if own and not pod["status"].get("resourceClaimStatuses"):
                its = pod["metadata"]
                metadata = {"namespace": "x", "name": f"{its['name']}-own", "uid": f"{its['uid']}-own"}
                metadata["ownerReferences"] = [{"kind": "Pod", "name": its["name"], "uid": its["uid"]}]
                self.put_claim({"metadata": metadata, "spec": self.wants[its["uid"]], "status": {}})
                changed = copy.deepcopy(pod)
                changed["status"]["resourceClaimStatuses"] = [{"name": "own", "resourceClaimName": metadata["name"]}]
                self._put_pod(changed)

    def claim_of(self, pod):
        return self.claims[f"{pod}-own"]

    def steal(self, pod, allocation):
        self.put_claim({**copy.deepcopy(self.claim_of(pod)), "status": {"allocation": allocation}})

    def drop_claim(self, pod):
        found = self.claims.pop(f"{pod}-own")
        self.tell(told.ClaimDeleted(found))

    def remove(self, name):
        """A pod goes, and its own claim with it; its reservations are taken out of others."""
        pod = self.pods.pop(name)
        self.tell(told.PodDeleted(pod["metadata"]["uid"]))
        if f"{name}-own" in self.claims:
            self.drop_claim(name)
        for found in list(self.claims.values()):
            users = found["status"].get("reservedFor") or []
            left = [one for one in users if one["uid"] != pod["metadata"]["uid"]]
            if left != users:
                self.put_claim({**found, "status": {**found["status"], "reservedFor": left}})

    def gated(self, name):
        return bool(self.pods[name]["spec"].get("schedulingGates"))

    def where(self, name):
        return self.pods[name]["spec"].get("nodeName", "")

    def pinned(self, name):
        return pinned_node(self.pods[name])

    def bind(self, name, node):
        found = copy.deepcopy(self.pods[name])
        found["spec"]["nodeName"] = node
        found["status"].pop("conditions", None)
        self._put_pod(found)

    def unschedulable(self, name):
        found = copy.deepcopy(self.pods[name])
        why = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no volume there"}
        found["status"]["conditions"] = [why]
        node = json.loads(found["metadata"]["annotations"][ANNOTATION_PLAN])["node"]
        self.bad[name] = node
        self._put_pod(found)

    def schedule(self, only=()):
        """kube-scheduler's round: where the claims of a pod are, there it is bound."""
        for name, pod in list(self.pods.items()):
            if pod["spec"].get("schedulingGates") or pod["spec"].get("nodeName") or (only and name not in only):
                continue
            made = [one["resourceClaimName"] for one in pod["status"].get("resourceClaimStatuses") or ()]
            made += [one["resourceClaimName"] for one in pod["spec"]["resourceClaims"] if "resourceClaimName" in one]
            found = [self.claims[one] for one in made if one in self.claims]
            held = [one["status"].get("allocation") for one in found]
            if len(found) < len(made) or not all(held):
                continue
            nodes = {one["pool"] for allocation in held for one in allocation["devices"]["results"]}
            node = next(iter(nodes))
            if (
                len(nodes) > 1
                or node not in self.nodes
                or self.nodes[node].is_unschedulable
                or self.bad.get(name) == node
            ):
                continue
            for claim in found:
                user = {"resource": "pods", "name": name, "uid": pod["metadata"]["uid"]}
                users = claim["status"].get("reservedFor") or []
                if user not in users:
                    self.put_claim({**claim, "status": {**claim["status"], "reservedFor": [*users, user]}})
            self.bind(name, node)

    def overdrawn(self):
        return find_overdrawn(self.slices.values(), self.claims.values())

    # Writes

    def status(self, body, epoch, leading):
        """A claim's status, by its version; what the API server checks of it."""
        metadata = body["metadata"]
        found = self.claims.get(metadata["name"])
        if found is None or found["metadata"]["uid"] != metadata["uid"]:
            return told.WriteFailure.GONE
        if found["metadata"]["resourceVersion"] != metadata["resourceVersion"]:
            return told.WriteFailure.CONFLICT
        was, new = found["status"].get("allocation"), body["status"].get("allocation")
        assert not (was and new and was != new), "an allocation is immutable"
        assert new is None or new["allocationTimestamp"]
        self.writes.append((metadata["uid"], epoch, leading))
        self.put_claim({**copy.deepcopy(found), "status": copy.deepcopy(dict(body["status"]))})
        return None

    def release(self, one):
        found = self.pods.get(one.key.name)
        if found is None or found["metadata"]["uid"] != one.uid:
            return told.WriteFailure.GONE
        if found["metadata"]["resourceVersion"] != one.version:
            return told.WriteFailure.CONFLICT
        found = copy.deepcopy(found)
        found["spec"].pop("schedulingGates", None)
        found["metadata"]["annotations"][ANNOTATION_PLAN] = one.plan
        if one.is_pinned:
            field = {"key": "metadata.name", "operator": "In", "values": [one.node_name]}
            required = {"nodeSelectorTerms": [{"matchFields": [field]}]}
            found["spec"]["affinity"] = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
        self._put_pod(found)
        return None


class Side:
    """One controller: the machine and what is under way."""

    def __init__(self, api, *, epoch, settings=SETTINGS):
        self.api, self.settings = api, settings
        self.at_s = 1000.0
        self.begin()
        api.sides.append(self)
        self.lead(epoch)

    def begin(self):
        """A new process: everything is listed."""
        self.machine = ClaimAllocator(self.settings)
        self.watch, self.events, self.under_way, self.tells, self.recreated = [], [], [], [], []
        self.epoch = None
        api = self.api
        self.events += [told.ClaimNodeUpdated(one) for one in api.nodes.values()]
        self.events += [told.DeviceClassUpdated(one) for one in api.classes.values()]
        self.events += [told.ResourceSliceUpdated(name, one["spec"]) for name, one in api.slices.items()]
        self.events += [pod_event_of(copy.deepcopy(one), {}) for one in api.pods.values()]
        self.events += [told.ClaimUpdated(copy.deepcopy(one)) for one in api.claims.values()]
        self.events.append(told.ClaimsSynced())

    def lead(self, epoch, *, is_listed=True):
        self.epoch = epoch
        self.events.append(told.LeadershipLost() if epoch is None else told.LeadershipAcquired(epoch))
        if epoch is not None and is_listed:
            self.listed()

    def listed(self):
        self.events.append(told.ClaimsListed(self.epoch, copy.deepcopy(list(self.api.claims.values()))))

    def hear(self, count=1_000_000):
        self.events += self.watch[:count]
        del self.watch[:count]

    def round(self):
        events, self.events = self.events, []
        for one in self.machine.on_events(events, self.at_s, STAMP):
            match one:
                case told.ClaimGrant() | told.ClaimDeallocation() | told.RemoveGate() | told.RecreatePod():
                    self.under_way.append(one)
                case told.RecordEvent():
                    self.tells.append(one)

    def write(self, index=0, *, fault=None):
        """Carry out one instruction; `fault` is None, "busy" (not done) or "lost" (done, unanswered)."""
        one = self.under_way.pop(index)
        match one:
            case told.ClaimGrant():
                self._grant(one, fault)
            case told.ClaimDeallocation():
                failure = self._status(one.body, one.epoch, fault)
                if failure is not None:
                    self.events.append(told.DeallocationFailed(one.uid, failure))
            case told.RemoveGate() if one.epoch == self.epoch:
                self.api.release(told.PodRelease(one.uid, one.key, one.version, "", "", is_pinned=False))
            case told.RecreatePod() if one.epoch == self.epoch:
                self.recreated.append(one.uid)

    def _status(self, body, epoch, fault):
        if epoch != self.epoch:
            return told.WriteFailure.STALE
        if fault == "busy":
            return told.WriteFailure.BUSY
        failure = self.api.status(body, epoch, self.epoch)
        found = self.api.claims.get(body["metadata"]["name"])
        if fault == "lost":
            return failure or told.WriteFailure.BUSY
        if found is not None:
            self.events.append(told.ClaimUpdated(copy.deepcopy(found)))
        return failure

    def _grant(self, one, fault):
        failed = [
            (write.uid, failure) for write in one.writes if (failure := self._status(write.body, one.epoch, fault))
        ]
        if not failed and one.epoch == self.epoch:
            for release in one.releases:
                failure = told.WriteFailure.BUSY if fault == "busy" else self.api.release(release)
                if failure or fault == "lost":
                    failed.append((release.uid, failure or told.WriteFailure.BUSY))
        self.events += [told.GrantFailed(one.unit, uid, failure) for uid, failure in failed]
        if not failed:
            self.events.append(told.GrantWritten(one.unit))

    def play(self, seconds=1):
        """So many quiet seconds."""
        for _ in range(seconds):
            self.at_s += 1.0
            self.hear()
            self.events.append(told.GateTicked())
            for _ in range(6):
                self.round()
                while self.under_way:
                    self.write()
                self.hear()
