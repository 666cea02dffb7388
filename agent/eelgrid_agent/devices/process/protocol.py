"""The protocol between the agent and its driver process: frames, port calls, encoded values and shared progress.

A frame is a length and a JSON text. Each value type of the port has its encoding here; a missing reading travels as a
list of one reason. The child writes its progress (current request, operation, device and finished answers) into shared
memory, which the agent reads only after a deadline or the death of the child.
"""

import json
import mmap
import os
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from enum import Enum
from typing import Any

from eelgrid_agent.devices import port
from eelgrid_agent.devices.port import (
    FAST_VALUE_READINGS,
    INSTANCE_READINGS,
    SLOW_READINGS,
    Missing,
    RawReadings,
    ReadingValue,
)
from eelgrid_protos.catalogue.products import CiProfile, GiProfile, MigGeometry
from eelgrid_protos.messages import AbsenceReason, AccessLevel, Gpu, Reading
from eelgrid_protos.plain_messages import from_plain, to_plain
from eelgrid_protos.values import dataclass

_BYTES = 2**20
_STATE = struct.Struct("<QdiiII")  # request, since, operation, device, answers, bytes of answers
_PLACE = struct.Struct("<dii")
_TALLY = struct.Struct("<II")
_PLACE_AT = 8
_TALLY_AT = _PLACE_AT + _PLACE.size
_NOWHERE = -1


@dataclass(frozen=True, slots=True)
class CallProgress:
    """How far a child is, and since when on the machine's monotonic clock; -1 is no operation or no device."""

    request: int
    operation: int
    device: int
    since_s: float


class ProgressBoard:
    """One child's board."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._memory = mmap.mmap(fd, _BYTES)
        self._count = self._used = 0
        self._operation = _NOWHERE

    @classmethod
    def create(cls) -> "ProgressBoard":
        """A new board; its descriptor is handed to the child."""
        fd = os.memfd_create("eelgrid-board", os.MFD_CLOEXEC)
        os.ftruncate(fd, _BYTES)
        board = cls(fd)
        board.begin_request(0)
        return board

    def close(self) -> None:
        """Unmaps the memory; the other side keeps its own mapping."""
        self._memory.close()
        os.close(self.fd)

    # The child

    def begin_request(self, request: int) -> None:
        """Records the start of a request."""
        self._count = self._used = 0
        self._operation = _NOWHERE
        _STATE.pack_into(self._memory, 0, request, 0.0, _NOWHERE, _NOWHERE, 0, 0)

    def begin_operation(self, operation: int) -> None:
        """Records the start of an operation of the request."""
        self._operation = operation
        _PLACE.pack_into(self._memory, _PLACE_AT, time.monotonic(), operation, _NOWHERE)

    def begin_device(self, device: int) -> None:
        """Records that a listing is about to read this device."""
        _PLACE.pack_into(self._memory, _PLACE_AT, time.monotonic(), self._operation, device)

    def add_answer(self, answer: bytes) -> None:
        """An operation is done; an answer that finds no room is not kept, nor are those after it."""
        at = _STATE.size + self._used
        end = at + _LENGTH.size + len(answer)
        if end > _BYTES:
            self._used = _BYTES
            return
        _LENGTH.pack_into(self._memory, at, len(answer))
        self._memory[at + _LENGTH.size : end] = answer
        self._used, self._count = end - _STATE.size, self._count + 1
        _TALLY.pack_into(self._memory, _TALLY_AT, self._count, self._used)

    # The agent

    def progress(self) -> CallProgress:
        """How far the child is."""
        request, since_s, operation, device, _, _ = _STATE.unpack_from(self._memory, 0)
        return CallProgress(request, operation, device, since_s)

    def answers(self) -> list[Any]:
        """The answers that were ready; none after the first that cannot be read."""
        *_, count, used = _STATE.unpack_from(self._memory, 0)
        found: list[Any] = []
        at, end = _STATE.size, min(_STATE.size + used, _BYTES)
        while len(found) < count and at + _LENGTH.size <= end:
            (length,) = _LENGTH.unpack_from(self._memory, at)
            text = self._memory[at + _LENGTH.size : min(at + _LENGTH.size + length, end)]
            try:
                found.append(json.loads(text))
            except ValueError:
                break
            at += _LENGTH.size + length
        return found


MAX_FRAME_BYTES = 4 * 2**20
_LENGTH = struct.Struct("<I")


class FrameError(Exception):
    """The other side does not speak this protocol; the connection is unusable."""


def pack_frame(value: Any) -> bytes:
    """The frame of a plain value; raises FrameError where it is too long."""
    return pack_json_frame(json.dumps(value, separators=(",", ":")).encode())


def pack_json_frame(text: bytes) -> bytes:
    """Returns the frame of a text that is JSON already."""
    if len(text) > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {len(text)} bytes; the most is {MAX_FRAME_BYTES}: ask for less at once")
    return _LENGTH.pack(len(text)) + text


class FrameReader:
    """Bytes in, whole values out."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed_data(self, data: bytes) -> None:
        """Takes bytes as they come."""
        self._buffer += data

    def read_frame(self) -> Any:
        """The next whole value; raises EOFError until it is there, FrameError when it never can be."""
        if len(self._buffer) < _LENGTH.size:
            raise EOFError
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > MAX_FRAME_BYTES:
            raise FrameError(f"a frame announces {length} bytes; the maximum is {MAX_FRAME_BYTES}")
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            raise EOFError
        text = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise FrameError(f"a frame is not valid JSON: {error}") from None


# Calls in one request; a slow look asks three of each device.
MAX_OPERATIONS = 512
_MISSING: Mapping[AbsenceReason, Missing] = {reason: Missing(reason) for reason in AbsenceReason}
_MESSAGE_LONGEST = 500
_ERRORS: Mapping[str, type[port.DeviceError]] = {
    kind.__name__: kind
    for kind in (
        port.DeviceError,
        port.DriverUnavailable,
        port.GpuLostError,
        port.DeviceTimeout,
        port.UnknownGpu,
        port.UnknownInstance,
        port.NotSupported,
        port.NoPermission,
        port.DeviceInUse,
        port.InsufficientResources,
        port.OutOfRange,
        port.OutcomeUnknown,
    )
}


class CallClass(Enum):
    """How long a call may take."""

    QUICK = "quick"
    SLOW = "slow"
    LISTING = "listing"
    SETTING = "setting"
    INSTANCE = "instance"
    MODE = "mode"


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class PortCall:
    """How one call of the ports is made and encoded.

    `of_device` calls take a UUID first; `keyword` is the name of the last argument where it needs one. A call that
    `changes` a device is never repeated. During an `alone` call no other process of the agent holds a session.
    """

    name: str
    pace: CallClass
    of_device: bool = True
    keyword: str = ""
    changes: bool = False
    alone: bool = False
    encode: Callable[[Any], Any] = _same
    decode: Callable[[Any], Any] = _same

    @property
    def control(self) -> bool:
        """Whether it is a call of Control and not of Device."""
        return self.name in _CONTROL


# Values


def _plain_value(value: ReadingValue) -> Any:
    return [int(value.reason)] if isinstance(value, Missing) else value


def _value(plain: Any) -> ReadingValue:
    if isinstance(plain, list):
        return _MISSING[AbsenceReason(plain[0])]
    return float(plain)


def _row(readings: Sequence[Reading]) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Mapping of these readings to a list in their order, and back; one that is not there was not sampled."""
    absent = _MISSING[AbsenceReason.NOT_SAMPLED]

    def encode(values: Mapping[Reading, ReadingValue]) -> Any:
        return [_plain_value(values.get(reading, absent)) for reading in readings]

    def decode(plain: Any) -> Any:
        return {reading: _value(value) for reading, value in zip(readings, plain, strict=True)}

    return encode, decode


_plain_fast, _fast = _row(FAST_VALUE_READINGS)
_plain_slow, _slow = _row(SLOW_READINGS)
_plain_instance, _instance = _row(INSTANCE_READINGS)


def _plain_readings(look: RawReadings) -> Any:
    return [_plain_value(look.energy_counter_j), _plain_fast(look.values)]


def _parse_readings(plain: Any) -> RawReadings:
    energy, values = plain
    return RawReadings(energy_counter_j=_value(energy), values=_fast(values))


def _plain_instances(found: Sequence[port.InstanceReadings]) -> Any:
    return [[one.gpu_instance_id, _plain_instance(one.values)] for one in found]


def _instances(plain: Any) -> tuple[port.InstanceReadings, ...]:
    return tuple(port.InstanceReadings(gpu_instance_id=number, values=_instance(values)) for number, values in plain)


def _plain_gpus(gpus: Sequence[Gpu]) -> Any:
    return [to_plain(gpu, brief=True) for gpu in gpus]


def _gpus(plain: Any) -> tuple[Gpu, ...]:
    return tuple(from_plain(Gpu, one, trusted=True) for one in plain)


def _plain_kinds(found: Sequence[port.GpuProcess | port.DeviceEvent]) -> Any:
    return [{**asdict(one), "kind": one.kind.value} for one in found]


def _processes(plain: Any) -> tuple[port.GpuProcess, ...]:
    return tuple(port.GpuProcess(**{**one, "kind": port.ProcessKind(one["kind"])}) for one in plain)


def _events(plain: Any) -> tuple[port.DeviceEvent, ...]:
    return tuple(port.DeviceEvent(**{**one, "kind": port.DeviceEventKind(one["kind"])}) for one in plain)


def _plain_links(found: Sequence[port.DeviceLink]) -> Any:
    return [asdict(one) for one in found]


def _links(plain: Any) -> tuple[port.DeviceLink, ...]:
    return tuple(port.DeviceLink(**one) for one in plain)


def _settings(plain: Any) -> port.PowerSettings:
    lists = {name: tuple(plain[name]) for name in ("sm_clocks_mhz", "power_profiles")}
    return port.PowerSettings(**{**plain, **lists})


def _fields(value: Any) -> dict[str, Any]:
    return {entry.name: getattr(value, entry.name) for entry in fields(value)}


def _plain_geometry(geometry: MigGeometry) -> Any:
    profiles = {
        key: {
            **_fields(one),
            "kinds": dict(one.kinds),
            "compute_instances": [_fields(part) for part in one.compute_instances],
        }
        for key, one in geometry.profiles.items()
    }
    return {**_fields(geometry), "profiles": profiles}


def _geometry(plain: Any) -> MigGeometry:
    profiles = {}
    for key, one in plain["profiles"].items():
        compute = tuple(CiProfile(**{**part, "starts": tuple(part["starts"])}) for part in one["compute_instances"])
        engines = None if one["engines"] is None else tuple(one["engines"])
        profiles[key] = GiProfile(
            **{**one, "starts": tuple(one["starts"]), "engines": engines, "compute_instances": compute}
        )
    return MigGeometry(**{**plain, "nvml_names": tuple(plain["nvml_names"]), "profiles": profiles})


def encode_error(error: Exception) -> tuple[str, str]:
    """Encodes the class and message of an error; anything but a DeviceError is reported as a fault of the adapter."""
    if isinstance(error, port.DeviceError):
        known = next(kind.__name__ for kind in type(error).__mro__ if _ERRORS.get(kind.__name__) is kind)
        return known, str(error)[:_MESSAGE_LONGEST]
    return "DeviceError", f"the adapter failed with {type(error).__name__}: {error}"[:_MESSAGE_LONGEST]


def decode_error(name: str, message: str) -> port.DeviceError:
    """The error again."""
    try:
        return _ERRORS[name](message)
    except KeyError:
        raise FrameError(f"no such error: {name!r}") from None


_READS = (
    PortCall(name="driver_version", pace=CallClass.LISTING, of_device=False),
    PortCall(name="access", pace=CallClass.LISTING, of_device=False, encode=int, decode=AccessLevel),
    PortCall(name="gpus", pace=CallClass.LISTING, of_device=False, encode=_plain_gpus, decode=_gpus),
    PortCall(name="read", pace=CallClass.QUICK, encode=_plain_readings, decode=_parse_readings),
    PortCall(name="read_slow", pace=CallClass.SLOW, encode=_plain_slow, decode=_slow),
    PortCall(name="read_instances", pace=CallClass.SLOW, encode=_plain_instances, decode=_instances),
    PortCall(name="processes", pace=CallClass.SLOW, encode=_plain_kinds, decode=_processes),
    PortCall(name="topology", pace=CallClass.LISTING, of_device=False, encode=_plain_links, decode=_links),
    PortCall(name="take_events", pace=CallClass.QUICK, of_device=False, encode=_plain_kinds, decode=_events),
    PortCall(name="close", pace=CallClass.SLOW, of_device=False, alone=True),
    # Not of the port: what a simulated device in the child is told, and which devices a listing leaves out.
    PortCall(name="order", pace=CallClass.SLOW, of_device=False),
    PortCall(name="pass_over", pace=CallClass.QUICK, of_device=False),
)
_CHANGES = (
    PortCall(name="power_settings", pace=CallClass.SLOW, encode=asdict, decode=_settings),
    PortCall(name="set_power_limit", pace=CallClass.SETTING, changes=True),
    PortCall(name="lock_sm_clocks", pace=CallClass.SETTING, changes=True),
    PortCall(name="unlock_sm_clocks", pace=CallClass.SETTING, changes=True),
    PortCall(name="set_power_profile", pace=CallClass.SETTING, changes=True),
    PortCall(name="mig_geometry", pace=CallClass.SLOW, encode=_plain_geometry, decode=_geometry),
    PortCall(
        name="set_mig_mode",
        pace=CallClass.MODE,
        keyword="enabled",
        changes=True,
        alone=True,
        encode=lambda mode: mode.value,
        decode=port.ModeChange,
    ),
    PortCall(name="create_gpu_instance", pace=CallClass.INSTANCE, changes=True),
    PortCall(name="destroy_gpu_instance", pace=CallClass.INSTANCE, changes=True),
    PortCall(name="create_compute_instance", pace=CallClass.INSTANCE, changes=True),
    PortCall(name="destroy_compute_instance", pace=CallClass.INSTANCE, changes=True),
)
_CONTROL = frozenset(call.name for call in _CHANGES)
PORT_CALLS: Mapping[str, PortCall] = {call.name: call for call in (*_READS, *_CHANGES)}
