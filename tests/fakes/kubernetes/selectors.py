"""Label and field selectors, as the API server reads them."""

import re

from tests.fakes.kubernetes.faults import bad_request

_SET = re.compile(r"\s*(?P<key>[^\s!=,()]+)\s+(?P<op>in|notin)\s+\((?P<values>[^)]*)\)\s*\Z")
_EQUAL = re.compile(r"\s*(?P<key>[^\s!=,()]+)\s*(?P<op>==|=|!=)\s*(?P<value>[^\s,()]*)\s*\Z")
_EXISTS = re.compile(r"\s*(?P<no>!)?\s*(?P<key>[^\s!=,()]+)\s*\Z")
_SPLIT = re.compile(r",(?![^(]*\))")

FIELDS = {
    "pods": {
        "spec.nodeName",
        "spec.restartPolicy",
        "spec.schedulerName",
        "spec.serviceAccountName",
        "spec.hostNetwork",
        "status.phase",
        "status.podIP",
        "status.nominatedNodeName",
    },
    "nodes": {"spec.unschedulable"},
    "jobs": {"status.successful"},
    "namespaces": {"status.phase"},
    "replicasets": {"status.replicas"},
    "resourceslices": {"spec.nodeName", "spec.driver"},
}


def _label_test(text):
    if found := _SET.match(text):
        values = {value.strip() for value in found["values"].split(",")}
        if found["op"] == "in":
            return lambda labels: labels.get(found["key"]) in values and found["key"] in labels
        return lambda labels: labels.get(found["key"]) not in values
    if found := _EQUAL.match(text):
        if found["op"] == "!=":
            return lambda labels: labels.get(found["key"]) != found["value"]
        return lambda labels: labels.get(found["key"]) == found["value"]
    if found := _EXISTS.match(text):
        return lambda labels: (found["key"] in labels) is not bool(found["no"])
    raise bad_request(f'unable to parse requirement: <nil>: Invalid value: "{text}"')


def _field_test(kind, text):
    found = _EQUAL.match(text)
    if found is None:
        raise bad_request(f"invalid selector: '{text}'; can't understand '{text}'")
    path = found["key"]
    if path not in {"metadata.name", "metadata.namespace"} | FIELDS.get(kind.plural, set()):
        raise bad_request(f"field label not supported: {path}")
    parts, wanted, differs = path.split("."), found["value"], found["op"] == "!="

    def test(subject):
        for part in parts:
            subject = subject.get(part) if subject else None
        if subject is None:
            text = "false" if path in {"spec.unschedulable", "spec.hostNetwork"} else ""
        else:
            text = str(subject).lower() if isinstance(subject, bool) else str(subject)
        return (text == wanted) is not differs

    return test


def selector(kind, labels, fields):
    """Whether an object is meant, as a function; None where all are."""
    of_labels = [_label_test(part) for part in _SPLIT.split(labels) if part.strip()]
    of_fields = [_field_test(kind, part) for part in fields.split(",") if part.strip()]
    if not of_labels and not of_fields:
        return None

    def meant(found):
        its = found["metadata"].get("labels") or {}
        return all(test(its) for test in of_labels) and all(test(found) for test in of_fields)

    return meant


def matches(label_selector, labels):
    """Whether a LabelSelector object means these labels; an empty one means all."""
    if any(labels.get(key) != value for key, value in (label_selector.get("matchLabels") or {}).items()):
        return False
    for one in label_selector.get("matchExpressions") or ():
        has, value, values = one["key"] in labels, labels.get(one["key"]), one.get("values") or ()
        verdict = {"In": has and value in values, "NotIn": value not in values, "Exists": has, "DoesNotExist": not has}
        if not verdict[one["operator"]]:
            return False
    return True
