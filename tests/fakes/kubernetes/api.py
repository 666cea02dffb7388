"""The verbs of the API over the store: what a write passes through before it is stored.

Owns the order of the rules: mutators, defaults, validation, status apart, generation, and
that a write that changes nothing leaves the version as it is. Must not know HTTP. Every call
is one step of the event loop, so that nothing comes between its reads and its write.
"""

from tests.fakes.kubernetes import claims, kinds, metadata, patches, pods, rules
from tests.fakes.kubernetes.faults import (
    Bad,
    already_exists,
    bad_request,
    conflict,
    forbidden,
    invalid,
    not_found,
    unsupported_media,
)
from tests.fakes.kubernetes.patches import applied, claimed, leaves
from tests.fakes.kubernetes.store import Garbage, Store, copied

MERGE, JSON = "application/merge-patch+json", "application/json-patch+json"
STRATEGIC, APPLY = "application/strategic-merge-patch+json", "application/apply-patch+yaml"
_FREE = {"metadata", "status"}  # what may change without a new generation


class Api:
    """Every verb, for a caller whose permissions were checked."""

    def __init__(self, stamps, access, minor=36):
        self.stamps = stamps
        self.access = access
        self.catalogue = kinds.Catalogue(minor)
        self.store = Store()
        self.mutators = []  # called with (kind, object) at each creation; may change the object, or raise a Fault
        self.owners = {}  # by uid: {manager: {path: value}}, of objects that were ever applied
        self.garbage = Garbage(self)
        for name in ("default", "kube-system", "kube-public", "kube-node-lease"):
            self.create(self._namespaces, "", {"metadata": {"name": name}})

    @property
    def _namespaces(self):
        return self.catalogue.find("", "v1", "namespaces")

    def get(self, kind, namespace, name):
        record = self.store.find(kind, namespace, name)
        if record is None:
            raise not_found(kind, name)
        return record

    def create(self, kind, namespace, body):
        """A new object."""
        found = {key: value for key, value in body.items() if key not in {"kind", "apiVersion"}}
        told = (found.get("metadata") or {}).get("namespace")
        if kind.is_namespaced and told and told != namespace:
            raise bad_request("the namespace of the provided object does not match the namespace sent on the request")
        if (found.get("metadata") or {}).get("resourceVersion"):
            raise bad_request("resourceVersion should not be set on objects to be created")
        space = self.store.find(self._namespaces, "", namespace)
        if kind.is_namespaced and space is None:
            raise not_found(self._namespaces, namespace)
        metadata.born(found, kind, namespace, self.stamps)
        name = found["metadata"]["name"]
        if kind.is_namespaced and space.object["metadata"].get("deletionTimestamp"):
            why = f"unable to create new content in namespace {namespace} because it is being terminated"
            raise forbidden(kind, name, why)
        for mutate in self.mutators:
            mutate(kind, found)
        rules.created(found, kind, self.stamps.time())
        if (namespace if kind.is_namespaced else "", name) in self.store.of(kind):
            raise already_exists(kind, name)
        if kind.plural == "customresourcedefinitions":
            self._defined(found)
        return self.store.put(kind, found)

    def _defined(self, found):
        self.catalogue.serve(kinds.custom(found))
        now = self.stamps.time()
        for name in ("NamesAccepted", "Established"):
            pods.condition(found, name, "True", now, "Accepted")

    def replace(self, kind, namespace, name, part, body, token=None, manager="unknown"):
        """PUT."""
        old = self.get(kind, namespace, name)
        found = {key: copied(value) for key, value in body.items() if key not in {"kind", "apiVersion"}}
        told = found.get("metadata") or {}
        if told.get("name") != name:
            raise bad_request("the name of the object does not match the name on the URL")
        if kind.needs_version and not told.get("resourceVersion"):
            raise invalid(kind, name, [Bad("metadata.resourceVersion", "must be specified for an update")])
        if part == "scale":
            return self._scaled(kind, old, found, token)
        return self._write(kind, old, found, part, token, manager)

    def patch(self, kind, namespace, name, part, body, content_type, token=None, manager="unknown", is_forced=False):
        """PATCH, in any of its forms."""
        record = self.store.find(kind, namespace, name)
        if content_type == APPLY:
            return self._apply(kind, namespace, name, part, body, token, manager, is_forced, record)
        record = self.get(kind, namespace, name)
        old = record.object
        if part == "scale":
            old = {"metadata": old["metadata"], "spec": {"replicas": old["spec"].get("replicas")}}
        if content_type == MERGE:
            found = patches.merged(old, body)
        elif content_type == STRATEGIC and not kind.is_custom:
            found = patches.strategic(old, body)
        elif content_type == JSON:
            found = patches.json_patched(old, body)
        else:
            supported = [JSON, MERGE, *([] if kind.is_custom else [STRATEGIC]), APPLY]
            why = f"the body of the request was in an unknown format - accepted media types include: {', '.join(supported)}"
            raise unsupported_media(why)
        found = copied({key: value for key, value in found.items() if key not in {"kind", "apiVersion"}})
        if part == "scale":
            return self._scaled(kind, record, found, token)
        return self._write(kind, record, found, part, token, manager)

    def _scaled(self, kind, old, found, token):
        body = copied(old.object)
        body["spec"]["replicas"] = found["spec"]["replicas"]
        body["metadata"]["resourceVersion"] = (found.get("metadata") or {}).get("resourceVersion", "")
        return self._write(kind, old, body, "", token, "scale")

    def _apply(self, kind, namespace, name, part, body, token, manager, is_forced, record):
        body = {key: value for key, value in body.items() if key not in {"kind", "apiVersion"}}
        if manager == "unknown":
            raise bad_request("fieldManager: Required value: is required for apply patch")
        if record is None:
            if part:
                raise not_found(kind, name)
            wanted = {**copied(body), "metadata": {**body.get("metadata", {}), "name": name}}
            record = self.create(kind, namespace, wanted)
            self.owners[record.object["metadata"]["uid"]] = {manager: dict(leaves(body))}
            return record
        uid = record.object["metadata"]["uid"]
        owners = self.owners.setdefault(uid, {"before-first-apply": dict(leaves(record.object))})
        found = applied(copied(record.object), body, owners, manager, is_forced)
        found["metadata"]["resourceVersion"] = body.get("metadata", {}).get("resourceVersion", "")
        return self._write(kind, record, found, part, token, None)

    def _write(self, kind, record, found, part, token, manager):
        """Bring an object to a new state; `found` is ours to change."""
        old = record.object
        name = old["metadata"]["name"]
        metadata.kept(found, old, kind, is_status=part == "status" and kind.plural == "pods")
        if part == "status":
            found = metadata.part_alone(found, old, "status")
        elif kind.has_status:
            found = (
                {**found, "status": old["status"]}
                if "status" in old
                else {k: v for k, v in found.items() if k != "status"}
            )
        if part == "status" and kind.plural == "resourceclaims" and self.catalogue.minor >= claims.MINOR_OF_BINDING:
            claims.allocated(found, old, kind, lambda where: self._may(token, kind, where, name))
        if not part:
            rules.updated(found, old, kind)
        if found == old:
            return record
        if kind.has_generation and any(found.get(key) != old.get(key) for key in (found.keys() | old.keys()) - _FREE):
            found["metadata"]["generation"] = old["metadata"].get("generation", 0) + 1
        if (owners := self.owners.get(old["metadata"]["uid"])) is not None and manager is not None:
            claimed(old, found, owners, manager)
        if (
            found["metadata"].get("deletionTimestamp")
            and not found["metadata"].get("finalizers")
            and not self._lingers(kind, found)
        ):
            return self._gone(kind, found)
        return self.store.put(kind, found)

    def _may(self, token, kind, where, name):
        return token is None or any(
            self.access.may(token, verb, kind.group, where, name) for verb in ("update", "patch")
        )

    @staticmethod
    def _lingers(kind, found):
        """Whether a pod that is being deleted waits for its kubelet."""
        return kind.plural == "pods" and found["metadata"].get("deletionGracePeriodSeconds", 0) > 0

    def delete(self, kind, namespace, name, options=None):
        """DELETE; the record that is left, or the last one."""
        options = options or {}
        record = self.get(kind, namespace, name)
        its, wanted = record.object["metadata"], options.get("preconditions") or {}
        if wanted.get("uid") not in {None, its["uid"]}:
            why = f"Precondition failed: UID in precondition: {wanted['uid']}, UID in object meta: {its['uid']}"
            raise conflict(kind, name, why)
        if wanted.get("resourceVersion") not in {None, its["resourceVersion"]}:
            why = f"Precondition failed: ResourceVersion in precondition: {wanted['resourceVersion']}, ResourceVersion in object meta: {its['resourceVersion']}"
            raise conflict(kind, name, why)
        propagation = options.get("propagationPolicy")
        if propagation == "Orphan":
            self.garbage.orphan(its["uid"])
        elif propagation == "Foreground" and self.garbage.dependents(its["uid"]):
            return self._marked(kind, record, 0, [*its.get("finalizers", []), "foregroundDeletion"])
        grace_s = self._grace_s(kind, record.object, options)
        if its.get("finalizers") or grace_s:
            return self._marked(kind, record, grace_s, its.get("finalizers"))
        return self._gone(kind, record.object)

    @staticmethod
    def _grace_s(kind, found, options):
        if kind.plural != "pods" or not found["spec"].get("nodeName"):
            return 0
        if found["status"].get("phase") in {"Succeeded", "Failed"}:
            return 0
        asked = options.get("gracePeriodSeconds")
        return found["spec"].get("terminationGracePeriodSeconds", 30) if asked is None else asked

    def _marked(self, kind, record, grace_s, finalizers):
        """An object that is to go, and stays until its finalizers or its kubelet let it."""
        its = record.object["metadata"]
        if (
            its.get("deletionTimestamp")
            and its.get("deletionGracePeriodSeconds", 0) <= grace_s
            and its.get("finalizers") == finalizers
        ):
            return record
        marked = {
            **its,
            "deletionTimestamp": its.get("deletionTimestamp") or self.stamps.time(),
            "deletionGracePeriodSeconds": grace_s,
        }
        if finalizers:
            marked["finalizers"] = finalizers
        if kind.has_generation:
            marked["generation"] = its.get("generation", 0) + 1
        found = {**record.object, "metadata": marked}
        if kind.plural == "namespaces":
            found["status"] = {"phase": "Terminating"}
        stored = self.store.put(kind, found)
        if "foregroundDeletion" in (finalizers or ()):
            self.garbage.foreground(kind, stored)
        return stored

    def _gone(self, kind, found):
        its = found["metadata"]
        namespace, name = its.get("namespace", ""), its["name"]
        if kind.plural == "namespaces":
            self.garbage.emptied(name)
        gone = self.store.remove(kind, namespace, name)
        self.owners.pop(its["uid"], None)
        if kind.plural == "customresourcedefinitions":
            defined = kinds.custom(found)
            for at, below in list(self.store.of(defined)):
                self.store.remove(defined, at, below)
            self.catalogue.withdraw(defined)
        return gone

    def bind(self, kind, namespace, name, body):
        """POST pods/x/binding."""
        return self.store.put(kind, pods.bound(self.get(kind, namespace, name), kind, body, self.stamps.time()))

    def evict(self, kind, namespace, name, body):
        """POST pods/x/eviction."""
        pod = self.get(kind, namespace, name)
        of = self.catalogue.find("policy", "v1", "poddisruptionbudgets")
        budgets = [one.object for (at, _), one in self.store.of(of).items() if at == namespace]
        spent = pods.evictable(pod.object, pods.budget_of(pod.object, budgets), self.stamps.time())
        if (body.get("deleteOptions") or {}).get("dryRun"):
            return None
        if spent is not None:
            self.store.put(of, spent)  # before the deletion, which may yet be refused
        return self.delete(kind, namespace, name, body.get("deleteOptions"))
