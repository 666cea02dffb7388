"""Merge (RFC 7396), JSON (RFC 6902) and strategic merge patches; none changes what it is given.

The strategic one knows the merge keys of the lists that Eelgrid touches; a list that it does
not know is replaced whole, as `atomic` lists are.
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
