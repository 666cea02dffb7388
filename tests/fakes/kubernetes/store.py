"""Objects, resource versions and the log of changes: what etcd and the watch cache are together.

Owns that versions only grow, that a stored object is never changed in place, and how far
back the log reaches. Must not know rules or HTTP. Objects are kept without `kind` and
`apiVersion`, with their bytes beside them, so that a list or an event costs a copy of bytes.
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
