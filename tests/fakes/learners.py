"""Profiles that follow one law on two GPU models, and learners that learn in the test's own process.

Owns the law and the points. Must not know what is predicted.
"""

import math

import numpy as np

from eelgrid_controller.profiles.learning import learn_family
from eelgrid_protos.catalogue.loader import load_catalogue
from eelgrid_protos.messages import MeasuredPoint, QuantileLatency

SPEEDS = {"G2": 1.0, "G3": 1.7}
SIZES = {"a": 0.6, "b": 1.6, "c": 2.4, "llm": 1.0}
LIMITS_W = (400.0, 300.0, 250.0, 200.0, 150.0)


class LearnsHere:
    """Learns where it is called; implements the port of forecasts."""

    def __init__(self):
        self.asked = []
        self.closed = False

    def __call__(self, profiles, family):
        self.asked.append(family)
        return learn_family(profiles, family, load_catalogue())

    def close(self):
        self.closed = True


def served(profile, model, *, slower=1.0, seed=0):
    """As `build_engine_points` on a G2, and faster on a G3; each 1 % off by chance."""
    rng = np.random.default_rng([seed, *profile.encode(), *model.encode()])
    factor = slower * SIZES[profile] / SPEEDS[model]
    return [
        MeasuredPoint(
            profile=profile,
            gpu_model=model,
            batch=batch,
            throughput_hz=1000.0 * batch / factor * math.exp(rng.normal(0.0, 0.01)),
            latencies=(
                QuantileLatency(quantile=0.95, latency_s=0.01 * batch * factor * math.exp(rng.normal(0.0, 0.01))),
            ),
        )
        for batch in (1, 2, 4)
    ]


def family():
    """Three profiles on both GPU models, and one, "llm", on the other model alone."""
    known = [point for name in ("a", "b", "c") for model in SPEEDS for point in served(name, model)]
    return [*known, *served("llm", "G3")]


def trained(profile, model, *, bend=0.5, seed=0):
    """A job that slows by `bend` of what its limit falls below 300 W, and draws what it may."""
    rng = np.random.default_rng([seed, *profile.encode(), *model.encode()])
    return [
        MeasuredPoint(
            profile=profile,
            gpu_model=model,
            power_limit_w=limit_w,
            power_w=0.9 * limit_w,
            throughput_hz=10.0
            * SPEEDS[model]
            / SIZES[profile]
            * min(1.0, 1.0 - bend * (300.0 - limit_w) / 300.0)
            * math.exp(rng.normal(0.0, 0.005)),
        )
        for limit_w in LIMITS_W
    ]
