"""The loop closed on a simulated service that speaks Prometheus: promise kept, no swinging, overload seen."""

import bisect
import heapq
import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from tests.builders.objectives import build_metrics_window

from eelgrid_controller.objectives.services.autoscaler import (
    AutoscalerTarget,
    ScalerPhase,
    ScalingLimits,
    on_ready_replicas,
    on_tick,
    on_window,
    start_autoscaler,
)
from eelgrid_controller.objectives.services.service_metrics import (
    LiveDistribution,
    ScrapePair,
    parse_exposition,
    server_metric_names,
    service_window,
)
from eelgrid_controller.objectives.services.service_model import (
    RequestService,
    TokenCurve,
    TokenDemand,
    TokenService,
)
from eelgrid_controller.profiles.queueing_model import QuantileObjective, ServiceStation, SlownessFactor

WINDOW_S = 30.0
BORDERS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 2.0, 5.0, 20.0)


class Service:
    """Servers behind one queue; a replica is two of them. What it tells, it tells as vLLM does."""

    def __init__(self, service_s, replicas, seed=1):
        self.rng = np.random.default_rng(seed)
        self.service_s, self.replicas, self.now_s = service_s, replicas, 0.0
        self.free = [0.0] * (2 * replicas)
        self.ends, self.starts, self.counts, self.finished, self.took = [], [], [0] * (len(BORDERS) + 1), 0, []

    def resize(self, replicas):
        while len(self.free) < 2 * replicas:
            heapq.heappush(self.free, self.now_s)
        while len(self.free) > 2 * replicas:
            heapq.heappop(self.free)
        self.replicas = replicas

    def run(self, rate_hz, seconds):
        until_s, at_s = self.now_s + seconds, self.now_s
        while (at_s := at_s + self.rng.exponential(1.0 / rate_hz)) < until_s:
            start_s = max(at_s, heapq.heappop(self.free))
            end_s = start_s + self.rng.gamma(4.0, self.service_s / 4.0)
            heapq.heappush(self.free, end_s)
            self.starts.append(start_s)
            self.ends.append((end_s, end_s - at_s))
        self.now_s = until_s
        for _, took_s in (done := [one for one in self.ends if one[0] <= until_s]):
            self.counts[bisect.bisect_left(BORDERS, took_s)] += 1
            self.took.append(took_s)
        self.finished += len(done)
        self.ends = [one for one in self.ends if one[0] > until_s]
        self.starts = [start_s for start_s in self.starts if start_s > until_s]

    def page(self):
        running = np.cumsum(self.counts)
        name = "vllm:e2e_request_latency_seconds"
        lines = [f'{name}_bucket{{le="{le}"}} {count}' for le, count in zip((*BORDERS, "+Inf"), running, strict=True)]
        waiting = len(self.starts)
        return "\n".join(
            [
                *lines,
                f"vllm:request_success_total {self.finished}",
                f"vllm:num_requests_waiting {waiting}",
                f"vllm:num_requests_running {len(self.ends) - waiting}",
            ]
        )


def _promised(**limits):
    replica = ServiceStation(servers=2, service_s=0.1, service_cv2=0.25)
    return AutoscalerTarget(
        RequestService(replica, QuantileObjective(0.95, 0.6)),
        ScalingLimits(start_s=30.0, hold_s=120.0, cool_s=30.0, **limits),
    )


def play(promised, service, rates):
    """One window a rate; a replica that is asked for serves a window later."""
    watch = start_autoscaler(promised, service.replicas)
    before = parse_exposition(service.page(), service.now_s)
    course = []
    for rate_hz in rates:
        service.took.clear()
        service.run(rate_hz, WINDOW_S)
        after = parse_exposition(service.page(), service.now_s)
        watch, advice = on_window(
            promised, watch, service_window(server_metric_names("vllm"), [ScrapePair(before, after)]), service.now_s
        )
        p95_s = float(np.quantile(service.took, 0.95)) if service.took else None
        course.append((service.replicas, p95_s, advice))
        service.resize(advice.decision.replicas)
        watch = on_ready_replicas(promised, watch, service.replicas, service.now_s)
        before = after
    return watch, course


def test_the_promise_is_kept_through_a_rise_and_a_fall():
    rates = [60.0] * 12 + [240.0] * 20 + [60.0] * 30
    _, course = play(_promised(), Service(0.1, 5), rates)
    kept = [p95_s <= 0.6 for _, p95_s, _ in course]
    assert all(kept[:12])
    assert all(kept[15:])  # three windows after the step all is well
    replicas = [count for count, _, _ in course]
    assert max(replicas) <= 2.2 * 240.0 / 20.0
    settled = replicas[-8:]
    assert len(set(settled)) == 1
    assert settled[0] < replicas[25]


def test_a_slower_service_than_its_profile_is_learned_and_given_more():
    """It takes twice as long as was measured: the model alone would leave it overloaded."""
    watch, course = play(_promised(), Service(0.2, 8), [100.0] * 40)
    assert all(p95_s <= 0.6 for _, p95_s, _ in course[20:])
    assert watch.correction.samples > 5
    assert watch.correction.log_factor > 0.2
    assert len({count for count, _, _ in course[-10:]}) <= 2
    assert course[-1][0] >= 100.0 * 0.2 / 2.0


def test_overload_is_seen_while_the_output_stands_still():
    """All servers busy: the output is what they give, the queue grows, and more are asked for at once."""
    watch, course = play(_promised(), Service(0.1, 2), [100.0] * 3)
    assert course[0][2].decision.replicas > 2
    assert "wait" in course[0][2].decision.reason
    assert watch.state.target * 20.0 > 100.0


def test_a_page_without_arrivals_takes_nothing_away():
    promised = _promised()
    watch = start_autoscaler(promised, 6)
    empty = service_window(
        server_metric_names("vllm"), [ScrapePair(parse_exposition("up 1", 0.0), parse_exposition("up 1", 30.0))]
    )
    after, advice = on_window(promised, watch, empty, 30.0)
    assert after == watch
    assert advice.decision.replicas == 6
    assert "no arrivals" in advice.decision.reason


def test_blind_it_keeps_what_there_is():
    promised, service = _promised(), Service(0.1, 5)
    watch, _ = play(promised, service, [60.0] * 3)
    later, advice = on_tick(promised, watch, service.now_s + 600.0)
    assert later.state.phase is ScalerPhase.BLIND
    assert advice.decision.replicas == watch.state.target


def test_what_no_number_keeps_asks_for_what_helps():
    """A request alone takes longer than the promise: more replicas than do away with the wait are of no use."""
    model = RequestService(ServiceStation(servers=2, service_s=1.0, service_cv2=0.25), QuantileObjective(0.95, 0.5))
    promised = AutoscalerTarget(model, ScalingLimits(most=50))
    _, course = play(promised, Service(1.0, 6), [6.0] * 30)
    assert all(p95_s > 0.5 for _, p95_s, _ in course)
    last = [count for count, _, _ in course[-5:]]
    assert len(set(last)) == 1
    assert 4 <= last[0] <= 12
    few = AutoscalerTarget(model, ScalingLimits(most=2))
    assert play(few, Service(1.0, 1), [6.0] * 4)[1][-1][2].decision.replicas == 2
    nothing = AutoscalerTarget(model, ScalingLimits(least=0, most=0))
    assert play(nothing, Service(1.0, 0), [])[0].state.target == 0


@pytest.mark.parametrize("seed", [2, 3])
def test_steady_traffic_does_not_swing(seed):
    _, course = play(_promised(), Service(0.1, 8, seed), [120.0] * 40)
    replicas = [count for count, _, _ in course[10:]]
    changes = [b - a for a, b in pairwise(replicas) if a != b]
    assert len(changes) <= 3
    assert max(replicas) - min(replicas) <= 2


CURVE = TokenCurve((8.0, 32.0, 128.0), (800.0, 2000.0, 4000.0), {0.95: (0.012, 0.02, 0.04)})
USUAL = TokenDemand(request_hz=0.0, output_tokens=100.0)


def _engine(asked_hz, replicas, slow, seconds, counts, waiting, finished):
    """A page of an engine whose curve is `slow` times that of the profile; returns it and the new counts."""
    given_hz = min(asked_hz, replicas * CURVE.token_hz[-1] / slow)
    itl_s = slow * float(np.interp(given_hz / replicas * slow, CURVE.token_hz, CURVE.inter_token_s[0.95]))
    borders = [0.005 * 1.1**n for n in range(60)]
    at = bisect.bisect_left(borders, itl_s)
    tokens = given_hz * seconds
    gained = list(counts)
    gained[max(0, at - 6)] += 0.9 * tokens  # all but a tenth well below
    gained[at] += 0.1 * tokens  # so that p95 lies in the bucket of the curve's p95
    waiting += (asked_hz - given_hz) * seconds / 100.0
    finished += tokens / 100.0
    running = np.cumsum(gained)
    name = "vllm:inter_token_latency_seconds"
    lines = [
        f'{name}_bucket{{le="{le}"}} {n}' for le, n in zip([*borders, "+Inf"], [*running, running[-1]], strict=True)
    ]
    lines += [
        f"vllm:request_success_total {finished}",
        f"vllm:num_requests_waiting {waiting}",
        f"vllm:num_requests_running {10 * replicas}",
        f"vllm:generation_tokens_total {running[-1]}",
    ]
    return "\n".join(lines), gained, waiting, finished, itl_s


@pytest.mark.parametrize("slow", [1.0, 1.6])
def test_tokens_are_watched_by_their_latency(slow):
    """The engines' curve is what was measured, or slower; the instances that follow keep the objective."""
    model = TokenService(CURVE, USUAL, QuantileObjective(0.95, 0.035))
    promised = AutoscalerTarget(model, ScalingLimits(start_s=30.0, hold_s=120.0, cool_s=30.0))
    watch, replicas, counts, waiting, finished = start_autoscaler(promised, 4), 4, [0.0] * 60, 0.0, 0.0
    page, *_ = _engine(0.0, replicas, slow, 0.0, counts, 0.0, 0.0)
    before, course = parse_exposition(page, 0.0), []
    for number in range(1, 41):
        page, counts, waiting, finished, itl_s = _engine(
            12_000.0, replicas, slow, WINDOW_S, counts, max(0.0, waiting - 500.0), finished
        )
        after = parse_exposition(page, number * WINDOW_S)
        watch, advice = on_window(
            promised, watch, service_window(server_metric_names("vllm"), [ScrapePair(before, after)]), number * WINDOW_S
        )
        replicas, before = advice.decision.replicas, after
        watch = on_ready_replicas(promised, watch, replicas, number * WINDOW_S)
        course.append((replicas, itl_s))
    assert all(itl_s <= 0.035 for _, itl_s in course[15:])
    assert len({count for count, _ in course[-10:]}) == 1
    assert math.exp(watch.correction.log_factor) == pytest.approx(slow, rel=0.15)
    # What the objective needs, and no more than half as much again for the uncertainty.
    keeps_hz = float(np.interp(0.035 / slow, CURVE.inter_token_s[0.95], CURVE.token_hz)) / slow
    assert 12_000.0 / keeps_hz <= course[-1][0] <= 1.8 * 12_000.0 / keeps_hz + 1


def test_tokens_that_no_instance_gives_in_time():
    hopeless = TokenService(CURVE, USUAL, QuantileObjective(0.95, 0.005))
    assert hopeless.is_hopeless(SlownessFactor(1.0, 0.1))
    assert (
        hopeless.needed_replicas(40.0, SlownessFactor(1.0, 0.0), 64) == 5
    )  # as few sequences at once as were measured
    assert hopeless.needed_replicas(40.0, SlownessFactor(1.0, 0.0), 3) == 3
    assert hopeless.needed_replicas(40.0, SlownessFactor(1.0, 0.0), 0) == 0
    fine = TokenService(CURVE, USUAL, QuantileObjective(0.95, 0.03))
    assert not fine.is_hopeless(SlownessFactor(1.0, 0.1))
    assert fine.needed_replicas(1e6, SlownessFactor(1.0, 0.0), 64) == 64
    assert fine.concurrent_requests(3) == 384


def test_a_promise_that_takes_more_than_there_may_be_gets_all_of_them():
    service = TokenService(CURVE, USUAL, QuantileObjective(0.95, 0.03))
    for known in (SlownessFactor(1.0, 0.0), SlownessFactor(1.2, 0.1)):
        needed = [service.needed_replicas(rate_hz, known, 10) for rate_hz in np.geomspace(1.0, 1e4, 60)]
        assert needed == sorted(needed)
        assert (needed[0], needed[-1]) == (1, 10)


def test_the_first_token_is_promised_too():
    both = TokenService(CURVE, USUAL, QuantileObjective(0.95, 0.05), QuantileObjective(0.95, 0.2))
    late = LiveDistribution((0.1, 0.2, 0.4, math.inf), (0.0, 0.0, 100.0, 100.0))
    fast = LiveDistribution((0.01, math.inf), (100.0, 100.0))
    seen = build_metrics_window(
        first_token=late, inter_token=fast, running=1.0, output_token_hz=100.0, context_token_hz=100.0
    )
    assert both.is_late(seen)
    assert not both.is_late(replace(seen, first_token=fast))
    assert not replace(both, watched_first=None).is_late(seen)
