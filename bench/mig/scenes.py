"""New scenarios of the published kind: models, objectives and rates drawn by a seed.

Owns the draw. Must not know how they are planned. Three to eleven models; a model's
objective is 1.02 to 4 times (by equal ratios) what one of its configurations on one
slice size needs, so that every scenario can be served and many configurations
cannot be used; the work is that of 1 to 60 whole GPUs (by equal ratios), divided
among the models with weights that differ by up to e^2.
"""

import math
import random
from collections.abc import Iterator, Sequence

from bench.mig.tables import QUANTILE, SAFETY, Asked, Scenario
from eelgrid_controller.profiles.points import Point

__all__ = ["GPUS_MOST", "drawn"]

GPUS_MOST = 60
_MODELS_LEAST = 3


def drawn(points: Sequence[Point], count: int, seed: int) -> Iterator[Scenario]:
    """So many scenarios, R1, R2 ...; scenario n of a seed is the same whatever the count."""
    by_model: dict[str, list[Point]] = {}
    for point in points:
        by_model.setdefault(point.workload, []).append(point)
    for number in range(1, count + 1):
        draw = random.Random(f"{seed} {number}")
        models = sorted(draw.sample(sorted(by_model), draw.randint(min(_MODELS_LEAST, len(by_model)), len(by_model))))
        gpus = math.exp(draw.uniform(0.0, math.log(GPUS_MOST)))
        weights = {model: math.exp(draw.uniform(-1.0, 1.0)) for model in models}
        asked = []
        for model in models:
            objective_ms, whole_hz = _objective(by_model[model], draw)
            rate_hz = max(1.0, gpus * whole_hz * weights[model] / sum(weights.values()))
            asked.append(Asked(model, f"{objective_ms:.1f}", f"{rate_hz:.0f}"))
        yield Scenario(f"R{number}", tuple(asked))


def _objective(points: Sequence[Point], draw: random.Random) -> tuple[float, float]:
    """An objective in milliseconds, and what a whole GPU does under it."""
    point = draw.choice(points)
    objective_ms = 1e3 * point.latency_s[QUANTILE] / SAFETY * math.exp(draw.uniform(math.log(1.02), math.log(4.0)))
    objective_ms = math.ceil(10.0 * objective_ms) / 10.0  # as it will be spelt: never below what the point needs
    admissible = [one for one in points if 1e3 * one.latency_s[QUANTILE] < SAFETY * objective_ms]
    return objective_ms, max(one.throughput_hz for one in admissible)
