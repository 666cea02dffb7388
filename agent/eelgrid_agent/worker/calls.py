"""The calls of the device port as plain data: what may be asked, how long it may take, how values travel.

Owns the table of calls and the translation of every value of the port to JSON
and back; a value that is added to the port is added here. Must not know
processes. A missing reading travels as a list of one reason, which no number
can be taken for. What the two sides disagree on is a FrameError.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from enum import Enum
from typing import Any

from eelgrid_agent import device as port
from eelgrid_agent.device import FAST_READINGS, INSTANCE_READINGS, SLOW_READINGS, Missing, RawReadings, Value
from eelgrid_agent.worker.frames import FrameError
from eelgrid_protos.catalogue import CiProfile, GiProfile, MigGeometry
from eelgrid_protos.messages import AbsenceReason, AccessLevel, Gpu, Reading
from eelgrid_protos.plain import from_plain, to_plain

__all__ = ["CALLS", "FAST_VALUES", "OPERATIONS_MOST", "Call", "Pace", "decode_error", "encode_error"]

# Calls in one request; a slow look asks three of each device.
OPERATIONS_MOST = 512
FAST_VALUES: tuple[Reading, ...] = tuple(reading for reading in FAST_READINGS if reading is not Reading.ENERGY_J)
_MISSING: Mapping[AbsenceReason, Missing] = {reason: Missing(reason) for reason in AbsenceReason}
_MESSAGE_LONGEST = 500
_ERRORS: Mapping[str, type[port.DeviceError]] = {
    kind.__name__: kind
    for kind in (
        port.DeviceError, port.DriverUnavailable, port.GpuLost, port.DeviceTimeout, port.UnknownGpu,
        port.UnknownInstance, port.NotSupported, port.NoPermission, port.InUse, port.InsufficientResources,
        port.OutOfRange, port.OutcomeUnknown,
    )
}  # fmt: skip


class Pace(Enum):
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
class Call:
    """One call.

    `of_device` takes a UUID first; `keyword` is the name of the last argument where it needs one. `changes` a device:
    it is never repeated. `alone` lets no other process of ours hold a session beside it.
    """

    name: str
    pace: Pace
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


def _plain_value(value: Value) -> Any:
    return [int(value.reason)] if isinstance(value, Missing) else value


def _value(plain: Any) -> Value:
    if isinstance(plain, list):
        return _MISSING[AbsenceReason(plain[0])]
    return float(plain)


def _row(readings: Sequence[Reading]) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Mapping of these readings to a list in their order, and back; one that is not there was not sampled."""
    absent = _MISSING[AbsenceReason.NOT_SAMPLED]

    def encode(values: Mapping[Reading, Value]) -> Any:
        return [_plain_value(values.get(reading, absent)) for reading in readings]

    def decode(plain: Any) -> Any:
        return {reading: _value(value) for reading, value in zip(readings, plain, strict=True)}

    return encode, decode


_plain_fast, _fast = _row(FAST_VALUES)
_plain_slow, _slow = _row(SLOW_READINGS)
_plain_instance, _instance = _row(INSTANCE_READINGS)


def _plain_look(look: RawReadings) -> Any:
    return [_plain_value(look.energy_counter_j), _plain_fast(look.values)]


def _look(plain: Any) -> RawReadings:
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


def _plain_links(found: Sequence[port.GpuLink]) -> Any:
    return [asdict(one) for one in found]


def _links(plain: Any) -> tuple[port.GpuLink, ...]:
    return tuple(port.GpuLink(**one) for one in plain)


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
    Call(name="driver_version", pace=Pace.LISTING, of_device=False),
    Call(name="access", pace=Pace.LISTING, of_device=False, encode=int, decode=AccessLevel),
    Call(name="gpus", pace=Pace.LISTING, of_device=False, encode=_plain_gpus, decode=_gpus),
    Call(name="read", pace=Pace.QUICK, encode=_plain_look, decode=_look),
    Call(name="read_slow", pace=Pace.SLOW, encode=_plain_slow, decode=_slow),
    Call(name="read_instances", pace=Pace.SLOW, encode=_plain_instances, decode=_instances),
    Call(name="processes", pace=Pace.SLOW, encode=_plain_processes, decode=_processes),
    Call(name="topology", pace=Pace.LISTING, of_device=False, encode=_plain_links, decode=_links),
    Call(name="take_events", pace=Pace.QUICK, of_device=False, encode=_plain_events, decode=_events),
    Call(name="close", pace=Pace.SLOW, of_device=False, alone=True),
    # Not of the port: what a simulated device in the child is told, and which devices a listing leaves out.
    Call(name="order", pace=Pace.SLOW, of_device=False),
    Call(name="pass_over", pace=Pace.QUICK, of_device=False),
)
_CHANGES = (
    Call(name="power_settings", pace=Pace.SLOW, encode=asdict, decode=_settings),
    Call(name="set_power_limit", pace=Pace.SETTING, changes=True),
    Call(name="lock_sm_clocks", pace=Pace.SETTING, changes=True),
    Call(name="unlock_sm_clocks", pace=Pace.SETTING, changes=True),
    Call(name="set_power_profile", pace=Pace.SETTING, changes=True),
    Call(name="mig_geometry", pace=Pace.SLOW, encode=_plain_geometry, decode=_geometry),
    Call(
        name="set_mig_mode",
        pace=Pace.MODE,
        keyword="enabled",
        changes=True,
        alone=True,
        encode=lambda mode: mode.value,
        decode=port.ModeChange,
    ),
    Call(name="create_gpu_instance", pace=Pace.INSTANCE, changes=True),
    Call(name="destroy_gpu_instance", pace=Pace.INSTANCE, changes=True),
    Call(name="create_compute_instance", pace=Pace.INSTANCE, changes=True),
    Call(name="destroy_compute_instance", pace=Pace.INSTANCE, changes=True),
)
_CONTROL = frozenset(call.name for call in _CHANGES)
CALLS: Mapping[str, Call] = {call.name: call for call in (*_READS, *_CHANGES)}
