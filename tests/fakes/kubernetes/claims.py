"""ResourceClaims: what is fixed, what may be undone, and who may allocate.

Sources: kubernetes 1.36 `pkg/apis/resource/validation` and
`pkg/registry/resource/resourceclaim`; KEP-4381, KEP-4817.
"""

from tests.fakes.kubernetes.faults import Bad, invalid

_IMMUTABLE = "field is immutable"
MINOR_OF_BINDING = 36  # the synthetic subresources came with it


def updated(found, old, kind):
    """A claim's spec never changes."""
    if found["spec"] != old["spec"]:
        raise invalid(kind, found["metadata"]["name"], [Bad("spec", _IMMUTABLE)])


def allocated(found, old, kind, may):
    """Whether a claim's status may become this; `may(verb, part)` asks for permissions beside `resourceclaims/status`."""
    name = found["metadata"]["name"]
    new, before = found.get("status") or {}, old.get("status") or {}
    allocation, was = new.get("allocation"), before.get("allocation")
    reserved = new.get("reservedFor") or []
    bad = []
    if (allocation != was or reserved != (before.get("reservedFor") or [])) and not may("resourceclaims/binding"):
        why = 'changing status.allocation or status.reservedFor requires permission on the "resourceclaims/binding" subresource'
        bad.append(Bad("status", why, "FieldValueForbidden"))
    if was and allocation and allocation != was:
        bad.append(Bad("status.allocation", _IMMUTABLE))
    if allocation is None and reserved:
        bad.append(Bad("status.reservedFor", "may not be specified when `allocated` is not set", "FieldValueForbidden"))
    if allocation:
        bad += _allocation(allocation, found["spec"])
    uids = [one.get("uid") for one in reserved]
    if len(set(uids)) < len(uids):
        bad.append(Bad("status.reservedFor", "Duplicate value", "FieldValueDuplicate"))
    if len(reserved) > 256:
        bad.append(Bad("status.reservedFor", "must have at most 256 items", "FieldValueTooMany"))
    bad += _devices(new, allocation)
    if bad:
        raise invalid(kind, name, bad)


def _allocation(allocation, spec):
    requests = {one["name"] for one in (spec.get("devices") or {}).get("requests") or ()}
    bad = []
    for index, one in enumerate((allocation.get("devices") or {}).get("results") or ()):
        place = f"status.allocation.devices.results[{index}]"
        if one.get("request", "").partition("/")[0] not in requests:
            bad.append(Bad(f"{place}.request", "must be the name of a request in the claim"))
        bad += [
            Bad(f"{place}.{part}", "", "FieldValueRequired")
            for part in ("driver", "pool", "device")
            if not one.get(part)
        ]
    return bad


def _devices(status, allocation):
    """The status of a device may be told only of devices that are allocated."""
    results = ((allocation or {}).get("devices") or {}).get("results") or ()
    known = {(one.get("driver"), one.get("pool"), one.get("device")) for one in results}
    return [
        Bad(f"status.devices[{index}]", "must be an allocated device in the claim")
        for index, one in enumerate(status.get("devices") or ())
        if (one.get("driver"), one.get("pool"), one.get("device")) not in known
    ]
