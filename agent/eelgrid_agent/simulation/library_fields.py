"""The field values of the simulated library: what each number means to the simulated driver's branch.

Some numbers mean another field in other branches, as in real drivers: who
asks by the wrong table gets the wrong number and no error.
"""

from collections.abc import Callable
from typing import Any

import pynvml

from eelgrid_agent.simulation.gpu import SimGpu
from eelgrid_agent.simulation.handles import Handles, Symbol, behind
from eelgrid_agent.simulation.node import SimulatedNode
from eelgrid_agent.simulation.sensors import (
    LIMIT_FIELDS_SINCE,
    NEW_LINK_ERRORS_SINCE,
    POWER_FIELDS_SINCE,
    RECOVERY_SINCE,
)

__all__ = ["field_symbols"]

_WIDE = int(pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG)
_NARROW = int(pynvml.NVML_VALUE_TYPE_UNSIGNED_INT)
# What NVML's units of NVLink power thresholds are called; a constant of the driver.
_LOW_POWER_UNIT = 50

# The first branch that has it, its type, and what it says for a scope.
_Field = tuple[int, int, Callable[[SimGpu, int], int | None]]


def field_symbols(node: SimulatedNode, handles: Handles) -> dict[str, Symbol]:
    """All of them, by name."""
    fields = {**_power_fields(node), **_link_fields(node), **_state_fields(node), **_moved_fields(node)}

    def values(gpu: SimGpu, count: Any, ref: Any) -> int:
        for value in behind(ref)[: count.value]:
            since, kind, ask = fields.get(value.fieldId, (0, _NARROW, None))
            if ask is None or node.spec.driver_branch < since:
                value.nvmlReturn = pynvml.NVML_ERROR_INVALID_ARGUMENT
                continue
            number = ask(gpu, value.scopeId)
            value.nvmlReturn = pynvml.NVML_ERROR_NOT_SUPPORTED if number is None else 0
            value.valueType = kind
            if number is not None and kind == _WIDE:
                value.value.ullVal = number
            elif number is not None:
                value.value.uiVal = number
        return 0

    return {"nvmlDeviceGetFieldValues": handles.on_device(values)}


def _power_fields(node: SimulatedNode) -> dict[int, _Field]:
    now, sensors = node.monotonic_ns, node.sensors

    def instant(gpu: SimGpu, scope: int) -> int | None:
        if scope == pynvml.NVML_POWER_SCOPE_MODULE:
            return sensors(gpu).module_power_mw(now())
        if scope == pynvml.NVML_POWER_SCOPE_MEMORY:
            return sensors(gpu).memory_power_mw(now())
        return gpu.power_instant_mw(now()) if scope == pynvml.NVML_POWER_SCOPE_GPU else None

    def averaged(gpu: SimGpu, scope: int) -> int | None:
        return None if scope else sensors(gpu).power_average_mw(now())

    def enforced(gpu: SimGpu, scope: int) -> int | None:
        return None if scope else gpu.enforced_mw

    def requested(gpu: SimGpu, scope: int) -> int | None:
        return None if scope else gpu.limit_mw

    return {
        83: (0, _WIDE, lambda gpu, _scope: gpu.energy_mj(now())),
        185: (POWER_FIELDS_SINCE, _NARROW, averaged),
        186: (POWER_FIELDS_SINCE, _NARROW, instant),
        190: (LIMIT_FIELDS_SINCE, _NARROW, enforced),
        192: (LIMIT_FIELDS_SINCE, _NARROW, requested),
    }


def _link_fields(node: SimulatedNode) -> dict[int, _Field]:
    now, sensors = node.monotonic_ns, node.sensors

    def kib(gpu: SimGpu, link: int) -> int | None:
        return sensors(gpu).link_kib(link, now())

    def old_errors(gpu: SimGpu, _scope: int) -> int | None:
        return None if sensors(gpu).traits.new_link_errors else sensors(gpu).link_errors()

    def no_old_errors(gpu: SimGpu, _scope: int) -> int | None:
        return None if old_errors(gpu, 0) is None else 0

    def new_errors(gpu: SimGpu, link: int) -> int | None:
        traits = sensors(gpu).traits
        if not traits.new_link_errors or not 0 <= link < traits.links:
            return None
        # They all come in over the first link.
        return 0 if link else sensors(gpu).link_errors()

    def no_new_errors(gpu: SimGpu, link: int) -> int | None:
        return None if new_errors(gpu, link) is None else 0

    return {
        **dict.fromkeys((38, 45, 59), (0, _WIDE, no_old_errors)),
        52: (0, _WIDE, old_errors),
        138: (450, _WIDE, kib),
        139: (450, _WIDE, kib),
        **dict.fromkeys((206, 207, 211), (NEW_LINK_ERRORS_SINCE, _WIDE, no_new_errors)),
        208: (NEW_LINK_ERRORS_SINCE, _WIDE, new_errors),
    }


def _state_fields(node: SimulatedNode) -> dict[int, _Field]:
    now, sensors = node.monotonic_ns, node.sensors

    def changes_mode_at_once(gpu: SimGpu, _scope: int) -> int | None:
        return None if gpu.mig.geometry is None else int(not gpu.mig.geometry.reset_to_change_mode)

    return {
        82: (0, _NARROW, lambda gpu, _scope: sensors(gpu).memory_temperature_c(now())),
        184: (POWER_FIELDS_SINCE, _NARROW, changes_mode_at_once),
        230: (RECOVERY_SINCE, _NARROW, lambda gpu, _scope: sensors(gpu).recovery_action()),
    }


def _moved_fields(node: SimulatedNode) -> dict[int, _Field]:
    """Numbers that changed hands between branches: 199 with 200, and 251 with 269."""
    branch = node.spec.driver_branch

    def query_independent(gpu: SimGpu, _scope: int) -> int | None:
        return None if gpu.mig.geometry is None else 1

    def threshold(gpu: SimGpu, _scope: int) -> int | None:
        return _LOW_POWER_UNIT if node.sensors(gpu).traits.links else None

    def thermal_ns(_gpu: SimGpu, _scope: int) -> int | None:
        return 0

    def smoothing(gpu: SimGpu, _scope: int) -> int | None:
        return 0 if gpu.product.architecture == "blackwell" else None

    swapped = 555 <= branch < 565
    thermal_at_251 = 575 <= branch < 590
    return {
        199: (550, _NARROW, threshold if swapped else query_independent),
        200: (550, _NARROW, query_independent if swapped else threshold),
        251: (570, _WIDE, thermal_ns if thermal_at_251 else smoothing),
        269: (590, _WIDE, thermal_ns),
    }
