"""Objects, resource versions and the log of changes: what etcd and the watch cache are together.

Owns that versions only grow, that a stored object is never changed in place, and how far
back the log reaches. Must not know rules or HTTP. Objects are kept without `kind` and
`apiVersion`, with their bytes beside them, so that a list or an event costs a copy of bytes.

`Garbage` deletes what lost all of its owners; on the real server the controller manager does this.
"""

import asyncio
import bisect
from typing import NamedTuple

import msgspec

encode = msgspec.json.encode
decode = msgspec.json.decode


def copied(found):
    """A copy that shares nothing."""
    return decode(encode(found))


class Record(NamedTuple):
    """One version of an object."""

    version: int
    object: dict
    text: bytes


class Event(NamedTuple):
    """One change: what there was before (None: nothing), and what there is (None: nothing any more)."""

    version: int
    before: Record | None
    after: Record | None
    gone: Record | None  # the last state of a deleted object, at the version of its deletion


class Log:
    """The changes of one kind, oldest first."""

    def __init__(self):
        self.events = []
        self.versions = []
        self.waiting = set()

    def add(self, event):
        self.events.append(event)
        self.versions.append(event.version)
        for waiter in self.waiting:
            waiter.set()

    def after(self, version):
        """The index of the first change after a version."""
        return bisect.bisect_right(self.versions, version)


class Store:
    """All objects of all kinds."""

    def __init__(self):
        self.version = 1000
        self.compacted = 0  # changes up to here are forgotten
        self.records = {}  # by (group, plural): {(namespace, name): Record}
        self.logs = {}
        self.pages = {}  # continue tokens: (version, records that are left)
        self.heard = []  # called with (kind key, event) after each change; parts of the fake

    def of(self, kind):
        """The records of a kind, by namespace and name."""
        return self.records.setdefault(kind.key, {})

    def log(self, kind):
        return self.logs.setdefault(kind.key, Log())

    def find(self, kind, namespace, name):
        return self.of(kind).get((namespace, name))

    def put(self, kind, found):
        """Write an object; the record with its new version."""
        metadata = found["metadata"]
        key = (metadata.get("namespace", ""), metadata["name"])
        before = self.of(kind).get(key)
        self.version += 1
        metadata["resourceVersion"] = str(self.version)
        record = Record(self.version, found, encode(found))
        self.of(kind)[key] = record
        self._told(kind, Event(self.version, before, record, None))
        return record

    def remove(self, kind, namespace, name):
        before = self.of(kind).pop((namespace, name))
        self.version += 1
        found = {**before.object, "metadata": {**before.object["metadata"], "resourceVersion": str(self.version)}}
        gone = Record(self.version, found, encode(found))
        self._told(kind, Event(self.version, before, None, gone))
        return gone

    def _told(self, kind, event):
        self.log(kind).add(event)
        for hear in list(self.heard):
            hear(kind, event)

    def compact(self):
        """Forget all half-read lists and changes: who watches from an older version gets 410; running watches go on."""
        self.compacted = self.version
        self.pages.clear()

    def restored(self, version):
        """Go back to an older version, as a server does that comes back from a backup; the objects stay."""
        self.version = version
        self.compacted = 0
        self.pages.clear()
        for log in self.logs.values():
            log.events.clear()
            log.versions.clear()

    def subscribe(self, kind):
        """An event that is set with each change of a kind; give it back with `unsubscribe`."""
        waiter = asyncio.Event()
        self.log(kind).waiting.add(waiter)
        return waiter

    def unsubscribe(self, kind, waiter):
        self.log(kind).waiting.discard(waiter)


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
