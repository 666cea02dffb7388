"""Server-side apply: who owns which field, and what an apply of theirs changes.

Fields are told by their path of names; lists are one value, save those with a known merge key.
Enough for objects that Eelgrid owns; not for arguments among five controllers.
"""

from tests.fakes.kubernetes.faults import Fault
from tests.fakes.kubernetes.patches import MERGE_KEYS

_IGNORED = {"apiVersion", "kind"}
_IGNORED_METADATA = {"name", "namespace", "resourceVersion", "uid", "creationTimestamp", "generation", "managedFields"}


def leaves(found, at=()):
    """Every field with its path; elements of lists with a merge key stand under `key=value`."""
    if isinstance(found, dict) and found:
        for name, value in found.items():
            if (not at and name in _IGNORED) or (at == ("metadata",) and name in _IGNORED_METADATA):
                continue
            yield from leaves(value, (*at, name))
    elif isinstance(found, list) and at and (key := MERGE_KEYS.get(at[-1])) and all(key in one for one in found):
        for one in found:
            yield from leaves(one, (*at, (key, one[key])))
    else:
        yield at, found


def _put(found, path, value):
    head, *rest = path
    if isinstance(head, tuple):
        key, named = head
        element = next((one for one in found if one.get(key) == named), None)
        if element is None:
            element = {key: named}
            found.append(element)
        if rest:
            _put(element, rest, value)
        return
    if not rest:
        found[head] = value
        return
    if head not in found or not isinstance(found[head], dict | list):
        found[head] = [] if isinstance(rest[0], tuple) else {}
    _put(found[head], rest, value)


def _drop(found, path):
    head, *rest = path
    below = (
        next((one for one in found if one.get(head[0]) == head[1]), None)
        if isinstance(head, tuple)
        else found.get(head)
    )
    if below is None:
        return
    if rest:
        _drop(below, rest)
        is_empty = below == [] or below == {} or (isinstance(head, tuple) and set(below) <= {head[0]})
        if not is_empty:
            return
    if isinstance(head, tuple):
        found.remove(below)
    else:
        found.pop(head, None)


def applied(found, patch, owners, manager, is_forced):
    """The object after an apply; `owners` ({manager: {path: value}}) is brought up to date. `found` is changed."""
    wanted = dict(leaves(patch))
    if not is_forced:
        held = [
            (other, path)
            for other, fields in owners.items()
            if other != manager
            for path, value in wanted.items()
            if path in fields and fields[path] != value
        ]
        if held:
            raise _conflict(held)
    for path in owners.get(manager, {}):
        if path not in wanted and not any(path in fields for other, fields in owners.items() if other != manager):
            _drop(found, path)
    for path, value in wanted.items():
        _put(found, path, value)
    for other, fields in owners.items():
        if other != manager:
            for path in [path for path in fields if path in wanted and fields[path] != wanted[path]]:
                del fields[path]
    owners[manager] = wanted
    return found


def claimed(before, after, owners, manager):
    """An ordinary write changed fields: they are its writer's now."""
    old, new = dict(leaves(before)), dict(leaves(after))
    changed = {path: value for path, value in new.items() if old.get(path, owners) != value}
    for other, fields in owners.items():
        if other != manager:
            for path in [path for path in fields if path in changed or path not in new]:
                del fields[path]
    owners.setdefault(manager, {}).update(changed)


def _conflict(held):
    names = [".".join("" if isinstance(part, tuple) else part for part in path) for _, path in held]
    causes = [
        {"reason": "FieldManagerConflict", "message": f'conflict with "{other}"', "field": f".{name}"}
        for (other, _), name in zip(held, names, strict=True)
    ]
    word = "conflict" if len(held) == 1 else "conflicts"
    message = f'Apply failed with {len(held)} {word}: conflict with "{held[0][0]}": .{names[0]}'
    return Fault(409, "Conflict", message, {"causes": causes})
