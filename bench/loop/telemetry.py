"""What is told of the world in the words of the controller: windows of metrics, and what a service promised.

Owns the translation. Must not know policies, or change what is true.
"""

import math

import numpy as np

from bench.loop.engines import BORDERS_S, Metrics
from bench.loop.scene import QUANTILE, START_S, Service
from eelgrid_controller.serving.live import Live, Window
from eelgrid_controller.serving.models import Tokens
from eelgrid_controller.serving.scaler import Limits
from eelgrid_controller.serving.sizing import Objective
from eelgrid_controller.serving.tokens import TokenDemand, curve_of
from eelgrid_controller.serving.watch import Promised

__all__ = ["promised_of", "service_window"]

_SCATTER = 0.01  # of counts: replicas are not scraped at one moment


def service_window(read: Metrics, rng: np.random.Generator) -> Window:
    """A window as a scraper makes it of two pages of vLLM."""
    scatter = 1.0 + _SCATTER * rng.standard_normal(3)
    arrived, finished, tokens = (np.array((read.arrived, read.finished, read.tokens)) * scatter / read.seconds).tolist()
    return Window(
        seconds=read.seconds,
        response=None,
        first_token=None,
        inter_token=Live((*BORDERS_S, math.inf), tuple(np.maximum.accumulate(read.below).tolist()), sum_s=read.spent_s),
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


def promised_of(service: Service) -> Promised:
    """What the service's owner states: its measured profile, its objective, how long an answer is, how many replicas."""
    usual = TokenDemand(0.0, service.engine.output_tokens)
    model = Tokens(curve_of(service.points), usual, Objective(QUANTILE, service.objective_s))
    return Promised(model, Limits(least=service.least, most=service.most, start_s=START_S[1]))
