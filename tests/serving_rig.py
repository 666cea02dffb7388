"""A cluster with a Deployment under an InferenceService: the rig of the gate, with replicas that somebody scales.

Owns the Deployment and its ReplicaSet in the simulation, and a side that knows services and
carries out what is said of their scale. No clock and no sockets.
"""

from eelgrid_controller.engines.kubernetes.model.inference_service import InferenceService, ServiceIndex, parse_service
from eelgrid_controller.engines.kubernetes.model.objects import parse_pod
from eelgrid_controller.engines.kubernetes.model.well_known import DELETION_COST
from eelgrid_controller.engines.kubernetes.pods import gate_events as told
from eelgrid_controller.engines.kubernetes.pods.intent import view_pod
from eelgrid_controller.engines.kubernetes.reconcilers.core_commands import status_event
from eelgrid_controller.engines.kubernetes.reconcilers.inference_services import (
    ScaleSubresourceWriter,
    SetDeletionCost,
    count_replicas,
)
from eelgrid_controller.state.events import WorkloadPlaced, WorkloadScaled
from tests.gate_rig import Api, Side

UNIT = "service-s"


def inference_service(**spec):
    """An InferenceService of the Deployment chat, as the API gives it."""
    metadata = {
        "name": "chat",
        "namespace": "x",
        "uid": "s",
        "generation": 1,
        "creationTimestamp": "2026-11-22T08:00:00Z",
    }
    whole = {
        "mode": "Enforce",
        "targetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "chat"},
        "profile": "chat-8b",
        "requestsPerSecond": "2",
        "objectives": [{"metric": "Response", "percentile": 95, "atMost": "1s"}],
        "replicas": {"least": 1, "most": 8},
        **spec,
    }
    return {"metadata": metadata, "spec": whole}


class ServedApi(Api):
    """With one Deployment of so many replicas and its ReplicaSets."""

    def __init__(self, *, replicas=1, surge=1):
        super().__init__()
        self.replicas = replicas
        self.surge = surge
        self.version_of_target = 1
        self.revision = 1
        self.gpus = 1
        self.is_gating = True

    def pods_of(self, revision=None):
        found = [
            pod
            for pod in self.pods.values()
            if any(one["name"].startswith("chat-") for one in pod["metadata"].get("ownerReferences", ()))
            and pod["status"]["phase"] != "Succeeded"
        ]
        return found if revision is None else [pod for pod in found if _revision(pod) == revision]

    def scale(self, replicas):
        self.replicas = replicas
        self.version_of_target += 1

    def roll(self, *, gpus=1):
        """Another pod template."""
        self.revision += 1
        self.gpus = gpus

    def one(self):
        name = f"chat-r{self.revision}"
        made = self.pod(gpus=self.gpus, owner=name)
        del self.owned[name]  # the Deployment makes others, not this
        if not self.is_gating:
            found = self.pods[made]
            found["spec"].pop("schedulingGates", None)
            self.put("pod", found)
        return made

    def remove(self, name):
        found = self.pods.pop(name, None)
        if found is not None:
            self.bound.pop(found["metadata"]["uid"], None)
            self.tell("gone", found)

    def control(self):
        """One round of the Deployment's controllers: new pods with a surge, old ones go when new ones run."""
        new, old = self.pods_of(self.revision), [pod for pod in self.pods_of() if _revision(pod) != self.revision]
        running = [pod for pod in new if pod["spec"].get("nodeName")]
        room = self.replicas + (self.surge if old else 0) - len(new) - len(old)
        for _ in range(min(self.replicas - len(new), room)):
            self.one()
        if len(new) > self.replicas:
            for pod in sorted(new, key=_last_to_go)[: len(new) - self.replicas]:
                self.remove(pod["metadata"]["name"])
        for pod in sorted(old, key=_last_to_go)[: max(0, len(running) + len(old) - self.replicas)]:
            self.remove(pod["metadata"]["name"])

    def mark(self, mark):
        found = next((pod for pod in self.pods.values() if pod["metadata"]["uid"] == mark.uid), None)
        if found is None:
            return
        notes = found["metadata"]["annotations"]
        if mark.cost is None:
            notes.pop(DELETION_COST, None)
        else:
            notes[DELETION_COST] = mark.cost
        self.put("pod", found)


class ServingSide(Side):
    """One controller that knows services."""

    def begin(self):
        self.services = getattr(self, "services", None) or ServiceIndex()
        self.scaling = ScaleSubresourceWriter(agreed=getattr(self, "remembered", None))
        super().begin()
        self.events += [told.InferenceServiceUpdated(service) for service in self.services.services]

    def serve(self, found=None, **target):
        """An InferenceService as it is now, with its target; None for none."""
        service = None
        if found is not None:
            read = parse_service(found)
            assert isinstance(read, InferenceService), read
            service = type(read)(**{name: getattr(read, name) for name in read.__slots__} | target)
        before = list(self.services.services)
        changed = self.services.replace_services([] if service is None else [service])
        for one in before:
            if service is None or one.unit_name != service.unit_name:
                self.events.append(told.InferenceServiceDeleted(one.unit_name))
        if service is not None and before != [service]:
            self.events.append(told.InferenceServiceUpdated(service))
        if changed:
            for pod in list(self.objects.values()):
                self._see("pod", pod)
        return service

    def _see(self, kind, found):
        if kind != "pod":
            super()._see(kind, found)
            return
        self.objects[found["metadata"]["name"]] = found
        self.events.append(told.PodUpdated(view_pod(parse_pod(found), found, {}, self.services)[0]))

    @property
    def unit(self):
        return self.gate.units.get(UNIT)

    @property
    def workload(self):
        """What the core holds of the service now."""
        live = [
            one for one in self.core.state.workloads.values() if one.workload_id.startswith(UNIT) and one.placements
        ]
        live = [one for one in live if one.phase.name == "PLACED"]
        assert len(live) <= 1, "two workloads of one service"
        return live[0] if live else None

    def steer(self, replicas):
        """What the steering does."""
        self.now_ns += 1
        step = self.core.scale(self.workload.workload_id, replicas, now_ns=self.now_ns)
        self._heard(step.events)

    def look(self, found, at_s):
        """One look of the services' part; its writes are done at once."""
        service = self.serve(found, wanted=self.api.replicas, surge=self.api.surge)
        asked = self.scaling.reconcile_replicas(
            service, str(self.api.version_of_target), count_replicas(self.unit), at_s
        )
        for one in asked if self.epoch is not None else ():
            if isinstance(one, SetDeletionCost):
                self.api.mark(one)
            elif one.version == str(self.api.version_of_target):
                self.api.scale(one.replicas)
                self.scaling.on_written(one.replicas, str(self.api.version_of_target), at_s)
        self.remembered = self.scaling.agreed

    def _heard(self, events):
        super()._heard(events)
        for event in events:
            if isinstance(event, WorkloadScaled | WorkloadPlaced):
                self.events.append(status_event(self.core.state.workloads[event.workload_id]))


def play(api, sides, found, at_s, *, rounds=30):
    """Everything is heard and carried out, second by second, for so many seconds; the time after."""
    for _ in range(rounds):
        at_s += 1.0
        api.control()
        for side in sides:
            side.hear()
            side.events.append(told.GateTicked())
            side.look(found, at_s)
            side.round(at_s)
            while side.under_way:
                side.write()
            side.round(at_s)
        api.schedule()
        for name in [name for name, pod in api.pods.items() if pod["spec"].get("nodeName")]:
            ready(api, name)
    return at_s


def ready(api, name):
    """A bound pod runs and serves."""
    found = api.pods[name]
    if found["status"].get("phase") != "Running" and found["status"].get("phase") != "Succeeded":
        found["status"] = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}], "podIP": "10.0.0.1"}
        api.put("pod", found)


def _revision(pod):
    return int(pod["metadata"]["ownerReferences"][0]["name"].rpartition("r")[2])


def _last_to_go(pod):
    cost = int(pod["metadata"]["annotations"].get(DELETION_COST, "0"))
    return (bool(pod["spec"].get("nodeName")), pod["status"]["phase"] == "Running", cost, pod["metadata"]["name"])
