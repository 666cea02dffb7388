"""Quantities as people read and write them: CPUs, GPUs, memory, power, energy, counts, shares and durations.

Knows nothing of where they are shown or asked for. A missing reading is a dash, never a number. Internally, amounts are
thousandths of a CPU or GPU, and bytes.
"""

import math
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from signal import Signals
from typing import TYPE_CHECKING, NamedTuple

from eelgrid_protos.quantities import MIB

if TYPE_CHECKING:
    from eelgrid_protos.messages import AttemptStatus, CheckpointAdvice, LoadTarget, Workload, WorkloadSummary

_EPOCH = datetime.fromtimestamp(0, UTC)


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


def format_watts(milliwatts: int) -> str:
    """Formats milliwatts exactly, in watts: 5,600 W."""
    return f"{milliwatts / 1000:,.3f}".rstrip("0").rstrip(".") + " W"


class _Unit(NamedTuple):
    symbol: str
    size: float
    least: float  # amounts from here on are in this unit
    decimals: int


_POWER = (_Unit("MW", 1e6, 1e7, 1), _Unit("kW", 1e3, 1e4, 1), _Unit("W", 1.0, 1e3, 0), _Unit("W", 1.0, 0.0, 1))
_ENERGY = (
    _Unit("MWh", 3.6e9, 3.6e10, 1),
    _Unit("kWh", 3.6e6, 3.6e8, 1),
    _Unit("kWh", 3.6e6, 3.6e5, 2),
    _Unit("kJ", 1e3, 1e3, 1),
    _Unit("J", 1.0, 0.0, 0),
)


def format_power(power_w: float | None) -> str:
    """Formats watts with three or four digits; a missing reading is a dash."""
    return format_powers([power_w])[0]


def format_powers(powers_w: Sequence[float | None]) -> list[str]:
    """Formats the watts of a column in one unit, that of the largest; a missing reading is a dash."""
    return _format_amounts(powers_w, _POWER)


def format_energy(energy_j: float) -> str:
    """Formats joules, from a tenth of a kilowatt-hour as kWh and MWh."""
    return format_energies([energy_j])[0]


def format_energies(energies_j: Sequence[float | None], *, largest_j: float | None = None) -> list[str]:
    """Formats the joules of a column in one unit: that of the largest, or of `largest_j`; a missing one is a dash."""
    return _format_amounts(energies_j, _ENERGY, largest_j)


def _format_amounts(amounts: Sequence[float | None], units: Sequence[_Unit], largest: float | None = None) -> list[str]:
    known = [abs(amount) for amount in amounts if amount is not None]
    most = max(known, default=0.0) if largest is None else abs(largest)
    unit = next((one for one in units if most >= one.least), units[-1])
    # In a large unit small amounts need more digits, or they would all be the same.
    decimals = max(unit.decimals, 2 if unit.size > 1.0 and any(0.0 < one < unit.size for one in known) else 0)
    least = 10.0**-decimals

    def text(amount: float | None) -> str:
        if amount is None:
            return "-"
        value = amount / unit.size
        if 0.0 < abs(value) < 0.5 * least:
            return f"{'-' if value < 0.0 else ''}<{least:.{decimals}f} {unit.symbol}"
        return f"{value:,.{decimals}f} {unit.symbol}"

    return [text(amount) for amount in amounts]


def format_money(amount: float | None, currency: str) -> str:
    """Formats money with its currency; a dash where no price is known."""
    return "-" if amount is None else f"{amount:,.2f} {currency}"


def format_carbon(carbon_g: float | None) -> str:
    """Formats grams of carbon dioxide as kilograms; a dash where no carbon intensity is known."""
    return "-" if carbon_g is None else f"{carbon_g / 1000.0:,.3g} kg"


def format_percent(part: float, whole: float) -> str:
    """Formats a share in per cent; a dash if the whole is zero."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def count_noun(count: int, one: str, many: str = "") -> str:
    """Formats a number with its noun, in singular or plural."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def format_load_target(target: "LoadTarget") -> str:
    """Formats what each replica should carry: 2,500 tokens a second."""
    return f"{target.per_replica:,.6g} {target.metric.unit}"


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


# With less, most of an estimate is what is presumed of work that nothing is known of.
_LITTLE_S = _DAY_S
_COST_SOURCES = {"THIS_RUN": "reported by it", "EARLIER_RUNS": "as in earlier runs"}


def describe_checkpoint_advice(advice: "CheckpointAdvice") -> str:
    """Says how often a job should save, and what that comes from, without a full stop."""
    whose = f"queue {advice.queue}" if advice.queue else "all jobs"
    counted = [f"{advice.queue_interruptions:.3g} in {format_age(advice.queue_job_s)} of running of {whose}"]
    if advice.pool:
        counted.append(f"{advice.pool_losses:.3g} GPU losses in {format_age(advice.pool_gpu_s)} of pool {advice.pool}")
    presumed = "presumed, as little has run: " if advice.queue_job_s < _LITTLE_S else ""
    every = f"an interruption is expected every {format_age(advice.mean_between_s)} ({presumed}{', '.join(counted)})"
    if not advice.interval_s:
        return f"{every}; what a save takes is not known: eelgrid.checkpoint reports it"
    source = _COST_SOURCES.get(advice.cost_source.name, "")
    takes = f"{advice.cost_s:.2g} s" if advice.cost_s < 10.0 else format_age(advice.cost_s)
    return f"checkpoint every {format_age(advice.interval_s)}: a save takes {takes} ({source}), and {every}"


_DURATION = re.compile(r"(\d{1,9})\s*(s|min|m|h|d)?")
_DURATION_UNITS_S = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}


def format_time(time_ns: int) -> str:
    """Formats nanoseconds since the epoch to the second, in UTC."""
    moment = _EPOCH + timedelta(seconds=time_ns // 10**9)
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC"


def format_phase(workload: "Workload") -> str:
    """Formats the phase of a workload, or what the processes of a placed one, or the job that it is for an engine, do."""
    if workload.spec.process is None and not workload.attempts:
        return workload.phase.name.lower()
    return _format_job_phase(workload, is_reported=bool(workload.attempts))


def format_summary_phase(row: "WorkloadSummary") -> str:
    """Formats the phase of a workload's summary as `format_phase` formats that of the workload."""
    if not row.runs_processes and not row.processes_reported:
        return row.phase.name.lower()
    return _format_job_phase(row, is_reported=bool(row.processes_reported))


def _format_job_phase(job: "Workload | WorkloadSummary", *, is_reported: bool) -> str:
    if job.phase.name != "PLACED":
        return job.phase.name.lower()
    if job.stopping_ns:
        return "stopping"
    return "running" if is_reported else "starting"


def format_progress(workload: "Workload | WorkloadSummary") -> str:
    """Formats what a job last reported of itself: percent or step, and its figure; "-" if it reported nothing."""
    found = workload.progress
    if found is None:
        return "-"
    text = f"{100 * found.step // found.total}%" if found.total else f"step {found.step}"
    return text if found.metric is None else f"{text} {found.metric:.4g}"


def describe_attempt(status: "AttemptStatus") -> str:
    """Says how a process ended, in a few words; or that it runs."""
    if status.state.name == "RUNNING":
        return "running"
    if status.signal:
        name = Signals(status.signal).name if status.signal in set(Signals) else str(status.signal)
        end = f"ended by {name}"
    elif status.exit_code is not None:
        end = f"exited with {status.exit_code}"
    else:
        end = "lost" if status.state.name == "LOST" else "not started"
    return f"{end}: {status.reason}" if status.reason else end


def parse_duration_s(text: str) -> int:
    """Parses a duration into seconds: 90, 90s, 30m, 2h, 1d; raises ValueError."""
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is no duration; write 90s, 30m, 2h or 1d")
    return int(found[1]) * _DURATION_UNITS_S[found[2] or ""]


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


def describe_start(log: str) -> str:
    """What a controller does that does not answer yet, by the last lines of its log."""
    found = re.findall(r"kernels=(?:compiling done=(\S+)|warm)", log)
    return f"compiling kernels, once: {found[-1]}" if found and found[-1] else "starting the controller"
