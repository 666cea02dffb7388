"""Merge (RFC 7396), JSON (RFC 6902) and strategic merge patches, and server-side apply; none changes what it is given.

The strategic one knows the merge keys of the lists that Eelgrid touches; a list that it does
not know is replaced whole, as `atomic` lists are. Of server-side apply fields are told by their
path of names; lists are one value, save those with a known merge key. Enough for objects that
Eelgrid owns; not for conflicts among five controllers.
"""

from tests.fakes.kubernetes.faults import Fault, bad_request

MERGE_KEYS = {
    "conditions": "type",
    "containers": "name",
    "env": "name",
    "ephemeralContainers": "name",
    "imagePullSecrets": "name",
    "initContainers": "name",
    "ownerReferences": "uid",
    "resourceClaims": "name",
    "schedulingGates": "name",
    "topologySpreadConstraints": "topologyKey",
    "volumeDevices": "devicePath",
    "volumeMounts": "mountPath",
    "volumes": "name",
}
_SETS = {"finalizers"}


def merged(found, patch):
    """A merge patch applied."""
    if not isinstance(patch, dict):
        return patch
    result = dict(found) if isinstance(found, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merged(result.get(name), value)
    return result


def strategic(found, patch):
    """A strategic merge patch applied to an object."""
    directive = patch.get("$patch")
    if directive == "replace":
        return {name: value for name, value in patch.items() if name != "$patch"}
    result = dict(found) if isinstance(found, dict) else {}
    for name in patch.get("$retainKeys") or ():
        result = {key: value for key, value in result.items() if key in patch["$retainKeys"] or key == name}
    for name, value in patch.items():
        if name.startswith("$deleteFromPrimitiveList/"):
            real = name.partition("/")[2]
            result[real] = [one for one in result.get(real) or () if one not in value]
        elif name.startswith("$"):
            continue
        elif value is None:
            result.pop(name, None)
        elif isinstance(value, dict):
            result[name] = strategic(result.get(name), value)
        elif isinstance(value, list):
            result[name] = _list(name, result.get(name) or [], value)
        else:
            result[name] = value
    return result


def _list(name, found, patch):
    if name in _SETS:
        return found + [one for one in patch if one not in found]
    key = MERGE_KEYS.get(name)
    if name == "ports":
        key = "containerPort" if any("containerPort" in one for one in patch + found) else "port"
    if key is None:
        return patch
    if any(one.get("$patch") == "replace" for one in patch):
        return [one for one in patch if "$patch" not in one]
    result = list(found)
    for one in patch:
        if key not in one:
            raise bad_request(f"map: {one} does not contain declared merge key: {key}")
        at = next((index for index, old in enumerate(result) if old.get(key) == one[key]), None)
        if one.get("$patch") == "delete":
            if at is not None:
                del result[at]
        elif at is None:
            result.append(strategic({}, one))
        else:
            result[at] = strategic(result[at], one)
    return result


def _unescaped(pointer):
    if pointer and not pointer.startswith("/"):
        raise bad_request(f"a JSON pointer begins with a slash: {pointer}")
    return [part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:]]


def _unprocessable(why):
    return Fault(422, "Invalid", f"the server rejected our request due to an error in our request: {why}")


def _step(found, part):
    try:
        return found[int(part)] if isinstance(found, list) else found[part]
    except (KeyError, IndexError, ValueError, TypeError):
        raise _unprocessable(f"no such path: {part}") from None


def _write(found, parts, value, is_new):
    """A copy with a value at a path; `is_new` inserts into lists."""
    if not parts:
        return value
    head, *rest = parts
    if isinstance(found, list):
        result = list(found)
        if not rest and is_new:
            result.insert(len(result) if head == "-" else int(head), value)
        else:
            result[int(head)] = _write(_step(found, head), rest, value, is_new)
        return result
    if not isinstance(found, dict):
        raise _unprocessable(f"no such path: {head}")
    return {**found, head: _write(_step(found, head), rest, value, is_new) if rest else value}


def _without(found, parts):
    head, *rest = parts
    below = _step(found, head)
    if isinstance(found, list):
        result = list(found)
        if rest:
            result[int(head)] = _without(below, rest)
        else:
            del result[int(head)]
        return result
    result = dict(found)
    if rest:
        result[head] = _without(below, rest)
    else:
        del result[head]
    return result


def json_patched(found, operations):
    """A JSON patch applied: all of its operations, or a fault."""
    if not isinstance(operations, list):
        raise bad_request("json: cannot unmarshal object into Go value of type jsonpatch.Patch")
    for one in operations:
        parts = _unescaped(one["path"])
        if one["op"] in {"test", "copy", "move"}:
            source = found
            for part in _unescaped(one["from"]) if one["op"] != "test" else parts:
                source = _step(source, part)
        match one["op"]:
            case "test":
                if source != one.get("value"):
                    raise _unprocessable(f"testing value {one['path']} failed")
            case "add":
                found = _write(found, parts, one["value"], is_new=True)
            case "replace":
                for at in range(len(parts)):
                    _walk(found, parts[: at + 1])
                found = _write(found, parts, one["value"], is_new=False)
            case "remove":
                found = _without(found, parts)
            case "copy":
                found = _write(found, parts, source, is_new=True)
            case "move":
                found = _write(_without(found, _unescaped(one["from"])), parts, source, is_new=True)
            case other:
                raise bad_request(f"Unexpected kind: {other}")
    return found


def _walk(found, parts):
    for part in parts:
        found = _step(found, part)
    return found


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
