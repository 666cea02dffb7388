"""Store of the objects of one kind, updated from lists and watches: pure."""

from collections.abc import Callable, Iterable, Mapping
from enum import Enum, auto
from types import MappingProxyType
from typing import NamedTuple

from eelgrid_controller.engines.kubernetes.api.port import (
    Object,
    ObjectKey,
    WatchEvent,
    WatchEventType,
    key_of,
    uid_of,
    version_of,
)
from eelgrid_controller.errors import ControllerError


class TooManyObjects(ControllerError):
    """More objects of a kind than may be held."""


class DeltaType(Enum):
    """What happened to an object."""

    ADDED = auto()
    MODIFIED = auto()
    DELETED = auto()


class Delta(NamedTuple):
    """One difference; `old` is None of what is new, `new` of what has gone."""

    what: DeltaType
    key: ObjectKey
    old: Object | None
    new: Object | None


class ObjectStore:
    """The objects of one kind as they are known."""

    def __init__(self, *, most: int, keep: Callable[[Object], Object] | None = None) -> None:
        """`keep` gives what is kept of an object; its name, namespace, uid and version must be.

        What is listed or told is taken over, without its `kind` and `apiVersion`.
        """
        self._most = most
        self._keep = keep
        self._objects: dict[ObjectKey, Object] = {}

    @property
    def objects(self) -> Mapping[ObjectKey, Object]:
        """All of them, as they are at any moment; not to be changed."""
        return MappingProxyType(self._objects)

    def replace(self, items: Iterable[Object]) -> list[Delta]:
        """The differences that a whole list makes; TooManyObjects leaves all as it was."""
        listed: dict[ObjectKey, Object] = {}
        for item in items:
            found = self._kept(item)
            listed[key_of(found)] = found
        if len(listed) > self._most:
            raise TooManyObjects(
                f"{len(listed)} objects, of which {self._most} may be held", "raise the bound, or select fewer of them"
            )
        deltas = [Delta(DeltaType.DELETED, key, old, None) for key, old in self._objects.items() if key not in listed]
        for delta in deltas:
            del self._objects[delta.key]
        for key, found in listed.items():
            # A list is right whatever was held: after a restore from a backup versions are lower.
            old = self._objects.get(key)
            if old is None or version_of(old) != version_of(found):
                deltas += self._put(found)
        return deltas

    def apply_change(self, change: WatchEvent) -> list[Delta]:
        """The differences that an event makes: none, one, or two where a name was taken over."""
        if change.told is WatchEventType.BOOKMARK:
            return []
        found = self._kept(change.object)
        key = key_of(found)
        old = self._objects.get(key)
        if change.told is WatchEventType.DELETED:
            if old is None or not _is_newer(found, old):
                return []
            del self._objects[key]
            return [Delta(DeltaType.DELETED, key, old, None)]
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
            return [Delta(DeltaType.ADDED, key, None, found)]
        if uid_of(old) != uid_of(found):
            return [Delta(DeltaType.DELETED, key, old, None), Delta(DeltaType.ADDED, key, None, found)]
        return [Delta(DeltaType.MODIFIED, key, old, found)]


def _is_newer(found: Object, old: Object) -> bool:
    new, was = version_of(found), version_of(old)
    if new.isdigit() and was.isdigit():
        return int(new) > int(was)
    return new != was
