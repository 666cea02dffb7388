"""Kubelets without machines: what is bound runs, what is to go goes, what is told to finish finishes."""

import time

from eelgrid_controller.engines.kubernetes.api.port import PODS
from tests.fakes.kubernetes.parts import Part
from tests.fakes.kubernetes.pods import condition
from tests.fakes.kubernetes.store import copied


class Kubelets(Part):
    """Those of all nodes; a part."""

    def __init__(self, fake, *, start_s=0.0, stop_s=0.0, run_s=None, delay_s=0.0):
        super().__init__(fake, delay_s=delay_s)
        self.start_s = start_s  # from being bound to being ready
        self.stop_s = stop_s  # from being told to go to having gone
        self.run_s = run_s  # from being ready to having ended well, of pods that are not restarted; None for never
        self.due = {}  # by key: (uid, when, what)

    def begin(self):
        for record in self.store.of(self.kind(PODS)).values():
            self._note(record)

    def heard(self, kind, event):
        if kind.plural != "pods" or event.after is None:
            return False
        return self._note(event.after)

    def _note(self, record):
        its, spec = record.object["metadata"], record.object["spec"]
        key = (its["namespace"], its["name"])
        if not spec.get("nodeName"):
            return False
        if its.get("deletionTimestamp"):
            what, after_s = "gone", self.stop_s
        elif record.object["status"].get("phase") == "Pending":
            what, after_s = "running", self.start_s
        elif record.object["status"].get("phase") == "Running" and self._ends(spec):
            what, after_s = "succeeded", self.run_s
        else:
            return False
        if self.due.get(key, ("", 0.0, ""))[::2] != (its["uid"], what):
            self.due[key] = (its["uid"], time.monotonic() + after_s, what)
        return True

    def work(self):
        now_s = time.monotonic()
        for key, (uid, due_s, what) in list(self.due.items()):
            if due_s > now_s:
                continue
            del self.due[key]
            record = self.store.find(self.kind(PODS), *key)
            if record is None or record.object["metadata"]["uid"] != uid:
                continue
            if what == "gone":
                self.api.delete(self.kind(PODS), *key, {"gracePeriodSeconds": 0})
            elif what == "succeeded":
                self._told(record, "Succeeded", is_ready=False)
            else:
                self._told(record, "Running", is_ready=True)
        return (
            max(0.001, min((due_s for _, due_s, _ in self.due.values()), default=now_s) - now_s) if self.due else None
        )

    def _ends(self, spec):
        return self.run_s is not None and spec.get("restartPolicy") == "Never"

    def _told(self, record, phase, *, is_ready):
        found = copied(record.object)
        found["status"]["phase"] = phase
        for name in ("Initialized", "ContainersReady", "Ready"):
            condition(found, name, "True" if is_ready else "False", self.api.stamps.time())
        self.store.put(self.kind(PODS), found)

    def finish(self, namespace, name, *, phase="Succeeded"):
        """A pod's program ends; phase Failed for one that fails."""
        self._told(self.store.find(self.kind(PODS), namespace, name), phase, is_ready=False)
