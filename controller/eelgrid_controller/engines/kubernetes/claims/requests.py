"""What ResourceClaims and pods request of mode `dra`: parsing, or a refusal with the field and the remedy.

Every field of a claim of our driver has to be understood; of claims of other drivers, what is not understood is left
to kube-scheduler.

Source: k8s.io/api/resource/v1, ExactDeviceRequest, DeviceSubRequest, DeviceConstraint.
"""

import re
from collections.abc import Iterator, Mapping
from itertools import islice, product
from typing import Any, NamedTuple

from eelgrid_controller.engines.kubernetes.claims.allocation import (
    MAX_DEVICES,
    MAX_VARIANTS,
    ClaimRequest,
    DeviceRequest,
    MatchAttribute,
)
from eelgrid_controller.engines.kubernetes.claims.cel import CelSelector, ExpressionUnreadable, compile_selector
from eelgrid_controller.engines.kubernetes.claims.device_pools import DRIVER_NAME
from eelgrid_controller.engines.kubernetes.claims.events import Claimant, ClaimPodUpdated
from eelgrid_controller.engines.kubernetes.model import annotations
from eelgrid_controller.engines.kubernetes.model.objects import Pod, is_claimant, parse_pod
from eelgrid_controller.engines.kubernetes.model.pod_group import IntentRefusal, OwnerTemplates, membership_of
from eelgrid_controller.engines.kubernetes.model.quantities import AnnotationUnreadable, KubernetesUnreadable
from eelgrid_controller.engines.kubernetes.model.well_known import ANNOTATION_PLAN
from eelgrid_controller.engines.kubernetes.pods.plan_annotation import plan_for_pod
from eelgrid_protos.messages import WorkloadKind

_DRIVER = re.compile(r"device\.driver\s*==\s*[\"']([^\"']+)[\"']")

# DeviceClasses by name, as the API gives them.
DeviceClasses = Mapping[str, Mapping[str, Any]]


class ClaimRejection(NamedTuple):
    """Why a claim cannot be honoured: the field, the problem and the remedy."""

    field: str
    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.field}: {self.problem}; {self.remedy}"


class ParsedClaim(NamedTuple):
    """A claim's request; `driver` owns the devices, empty where kube-scheduler alone judges it."""

    asked: ClaimRequest
    driver: str

    @property
    def is_ours(self) -> bool:
        """Whether it is allocated here."""
        return self.driver == DRIVER_NAME


class _Refuse(Exception):
    def __init__(self, field: str, problem: str, remedy: str) -> None:
        self.refused = ClaimRejection(field, problem, remedy)
        super().__init__(str(self.refused))


def parse_claim(claim: Mapping[str, Any], classes: DeviceClasses) -> ParsedClaim | ClaimRejection:
    """Parse what a claim requests."""
    metadata, devices = claim["metadata"], claim["spec"].get("devices") or {}
    requests = devices.get("requests") or ()
    try:
        read = [
            list(_alternatives(f"spec.devices.requests[{index}]", one, classes)) for index, one in enumerate(requests)
        ]
        drivers = _drivers(read)
        is_ours = drivers == {DRIVER_NAME}
        for index, one in enumerate(requests) if is_ours else ():
            _check(f"spec.devices.requests[{index}]", one)
        asked = ClaimRequest(
            namespace=metadata["namespace"],
            name=metadata["name"],
            uid=metadata["uid"],
            variants=_variants(read, is_ours=is_ours),
            same=tuple(_same(devices)) if is_ours else (),
            config=tuple(devices.get("config") or ()),
            classes={name: _class_config(name_of, classes) for name, name_of in _class_names(requests)},
            tolerations={
                name: tuple(body["tolerations"]) for name, body in _bodies(requests) if body.get("tolerations")
            },
        )
    except _Refuse as error:
        return error.refused
    return ParsedClaim(asked, DRIVER_NAME if is_ours else _find_countable_driver(drivers, requests))


def _drivers(read: list[list[DeviceRequest]]) -> set[str]:
    drivers = {want.driver for alternatives in read for want in alternatives}
    place = "spec.devices.requests"
    if not drivers:
        raise _Refuse(place, "requests no device", "request a device, or remove the claim")
    if DRIVER_NAME in drivers and len(drivers) > 1:
        theirs = ", ".join(sorted(filter(None, drivers - {DRIVER_NAME}))) or "of a class without a driver"
        raise _Refuse(place, f"devices of {DRIVER_NAME} and {theirs} are in one claim", "make a claim for each driver")
    return drivers


def _find_countable_driver(drivers: set[str], requests: Any) -> str:
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


def _class_config(name: str, classes: DeviceClasses) -> tuple[str, tuple[Mapping[str, Any], ...]]:
    return name, tuple((classes.get(name, {}).get("spec") or {}).get("config") or ())


def _alternatives(place: str, request: Mapping[str, Any], classes: DeviceClasses) -> Iterator[DeviceRequest]:
    if request.get("firstAvailable"):
        for index, sub in enumerate(request["firstAvailable"]):
            yield _parse_device_request(
                f"{place}.firstAvailable[{index}]", f"{request['name']}/{sub['name']}", sub, classes
            )
    else:
        yield _parse_device_request(f"{place}.exactly", request["name"], request.get("exactly") or {}, classes)


def _parse_device_request(place: str, name: str, body: Mapping[str, Any], classes: DeviceClasses) -> DeviceRequest:
    class_name = str(body.get("deviceClassName") or "")
    found = classes.get(class_name)
    if found is None:
        raise _Refuse(f"{place}.deviceClassName", f"there is no DeviceClass {class_name}", "make it, or name another")
    choices: list[CelSelector] = []
    unread: list[tuple[str, ExpressionUnreadable]] = []
    driver = ""
    said = [(f"DeviceClass {class_name} spec.selectors", (found.get("spec") or {}).get("selectors") or ())]
    said.append((f"{place}.selectors", body.get("selectors") or ()))
    for where, selectors in said:
        for index, selector in enumerate(selectors):
            text = str((selector.get("cel") or {}).get("expression") or "")
            try:
                choice = compile_selector(text)
            except ExpressionUnreadable as error:
                unread.append((f"{where}[{index}].cel.expression", error))
                continue
            driver = driver or choice.driver
            choices.append(choice)
    texts = [one.text for one in choices]
    if not driver and any(f"[{quote}{DRIVER_NAME}{quote}]" in text for text in texts for quote in "\"'"):
        driver = DRIVER_NAME
    driver = driver or next((named[1] for _, fault in unread if (named := _DRIVER.search(fault.text))), "")
    if unread and driver == DRIVER_NAME:
        place, fault = unread[0]
        raise _Refuse(place, fault.fault, fault.remedy)
    return DeviceRequest(name, driver, tuple(choices), int(body.get("count") or 1))


def _check(place: str, request: Mapping[str, Any]) -> None:
    """Refuse requests that an allocation here cannot honour."""
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
                f"{where}.allocationMode",
                f"{body['allocationMode']} is not supported: these devices exclude each other",
                remedy,
            )
        if body.get("capacity"):
            raise _Refuse(f"{where}.capacity", "asks for a part of a device", "choose a MIG profile by its attribute")
        if int(body.get("count") or 1) > MAX_DEVICES:
            raise _Refuse(f"{where}.count", f"is more than {MAX_DEVICES}", "make several claims")


def _variants(read: list[list[DeviceRequest]], *, is_ours: bool) -> tuple[tuple[DeviceRequest, ...], ...]:
    count = 1
    for alternatives in read:
        count *= len(alternatives)
    if is_ours and count > MAX_VARIANTS:
        remedy = f"list fewer: {MAX_VARIANTS} combinations may be"
        raise _Refuse("spec.devices.requests", f"its alternatives have {count} combinations", remedy)
    return tuple(islice(product(*read), MAX_VARIANTS))


def _same(devices: Mapping[str, Any]) -> Iterator[MatchAttribute]:
    for index, one in enumerate(devices.get("constraints") or ()):
        place = f"spec.devices.constraints[{index}]"
        if not one.get("matchAttribute"):
            raise _Refuse(place, "is not a matchAttribute constraint", "use selectors, or remove the constraint")
        domain, _, name = str(one["matchAttribute"]).rpartition("/")
        yield MatchAttribute(frozenset(one.get("requests") or ()), (domain, name))


_TERMINAL = ("Succeeded", "Failed")


def pod_event_of(found: Mapping[str, Any], holders: OwnerTemplates) -> ClaimPodUpdated:
    """A pod as an event; one that cannot be read counts where it is, and is nobody's."""
    spec, metadata = found.get("spec") or {}, found["metadata"]
    claimant = None
    if spec.get("resourceClaims"):
        try:
            pod = parse_pod(found)
        except KubernetesUnreadable:
            pod = None
        if pod is not None and is_claimant(pod):
            claimant = claimant_of(pod, holders)
    return ClaimPodUpdated(metadata["uid"], found, _where(found), claimant)


def claimant_of(pod: Pod, holders: OwnerTemplates) -> Claimant:
    """The group of a pod, or why it cannot be determined."""
    is_released = False
    try:
        is_released = annotations.schedules_on_error(pod.annotations)
        annotations.check_names(pod.annotations)
        is_training = annotations.parse_kind(pod.annotations) is WorkloadKind.TRAINING_JOB
        asked = annotations.parse_priority(pod.annotations)
        member = membership_of(pod, holders, is_training=is_training)
    except AnnotationUnreadable as error:
        return Claimant(pod, IntentRefusal(error.field, error.fault, error.remedy), 0, is_released)
    is_free = isinstance(member, IntentRefusal) and member.is_released
    return Claimant(pod, member, pod.priority if asked is None else asked, is_released or is_free)


def _where(found: Mapping[str, Any]) -> str:
    """The node that a pod is on or can only go to."""
    spec, status = found.get("spec") or {}, found.get("status") or {}
    if status.get("phase") in _TERMINAL:
        return ""
    if spec.get("nodeName") or spec.get("schedulingGates"):
        return str(spec.get("nodeName") or "")
    metadata = found["metadata"]
    plan = plan_for_pod(metadata["uid"], (metadata.get("annotations") or {}).get(ANNOTATION_PLAN, ""))
    return "" if plan is None else plan.node_name
