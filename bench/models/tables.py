"""The measured data sets as points.

Owns the reading of their files. Must not know models or how points are held out.

Data (see docs/explanation/profiles.md for sources and licences): ParvaGPU's inference profiles, ML.ENERGY's
leaderboard, Zeus's power-limit sweeps, MISO's training times on MIG slices, and a file of relative
power curves that was derived from Zeus and ML.ENERGY.
"""

import csv
import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from eelgrid_controller.profiles.points import POWER, THROUGHPUT, Configuration, Point, latency_quantity

_PARVAGPU = "a100-sxm4-80gb"
_MISO = "a100-sxm4-40gb"
_ZEUS = {"v100": "v100-pcie-16gb", "a40": "a40", "p100": "p100-pcie-16gb", "rtx6000": "quadro-rtx-6000"}
_MLENERGY = {"H100": "h100-sxm5-80gb", "B200": "b200"}
_MILLISECOND_S = 1e-3


class Unreadable(ValueError):
    """A file that is missing or not in the format known here."""


class Told(NamedTuple):
    """One quantity of a data set as it is reported."""

    quantity: str  # as profiles call it
    name: str  # as the report calls it
    inverse: bool = False  # the data set gives seconds of what profiles call a rate


class Cell(NamedTuple):
    """A measured point, with the group that is left out as one when a whole workload is."""

    point: Point
    group: str
    noise: Mapping[str, float]  # stated deviation of the reading, log units


class DataSet(NamedTuple):
    """All points of one family of workloads."""

    name: str
    told: tuple[Told, ...]
    cells: tuple[Cell, ...]
    traits: Mapping[str, Mapping[str, float]]  # by workload
    refused: int  # rows that say that a configuration did not run


def _rows(path: Path) -> list[dict[str, str]]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))
    except OSError as error:
        raise Unreadable(f"{path}: {error.strerror}; give the folder with --data") from None


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Unreadable(f"{path}: {error.strerror}; give the folder with --data") from None


def parvagpu(data: Path) -> list[DataSet]:
    """Inference on MIG slices: throughput per process and latency of a batch, the latter in whole milliseconds."""
    folder = data / "parvagpu" / "prof_data"
    cells, refused = [], 0
    for path in sorted(folder.glob("*.csv")):
        for row in _rows(path):
            slices, batch, processes = (int(row[key]) for key in ("Mig instance", "Batch size", "Workload Number"))
            each, seconds = float(row["Throughput"]), float(row["Latency"])
            how = Configuration(_PARVAGPU, f"{slices}g", batch=batch, processes=processes)
            if each <= 0 or seconds <= 0:
                refused += 1
                continue
            # Rounded to a millisecond: an even error of half of one either way.
            noise = {latency_quantity(0.5): _MILLISECOND_S / math.sqrt(12.0) / seconds}
            point = Point(path.stem, how, each * processes, {0.5: seconds}, source="parvagpu")
            cells.append(Cell(point, path.stem, noise))
    if not cells:
        raise Unreadable(f"{folder}: no profiles; give the folder with --data")
    told = (Told(latency_quantity(0.5), "latency"), Told(THROUGHPUT, "throughput"))
    return [DataSet("parvagpu", told, tuple(cells), {}, refused)]


def zeus(data: Path) -> list[DataSet]:
    """Training under power limits: watts and seconds an epoch."""
    cells = []
    for short, model in _ZEUS.items():
        for row in _rows(data / "zeus_nsdi23" / f"summary_power_{short}.csv"):
            workload = f"{row['dataset']}/{row['network']}"
            how = Configuration(
                model,
                batch=int(row["batch_size"]),
                power_limit_w=float(row["power_limit"]),
                label=f"optimizer={row['optimizer']}",
            )
            watts, seconds = float(row["average_power"]), float(row["time_per_epoch"])
            cells.append(Cell(Point(workload, how, 1.0 / seconds, power_w=watts, source="zeus"), workload, {}))
    told = (Told(POWER, "power"), Told(THROUGHPUT, "time_per_epoch", inverse=True))
    return [DataSet("zeus", told, tuple(cells), {}, 0)]


def miso(data: Path) -> list[DataSet]:
    """Training on MIG slices: seconds an iteration."""
    cells = []
    for row in _rows(data / "miso" / "a100_mig_iteration_time_s.csv"):
        found = re.fullmatch(r"(.+)_train(\d+)", row["job"])
        if found is None:
            raise Unreadable(f"miso: the job {row['job']!r} is not NAME_trainBATCH")
        how = Configuration(_MISO, row["mig_profile"], batch=int(found[2]))
        cells.append(Cell(Point(found[1], how, 1.0 / float(row["median_s"]), source="miso"), found[1], {}))
    return [DataSet("miso", (Told(THROUGHPUT, "iteration_time", inverse=True),), tuple(cells), {}, 0)]


_LLM = ("gpqa", "image-chat", "lm-arena-chat", "sourcegraph-fim", "video-chat")
_DIFFUSION = ("text-to-image", "text-to-video")
_ITL = {0.5: "median_itl_ms", 0.9: "p90_itl_ms", 0.95: "p95_itl_ms", 0.99: "p99_itl_ms"}


def _traits(row: Mapping[str, Any], task: str, tasks: tuple[str, ...]) -> dict[str, float]:
    """What is known of a model without measuring it: parameters, precision, and the task."""
    found = {
        "active": math.log2(row["activated_params_billions"]),
        "total": math.log2(row["total_params_billions"]),
        "short": float("8" in row["weight_precision"] or "4" in row["weight_precision"]),
    }
    found.update({f"is {one}": float(one == task) for one in tasks})
    return found


def _llm(row: Mapping[str, Any], workload: str) -> Point:
    label = ",".join(f"{short}={row[f'{short}_parallel']}" for short in ("tensor", "expert", "data"))
    how = Configuration(_MLENERGY[row["gpu_model"]], gpus=row["num_gpus"], batch=row["max_num_seqs"], label=label)
    latencies = {quantile: row[key] * 1e-3 for quantile, key in _ITL.items()}
    rate_hz, watts = row["output_throughput_tokens_per_sec"], row["avg_power_watts"]
    return Point(workload, how, rate_hz, latencies, watts, source="mlenergy")


def _diffusion(row: Mapping[str, Any], workload: str) -> Point:
    size = ",".join(
        f"{key}={row[key]}" for key in ("image_height", "num_frames", "video_height", "inference_steps") if key in row
    )
    label = f"ulysses={row['ulysses_degree']},ring={row['ring_degree']},{size}"
    how = Configuration(_MLENERGY[row["gpu_model"]], gpus=row["num_gpus"], batch=row["batch_size"], label=label)
    rate_hz = row.get("throughput_images_per_sec") or row["throughput_videos_per_sec"]
    watts, seconds = row["avg_power_watts"], row["batch_latency_s"]
    return Point(workload, how, rate_hz, {0.5: seconds}, watts, source="mlenergy")


def mlenergy(data: Path) -> list[DataSet]:
    """Serving of language and diffusion models: watts, rates and latencies; two families."""
    found = []
    itl = tuple(Told(latency_quantity(quantile), f"itl_p{100 * quantile:g}") for quantile in _ITL)
    kinds: tuple[tuple[str, tuple[str, ...], Callable[..., Point], tuple[Told, ...]], ...] = (
        ("mlenergy-llm", _LLM, _llm, (Told(POWER, "power"), Told(THROUGHPUT, "throughput"), *itl)),
        (
            "mlenergy-diffusion",
            _DIFFUSION,
            _diffusion,
            (Told(POWER, "power"), Told(THROUGHPUT, "throughput"), Told(latency_quantity(0.5), "batch_latency")),
        ),
    )
    for name, tasks, point_of, told in kinds:
        cells: list[Cell] = []
        traits: dict[str, Mapping[str, float]] = {}
        for task in tasks:
            for row in _json(data / "mlenergy" / "tasks" / f"{task}.json")["configurations"]:
                workload = f"{task}/{row['model_id']}"
                traits[workload] = _traits(row, task, tasks)
                # The same model under another task is no stranger: a model is left out as one.
                cells.append(Cell(point_of(row, workload), row["model_id"], {}))
        found.append(DataSet(name, told, tuple(cells), traits, 0))
    return found


def power_curves(data: Path) -> list[DataSet]:
    """Throughput over that at the highest limit, derived from Zeus's sweeps: its baseline's noise is in every ratio."""
    cells = []
    for curve in _json(data / "power_curves.json")["zeus_power_cap"]["curves"]:
        workload = f"{curve['dataset']}/{curve['network']}"
        for row in curve["points"]:
            how = Configuration(
                _ZEUS[curve["gpu"]],
                batch=int(curve["batch"]),
                power_limit_w=float(row["cap_w"]),
                label=f"optimizer={curve['optimizer']}",
            )
            point = Point(workload, how, row["throughput"], power_w=row["avg_power_w"], source="power_curves")
            cells.append(Cell(point, workload, {}))
    told = (Told(POWER, "power"), Told(THROUGHPUT, "relative_throughput"))
    return [DataSet("power_curves", told, tuple(cells), {}, 0)]


DATA_SETS: Mapping[str, Callable[[Path], list[DataSet]]] = {
    "parvagpu": parvagpu,
    "mlenergy": mlenergy,
    "zeus": zeus,
    "miso": miso,
    "power_curves": power_curves,
}


def load(data: Path, name: str) -> list[DataSet]:
    """The families of one data set; raises Unreadable."""
    try:
        return DATA_SETS[name](data)
    except (KeyError, ValueError, TypeError) as error:
        if isinstance(error, Unreadable):
            raise
        raise Unreadable(f"{name}: {error!r}; the files are not in the format known here") from error
