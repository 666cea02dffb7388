"""Whoever leads after whom, with which journal, and in whichever order all arrives: no device twice, nobody stuck."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.takeover_rig import Takeovers

STEPS = st.lists(st.integers(0, 2**32 - 1), min_size=20, max_size=120)


def plays(seeds, *, has_agents):
    story = Takeovers(has_agents=has_agents)
    for seed in seeds:
        story.step(seed)
    story.ended_well()


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_no_device_is_given_twice_and_every_pod_that_fits_is_bound(seeds):
    plays(seeds, has_agents=False)


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_so_it_is_where_agents_connect_at_any_time_and_say_what_was_really_given(seeds):
    plays(seeds, has_agents=True)


@pytest.mark.parametrize("seed", range(10))
def test_long_courses(seed):
    rng = random.Random(seed)
    plays([rng.getrandbits(32) for _ in range(400)], has_agents=seed % 2 == 1)
