"""Quantities as people read and write them: CPUs, GPUs, memory, power, energy, shares and durations.

Knows nothing of where they are shown or asked for. A missing reading is a dash, never a number. Internally, amounts are
thousandths of a CPU or GPU, and bytes.
"""

import math
import re

from eelgrid_protos.quantities import MIB


def format_cpu(milli: int) -> str:
    """Formats thousandths of a CPU as CPUs: 2.5."""
    return f"{milli / 1000:.6g}"


def format_gpu(milli: int) -> str:
    """Formats thousandths of a GPU as GPUs: 0.47."""
    return f"{milli / 1000:.6g}"


def format_memory(amount_bytes: int) -> str:
    """Formats bytes in the largest binary unit that gives a number of at least 1."""
    power = min(4, int(math.log2(amount_bytes) // 10)) if amount_bytes else 0
    if not power:
        return f"{amount_bytes} B"
    return f"{amount_bytes / 1024**power:.4g} {'KMGT'[power - 1]}iB"


def format_power(power_w: float | None) -> str:
    """Formats watts with three or four digits; a missing reading is a dash."""
    if power_w is None:
        return "-"
    for unit, size in (("MW", 1e6), ("kW", 1e3)):
        if abs(power_w) >= 10 * size:
            return f"{power_w / size:,.1f} {unit}"
    return f"{power_w:,.1f} W" if power_w < 1000 else f"{power_w:,.0f} W"


def format_energy(energy_j: float) -> str:
    """Formats joules, from a tenth of a kilowatt-hour as kWh and MWh."""
    kwh = energy_j / 3.6e6
    if abs(kwh) >= 10_000.0:
        return f"{kwh / 1000.0:,.1f} MWh"
    if abs(kwh) >= 0.1:
        return f"{kwh:,.1f} kWh" if abs(kwh) >= 100.0 else f"{kwh:,.2f} kWh"
    return f"{energy_j / 1000.0:,.1f} kJ" if abs(energy_j) >= 1000.0 else f"{energy_j:,.0f} J"


def format_percent(part: float, whole: float) -> str:
    """Formats a share in per cent; a dash if the whole is zero."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def format_milliseconds(latency_s: float | None) -> str:
    """Formats seconds as milliseconds; a missing reading is a dash."""
    return "-" if latency_s is None else f"{1000 * latency_s:.2f} ms"


_MINUTE_S, _HOUR_S, _DAY_S = 60.0, 3600.0, 86_400.0


def format_age(age_s: float) -> str:
    """Formats a time span in the largest unit of which there are at least two: 90 s, 3 min, 2 d."""
    for unit, size_s in (("d", _DAY_S), ("h", _HOUR_S), ("min", _MINUTE_S)):
        if age_s >= 2.0 * size_s:
            return f"{age_s / size_s:.0f} {unit}"
    return f"{max(0.0, age_s):.0f} s"


_NUMBER = re.compile(r"(\d{1,18}(?:\.\d{1,9})?)\s*([A-Za-z]*)")
_BYTES: dict[str, float] = {"": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12} | {
    f"{letter}{end}": 1024**power for power, letter in enumerate("kmgt", start=1) for end in ("i", "ib")
}


def _number(text: str, what: str) -> tuple[float, str]:
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not {what}")
    return float(match[1]), match[2].lower()


def parse_cpu_milli(text: str) -> int:
    """Parses `2.5` or `2500m` into thousandths of a CPU; raises ValueError."""
    number, unit = _number(text, "a number of CPUs: write 2.5 or 2500m")
    if unit not in {"", "m"}:
        raise ValueError(f"{text!r} has an unknown unit: write 2.5 or 2500m")
    return round(number if unit == "m" else number * 1000)


def parse_memory_bytes(text: str) -> int:
    """Parses `16GiB`, `16Gi`, `16GB` or a number of bytes into bytes; raises ValueError.

    A bare number below a mebibyte is refused: who writes 8 means 8 GiB, and no work fits into 8 bytes.
    """
    number, unit = _number(text, "an amount of memory: write 16GiB, 16GB or bytes")
    if unit not in _BYTES:
        raise ValueError(f"{text!r} has an unknown unit: write 16GiB, 16GB or bytes")
    if not unit and 0 < number < MIB:
        raise ValueError(f"{text!r} is less than 1 MiB without a unit: write {text.strip()}GiB")
    return round(number * _BYTES[unit])


def parse_gpu_milli(text: str) -> int:
    """Parses `0.5` or `50%` of a GPU into thousandths; raises ValueError."""
    percent = text.strip().endswith("%")
    number, unit = _number(text.strip().removesuffix("%"), "a share of a GPU: write 0.5 or 50%")
    milli = round(number * (10 if percent else 1000))
    if unit or not 1 <= milli <= 1000:
        raise ValueError(f"{text!r} is not a share of a GPU: write more than 0 and at most 1, such as 0.5 or 50%")
    return milli
