"""The two files of `eelctl frontier`: measured points in CSV, services and fleet in YAML.

Owns their formats (docs/how-to/frontier.md). Must not know what is computed from them.
Every complaint names the line and column, or the field, and what to write instead.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eelgrid_controller.cli.errors import RequestRefused
from eelgrid_controller.profiles.points import Configuration, Point
from eelgrid_controller.replay.csv_reader import CsvLine, read_lines
from eelgrid_controller.whatif.frontier.sweep import POINTS_MOST, FrontierPool, FrontierService
from eelgrid_protos.catalogue.loader import load_catalogue

_NEEDED = ("workload", "gpu_model", "throughput_hz")
_OTHERS = (
    "mig_profile",
    "gpus",
    "batch",
    "processes",
    "power_limit_w",
    "power_w",
    "latency_p50_s",
    "latency_p95_s",
    "latency_p99_s",
    "source",
)
COLUMNS = (*_NEEDED, *_OTHERS)
_QUANTILES = {"latency_p50_s": 0.5, "latency_p95_s": 0.95, "latency_p99_s": 0.99}
_WHOLE_MOST = 1_000_000
_YAML_BYTES_MOST = 1 << 20
# Wider than csv_lines': measured values come with all digits of a float.
_NUMBER = re.compile(r"(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,3})?", re.ASCII)


def _amount(line: CsvLine, column: str, most: float) -> float | None:
    """A number above 0, None where it was not measured."""
    text = line.text(column)
    if not text:
        return None
    number = float(text) if len(text) <= 40 and _NUMBER.fullmatch(text) else math.nan
    if not 0.0 < number <= most:
        remedy = f"write a number above 0, at most {most:g}, or nothing where it was not measured"
        raise line.cell_error(column, f"holds {text!r}", remedy)
    return number


def _count(line: CsvLine, column: str) -> int:
    """A whole number from 1 on, 1 where the cell is empty."""
    if not line.text(column):
        return 1
    number = line.whole(column, _WHOLE_MOST)
    if number < 1:
        raise line.cell_error(column, "holds 0", "write 1 or more, or nothing for 1")
    return number


def _point(line: CsvLine) -> Point:
    throughput_hz = _amount(line, "throughput_hz", 1e12)
    if throughput_hz is None:
        raise line.cell_error("throughput_hz", "is empty", "write it, or remove the line: it says nothing without")
    latency_s: dict[float, float] = {}
    for column, quantile in _QUANTILES.items():
        value_s = _amount(line, column, 1e6)
        if value_s is not None:
            if value_s < max(latency_s.values(), default=0.0):
                raise line.cell_error(
                    column, f"holds {value_s:g}, less than a lower quantile", "correct one of the two"
                )
            latency_s[quantile] = value_s
    configuration = Configuration(
        gpu_model=line.name("gpu_model"),
        mig_profile=line.text("mig_profile"),
        gpus=_count(line, "gpus"),
        batch=_count(line, "batch"),
        processes=_count(line, "processes"),
        power_limit_w=_amount(line, "power_limit_w", 1e5),
    )
    return Point(
        line.name("workload"),
        configuration,
        throughput_hz,
        latency_s,
        power_w=_amount(line, "power_w", 1e7),
        source=line.text("source"),
    )


def read_points(path: Path) -> tuple[Point, ...]:
    """The points of a file; raises TraceError naming line, column and remedy."""
    found = tuple(_point(line) for line in read_lines(path, _NEEDED, POINTS_MOST, others=_OTHERS))
    if not found:
        raise RequestRefused(f"{path}: holds no point", f"write a line a point under {','.join(COLUMNS)}")
    return found


def _yaml(path: Path) -> Any:
    import yaml

    try:
        if path.stat().st_size > _YAML_BYTES_MOST:
            raise RequestRefused(f"{path}: has over {_YAML_BYTES_MOST >> 20} MiB", "name fewer services")
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "is no YAML"
        raise RequestRefused(f"{path}{place}: {problem}", "correct the YAML there") from None
    except OSError as error:
        raise RequestRefused(f"{path}: {error.strerror or 'cannot be read'}", "check the path and its rights") from None
    except UnicodeDecodeError as error:
        raise RequestRefused(f"{path}, byte {error.start}: is not UTF-8", "save the file as UTF-8") from None


def _fields(value: Any, place: str, needed: tuple[str, ...], others: tuple[str, ...] = ()) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise RequestRefused(f"{place}: is no mapping", f"write {', '.join(f'{name}:' for name in needed)}")
    for name in needed:
        if name not in value:
            raise RequestRefused(f"{place}: {name} is missing", f"write `{name}:`")
    for name in value:
        if name not in needed + others:
            raise RequestRefused(
                f"{place}: {name} is unknown", f"remove it, or write one of {', '.join(needed + others)}"
            )
    return value


def _number(value: Any, place: str, remedy: str) -> float:
    # YAML 1.1 reads 1e3 as text, so text that is a number is taken as one.
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value <= 1e12:
        raise RequestRefused(f"{place}: is {value!r}", remedy)
    return float(value)


def _service(value: Any, place: str) -> FrontierService:
    fields = _fields(value, place, ("name", "workload", "rate_hz", "quantile"))
    for key in ("name", "workload"):
        if not isinstance(fields[key], str) or not 0 < len(fields[key]) <= 128:
            raise RequestRefused(
                f"{place}: {key} is {fields[key]!r}", "write a name of 1 to 128 characters, quoted if a number"
            )
    rate_hz = _number(fields["rate_hz"], f"{place}: rate_hz", "write requests a second, above 0, such as 12.5")
    quantile = fields["quantile"]
    if not isinstance(quantile, float) or quantile not in _QUANTILES.values():
        raise RequestRefused(f"{place}: quantile is {quantile!r}", "write 0.5, 0.95 or 0.99")
    if rate_hz == 0.0:
        raise RequestRefused(f"{place}: rate_hz is 0", "write requests a second, or leave the service out")
    return FrontierService(fields["name"], fields["workload"], rate_hz, quantile)


def _gpus(model: Any, value: Any, path: Path) -> FrontierPool:
    place = f"{path}: fleet: {model}"
    fields = _fields(value, place, ("gpus",), ("idle_w",)) if isinstance(value, Mapping) else {"gpus": value}
    count = fields["gpus"]
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise RequestRefused(f"{place}: gpus is {count!r}", "write how many GPUs there are, such as 8")
    if "idle_w" in fields:
        return FrontierPool(count, _number(fields["idle_w"], f"{place}: idle_w", "write the watts of one idle GPU"))
    known = next((product for product in load_catalogue().products.values() if product.model == model), None)
    if known is None:
        raise RequestRefused(
            f"{place}: the catalogue has no such model", f"correct it, or write {{gpus: {count}, idle_w: WATTS}}"
        )
    return FrontierPool(count, known.idle_w)


def read_services(path: Path) -> tuple[tuple[FrontierService, ...], Mapping[str, FrontierPool]]:
    """Services and fleet of a file; raises Refused naming the field and the remedy."""
    fields = _fields(_yaml(path), str(path), ("services", "fleet"))
    listed, fleet = fields["services"], fields["fleet"]
    if not isinstance(listed, list) or not listed:
        raise RequestRefused(f"{path}: services is no list", "write `- name: ...` for each service")
    if not isinstance(fleet, Mapping) or not fleet:
        raise RequestRefused(
            f"{path}: fleet is no mapping", "write how many GPUs of each model there are, such as H200: 8"
        )
    services = tuple(_service(value, f"{path}: service {number}") for number, value in enumerate(listed, 1))
    return services, {str(model): _gpus(model, value, path) for model, value in fleet.items()}
