"""What the server itself writes into metadata, and what nobody may change there."""

import random
import uuid
from datetime import UTC, datetime

from tests.fakes.kubernetes.faults import Bad, conflict, invalid
from tests.fakes.kubernetes.store import copied

_LETTERS = "bcdfghjklmnpqrstvwxz2456789"


class Stamps:
    """Uids, names and times; from a seed, so that a run can be repeated."""

    def __init__(self, seed, now):
        self.random = random.Random(seed)
        self.now = now  # a datetime in UTC

    def uid(self):
        return str(uuid.UUID(int=self.random.getrandbits(128), version=4))

    def suffix(self):
        return "".join(self.random.choice(_LETTERS) for _ in range(5))

    def time(self):
        return self.now().strftime("%Y-%m-%dT%H:%M:%SZ")


def wall_clock():
    return datetime.now(UTC)


def born(found, kind, namespace, stamps):
    """A new object's metadata; `found` is changed."""
    metadata = found.setdefault("metadata", {})
    for name in (
        "uid",
        "resourceVersion",
        "generation",
        "deletionTimestamp",
        "deletionGracePeriodSeconds",
        "managedFields",
    ):
        metadata.pop(name, None)
    if not metadata.get("name"):
        if not metadata.get("generateName"):
            raise invalid(kind, "", [Bad("metadata.name", "name or generateName is required", "FieldValueRequired")])
        metadata["name"] = metadata["generateName"] + stamps.suffix()
    if kind.is_namespaced:
        metadata["namespace"] = namespace
    else:
        metadata.pop("namespace", None)
    metadata["uid"] = stamps.uid()
    metadata["creationTimestamp"] = stamps.time()
    if kind.has_generation:
        metadata["generation"] = 1
    _tidy(metadata)
    return found


def _tidy(metadata):
    """Empty maps and lists are not kept, nor what is null."""
    for name in ("labels", "annotations", "finalizers", "ownerReferences"):
        if not metadata.get(name):
            metadata.pop(name, None)


def kept(found, old, kind, *, is_status=False):
    """An updated object's metadata: what the writer must not change is as it was; `found` is changed.

    An update with another uid is a conflict; of a pod's status it is invalid, as an API server of 1.36 answers.
    """
    metadata, before = found.setdefault("metadata", {}), old["metadata"]
    name = before["name"]
    if metadata.get("name", name) != name:
        raise invalid(kind, name, [Bad("metadata.name", "field is immutable")])
    if metadata.get("uid") not in {None, "", before["uid"]}:
        if is_status:
            raise invalid(kind, name, [Bad("metadata.uid", "field is immutable")])
        why = f"Precondition failed: UID in precondition: {metadata['uid']}, UID in object meta: {before['uid']}"
        raise conflict(kind, name, why)
    if metadata.get("resourceVersion") not in {None, "", before["resourceVersion"]}:
        raise conflict(kind, name)
    metadata.pop("managedFields", None)
    for one in (
        "name",
        "namespace",
        "uid",
        "creationTimestamp",
        "generation",
        "resourceVersion",
        "deletionTimestamp",
        "deletionGracePeriodSeconds",
        "generateName",
    ):
        if one in before:
            metadata[one] = before[one]
        else:
            metadata.pop(one, None)
    _tidy(metadata)
    return found


def part_alone(found, old, part):
    """A write to the status: all else is as it was."""
    result = copied(old)
    if part in found:
        result[part] = found[part]
    else:
        result.pop(part, None)
    return result
