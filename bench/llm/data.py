"""ML.ENERGY's measured configurations and the Azure 2023 token traces, as published.

Owns the reading of both formats. Must not know policies, pools or objectives.

ML.ENERGY (`mlenergy/tasks/*.json`, one a task): a list of configurations with
gpu_model, num_gpus, parallelism, max_num_seqs, avg_power_watts (of all its GPUs),
output_throughput_tokens_per_sec, energy_per_token_joules and inter-token latency as
median, p90, p95 and p99. 1,858 in all, of which 838 answer in tokens (LLM and MLLM);
images and videos have no inter-token latency and are counted, not served. There is
no time to first token and no sweep of clocks or power limits in it.

Azure (`azure_llm_2023/*.csv`): a request a line, TIMESTAMP, ContextTokens,
GeneratedTokens. All tokens of a request are asked for in the minute that it comes in;
the prompt is not counted, because the measured throughput is that of output tokens.
"""

import csv
import json
import math
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from eelgrid_controller.profiles.points import Configuration, Point

__all__ = ["GPU_MODELS", "QUANTILES", "TRACES", "WINDOW_S", "Missing", "Service", "demands", "own_trace", "services"]

WINDOW_S = 60.0
TRACES = ("conv", "code")
QUANTILES = {0.5: "median_itl_ms", 0.9: "p90_itl_ms", 0.95: "p95_itl_ms", 0.99: "p99_itl_ms"}
GPU_MODELS = {"H100": "h100-sxm5-80gb", "B200": "b200"}  # as the catalogue spells them
_CODE_TASKS = {"sourcegraph-fim"}


class Missing(FileNotFoundError):
    """The data is not there; the message says what was looked for."""


class Service(NamedTuple):
    """One model at one task, and all that was measured of it."""

    task: str
    model: str
    points: tuple[Point, ...]


def _point(task: str, entry: dict[str, Any]) -> Point:
    parallel = (
        f"{short}{entry[f'{name}_parallel']}" for short, name in (("tp", "tensor"), ("dp", "data"), ("ep", "expert"))
    )
    return Point(
        workload=f"{task}/{entry['model_id']}",
        configuration=Configuration(
            gpu_model=GPU_MODELS[entry["gpu_model"]],
            gpus=entry["num_gpus"],
            batch=entry["max_num_seqs"],
            label=" ".join(parallel),
        ),
        throughput_hz=entry["output_throughput_tokens_per_sec"],
        latency_s={level: entry[name] / 1e3 for level, name in QUANTILES.items()},
        power_w=entry["avg_power_watts"],
        source="ML.ENERGY",
    )


def services(data: Path) -> tuple[list[Service], int]:
    """Every model and task with inter-token latency, and how many configurations were read in all."""
    files = sorted((data / "mlenergy" / "tasks").glob("*.json"))
    if not files:
        raise Missing(f"no mlenergy/tasks/*.json in {data}")
    found: dict[tuple[str, str], list[Point]] = {}
    read = 0
    for path in files:
        listed = json.loads(path.read_text(encoding="utf-8"))
        read += len(listed["configurations"])
        for entry in listed["configurations"]:
            if QUANTILES[0.95] in entry:
                found.setdefault((listed["task"], entry["model_id"]), []).append(_point(listed["task"], entry))
    return [Service(task, model, tuple(points)) for (task, model), points in sorted(found.items())], read


def own_trace(service: Service) -> str:
    """The trace of its kind: code completion for code, conversation for the others."""
    return "code" if service.task in _CODE_TASKS else "conv"


def demands(data: Path, trace: str) -> np.ndarray:
    """Output tokens a second in each whole minute from the first request on, in Hz; the last, broken minute is left out."""
    path = data / "azure_llm_2023" / f"AzureLLMInferenceTrace_{trace}.csv"
    if not path.is_file():
        raise Missing(f"no {path}")
    with path.open(newline="", encoding="utf-8") as file:
        lines = [
            (datetime.fromisoformat(line["TIMESTAMP"][:26]).timestamp(), int(line["GeneratedTokens"]))
            for line in csv.DictReader(file)
        ]
    arrived_s = np.array([at_s for at_s, _ in lines]) - lines[0][0]
    minutes = (arrived_s // WINDOW_S).astype(int)
    tokens = np.bincount(minutes, weights=[float(count) for _, count in lines])
    return tokens[: math.floor(arrived_s[-1] / WINDOW_S)] / WINDOW_S
