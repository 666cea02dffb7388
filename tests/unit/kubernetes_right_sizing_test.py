"""The size of the fewest joules that keeps the promise."""

import pytest
from tests.builders.kubernetes import A100, H100, build_measurements

from eelgrid_controller.engines.kubernetes.pods.suspended_job import (
    JobSize,
    SizeChoice,
    SizeMeasurement,
    SizeUnknown,
    SizingProblem,
    choose_size,
)

SIZES = {JobSize(1, gpus): (H100,) for gpus in (1, 2, 4, 8)}


def ask(**more):
    return choose_size(SizingProblem(**{"asked": JobSize(1, 4), "sizes": SIZES, "known": build_measurements(), **more}))


def test_without_a_promise_nothing_becomes_slower():
    answer = ask()
    assert isinstance(answer, SizeChoice)
    assert answer.size == JobSize(1, 4)
    assert "2 may become slower" in answer.why
    assert "1 would not save" in answer.why


def test_a_slowdown_frees_what_it_allows():
    # 10 Hz at 2,400 W are 240 J; 5.2 Hz at 1,080 W are 207.7 J, and 2.6 Hz at 560 W are 215.4 J.
    assert ask(slowdown_most=0.9).size == JobSize(1, 4)
    answer = ask(slowdown_most=0.93)
    assert answer.size == JobSize(1, 2)
    assert answer.ratio == pytest.approx(1080 / 5.2 / 240)
    assert answer.speed == pytest.approx(0.52)
    assert answer.energy_j[H100] == pytest.approx((240.0, 1080 / 5.2))
    assert "13 % fewer joules" in answer.why


def test_a_deadline_counts_alone_and_beside_a_slowdown():
    assert ask(need_hz=5.0).size == JobSize(1, 2)
    assert ask(need_hz=5.5).size == JobSize(1, 4)
    assert ask(need_hz=5.5, slowdown_most=9.0).size == JobSize(1, 4)
    assert ask(need_hz=1.0, slowdown_most=0.1).size == JobSize(1, 4)
    assert "may miss its deadline" in ask(need_hz=float("inf")).why


def test_a_gain_that_two_runs_differ_by_is_none():
    close = {2: (5.0, 1_185.0), 4: (10.0, 2_400.0)}
    assert ask(known=build_measurements(close), slowdown_most=9.0).size == JobSize(1, 4)
    close[2] = (5.0, 1_170.0)
    assert ask(known=build_measurements(close), slowdown_most=9.0).size == JobSize(1, 2)


def test_intervals_count_at_their_bad_ends():
    base = build_measurements({4: (10.0, 2_400.0)})
    guess = SizeMeasurement(H100, "", 2, 4.8, 5.6, 1_000.0, 1_100.0, "predicted")
    answer = ask(known=(*base, guess), slowdown_most=1.1)
    assert answer.size == JobSize(1, 2)
    assert answer.ratio == pytest.approx(1_100 / 4.8 / 240)
    assert answer.bases == ("measured", "predicted")
    assert ask(known=(*base, guess), slowdown_most=1.0).size == JobSize(1, 4)
    wide = guess._replace(power_high_w=1_200.0)
    assert ask(known=(*base, wide), slowdown_most=2.0).size == JobSize(1, 4)


def test_every_model_that_it_may_come_to_has_a_say():
    both = dict.fromkeys(SIZES, (A100, H100))
    answer = ask(sizes=both, slowdown_most=9.0)
    assert isinstance(answer, SizeUnknown)
    assert A100 in answer.why
    assert "gpu-models" in answer.remedy
    slow = build_measurements({2: (1.0, 800.0), 4: (6.0, 1_400.0)}, model=A100)
    assert ask(sizes=both, known=(*build_measurements(), *slow), slowdown_most=9.0).size == JobSize(1, 4)
    fine = build_measurements({2: (3.1, 650.0), 4: (6.0, 1_400.0)}, model=A100)
    assert ask(sizes=both, known=(*build_measurements(), *fine), slowdown_most=9.0).size == JobSize(1, 2)


def test_a_model_that_only_the_smaller_size_reaches_is_held_against_what_it_asked_for_anywhere():
    sizes = {JobSize(1, 4): (H100,), JobSize(1, 2): (A100, H100)}
    cheap = build_measurements({2: (5.1, 900.0)}, model=A100)
    assert ask(sizes=sizes, known=(*build_measurements(), *cheap), slowdown_most=1.0).size == JobSize(1, 2)
    dear = build_measurements({2: (5.1, 1_250.0)}, model=A100)
    assert ask(sizes=sizes, known=(*build_measurements(), *dear), slowdown_most=1.0).size == JobSize(1, 4)


def test_pods_of_one_run_were_measured_together_and_others_alone():
    sizes = {JobSize(2, 4): (H100,), JobSize(2, 2): (H100,), JobSize(1, 4): (H100,)}
    together = ask(asked=JobSize(2, 4), sizes=sizes, is_together=True, slowdown_most=1.0)
    # Both have four GPUs; as many pods as before is the smaller change.
    assert together.size == JobSize(2, 2)
    assert together.ratio == pytest.approx(240 / (5_000 / 17))
    apart = ask(asked=JobSize(2, 4), sizes=sizes, slowdown_most=1.0)
    assert apart.size == JobSize(2, 2)
    assert apart.ratio == pytest.approx(1080 / 5.2 / 240)


def test_a_slice_instead_of_a_gpu():
    slices = build_measurements({1: (2.5, 300.0)}, mig="2g.20gb")
    sizes = {JobSize(1, 1): (H100,), JobSize(1, 1, "2g.20gb"): (H100,), JobSize(1, 1, "1g.10gb"): (H100,)}
    answer = ask(asked=JobSize(1, 1), sizes=sizes, known=(*build_measurements(), *slices), slowdown_most=0.05)
    assert answer.size == JobSize(1, 1, "2g.20gb")


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"known": ()}, "was measured nowhere"),
        ({"known": build_measurements({4: (10.0, 0.0)})}, "was measured without watts"),
        ({"known": build_measurements({4: (10.0, 2_400.0)})}, "no other size that is allowed was measured"),
        ({"sizes": {JobSize(1, 4): ()}}, "no node"),
        ({"sizes": {JobSize(1, 4): (H100,)}}, "no other size is allowed"),
        ({"sizes": {JobSize(1, 4): ("",)}}, "no known model"),
    ],
)
def test_what_is_not_known_is_not_changed(more, why):
    answer = ask(**more)
    assert isinstance(answer, SizeUnknown)
    assert why in answer.why
    assert answer.remedy
