"""A cluster in a few lines: an API server's pods and nodes, a kube-scheduler, and controllers with real cores.

Everything that may happen in between is a step of its own: a watch event that comes late, an
instruction that is carried out late, twice refused or answered by silence, a controller
that dies, a pod or node that somebody else changes. `check` looks at all that was ever
written. No clock and no sockets.
"""

import copy
import json

from eelgrid_controller.core.core import Core
from eelgrid_controller.engines.kubernetes.model.objects import parse_node, parse_pod
from eelgrid_controller.engines.kubernetes.model.well_known import (
    ANNOTATION_GROUP,
    ANNOTATION_GROUP_SIZE,
    ANNOTATION_PLAN,
    GATE,
    SCHEDULER,
)
from eelgrid_controller.engines.kubernetes.pods import gate_events as told
from eelgrid_controller.engines.kubernetes.pods.gate import Gate
from eelgrid_controller.engines.kubernetes.pods.intent import view_pod
from eelgrid_controller.engines.kubernetes.pods.placement_unit import GateSettings
from eelgrid_controller.engines.kubernetes.pods.plan_annotation import (
    annotation_patch,
    gate_removal_patch,
    pinned_node,
    ungating_patch,
)
from eelgrid_controller.engines.kubernetes.reconcilers.core_commands import placement_event, status_event
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.engine_reports import Eligibility
from eelgrid_controller.state.events import (
    DevicesCorrected,
    NodeJoined,
    WorkloadCancelled,
    WorkloadDeferred,
    WorkloadMoved,
    WorkloadPlaced,
)
from eelgrid_protos import catalogue
from eelgrid_protos.faults import AlreadyExists, Fault, NotFound
from eelgrid_protos.messages import Gpu, Inventory
from tests.builders.kubernetes import count_gpus
from tests.fakes.kubernetes.relations import Relations

PRODUCTS = catalogue.load_catalogue()
ROOM = "0/4 nodes are available: 1 Insufficient nvidia.com/gpu, 3 node(s) didn't match Pod's node affinity/selector."
SETTINGS = GateSettings(unbound_s=10.0, retry_s=5.0, busy_s=1.0, conflict_s=1.0)


class Api:
    """Pods and nodes, their versions, and who watches."""

    def __init__(self):
        self.pods = {}
        self.nodes = {}
        self.version = 0
        self.made = 0
        self.watchers = []
        self.patches = []  # (uid, epoch, node, leading epoch)
        self.bound = {}  # uid -> (node, plan's node, gpus)
        self.owned = {}  # owner uid -> how to make another
        self.groups = {}  # with a PodGroup: name -> size
        self.in_flight = []  # writes that were sent and have not arrived: (side, what, body)

    def tell(self, kind, found):
        for side in self.watchers:
            side.watch.append((kind, copy.deepcopy(found)))

    def put(self, kind, found):
        self.version += 1
        found["metadata"]["resourceVersion"] = str(self.version)
        (self.pods if kind == "pod" else self.nodes)[found["metadata"]["name"]] = found
        self.tell(kind, found)

    def pod(
        self, *, gpus=1, group="", size=1, owner="", node="", affinity=None, app="", spread=None, labels=None, own=False
    ):
        self.made += 1
        name = f"p{self.made:03d}"
        metadata = {"name": name, "namespace": "x", "uid": f"u{self.made}", "annotations": {}}
        if group:
            metadata["annotations"] = {ANNOTATION_GROUP: group, ANNOTATION_GROUP_SIZE: str(size)}
        if owner:
            metadata["ownerReferences"] = [
                {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": owner, "uid": owner, "controller": True}
            ]
            self.owned[owner] = {
                "gpus": gpus,
                "group": group,
                "size": size,
                "owner": owner,
                "affinity": affinity,
                "app": app,
                "spread": spread,
                "own": own,
            }
        if app:
            metadata["labels"] = {"app": app}
        if labels:
            metadata["labels"] = {**metadata.get("labels", {}), **labels}
        made = copy.deepcopy(affinity)
        asked = {"cpu": "1", "memory": "1Gi", "nvidia.com/gpu": str(gpus)}
        spec = {"containers": [{"name": "main", "resources": {"requests": asked}}]}
        if made:
            spec["affinity"] = made
        if spread:
            spec["topologySpreadConstraints"] = spread
        if node:
            spec["nodeName"] = node
        elif own:
            spec["schedulerName"] = SCHEDULER
        else:
            spec["schedulingGates"] = [{"name": GATE}]
        self.put("pod", {"metadata": metadata, "spec": spec, "status": {"phase": "Pending"}})
        return name

    def node(self, name, *, gpus=8, cordoned=False, zone=""):
        amounts = {"cpu": "64", "memory": "512Gi", "pods": "110", "nvidia.com/gpu": str(gpus)}
        ready = [{"type": "Ready", "status": "True"}]
        labels = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3", "kubernetes.io/hostname": name}
        before = self.nodes.get(name, {"metadata": {"labels": {}}})["metadata"]["labels"]
        zone = zone or before.get("topology.kubernetes.io/zone", "")
        if zone:
            labels["topology.kubernetes.io/zone"] = zone
        spec = {"unschedulable": True} if cordoned else {}
        status = {"capacity": amounts, "allocatable": amounts, "conditions": ready}
        self.put(
            "node",
            {"metadata": {"name": name, "uid": f"node-{name}", "labels": labels}, "spec": spec, "status": status},
        )

    def remove(self, name):
        found = self.pods.pop(name, None)
        if found is None:
            return
        self.bound.pop(found["metadata"]["uid"], None)
        self.tell("gone", found)
        owner = next(iter(found["metadata"].get("ownerReferences", ())), None)
        if owner is not None:
            self.pod(**self.owned[owner["uid"]])

    def end(self, name):
        found = self.pods[name]
        found["status"] = {"phase": "Succeeded"}
        self.bound.pop(found["metadata"]["uid"], None)
        self.put("pod", found)

    def patch(self, key, body, epoch, leading):
        """A merge patch with its preconditions, by the rules of gated pods."""
        found = self.pods.get(key.name)
        if found is None:
            return told.WriteFailure.GONE
        metadata = body["metadata"]
        if metadata["uid"] != found["metadata"]["uid"]:
            return told.WriteFailure.CONFLICT
        if metadata["resourceVersion"] != found["metadata"]["resourceVersion"]:
            return told.WriteFailure.CONFLICT
        assert GATE in [gate["name"] for gate in found["spec"].get("schedulingGates", ())], (
            "patched what we do not gate"
        )
        found = copy.deepcopy(found)
        found["metadata"]["annotations"] |= metadata.get("annotations", {})
        found["spec"]["schedulingGates"] = body["spec"]["schedulingGates"] or []
        if "affinity" in body["spec"]:
            found["spec"]["affinity"] = body["spec"]["affinity"]
        self.patches.append((found["metadata"]["uid"], epoch, pinned_node(found), leading))
        self.put("pod", found)
        return None

    def bind(self, one, leading):
        """A binding with its preconditions; nobody looks for room."""
        found = self.pods.get(one.key.name)
        if found is None:
            return told.WriteFailure.GONE
        metadata = found["metadata"]
        if (one.uid, one.version) != (metadata["uid"], metadata["resourceVersion"]) or found["spec"].get("nodeName"):
            return told.WriteFailure.CONFLICT
        assert found["spec"].get("schedulerName") == SCHEDULER, "bound what is not ours to bind"
        self.patches.append((one.uid, one.epoch, one.node_name, leading))
        assert not self.why_not(found, one.node_name), "bound against a rule"
        found = copy.deepcopy(found)
        found["metadata"]["annotations"][ANNOTATION_PLAN] = one.plan
        self._bind(found, one.node_name)
        return None

    def annotate(self, key, body):
        """A merge patch of annotations with its preconditions."""
        found, metadata = self.pods.get(key.name), body["metadata"]
        if found is None or metadata["uid"] != found["metadata"]["uid"]:
            return told.WriteFailure.GONE
        if metadata["resourceVersion"] != found["metadata"]["resourceVersion"]:
            return told.WriteFailure.CONFLICT
        found = copy.deepcopy(found)
        found["metadata"]["annotations"] |= metadata["annotations"]
        self.put("pod", found)
        return None

    def arrive(self, index=0, *, is_answered=True):
        """A write that was sent is at the server, whoever leads by now."""
        side, one, body, leading = self.in_flight.pop(index)
        match one:
            case told.RecreatePod():
                failure, real = None, self.pods.get(one.key.name)
                if real is None or real["metadata"]["uid"] != one.uid:
                    failure = told.WriteFailure.GONE
                elif one.version not in ("", real["metadata"]["resourceVersion"]):
                    failure = told.WriteFailure.CONFLICT
                else:
                    self.remove(one.key.name)
            case told.AnnotatePod():
                failure = self.annotate(one.key, body)
            case told.BindPod():
                failure = self.bind(one, leading)
            case _:
                failure = self.patch(one.key, body, one.epoch, leading)
        side.answered(one, failure, is_answered=is_answered)

    def held(self, node):
        """The pods that hold devices on a node, as its kubelet would say: by name."""
        return {
            told.PodKey("x", name): ()
            for name, pod in self.pods.items()
            if pod["spec"].get("nodeName") == node and pod["status"]["phase"] != "Succeeded"
        }

    def free(self, node):
        held = sum(
            count_gpus(pod)
            for pod in self.pods.values()
            if pod["spec"].get("nodeName") == node and pod["status"]["phase"] != "Succeeded"
        )
        return int(self.nodes[node]["status"]["allocatable"]["nvidia.com/gpu"]) - held

    def schedule(self):
        """One round of kube-scheduler over all that is free to go; gangs of a PodGroup bind together."""
        waiting = [
            pod
            for pod in self.pods.values()
            if not pod["spec"].get("nodeName")
            and not pod["spec"].get("schedulingGates")
            and pod["spec"].get("schedulerName") != SCHEDULER
            and pod["status"]["phase"] == "Pending"
        ]
        for pod in waiting:
            node = self._node_for(pod)
            if node:
                self._bind(pod, node)
            elif not pod["status"].get("conditions"):
                why = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": ROOM}
                changed = copy.deepcopy(pod)
                changed["status"]["conditions"] = [why]
                self.put("pod", changed)

    def _node_for(self, pod):
        pinned = pinned_node(pod)
        for name, node in self.nodes.items():
            if (
                (not pinned or name == pinned)
                and not node["spec"].get("unschedulable")
                and self.free(name) >= count_gpus(pod)
                and not self.why_not(pod, name)
            ):
                return name
        return ""

    def why_not(self, pod, name):
        """Why rules between pods keep one from a node, now."""
        placed = [
            one for one in self.pods.values() if one["spec"].get("nodeName") and one["status"]["phase"] != "Succeeded"
        ]
        pinned = pinned_node(pod)
        relations = Relations(self.nodes, placed)
        return relations.why_not(
            pod, self.nodes[name], lambda node: pinned in {"", node["metadata"]["name"]}, lambda _: True
        )

    def _bind(self, pod, node):
        found = copy.deepcopy(pod)
        found["spec"]["nodeName"] = node
        found["status"].pop("conditions", None)
        text = found["metadata"]["annotations"].get(ANNOTATION_PLAN)
        if text:
            assert json.loads(text)["node"] == node, "bound elsewhere than planned"
        self.bound[found["metadata"]["uid"]] = node
        self.put("pod", found)


class Side:
    """One controller: a core, a gate, and what is under way."""

    def __init__(self, api, settings=SETTINGS, *, state=None):
        """`state` is what its journal gives back; it has been told nothing of what stands since."""
        self.api = api
        self.core = Core(state or ClusterState(), PRODUCTS, joins_closed=True)
        self.core.expect_reports(now_ns=1)
        self.met = set()  # nodes whose agents have told this process what they have
        self.settings = settings
        self.epoch = None
        self.now_ns = 1
        self.reported = 0
        self.adopted = set()  # by the core as they stood
        self.eligibility = Eligibility()
        self.core.set_eligibility(self.eligibility)
        self.begin()

    def begin(self):
        """A new process over the same journal: everything is listed."""
        self.gate = Gate(self.settings)
        self.eligibility.rules = self.gate.others.rules
        self.reports = {}  # by uid: the last condition
        self.watch, self.events, self.under_way = [], [], []
        self.objects = {}
        self.tells = []
        self.answers = {}  # to reviews of pods that are being admitted
        self.api.in_flight = [one for one in self.api.in_flight if one[0] is not self]
        for node in self.api.nodes.values():
            self._see("node", copy.deepcopy(node))
        for pod in self.api.pods.values():
            self._see("pod", copy.deepcopy(pod))
        for workload in self.core.state.workloads.values():
            self.events.append(status_event(workload))
        self.events += [told.NodeAcknowledged(name) for name in self.core.state.nodes]
        self.events.append(told.LeadershipAcquired(self.epoch) if self.epoch is not None else told.LeadershipLost())
        self.events.append(told.GateSynced())
        if self not in self.api.watchers:
            self.api.watchers.append(self)

    def _see(self, kind, found):
        name = found["metadata"]["name"]
        if kind == "node":
            self.events.append(told.KubeNodeUpdated(parse_node(found), self.has_agent(name), self.awaits_agent(name)))
        elif kind == "gone":
            self.objects.pop(name, None)
            self.events.append(told.PodDeleted(found["metadata"]["uid"]))
        else:
            self.objects[name] = found
            self.events.append(told.PodUpdated(view_pod(parse_pod(found), found, {})[0]))

    def hear(self, count=1_000_000):
        """Watch events that come now."""
        for kind, found in self.watch[:count]:
            self._see(kind, found)
        del self.watch[:count]

    def hear_devices(self, names):
        """Agents of these nodes, which are their device plugins, say what pods hold."""
        self.events += [told.DevicesReported(name, True, self.api.held(name)) for name in names]

    def has_agent(self, name):
        """Whether an agent has ever told this journal what a node has."""
        record = self.core.state.nodes.get(name)
        return record is not None and record.inventory.agent_version != ""

    def awaits_agent(self, name):
        """Whether it has not told this process."""
        return self.has_agent(name) and name not in self.met

    def agent(self, name, *, gpus=8, model_data=()):
        """The agent of a node connects, and says what it has."""
        devices = tuple(
            Gpu(uuid=f"GPU-{name}-{index}", index=index, product="NVIDIA H100 80GB HBM3", model="H100")
            for index in range(gpus)
        )
        inventory = Inventory(
            node_name=name, cpu_milli=64_000, memory_bytes=512 * 2**30, agent_version="1", generation=1, gpus=devices,
            model_data=model_data,
        )  # fmt: skip
        self.now_ns += 1
        self.met.add(name)
        self._heard(self.core.register_node(inventory, now_ns=self.now_ns).events)
        if name in self.api.nodes:
            self._see("node", copy.deepcopy(self.api.nodes[name]))

    def corrected(self, name, key, indexes):
        """The agent says which devices a replica really holds."""
        self.now_ns += 1
        uuids = {gpu.index: gpu.uuid for gpu in self.core.state.nodes[name].inventory.gpus}
        held = {key: tuple(uuids[index] for index in indexes)}
        self._heard(self.core.correct_devices(name, held, now_ns=self.now_ns).events)

    def take_over(self, epoch):
        """Lead as the engine does: when everything has been listed anew."""
        self.watch.clear()
        for name in [name for name in self.objects if name not in self.api.pods]:
            self._see("gone", self.objects[name])
        for pod in self.api.pods.values():
            self._see("pod", copy.deepcopy(pod))
        self.lead(epoch)

    def lead(self, epoch):
        self.epoch = epoch
        self.events.append(told.LeadershipAcquired(epoch) if epoch is not None else told.LeadershipLost())

    def round(self, at_s):
        """One round; commands to the core are carried out at once, writes wait."""
        events, self.events = self.events, []
        for one in self.gate.on_events(events, at_s):
            match one:
                case told.UngatePod() | told.BindPod() | told.RemoveGate() | told.RecreatePod() | told.AnnotatePod():
                    self.under_way.append(one)
                case told.PinAdmitted() | told.DeclineAdmitted():
                    self.answers[one.uid] = one
                case told.RecordEvent():
                    self.tells.append(one)
                case told.ReportPlacement(uid, _, condition):
                    self.reports[uid] = condition
                    self.reported += 1
                case told.RetryPending():
                    self.now_ns += 1
                    self._heard(self.core.retry_waiting(now_ns=self.now_ns).events)
                case told.RereadPod(uid, key):
                    found = self.objects.get(key.name)
                    if found is not None and found["metadata"]["uid"] == uid:
                        self.events.append(told.PodUpdated(view_pod(parse_pod(found), found, {}, recalls=True)[0]))
                case _:
                    self._command(one)

    def _command(self, one):
        self.now_ns += 1
        core, now_ns = self.core, self.now_ns
        try:
            match one:
                case told.RegisterNode(inventory):
                    step = core.register_node(inventory, now_ns=now_ns)
                case told.RemoveNode(name):
                    step = core.mark_node_lost(name, now_ns=now_ns)
                case told.ReportUsage(name, others):
                    step = core.update_external_usage(name, others, now_ns=now_ns)
                case told.SubmitUnit(request):
                    step = core.submit(request, now_ns=now_ns)
                    self.events.append(status_event(step.result))
                case told.AdoptUnit(request, adoption):
                    step = core.adopt(request, adoption, now_ns=now_ns)
                    self.adopted.add(request.workload_id)
                    self.events.append(status_event(step.result))
                case told.ScaleUnit(name, replicas):
                    step = core.scale(name, replicas, now_ns=now_ns)
                    self.events.append(status_event(core.state.workloads[name]))
                case told.CancelUnit(name, reason):
                    step = core.cancel(name, now_ns=now_ns, reason=reason)
                    self.events.append(told.UnitCancelled(name))
        except AlreadyExists as error:
            self.events.append(told.UnitRefused(one.request.workload_id, str(error), is_taken=True))
            return
        except NotFound:
            if isinstance(one, told.CancelUnit):
                self.events.append(told.UnitCancelled(one.workload_id))
            return
        except Fault as error:
            assert isinstance(one, told.SubmitUnit | told.AdoptUnit | told.ScaleUnit), one
            name = one.workload_id if isinstance(one, told.ScaleUnit) else one.request.workload_id
            self.events.append(told.UnitRefused(name, str(error)))
            return
        self._heard(step.events)

    def _heard(self, events):
        for event in events:
            match event:
                case WorkloadPlaced() | WorkloadMoved():
                    self.events.append(placement_event(event.workload_id, event.placements))
                case WorkloadDeferred():
                    self.events.append(told.UnitDeferred(event.workload_id, event.reason))
                case WorkloadCancelled():
                    self.events.append(told.UnitCancelled(event.workload_id))
                case DevicesCorrected():
                    for name in event.workload_ids:
                        self.events.append(status_event(self.core.state.workloads[name]))
                case NodeJoined():
                    self.events.append(told.NodeAcknowledged(event.inventory.node_name))

    def write(self, index=0, *, fault=None):
        """Carry out a write; `fault` is None, "busy" (not done) or "lost" (done, unanswered)."""
        if fault == "busy":
            one = self.under_way.pop(index)
            self.events.append(self._failure(one)(one.uid, told.WriteFailure.BUSY, "429"))
            return
        self.send(index)
        if self.api.in_flight and self.api.in_flight[-1][0] is self:
            self.api.arrive(-1, is_answered=fault is None)

    @staticmethod
    def _failure(one):
        match one:
            case told.RecreatePod():
                return told.DeleteFailed
            case told.AnnotatePod():
                return told.AnnotateFailed
        return told.PatchFailed

    def send(self, index=0):
        """The last look at the term and at the object; what is sent then may arrive at any time."""
        one = self.under_way.pop(index)
        found = self.objects.get(one.key.name)
        is_it = found is not None and found["metadata"]["uid"] == one.uid
        is_this = is_it and found["metadata"]["resourceVersion"] == one.version
        if (one.epoch is not None and one.epoch != self.epoch) or not (is_this or isinstance(one, told.RecreatePod)):
            self.events.append(self._failure(one)(one.uid, told.WriteFailure.STALE))
            return
        match one:
            case told.UngatePod():
                body = ungating_patch(found, one.node_name, one.plan)
            case told.RemoveGate():
                body = gate_removal_patch(found)
            case told.AnnotatePod():
                body = annotation_patch(found, one.annotations)
            case told.RecreatePod() | told.BindPod():
                body = None
        self.api.in_flight.append((self, one, body, self.epoch))

    def answered(self, one, failure, *, is_answered):
        """What came of a write, as far as this side hears."""
        if not is_answered:
            self.events.append(self._failure(one)(one.uid, told.WriteFailure.BUSY, "no answer"))
        elif failure is not None:
            self.events.append(self._failure(one)(one.uid, failure))
        elif isinstance(one, told.UngatePod | told.BindPod | told.RemoveGate):
            self.events.append(told.PatchDone(one.uid))


def settle(api, sides, at_s, *, rounds=60, steered=()):
    """No more trouble: everything is heard and carried out until nothing changes; the time after."""
    for _ in range(rounds):
        at_s += 1.0
        for side in sides:
            side.hear()
            side.hear_devices(steered)
            side.events.append(told.GateTicked())
            side.round(at_s)
            while side.under_way:
                side.write()
            side.round(at_s)
        api.schedule()
    return at_s


class TwoControllers:
    """What may happen to any cluster (`api`) with two controllers (`sides`); a story says how often, at `at_s`."""

    def hear(self, rng):
        rng.choice(self.sides).hear(rng.randint(1, 8))

    def round(self, rng):
        rng.choice(self.sides).round(self.at_s)

    def write(self, rng):
        side = rng.choice(self.sides)
        if side.under_way:
            side.write(rng.randrange(len(side.under_way)), fault=rng.choice((None, None, None, "busy", "lost")))

    def schedule(self, _):
        self.api.schedule()

    def delete(self, rng):
        if self.api.pods:
            self.api.remove(rng.choice(sorted(self.api.pods)))

    def cordon(self, rng):
        name = rng.choice(sorted(self.api.nodes))
        self.api.node(name, cordoned=not self.api.nodes[name]["spec"].get("unschedulable"))

    def change_leader(self, rng):
        self.elect(rng.randrange(2))

    def tick(self, rng):
        rng.choice(self.sides).events.append(told.GateTicked())

    def touch(self, rng):
        """Somebody else changes a pod."""
        if self.api.pods:
            self.api.put("pod", self.api.pods[rng.choice(sorted(self.api.pods))])


def check(api):
    """What must hold whatever happened."""
    seen = {}
    for uid, epoch, node, leading in api.patches:
        assert epoch is None or epoch == leading, "written by one that did not lead"
        assert uid not in seen, f"{uid} was patched by {seen.get(uid)} and {epoch}"
        seen[uid] = epoch
        assert epoch is None or node, "ungated without a pin"
    for name in api.nodes:
        assert api.free(name) >= 0
