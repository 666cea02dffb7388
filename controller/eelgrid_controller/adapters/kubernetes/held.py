"""What is held of a kind, and how it follows from lists and watches: pure.

Owns the objects by key and what each list or event changes, told as deltas. Must not know
where lists and events come from, nor time.

Theory. Whatever happened in between, a list is the truth: the deltas of a list are the
differences between what was held and what it says, deletions among them, and an object of
the same name with another uid is a deletion and an addition. An event older than what is
held (a watch may repeat what a list has told) changes nothing: versions of one object only
grow, and since Kubernetes 1.35 the API promises that they may be compared as numbers; where
a version is no number, any that differs counts as new. Applied in order, deltas always
carry the same objects as the store holds.

Source: client-go's `DeltaFIFO.Replace`; KEP-5504, comparable resource versions.
"""

from collections.abc import Callable, Iterable, Mapping
from enum import Enum, auto
from types import MappingProxyType
from typing import NamedTuple

from eelgrid_controller.adapters.kubernetes.port import Change, Key, Object, Told, key_of, uid_of, version_of
from eelgrid_controller.errors import ControllerError

__all__ = ["Delta", "Held", "TooManyObjects", "What"]


class TooManyObjects(ControllerError):
    """More objects of a kind than may be held."""


class What(Enum):
    """What happened to an object."""

    ADDED = auto()
    MODIFIED = auto()
    DELETED = auto()


class Delta(NamedTuple):
    """One difference; `old` is None of what is new, `new` of what has gone."""

    what: What
    key: Key
    old: Object | None
    new: Object | None


class Held:
    """The objects of one kind as they are known."""

    def __init__(self, *, most: int, keep: Callable[[Object], Object] | None = None) -> None:
        """`keep` gives what is kept of an object; its name, namespace, uid and version must be.

        What is listed or told is taken over, without its `kind` and `apiVersion`.
        """
        self._most = most
        self._keep = keep
        self._objects: dict[Key, Object] = {}

    @property
    def objects(self) -> Mapping[Key, Object]:
        """All of them, as they are at any moment; not to be changed."""
        return MappingProxyType(self._objects)

    def replaced(self, items: Iterable[Object]) -> list[Delta]:
        """The differences that a whole list makes; TooManyObjects leaves all as it was."""
        listed: dict[Key, Object] = {}
        for item in items:
            found = self._kept(item)
            listed[key_of(found)] = found
        if len(listed) > self._most:
            raise TooManyObjects(
                f"{len(listed)} objects, of which {self._most} may be held", "raise the bound, or select fewer of them"
            )
        deltas = [Delta(What.DELETED, key, old, None) for key, old in self._objects.items() if key not in listed]
        for delta in deltas:
            del self._objects[delta.key]
        for key, found in listed.items():
            # A list is right whatever was held: after a restore from a backup versions are lower.
            old = self._objects.get(key)
            if old is None or version_of(old) != version_of(found):
                deltas += self._put(found)
        return deltas

    def applied(self, change: Change) -> list[Delta]:
        """The differences that an event makes: none, one, or two where a name was taken over."""
        if change.told is Told.BOOKMARK:
            return []
        found = self._kept(change.object)
        key = key_of(found)
        old = self._objects.get(key)
        if change.told is Told.DELETED:
            if old is None or not _is_newer(found, old):
                return []
            del self._objects[key]
            return [Delta(What.DELETED, key, old, None)]
        if old is None and len(self._objects) >= self._most:
            raise TooManyObjects(
                f"over {self._most} objects, which is all that may be held", "raise the bound, or select fewer of them"
            )
        return [] if old is not None and not _is_newer(found, old) else self._put(found)

    def _kept(self, found: Object) -> Object:
        # A watch says what kind an object is, a list does not: the same object is held alike.
        found.pop("kind", None)
        found.pop("apiVersion", None)
        return found if self._keep is None else self._keep(found)

    def _put(self, found: Object) -> list[Delta]:
        key = key_of(found)
        old = self._objects.get(key)
        self._objects[key] = found
        if old is None:
            return [Delta(What.ADDED, key, None, found)]
        if uid_of(old) != uid_of(found):
            return [Delta(What.DELETED, key, old, None), Delta(What.ADDED, key, None, found)]
        return [Delta(What.MODIFIED, key, old, found)]


def _is_newer(found: Object, old: Object) -> bool:
    new, was = version_of(found), version_of(old)
    if new.isdigit() and was.isdigit():
        return int(new) > int(was)
    return new != was
