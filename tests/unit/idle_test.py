"""Idle power: what is learnt of it, when, and what is assumed before."""

import pytest

from eelgrid_agent.energy.attributor import CONTEXT_STEP_W_MOST, IdlePowerModel, build_idle_prior
from eelgrid_agent.energy.shares import ShareConfidence
from eelgrid_agent.energy.split import IdlePower
from eelgrid_protos.catalogue.loader import load_catalogue

H100 = load_catalogue().products["h100-sxm5-80gb"]


def learn(model, power_w, *, contexts, busy=False, times=1, seconds=5.0):
    for _ in range(times):
        model.observe(power_w=power_w, seconds=seconds, contexts=contexts, busy=busy, mig_enabled=False)


def test_idle_power_is_the_lowest_seen_with_no_context_and_never_learnt_under_load():
    model = IdlePowerModel()
    prior = model.estimate_idle(H100, mig_enabled=False)
    assert (prior.bare_w, prior.context_w) == (H100.idle_w, 38.0)
    learn(model, 40.0, contexts=True, busy=True, times=20)
    learn(model, 40.0, contexts=None, times=20)
    learn(model, 40.0, contexts=False, busy=None, times=20)
    learn(model, 40.0, contexts=False, busy=True, times=20)
    assert model.estimate_idle(H100, mig_enabled=False) == prior
    # In the first seconds of quiet clocks still fall.
    learn(model, 110.0, contexts=False, times=2)
    assert model.estimate_idle(H100, mig_enabled=False) == prior
    learn(model, 72.0, contexts=False, times=3)
    learn(model, 75.0, contexts=False, times=3)
    assert model.estimate_idle(H100, mig_enabled=False).bare_w == 72.0
    learn(model, 101.0, contexts=True, times=5)
    learned = model.estimate_idle(H100, mig_enabled=False)
    assert (learned.context_w, learned.confidence) == (29.0, ShareConfidence.HIGH)
    # The other mode was never seen.
    assert model.estimate_idle(H100, mig_enabled=True) == build_idle_prior(H100, mig_enabled=True)


def test_priors_are_only_what_was_published():
    products = load_catalogue().products
    assert build_idle_prior(products["l40s"], mig_enabled=False).context_w == 66.0
    assert build_idle_prior(products["a10"], mig_enabled=False).context_w == 0.0
    assert build_idle_prior(products["a100-sxm4-40gb"], mig_enabled=True).bare_w == 66.9
    assert build_idle_prior(None, mig_enabled=False) == IdlePower(
        bare_w=0.0, context_w=0.0, confidence=ShareConfidence.LOW
    )


def test_mig_has_idle_power_of_its_own():
    model = IdlePowerModel()
    for _ in range(5):
        model.observe(power_w=64.0, seconds=5.0, contexts=False, busy=False, mig_enabled=True)
    assert model.estimate_idle(H100, mig_enabled=True).bare_w == 64.0
    assert model.estimate_idle(H100, mig_enabled=False).bare_w == H100.idle_w


def test_a_context_step_is_bounded_and_never_below_zero():
    model = IdlePowerModel()
    learn(model, 70.0, contexts=False, times=5)
    learn(model, 400.0, contexts=True, times=5)
    assert model.estimate_idle(H100, mig_enabled=False).context_w == CONTEXT_STEP_W_MOST
    learn(model, 65.0, contexts=True, times=5)
    assert model.estimate_idle(H100, mig_enabled=False).context_w == 0.0


@pytest.mark.parametrize(("power_w", "seconds"), [(0.5, 5.0), (70.0, 0.5)])
def test_what_no_board_draws_and_what_is_too_short_teaches_nothing(power_w, seconds):
    model = IdlePowerModel()
    learn(model, power_w, contexts=False, times=50, seconds=seconds)
    assert model.estimate_idle(H100, mig_enabled=False) == build_idle_prior(H100, mig_enabled=False)
