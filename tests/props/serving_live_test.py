"""What must hold of every page and every window; and of what a correction makes of them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eelgrid_controller.serving.correction import (
    BOUND,
    HALF_LIFE_S,
    PRIOR_ERROR,
    Correction,
    factor,
    is_at_bound,
    learned,
)
from eelgrid_controller.serving.exposition import parse
from eelgrid_controller.serving.live import Live, LiveQuantile, Pair, window
from eelgrid_controller.serving.metric_names import generic

NAMES = st.from_regex(r"[a-zA-Z_:][a-zA-Z0-9_:]{0,12}", fullmatch=True)
LABELS = st.dictionaries(
    st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_]{0,8}", fullmatch=True),
    st.text(
        st.characters(blacklist_categories=("Cs",), blacklist_characters="\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"),
        max_size=12,
    ),
    max_size=3,
)
VALUES = st.floats(allow_nan=False) | st.integers(-(10**9), 10**9).map(float)


def _escaped(text):
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


@given(st.lists(st.tuples(NAMES, LABELS, VALUES), max_size=12))
def test_what_is_written_is_read(samples):
    lines = []
    for name, labels, value in samples:
        inside = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
        shown = {math.inf: "+Inf", -math.inf: "-Inf"}.get(value, repr(value))
        lines.append(f"{name}{{{inside}}} {shown}" if labels else f"{name} {shown}")
    page = parse("\n".join(lines), 0.0)
    found = sorted((s.name, s.labels, s.value) for each in page.samples.values() for s in each)
    assert found == sorted((name, tuple(sorted(labels.items())), value) for name, labels, value in samples)


BUCKETS = st.lists(st.integers(0, 50), min_size=3, max_size=6)


def _page(gains, at_s):
    total, lines = 0, []
    for number, gain in enumerate(gains):
        total += gain
        border = "+Inf" if number == len(gains) - 1 else f"{0.1 * 2**number:g}"
        lines.append(f'h_bucket{{le="{border}"}} {total}')
    return parse("\n".join([*lines, f"h_count {total}"]), at_s)


@given(BUCKETS, st.data())
def test_a_window_holds_what_was_added(before, data):
    added = data.draw(st.lists(st.integers(0, 50), min_size=len(before), max_size=len(before)))
    after = [one + more for one, more in zip(before, added, strict=True)]
    found = window(generic("h"), [Pair(_page(before, 0.0), _page(after, 2.0))])
    assert found.finished_hz == pytest.approx(sum(added) / 2.0)
    assert found.response.count == sum(added)
    rising = [sum(added[: n + 1]) for n in range(len(added))]
    assert list(found.response.counts) == rising


@given(BUCKETS, st.sampled_from([0.5, 0.9, 0.95]))
def test_a_quantile_lies_in_the_bucket_of_its_rank(gains, level):
    borders = (*(0.1 * 2**n for n in range(len(gains) - 1)), math.inf)
    counts = tuple(float(sum(gains[: n + 1])) for n in range(len(gains)))
    found = Live(borders, counts).quantile(level)
    if counts[-1] < max(20, 1 / (1 - level)):
        assert found is None
        return
    at = next(n for n, count in enumerate(counts) if count >= level * counts[-1])
    assert (borders[at - 1] if at else 0.0) <= found.value_s <= borders[at]
    assert found.is_least == (at == len(borders) - 1)


@given(st.lists(st.integers(0, 60), min_size=4, max_size=4).filter(lambda gains: sum(gains[:-1]) > 40))
def test_quantiles_rise_with_their_level(gains):
    counts = tuple(float(sum(gains[: n + 1])) for n in range(4))
    live = Live((0.1, 0.2, 0.4, math.inf), counts)
    found = [live.quantile(level) for level in (0.5, 0.7, 0.9, 0.95)]
    values = [one.value_s for one in found if one is not None]
    assert values == sorted(values)


LIVE = st.builds(
    LiveQuantile,
    value_s=st.floats(1e-4, 1e4),
    of=st.floats(20.0, 1e6) | st.just(math.inf),
    resolution=st.floats(0.0, 0.5),
    is_least=st.booleans(),
)
STEPS = st.lists(st.tuples(LIVE | st.none(), st.floats(1e-3, 100.0), st.floats(0.1, 300.0)), max_size=30)


@given(STEPS, st.sampled_from([0.5, 0.9, 0.95, 0.99]))
def test_a_correction_is_bounded_and_fades(steps, quantile):
    known, now_s = Correction(), 0.0
    for live, model_s, gap_s in steps:
        now_s += gap_s
        known = learned(known, live, model_s, quantile=quantile, at_s=now_s)
        found = factor(known, now_s)
        assert 1.0 / BOUND <= found.value <= BOUND * (1 + 1e-12)
        assert 0.0 <= found.error <= 1.0
    soon, later, never = (factor(known, now_s + gap_s) for gap_s in (0.0, HALF_LIFE_S, 100 * HALF_LIFE_S))
    assert math.log(later.value) == pytest.approx(
        math.log(soon.value)
        * 0.5 ** ((now_s + HALF_LIFE_S - known.at_s) / HALF_LIFE_S)
        / 0.5 ** ((now_s - known.at_s) / HALF_LIFE_S),
        abs=1e-9,
    )
    assert never.value == pytest.approx(1.0)
    assert never.error == pytest.approx(PRIOR_ERROR)


@given(st.floats(0.3, 3.5), st.sampled_from([0.5, 0.95, 0.99]))
def test_a_service_that_is_always_off_by_the_same_is_learned(ratio, quantile):
    known = Correction()
    for number in range(40):
        live = LiveQuantile(0.2 * ratio, 1e5, 0.0)
        known = learned(known, live, 0.2, quantile=quantile, at_s=10.0 * number)
    found = factor(known, 390.0)
    assert found.value == pytest.approx(ratio, rel=0.05)
    assert found.error < PRIOR_ERROR
    assert found.value * (1.0 + found.error) >= ratio * 0.999
    assert not is_at_bound(known)


@given(st.floats(0.01, 10.0))
def test_an_open_bucket_only_raises(value_s):
    before = learned(Correction(), LiveQuantile(0.3, 1e5, 0.0), 0.2, quantile=0.95, at_s=1.0)
    after = learned(before, LiveQuantile(value_s, 1e5, 0.0, is_least=True), 0.2, quantile=0.95, at_s=1.0)
    assert factor(after, 1.0).value >= factor(before, 1.0).value


def test_nothing_is_learned_from_nothing():
    known = Correction()
    assert learned(known, None, 1.0, quantile=0.5, at_s=5.0) is known
    assert learned(known, LiveQuantile(0.1, 50, 0.0), math.inf, quantile=0.5, at_s=5.0) is known
    assert learned(known, LiveQuantile(0.0, 50, 0.0), 1.0, quantile=0.5, at_s=5.0) is known


def test_few_and_coarse_samples_move_it_less():
    sure = learned(Correction(), LiveQuantile(0.4, 1e5, 0.0), 0.2, quantile=0.95, at_s=1.0)
    few = learned(Correction(), LiveQuantile(0.4, 40.0, 0.0), 0.2, quantile=0.95, at_s=1.0)
    coarse = learned(Correction(), LiveQuantile(0.4, 1e5, 0.5), 0.2, quantile=0.95, at_s=1.0)
    assert sure.log_factor > few.log_factor > 0.0
    assert sure.log_factor > coarse.log_factor > 0.0
    far = Correction()
    for number in range(60):
        far = learned(far, LiveQuantile(50.0, 1e6, 0.0), 0.2, quantile=0.95, at_s=float(number))
    assert is_at_bound(far)
