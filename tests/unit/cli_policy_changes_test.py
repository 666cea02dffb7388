"""eelctl policy set: what differs, names that no node has, watts without a unit, budgets below the draw."""

import json
from dataclasses import replace

import pytest
from tests.fakes.operators import a_node

from eelgrid_controller.cli import confirmation
from eelgrid_controller.cli import policy_changes as changes
from eelgrid_protos.messages import BudgetScope, EnergyPrices, Policy, PowerBudget, PricePeriod


@pytest.fixture
def racks(fake):
    """Two nodes, of which one names no pool."""
    one, other = a_node("n1"), a_node("n2")
    fake.nodes[:] = [
        replace(one, inventory=replace(one.inventory, pool="batch", topology=("z1", "r1"))),
        replace(other, inventory=replace(other.inventory, pool="", topology=("z1", "r2"))),
    ]
    return fake


def test_every_setting_that_changes_is_a_line_of_old_and_new(eelctl, racks):
    said = eelctl(
        "policy", "set", "--objective", "energy", "--pool-mode", "batch=enforce", "--budget", "rack:r1=20kW", "--yes"
    ).stdout
    assert "objective: balanced -> energy\n" in said
    assert "weight scarcity_w: 500 -> 0\n" in said
    assert "pool batch: not set -> enforce\n" in said
    assert "budget rack r1: not set -> 20,000 W\n" in said
    assert "lease:" not in said
    said = eelctl("policy", "set", "--budget", "rack:r1=none", "--lease", "90", "--pool-mode", "batch=observe").stdout
    assert "budget rack r1: 20,000 W -> not set\n" in said
    assert "lease: 60 s -> 90 s\n" in said
    assert "pool batch: enforce -> observe\n" in said
    assert "no setting changes\n" in eelctl("policy", "set", "--lease", "90").stdout


def test_a_dry_run_says_what_would_differ_and_changes_nothing(eelctl, racks):
    before = racks.policy
    said = eelctl("policy", "set", "--budget", "cluster=1.5MW", "--lease", "90", "--dry-run").stdout
    assert said.splitlines() == [
        "dry run: nothing was changed",
        "lease: 60 s -> 90 s",
        "budget cluster: not set -> 1,500,000 W",
    ]
    plain = json.loads(eelctl("policy", "set", "--lease", "90", "--dry-run", "-o", "json").stdout)
    assert plain["lease_s"] == 90.0
    assert racks.policy is before
    assert "update_policy" not in racks.calls


def test_prices_that_differ_in_single_periods_are_a_change():
    def prices(*amounts):
        periods = tuple(PricePeriod(begins_minute=60 * n, price_per_kwh=one) for n, one in enumerate(amounts))
        return EnergyPrices(currency="EUR", periods=periods)

    before = Policy(prices=prices(0.1, 0.2, 0.3))
    (line,) = changes.policy_changes(before, replace(before, prices=prices(0.1, 0.25, 0.3)))
    assert line.startswith("prices: other times")
    (line,) = changes.policy_changes(before, replace(before, prices=None))
    assert line.endswith("-> not set")


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("--pool-mode", "bacth=enforce"), "pool bacth: no node has it; did you mean batch?"),
        (("--partition", "gpu=on"), "pool gpu: no node has it; there are batch, default"),
        (("--budget", "rack:r3=20kW"), "rack r3: no node has it; there are r1, r2, z1"),
        (("--budget", "node:elsewhere=5kW"), "node elsewhere: no node has it; there are n1, n2"),
    ],
)
def test_what_no_node_has_is_refused_unless_it_is_declared_ahead(eelctl, racks, words, hint):
    before = racks.policy
    refused = eelctl("policy", "set", *words, code=4).stderr
    assert hint in refused
    assert "--ahead" in refused
    assert racks.policy is before
    eelctl("policy", "set", *words, "--ahead")
    assert racks.policy is not before
    # What the policy names already is changed and removed without a word.
    eelctl("policy", "set", *(word.replace("20kW", "none").replace("5kW", "none") for word in words))


def test_the_default_pool_is_known_and_names_before_any_node_are_a_warning(eelctl, racks):
    changed = eelctl("policy", "set", "--pool-mode", "default=enforce", "--yes").stdout
    assert "pool default: not set -> enforce" in changed
    racks.nodes.clear()
    warned = eelctl("policy", "set", "--pool-mode", "new=enforce")
    assert "warning: no node has joined yet" in warned.stderr
    assert "pool new" in warned.stderr


def test_a_pool_is_enforced_after_a_question(eelctl, racks):
    before = racks.policy
    command = ("policy", "set", "--pool-mode", "batch=enforce")
    effect = "pool batch: power limits and MIG layouts are set on the"
    refused = eelctl(*command, code=5).stderr
    assert "Enforcing 1 pool needs a confirmation" in refused
    assert effect in refused
    assert " of n1; " in refused or refused.rstrip().splitlines()[0].endswith(" of n1")
    tried = eelctl(*command, "--dry-run")
    assert effect in tried.stderr
    assert racks.policy is before
    eelctl(*command, "--yes")
    assert racks.policy is not before
    # It is enforced already: nothing to ask.
    eelctl(*command, "--lease", "45")
    assert racks.policy.lease_s == 45.0


@pytest.mark.parametrize(
    ("amount", "remedy"),
    [
        ("100", "has no unit: write 100W or 100kW"),
        ("0.5", "has no unit: write 0.5W or 0.5kW"),
        ("100k", "has no unit: write 100kW"),
        ("much", "write for example 5600W, 20kW or 1.3MW"),
        ("5kVA", "write for example 5600W, 20kW or 1.3MW"),
    ],
)
def test_watts_need_a_unit(eelctl, fake, amount, remedy):
    assert remedy in " ".join(eelctl("policy", "set", "--budget", f"cluster={amount}", code=2).stderr.split())
    assert remedy in " ".join(eelctl("promises", "--budget", f"cluster={amount}", code=2).stderr.split())
    words = ("profile", "predict", "chat", "--gpu", "T4", "--limit", amount)
    assert remedy in " ".join(eelctl(*words, code=2).stderr.split())
    assert fake.policy.budgets == ()


def test_a_budget_below_the_draw_needs_yes(eelctl, fake):
    fake.promised.drawn_w = 600.0
    refused = eelctl("policy", "set", "--budget", "cluster=400W", code=5).stderr
    assert "budget cluster: 400.0 W is below the 600.0 W that its GPUs draw now" in refused
    assert "add --yes" in refused
    assert fake.policy.budgets == ()
    shown = eelctl("policy", "set", "--budget", "cluster=400W", "--dry-run")
    assert "below the 600.0 W" in shown.stderr
    assert fake.policy.budgets == ()
    assert "below the 600.0 W" in eelctl("policy", "set", "--budget", "cluster=400W", "--yes").stderr
    assert fake.policy.budgets == (PowerBudget(scope=BudgetScope.CLUSTER, limit_w=400.0),)
    # Raised it may be, though still below; and what else is changed asks nothing.
    assert "below" not in eelctl("policy", "set", "--budget", "cluster=500W").stderr
    assert "below" not in eelctl("policy", "set", "--lease", "60").stderr
    eelctl("policy", "set", "--budget", "cluster=450W", code=5)
    fake.promised.drawn_w = None  # of what is not read nothing can be said
    eelctl("policy", "set", "--budget", "cluster=100W")


@pytest.mark.parametrize(("answer", "limits_w"), [("y\n", [400.0]), ("n\n", []), ("\n", [])])
def test_a_terminal_asks(eelctl, fake, monkeypatch, answer, limits_w):
    fake.promised.drawn_w = 600.0
    monkeypatch.setattr(confirmation, "is_interactive", lambda: True)
    said = eelctl("policy", "set", "--budget", "cluster=400W", input=answer, code=0 if limits_w else 5)
    assert "Setting 1 budget below what the GPUs draw now? [y/N]" in said.stderr
    assert [one.limit_w for one in fake.policy.budgets] == limits_w
