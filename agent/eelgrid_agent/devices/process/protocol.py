"""The protocol between the agent and its driver process: frames, port calls and the encoding of their values.

A frame is a length and a JSON text. Each value type of the port has its translation here. A missing reading travels
as a list of one reason.

FrameError                   the other side does not speak this protocol; the connection is unusable
"""

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from enum import Enum
from typing import Any

from eelgrid_agent.devices import port
from eelgrid_agent.devices.port import (
    FAST_READINGS,
    INSTANCE_READINGS,
    SLOW_READINGS,
    Missing,
    RawReadings,
    ReadingValue,
)
from eelgrid_protos.catalogue.products import CiProfile, GiProfile, MigGeometry
from eelgrid_protos.messages import AbsenceReason, AccessLevel, Gpu, Reading
from eelgrid_protos.plain_messages import from_plain, to_plain

MAX_FRAME_BYTES = 4 * 2**20
_LENGTH = struct.Struct("<I")


class FrameError(Exception):
    """The other side does not speak this protocol."""


def pack_frame(value: Any) -> bytes:
    """The frame of a plain value; raises FrameError where it is too long."""
    return pack_json_frame(json.dumps(value, separators=(",", ":")).encode())


def pack_json_frame(text: bytes) -> bytes:
    """The frame of what is JSON already."""
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
            raise FrameError(f"a frame says {length} bytes; the most is {MAX_FRAME_BYTES}")
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            raise EOFError
        text = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise FrameError(f"a frame holds no JSON: {error}") from None


# Calls in one request; a slow look asks three of each device.
MAX_OPERATIONS = 512
FAST_VALUE_READINGS: tuple[Reading, ...] = tuple(
    reading for reading in FAST_READINGS if reading is not Reading.ENERGY_J
)
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
    """One call.

    `of_device` takes a UUID first; `keyword` is the name of the last argument where it needs one. `changes` a device:
    it is never repeated. `alone` lets no other process of ours hold a session beside it.
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


def _plain_processes(found: Sequence[port.GpuProcess]) -> Any:
    return [{**asdict(one), "kind": one.kind.value} for one in found]


def _processes(plain: Any) -> tuple[port.GpuProcess, ...]:
    return tuple(port.GpuProcess(**{**one, "kind": port.ProcessKind(one["kind"])}) for one in plain)


def _plain_events(found: Sequence[port.DeviceEvent]) -> Any:
    return [{**asdict(one), "kind": one.kind.value} for one in found]


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
    """The class of an error and its message; what is no DeviceError is a fault of the adapter and says so."""
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
    PortCall(name="processes", pace=CallClass.SLOW, encode=_plain_processes, decode=_processes),
    PortCall(name="topology", pace=CallClass.LISTING, of_device=False, encode=_plain_links, decode=_links),
    PortCall(name="take_events", pace=CallClass.QUICK, of_device=False, encode=_plain_events, decode=_events),
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
