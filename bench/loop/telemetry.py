"""Translates the simulated world into the controller's events: windows of metrics, and the objectives of services.

Owns the translation. Must not know policies, or change what is true.
"""

import math

import numpy as np

from bench.loop.engines import BORDERS_S, Metrics
from bench.loop.scene import QUANTILE, START_S, Service
from eelgrid_controller.objectives.services.autoscaler import AutoscalerTarget, ScalingLimits
from eelgrid_controller.objectives.services.service_metrics import LiveDistribution, MetricsWindow
from eelgrid_controller.objectives.services.service_model import TokenDemand, TokenService, token_curve
from eelgrid_controller.profiles.queueing_model import QuantileObjective

__all__ = ["promised_of", "service_window"]

_SCATTER = 0.01  # of counts: replicas are not scraped at one moment


def service_window(read: Metrics, rng: np.random.Generator) -> MetricsWindow:
    """A window as a scraper makes it of two pages of vLLM."""
    scatter = 1.0 + _SCATTER * rng.standard_normal(3)
    arrived, finished, tokens = (np.array((read.arrived, read.finished, read.tokens)) * scatter / read.seconds).tolist()
    return MetricsWindow(
        seconds=read.seconds,
        response=None,
        first_token=None,
        inter_token=LiveDistribution(
            (*BORDERS_S, math.inf), tuple(np.maximum.accumulate(read.below).tolist()), sum_s=read.spent_s
        ),
        waiting_time=None,
        mean_response_s=None,
        arrived_hz=arrived,
        finished_hz=finished,
        waiting=read.waiting,
        waiting_growth=read.waiting - read.waiting_before,
        running=read.running,
        output_token_hz=tokens,
        context_token_hz=None,
    )


def promised_of(service: Service) -> AutoscalerTarget:
    """What the service's owner states: its measured profile, its objective, how long an answer is, how many replicas."""
    usual = TokenDemand(0.0, service.engine.output_tokens)
    model = TokenService(token_curve(service.points), usual, QuantileObjective(QUANTILE, service.objective_s))
    return AutoscalerTarget(model, ScalingLimits(least=service.least, most=service.most, start_s=START_S[1]))
