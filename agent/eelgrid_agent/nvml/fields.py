"""NVML's field values: which id a driver branch gives a field, and how one is read.

Ids are the driver's, not the binding's: some moved between branches, and a
binding knows only those of its own release. The table holds every field that
moved and that matters here, and every one that is used; an id that a branch
lacks is absent, for asking it would read another field.

Source: the headers of 17 releases of the binding (nvidia-ml-py 11.450 to
13.615) side by side. Apart from 199/200 and from 251 on, no id moved among
them; the highest id of each release bounds since when the others are there.
"""

from collections.abc import Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import Any

import pynvml

__all__ = ["Field", "field_id", "field_value", "field_values"]

_FOREVER = 10**6


class Field(Enum):
    """A field by meaning."""

    NVLINK_CRC_FLIT_ERRORS = "crc flit errors of all links"
    NVLINK_CRC_DATA_ERRORS = "crc data errors of all links"
    NVLINK_REPLAY_ERRORS = "replay errors of all links"
    NVLINK_RECOVERY_ERRORS = "recovery errors of all links"
    MEMORY_TEMPERATURE = "memory temperature"
    NVLINK_SENT_KIB = "data sent over a link"
    NVLINK_RECEIVED_KIB = "data received over a link"
    MIG_WITHOUT_RESET = "MIG mode changes without a reset"
    POWER_AVERAGE = "averaged power"
    POWER_INSTANT = "instant power"
    POWER_LIMIT = "enforced limit"
    POWER_LIMIT_REQUESTED = "requested limit"
    MIG_QUERY_INDEPENDENT = "queries do not depend on MIG mode"
    NVLINK_MALFORMED = "malformed packets of a link"
    NVLINK_OVERRUNS = "buffer overruns of a link"
    NVLINK_RECEIVE_ERRORS = "receive errors of a link"
    NVLINK_INTEGRITY_ERRORS = "integrity errors of a link"
    RECOVERY_ACTION = "recovery action"
    SW_THERMAL_SLOWDOWN = "time in software thermal slowdown"


# (first branch, first branch that it is no longer for, id), in no order.
_IDS: Mapping[Field, tuple[tuple[int, int, int], ...]] = MappingProxyType({
    Field.NVLINK_CRC_FLIT_ERRORS: ((0, _FOREVER, 38),),
    Field.NVLINK_CRC_DATA_ERRORS: ((0, _FOREVER, 45),),
    Field.NVLINK_REPLAY_ERRORS: ((0, _FOREVER, 52),),
    Field.NVLINK_RECOVERY_ERRORS: ((0, _FOREVER, 59),),
    Field.MEMORY_TEMPERATURE: ((0, _FOREVER, 82),),
    Field.NVLINK_SENT_KIB: ((450, _FOREVER, 138),),
    Field.NVLINK_RECEIVED_KIB: ((450, _FOREVER, 139),),
    Field.MIG_WITHOUT_RESET: ((525, _FOREVER, 184),),
    Field.POWER_AVERAGE: ((525, _FOREVER, 185),),
    Field.POWER_INSTANT: ((525, _FOREVER, 186),),
    Field.POWER_LIMIT: ((535, _FOREVER, 190),),
    Field.POWER_LIMIT_REQUESTED: ((535, _FOREVER, 192),),
    Field.MIG_QUERY_INDEPENDENT: ((550, 555, 199), (555, 565, 200), (565, _FOREVER, 199)),
    Field.NVLINK_MALFORMED: ((550, _FOREVER, 206),),
    Field.NVLINK_OVERRUNS: ((550, _FOREVER, 207),),
    Field.NVLINK_RECEIVE_ERRORS: ((550, _FOREVER, 208),),
    Field.NVLINK_INTEGRITY_ERRORS: ((550, _FOREVER, 211),),
    Field.RECOVERY_ACTION: ((570, _FOREVER, 230),),
    # In 570 this number is another field, and in 590 it is that one again.
    Field.SW_THERMAL_SLOWDOWN: ((575, 590, 251), (590, _FOREVER, 269)),
})  # fmt: skip


def field_id(field: Field, branch: int) -> int | None:
    """The id of a field in a driver branch, or None where it has none."""
    return next((number for since, until, number in _IDS[field] if since <= branch < until), None)


def field_value(handle: Any, number: int, scope: int = 0) -> int:
    """One field; raises NVMLError."""
    return _number(pynvml.nvmlDeviceGetFieldValues(handle, [(number, scope)])[0])


def field_values(handle: Any, asked: Sequence[tuple[int, int]]) -> list[int | None]:
    """Fields as (id, scope) in one call; None is one that does not answer."""
    values = pynvml.nvmlDeviceGetFieldValues(handle, list(asked))
    return [None if value.nvmlReturn else _number(value) for value in values]


def _number(value: Any) -> int:
    if value.nvmlReturn:
        raise pynvml.NVMLError(value.nvmlReturn)
    if value.valueType == pynvml.NVML_VALUE_TYPE_UNSIGNED_INT:
        return int(value.value.uiVal)
    if value.valueType == pynvml.NVML_VALUE_TYPE_SIGNED_INT:
        return int(value.value.siVal)
    if value.valueType == pynvml.NVML_VALUE_TYPE_UNSIGNED_SHORT:
        return int(value.value.usVal)
    if value.valueType == pynvml.NVML_VALUE_TYPE_DOUBLE:
        return int(value.value.dVal)
    return int(value.value.ullVal)
