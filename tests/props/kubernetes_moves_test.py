"""Whatever fails and whenever the mover begins anew: no ready pod fewer, no second surge, nothing left behind."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kubernetes_moves_rig import PACE, World

from eelgrid_controller.engines.kubernetes.pods.plan_annotation import MoveNote

SEEDS = st.integers(0, 2**32 - 1)


def begun(replicas, **how):
    world = World(replicas, **how)
    world.order(MoveNote(uid=world.old, pod=f"d-{world.old}", deployment="d", owner="rs", since_s=world.now_s))
    return world


def play(world, rng, *, steps=120, restarts=True, meddles=False):
    """Random things in random order."""
    acts = [(4, "control"), (3, "go"), (3, "hear"), (6, "step"), (3, "wait")]
    acts += [(1, "restart")] * restarts + [(1, "meddle")] * meddles
    for _ in range(steps):
        what = rng.choices([act for _, act in acts], [weight for weight, _ in acts])[0]
        if what == "control":
            world.control(rng)
        elif what == "go":
            world.go(rng)
        elif what == "hear":
            world.hear()
        elif what == "step":
            world.step(rng.choice(("", "", "", "busy", "lost")))
        elif what == "wait":
            world.now_s += rng.choice((0.1, 1.0, 5.0))
        elif what == "restart":
            world.restart()
        elif not world.is_meddled:
            world.meddle(rng.randint(1, world.wanted + 2))
        world.check()


@settings(max_examples=150, deadline=None)
@given(SEEDS, st.integers(1, 4))
def test_a_move_ends_with_as_many_ready_pods_as_it_began_with(seed, replicas):
    rng = random.Random(seed)
    world = begun(replicas)
    play(world, rng)
    world.settle(rng)
    world.check_end()


@settings(max_examples=100, deadline=None)
@given(SEEDS, st.integers(1, 4))
def test_a_pod_that_never_becomes_ready_goes_again_and_the_old_one_stays(seed, replicas):
    rng = random.Random(seed)
    world = begun(replicas, becomes_ready=False)
    play(world, rng)
    world.settle(rng)
    world.check_end()
    assert not world.outcome.is_done
    assert world.old in world.pods


@settings(max_examples=100, deadline=None)
@given(SEEDS, st.integers(1, 4))
def test_somebody_else_who_scales_has_the_last_word(seed, replicas):
    rng = random.Random(seed)
    world = begun(replicas)
    play(world, rng, meddles=True)
    world.settle(rng)
    world.check_end()
    if world.is_meddled:
        assert world.replicas in (world.wanted, world.wanted - 1, world.wanted + 1)


def test_without_trouble_it_is_done_in_a_few_steps():
    rng = random.Random(1)
    world = begun(3)
    world.settle(rng)
    world.check_end()
    assert world.outcome.is_done
    assert world.now_s - 1000.0 >= PACE.settle_s
