"""The table of `amdsmi` readings: which call holds which reading, under which name and in which unit.

Missing numbers are "N/A" or the largest number of their width. Power is in watts, caps are in microwatts, memory is
in MiB. The energy counter counts steps of `counter_resolution` microjoules. Names of 6.3 and 7.0 are both read.
`amdsmi_get_violation_status` (sleeps 100 ms) and `amdsmi_get_gpu_pci_throughput` (1 s) are left out on purpose;
throttle reasons come from residency counters that rose since the last read.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from eelgrid_agent.devices.port import SLOW_READINGS, Missing, ReadingValue
from eelgrid_protos.messages import READING_RANGES, AbsenceReason, Reading
from eelgrid_protos.quantities import MIB

_SENTINELS = frozenset({0xFFFF, 0xFFFF_FFFF, 0xFFFF_FFFF_FFFF_FFFF})
_MISSING = {reason: Missing(reason) for reason in AbsenceReason}
_NOT_SUPPORTED = _MISSING[AbsenceReason.NOT_SUPPORTED]
_IMPLAUSIBLE = _MISSING[AbsenceReason.IMPLAUSIBLE]
_SMALLEST_SENTINEL = 0xFFFF

# Residency counters, and what NVML's bits call a clock held down for that cause.
_CAUSES: Mapping[str, int] = MappingProxyType(
    {
        "ppt_residency_acc": 0x4,  # software power cap
        "socket_thm_residency_acc": 0x20,  # software thermal slowdown
        "vr_thm_residency_acc": 0x40,  # hardware thermal slowdown
        "hbm_thm_residency_acc": 0x40,
        "prochot_residency_acc": 0x48,  # hardware slowdown, thermal
    }
)
_PCIE_GENERATIONS = MappingProxyType({2500: 1, 5000: 2, 8000: 3, 16_000: 4, 32_000: 5, 64_000: 6})

AmdCall = Callable[[Any, Any], Any]


def find_number(answer: Any, *names: str) -> float | None:
    """The first of these fields that holds a number; None where none does."""
    for name in names:
        value = answer.get(name) if isinstance(answer, Mapping) else None
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if value >= _SMALLEST_SENTINEL and value in _SENTINELS:
            continue
        return float(value)
    return None


def _plausible(reading: Reading, value: float | None) -> ReadingValue:
    if value is None:
        return _NOT_SUPPORTED
    bounds = READING_RANGES[reading]
    return float(value) if bounds.low <= value <= bounds.high else _IMPLAUSIBLE


@dataclass(frozen=True, slots=True)
class AmdSource:
    """One call and the readings in its answer; a reading that no source holds is not supported."""

    ask: AmdCall
    readings: Mapping[Reading, Callable[[Any], float | None]]

    def values(self, answer: Any) -> Iterable[tuple[Reading, ReadingValue]]:
        """The readings, each within its range or missing."""
        return [(reading, _plausible(reading, take(answer))) for reading, take in self.readings.items()]


def _scaled_number(scale: float, *names: str) -> Callable[[Any], float | None]:
    def take(answer: Any) -> float | None:
        value = find_number(answer, *names)
        return None if value is None else value * scale

    return take


def _plain(answer: Any) -> float | None:
    return find_number({"": answer}, "")


def _temperature(*kinds: str) -> AmdCall:
    """The first of these sensors that the part has: MI300 has no edge sensor."""

    def ask(smi: Any, handle: Any) -> Any:
        *others, last = kinds
        metric = smi.AmdSmiTemperatureMetric.CURRENT
        for kind in others:
            try:
                return smi.amdsmi_get_temp_metric(handle, smi.AmdSmiTemperatureType[kind], metric)
            except smi.AmdSmiLibraryException as error:
                if error.err_code not in (1, 2):
                    raise
        return smi.amdsmi_get_temp_metric(handle, smi.AmdSmiTemperatureType[last], metric)

    return ask


def _clock(kind: str) -> AmdCall:
    return lambda smi, handle: smi.amdsmi_get_clock_info(handle, smi.AmdSmiClkType[kind])


def _generation(answer: Any) -> float | None:
    speed = find_number(answer.get("pcie_metric"), "pcie_speed")
    return None if speed is None else _PCIE_GENERATIONS.get(int(speed))


def _links_up(answer: Any) -> float | None:
    status = answer.get("status")
    return float(status.count("U")) if isinstance(status, list) else None


def _link_sum(name: str) -> Callable[[Any], float | None]:
    """Links are counted in kilobytes; those that the part lacks hold no number."""

    def take(answer: Any) -> float | None:
        parts = [find_number({"": part}, "") for part in answer.get(name, ()) if not isinstance(part, str)]
        present = [part for part in parts if part is not None]
        return 1000.0 * sum(present) if present else None

    return take


def _pages(*states: str) -> Callable[[Any], float | None]:
    """Retired pages in these states."""
    return lambda pages: float(sum(str(page.get("status", "")).upper() in states for page in pages))


def _is_any(take: Callable[[Any], float | None]) -> Callable[[Any], float | None]:
    return lambda answer: float(bool(take(answer)))


FAST_SOURCES: tuple[AmdSource, ...] = (
    AmdSource(
        lambda smi, handle: smi.amdsmi_get_power_info(handle),
        {
            Reading.POWER_W: _scaled_number(1.0, "current_socket_power", "average_socket_power"),
            Reading.POWER_AVERAGE_W: _scaled_number(1.0, "average_socket_power"),
        },
    ),
    AmdSource(
        lambda smi, handle: smi.amdsmi_get_gpu_activity(handle),
        {
            Reading.UTILIZATION_RATIO: _scaled_number(0.01, "gfx_activity"),
            Reading.MEMORY_UTILIZATION_RATIO: _scaled_number(0.01, "umc_activity"),
        },
    ),
    AmdSource(
        lambda smi, handle: smi.amdsmi_get_gpu_vram_usage(handle),
        {Reading.MEMORY_USED_BYTES: _scaled_number(MIB, "vram_used")},
    ),
    AmdSource(_clock("GFX"), {Reading.SM_CLOCK_MHZ: _scaled_number(1.0, "clk", "cur_clk")}),
    AmdSource(_clock("MEM"), {Reading.MEMORY_CLOCK_MHZ: _scaled_number(1.0, "clk", "cur_clk")}),
    AmdSource(_temperature("EDGE", "HOTSPOT"), {Reading.TEMPERATURE_C: _plain}),
    AmdSource(
        lambda smi, handle: smi.amdsmi_get_power_cap_info(handle),
        {Reading.POWER_LIMIT_W: _scaled_number(1e-6, "power_cap")},
    ),
)
SLOW_SOURCES: tuple[AmdSource, ...] = (
    AmdSource(
        lambda smi, handle: smi.amdsmi_get_power_cap_info(handle),
        {Reading.POWER_LIMIT_REQUESTED_W: _scaled_number(1e-6, "power_cap")},
    ),
    AmdSource(_temperature("VRAM", "HBM_0"), {Reading.MEMORY_TEMPERATURE_C: _plain}),
    AmdSource(
        # Counted since the driver was loaded, which NVML calls volatile.
        lambda smi, handle: smi.amdsmi_get_gpu_total_ecc_count(handle),
        {
            Reading.ECC_CORRECTED_VOLATILE: _scaled_number(1.0, "correctable_count"),
            Reading.ECC_UNCORRECTED_VOLATILE: _scaled_number(1.0, "uncorrectable_count"),
        },
    ),
    AmdSource(
        # A retired page is what a remapped row is elsewhere.
        lambda smi, handle: smi.amdsmi_get_gpu_bad_page_info(handle),
        {
            Reading.REMAPPED_ROWS_UNCORRECTABLE: _pages("RESERVED"),
            Reading.ROW_REMAP_PENDING: _is_any(_pages("PENDING")),
            Reading.ROW_REMAP_FAILED: _is_any(_pages("UNRESERVABLE")),
        },
    ),
    AmdSource(
        lambda smi, handle: smi.amdsmi_get_pcie_info(handle),
        {
            Reading.PCIE_LINK_GENERATION: _generation,
            Reading.PCIE_LINK_WIDTH: lambda answer: find_number(answer.get("pcie_metric"), "pcie_width"),
            Reading.PCIE_REPLAYS: lambda answer: find_number(answer.get("pcie_metric"), "pcie_replay_count"),
        },
    ),
    AmdSource(
        lambda smi, handle: smi.amdsmi_get_gpu_metrics_info(handle),
        {
            Reading.NVLINK_SENT_BYTES: _link_sum("xgmi_write_data_acc"),
            Reading.NVLINK_RECEIVED_BYTES: _link_sum("xgmi_read_data_acc"),
        },
    ),
    AmdSource(
        lambda smi, handle: smi.amdsmi_get_gpu_xgmi_link_status(handle), {Reading.NVLINK_ACTIVE_LINKS: _links_up}
    ),
    AmdSource(
        lambda smi, handle: smi.amdsmi_get_gpu_process_list(handle),
        {Reading.PROCESSES: lambda answer: float(len({process["pid"] for process in answer}))},
    ),
)
assert {reading for source in SLOW_SOURCES for reading in source.readings} <= set(SLOW_READINGS)


def read_energy_j(answer: Any) -> ReadingValue:
    """The energy counter."""
    count, step_uj = find_number(answer, "energy_accumulator", "power"), find_number(answer, "counter_resolution")
    return _plausible(Reading.ENERGY_J, None if count is None or step_uj is None else count * step_uj * 1e-6)


def read_residencies(answer: Any) -> Mapping[str, float]:
    """The residency counters of a metrics table that the part has."""
    found = {name: find_number(answer, name) for name in _CAUSES}
    return {name: value for name, value in found.items() if value is not None}


def compute_reasons_mask(before: Mapping[str, float], now: Mapping[str, float]) -> float:
    """The causes whose counters rose."""
    mask = 0
    for name, value in now.items():
        if value > before.get(name, value):
            mask |= _CAUSES[name]
    return float(mask)
