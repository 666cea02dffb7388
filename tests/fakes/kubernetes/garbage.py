"""Owner references: what goes when its owner goes. On the real server the controller manager does this."""

from tests.fakes.kubernetes.store import copied


class Garbage:
    """Follows the store; deletes what lost all of its owners."""

    def __init__(self, api):
        self.api = api
        self.is_on = True
        self._owned = {}  # by owner's uid: {(kind, namespace, name)}
        api.store.heard.append(self._heard)

    def dependents(self, uid):
        return self._owned.get(uid, set())

    def _heard(self, kind, event):
        for record, has in ((event.before, False), (event.after, True)):
            if record is None:
                continue
            its = record.object["metadata"]
            for owner in its.get("ownerReferences") or ():
                known = self._owned.setdefault(owner["uid"], set())
                (known.add if has else known.discard)((kind, its.get("namespace", ""), its["name"]))
        if event.after is None and self.is_on:
            self._collect(event.before.object["metadata"])

    def _collect(self, its):
        for kind, namespace, name in list(self._owned.pop(its["uid"], ())):
            record = self.api.store.find(kind, namespace, name)
            if record is None:
                continue
            owners = [one for one in record.object["metadata"]["ownerReferences"] if one["uid"] != its["uid"]]
            if any(self._lives(namespace, one) for one in owners):
                continue
            self.api.delete(kind, namespace, name)
        for owner in its.get("ownerReferences") or ():
            self._unblocked(its.get("namespace", ""), owner)

    def _owner(self, namespace, reference):
        kind = self.api.catalogue.named(reference["apiVersion"], reference["kind"])
        if kind is None:
            return None, None
        record = self.api.store.find(kind, namespace if kind.is_namespaced else "", reference["name"])
        return kind, record if record is not None and record.object["metadata"]["uid"] == reference["uid"] else None

    def _lives(self, namespace, reference):
        return self._owner(namespace, reference)[1] is not None

    def _unblocked(self, namespace, reference):
        """An owner that waits in the foreground for its dependents may go when the last has gone."""
        kind, record = self._owner(namespace, reference)
        if record is not None and "foregroundDeletion" in record.object["metadata"].get("finalizers", ()):
            self.foreground(kind, record)

    def foreground(self, kind, record):
        """Delete what an object owns; then the object."""
        its = record.object["metadata"]
        for of, namespace, name in list(self.dependents(its["uid"])):
            found = self.api.store.find(of, namespace, name)
            if found is not None and not found.object["metadata"].get("deletionTimestamp"):
                self.api.delete(of, namespace, name, {"propagationPolicy": "Foreground"})
        found = self.api.store.find(kind, its.get("namespace", ""), its["name"])
        if found is not None and not self.dependents(its["uid"]):
            left = copied(found.object)
            left["metadata"]["finalizers"].remove("foregroundDeletion")
            self.api._write(kind, found, left, "", None, None)

    def orphan(self, uid):
        """Cut the ties of what an object owns."""
        for kind, namespace, name in list(self.dependents(uid)):
            found = copied(self.api.store.find(kind, namespace, name).object)
            owners = [one for one in found["metadata"]["ownerReferences"] if one["uid"] != uid]
            found["metadata"]["ownerReferences"] = owners
            if not owners:
                del found["metadata"]["ownerReferences"]
            self.api.store.put(kind, found)

    def emptied(self, namespace):
        """Remove all that is in a namespace."""
        for kind in dict.fromkeys(self.api.catalogue.kinds.values()):
            for at, name in list(self.api.store.of(kind)):
                if kind.is_namespaced and at == namespace and (at, name) in self.api.store.of(kind):
                    self.api.store.remove(kind, at, name)
