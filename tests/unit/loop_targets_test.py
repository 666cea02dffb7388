"""The autoscaler's target of each service: the least energy within the windows that may be broken."""

from itertools import product

import pytest
from bench.loop.targets import Choice, best_targets, load_targets, main, read_choices
from hypothesis import given, settings
from hypothesis import strategies as st

CHOICES = st.lists(
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 6)), min_size=2, max_size=4), min_size=1, max_size=4
)


def _named(drawn):
    return {
        f"s{at}": [Choice(50 + 5 * number, float(energy), broken) for number, (energy, broken) in enumerate(of)]
        for at, of in enumerate(drawn)
    }


@settings(deadline=None)
@given(CHOICES, st.integers(0, 20))
def test_the_choice_keeps_within_the_windows_and_wastes_little(drawn, allowed):
    choices = _named(drawn)
    chosen = best_targets(choices, allowed)
    energy, broken = sum(one.drawn_j for one in chosen.values()), sum(one.broken for one in chosen.values())
    every = [(sum(one.drawn_j for one in each), sum(one.broken for one in each)) for each in product(*choices.values())]
    fewest = min(count for _, count in every)
    if fewest > allowed:
        assert broken == fewest
        return
    assert broken <= allowed
    best = min(cost for cost, count in every if count <= allowed)
    # A price finds the best of what it leaves convex; it misses by less than the dearest service.
    assert best <= energy <= best + max(one.drawn_j for of in choices.values() for one in of)


def test_the_runs_of_all_seeds_are_added_up_and_ours_counts_by_the_day():
    lines = [
        {"policy": policy, "seed": seed, "name": "a", "drawn_j": "5.0", "idle_j": "3.0", "violated": "3"}
        for policy, seed in (
            ("ours", "1"),
            ("hpa-50", "1"),
            ("hpa-50", "2"),
            ("hpa-60", "1"),
            ("hpa-strict", "1"),
            ("static", "1"),
        )
    ]
    choices, allowed = read_choices(lines)
    assert allowed == 6
    assert choices == {"a": [Choice(50, 4.0, 6), Choice(60, 2.0, 3)]}


def test_what_was_chosen_is_a_target_for_every_service_of_a_day():
    targets = load_targets()
    assert len(targets) == 22
    assert all(0.5 <= target <= 0.85 for target in targets.values())


@pytest.mark.parametrize("arguments", [[], ["a", "b"]])
def test_without_one_file_it_is_refused(arguments, capsys):
    assert main(arguments) == 2
    assert "services.csv" in capsys.readouterr().err
