"""From a ResourceClaim and its DeviceClasses to what it asks for, or why that cannot be kept.

Owns which parts of a claim are served and the words for those that are not. Must not know which
devices there are.

Theory. A claim of our driver is allocated here, so each word of it has to be understood: what is not is
refused, naming the field and what to write. Claims of other drivers are allocated by
kube-scheduler, on the node that is chosen here: of those, what is not understood is left
to it. A request's driver is the one that its class, or the request, names by `device.driver ==`;
where neither does, ours counts as meant when our attributes are asked for.

Source: k8s.io/api/resource/v1, ExactDeviceRequest, DeviceSubRequest, DeviceConstraint.
"""

import re
from collections.abc import Iterator, Mapping
from itertools import islice, product
from typing import Any, NamedTuple

from eelgrid_controller.kubernetes.claims import DEVICES_MOST, VARIANTS_MOST, AskedClaim, Same, Want
from eelgrid_controller.kubernetes.device_choice import Choice, ExpressionUnreadable, choice_of
from eelgrid_controller.kubernetes.device_pools import DRIVER

__all__ = ["ClaimRead", "ClaimRefused", "Classes", "read_claim"]

_DRIVER = re.compile(r"device\.driver\s*==\s*[\"']([^\"']+)[\"']")

# DeviceClasses by name, as the API gives them.
Classes = Mapping[str, Mapping[str, Any]]


class ClaimRefused(NamedTuple):
    """What of a claim cannot be kept, and the remedy."""

    field: str
    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.field}: {self.problem}; {self.remedy}"


class ClaimRead(NamedTuple):
    """What a claim asks for; `driver` is whose devices, empty where nothing of it is judged here."""

    asked: AskedClaim
    driver: str

    @property
    def is_ours(self) -> bool:
        """Whether it is allocated here."""
        return self.driver == DRIVER


class _Refuse(Exception):
    def __init__(self, field: str, problem: str, remedy: str) -> None:
        self.refused = ClaimRefused(field, problem, remedy)
        super().__init__(str(self.refused))


def read_claim(claim: Mapping[str, Any], classes: Classes) -> ClaimRead | ClaimRefused:
    """What a claim asks for."""
    metadata, devices = claim["metadata"], claim["spec"].get("devices") or {}
    requests = devices.get("requests") or ()
    try:
        read = [
            list(_alternatives(f"spec.devices.requests[{index}]", one, classes)) for index, one in enumerate(requests)
        ]
        drivers = _drivers(read)
        is_ours = drivers == {DRIVER}
        for index, one in enumerate(requests) if is_ours else ():
            _check(f"spec.devices.requests[{index}]", one)
        asked = AskedClaim(
            namespace=metadata["namespace"], name=metadata["name"], uid=metadata["uid"],
            variants=_variants(read, is_ours=is_ours),
            same=tuple(_same(devices)) if is_ours else (),
            config=tuple(devices.get("config") or ()),
            classes={name: _class_config(name_of, classes) for name, name_of in _class_names(requests)},
            tolerations={
                name: tuple(body["tolerations"]) for name, body in _bodies(requests) if body.get("tolerations")
            },
        )  # fmt: skip
    except _Refuse as error:
        return error.refused
    return ClaimRead(asked, DRIVER if is_ours else _judged(drivers, requests))


def _drivers(read: list[list[Want]]) -> set[str]:
    drivers = {want.driver for alternatives in read for want in alternatives}
    place = "spec.devices.requests"
    if not drivers:
        raise _Refuse(place, "asks for nothing", "ask for a device, or leave the claim out")
    if DRIVER in drivers and len(drivers) > 1:
        theirs = ", ".join(sorted(filter(None, drivers - {DRIVER}))) or "of a class without a driver"
        raise _Refuse(place, f"devices of {DRIVER} and {theirs} are in one claim", "make a claim for each driver")
    return drivers


def _judged(drivers: set[str], requests: Any) -> str:
    """The one other driver whose devices can be counted; none where kube-scheduler alone can say what is meant."""
    whole = len(drivers) == 1 and all(_is_counted(body) for _, body in _bodies(requests))
    return next(iter(drivers)) if whole else ""


def _is_counted(body: Mapping[str, Any]) -> bool:
    return not (body.get("adminAccess") or body.get("capacity") or body.get("allocationMode", "ExactCount") == "All")


def _bodies(requests: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each request and each alternative of one, by the name that an allocation has for it."""
    for one in requests:
        if one.get("firstAvailable"):
            for sub in one["firstAvailable"]:
                yield f"{one['name']}/{sub['name']}", sub
        else:
            yield one["name"], one.get("exactly") or {}


def _class_names(requests: Any) -> Iterator[tuple[str, str]]:
    for name, body in _bodies(requests):
        yield name, str(body.get("deviceClassName") or "")


def _class_config(name: str, classes: Classes) -> tuple[str, tuple[Mapping[str, Any], ...]]:
    return name, tuple((classes.get(name, {}).get("spec") or {}).get("config") or ())


def _alternatives(place: str, request: Mapping[str, Any], classes: Classes) -> Iterator[Want]:
    if request.get("firstAvailable"):
        for index, sub in enumerate(request["firstAvailable"]):
            yield _want(f"{place}.firstAvailable[{index}]", f"{request['name']}/{sub['name']}", sub, classes)
    else:
        yield _want(f"{place}.exactly", request["name"], request.get("exactly") or {}, classes)


def _want(place: str, name: str, body: Mapping[str, Any], classes: Classes) -> Want:
    class_name = str(body.get("deviceClassName") or "")
    found = classes.get(class_name)
    if found is None:
        raise _Refuse(f"{place}.deviceClassName", f"there is no DeviceClass {class_name}", "make it, or name another")
    choices: list[Choice] = []
    unread: list[tuple[str, ExpressionUnreadable]] = []
    driver = ""
    said = [(f"DeviceClass {class_name} spec.selectors", (found.get("spec") or {}).get("selectors") or ())]
    said.append((f"{place}.selectors", body.get("selectors") or ()))
    for where, selectors in said:
        for index, selector in enumerate(selectors):
            text = str((selector.get("cel") or {}).get("expression") or "")
            try:
                choice = choice_of(text)
            except ExpressionUnreadable as error:
                unread.append((f"{where}[{index}].cel.expression", error))
                continue
            driver = driver or choice.driver
            choices.append(choice)
    texts = [one.text for one in choices]
    if not driver and any(f"[{quote}{DRIVER}{quote}]" in text for text in texts for quote in "\"'"):
        driver = DRIVER
    driver = driver or next((named[1] for _, fault in unread if (named := _DRIVER.search(fault.text))), "")
    if unread and driver == DRIVER:
        place, fault = unread[0]
        raise _Refuse(place, fault.fault, fault.remedy)
    return Want(name, driver, tuple(choices), int(body.get("count") or 1))


def _check(place: str, request: Mapping[str, Any]) -> None:
    """Refuse what no allocation of ours keeps."""
    parts = [(f"{place}.exactly", request.get("exactly") or {})]
    if request.get("firstAvailable"):
        parts = [(f"{place}.firstAvailable[{index}]", sub) for index, sub in enumerate(request["firstAvailable"])]
    for where, body in parts:
        if body.get("adminAccess"):
            remedy = "leave it out; `eelctl` and the agent's metrics show devices without access to them"
            raise _Refuse(f"{where}.adminAccess", "gives devices that others hold", remedy)
        if body.get("allocationMode", "ExactCount") != "ExactCount":
            remedy = "ask for ExactCount and a count; for a whole GPU, the device of type gpu"
            raise _Refuse(
                f"{where}.allocationMode", f"{body['allocationMode']} of devices that exclude each other", remedy
            )
        if body.get("capacity"):
            raise _Refuse(f"{where}.capacity", "asks for a part of a device", "choose a MIG profile by its attribute")
        if int(body.get("count") or 1) > DEVICES_MOST:
            raise _Refuse(f"{where}.count", f"is more than {DEVICES_MOST}", "make several claims")


def _variants(read: list[list[Want]], *, is_ours: bool) -> tuple[tuple[Want, ...], ...]:
    count = 1
    for alternatives in read:
        count *= len(alternatives)
    if is_ours and count > VARIANTS_MOST:
        remedy = f"list fewer: {VARIANTS_MOST} combinations may be"
        raise _Refuse("spec.devices.requests", f"its alternatives have {count} combinations", remedy)
    return tuple(islice(product(*read), VARIANTS_MOST))


def _same(devices: Mapping[str, Any]) -> Iterator[Same]:
    for index, one in enumerate(devices.get("constraints") or ()):
        place = f"spec.devices.constraints[{index}]"
        if not one.get("matchAttribute"):
            raise _Refuse(place, "is no matchAttribute", "say by selectors what differs, or leave it out")
        domain, _, name = str(one["matchAttribute"]).rpartition("/")
        yield Same(frozenset(one.get("requests") or ()), (domain, name))
