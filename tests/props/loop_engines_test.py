"""The world's engines keep what comes: nothing is served that did not come, nothing is lost."""

import numpy as np
from bench.loop.engines import Engine, Engines
from hypothesis import given, settings
from hypothesis import strategies as st

from eelgrid_controller.profiles.points import Configuration, Point

LEVELS = (0.5, 0.9, 0.95, 0.99)


@st.composite
def engines(draw):
    batches = sorted(draw(st.sets(st.integers(1, 256), min_size=2, max_size=6)))
    token_hz = p95_s = power_w = 0.0
    points = []
    for batch in batches:
        token_hz += draw(st.floats(1.0, 2000.0))
        p95_s += draw(st.floats(1e-3, 0.05))
        power_w += draw(st.floats(10.0, 300.0))
        latency = {level: share * p95_s for level, share in zip(LEVELS, (0.5, 0.8, 1.0, 1.5), strict=True)}
        points.append(Point("m", Configuration("g", batch=batch), token_hz, latency, power_w))
    slowness, length = draw(st.floats(0.5, 2.0)), draw(st.floats(1.0, 1000.0))
    return Engine(tuple(points), draw(st.floats(1e-3, 0.3)), length, 5.0, slowness, 1.0)


STEPS = st.lists(st.tuples(st.floats(0.0, 5000.0), st.integers(0, 4)), min_size=1, max_size=20)


@settings(max_examples=20, deadline=None)
@given(engines(), STEPS)
def test_requests_are_conserved(engine, steps):
    world = Engines([engine], 5.0)
    came = served = 0.0
    for asked_hz, replicas in steps:
        step = world.step(np.array([asked_hz]), np.array([float(replicas)]))
        came += 5.0 * asked_hz
        served += float(step.tokens[0])
        assert -1e-6 <= step.within[0] <= step.tokens[0] * (1.0 + 1e-9) + 1e-6
        assert 0.0 <= step.waiting[0] <= world.inside[0] * (1.0 + 1e-9) + 1e-9
        most_hz = replicas * engine.points[-1].throughput_hz / engine.slowness
        assert step.tokens[0] <= 5.0 * most_hz * (1.0 + 1e-6) + 1e-6
    assert np.isclose(came, served + world.inside[0] * engine.output_tokens, rtol=1e-6, atol=1e-6)
    read = world.metrics(0)
    assert np.isclose(read.tokens, served)
    assert np.isclose(read.below[-1], served, rtol=1e-6, atol=1e-6)


@settings(max_examples=20, deadline=None)
@given(engines(), st.floats(0.0, 3000.0), st.floats(0.0, 3000.0), st.integers(1, 6))
def test_who_is_asked_more_gives_no_less(engine, asked_hz, more_hz, replicas):
    found = []
    for hz in (asked_hz, asked_hz + more_hz):
        world = Engines([engine], 5.0)
        for _ in range(10):
            step = world.step(np.array([hz]), np.array([float(replicas)]))
        found.append(float(step.tokens[0]))
    assert found[1] >= found[0] * (1.0 - 1e-6) - 1e-6
