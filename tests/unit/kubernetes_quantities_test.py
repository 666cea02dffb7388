"""Quantities of Kubernetes: its own grammar and rounding."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eelgrid_controller.engines.kubernetes.model.quantities import (
    QuantityUnreadable,
    format_cpu,
    parse_count,
    parse_cpu_milli,
    parse_nanos,
)

UNITS = {
    "n": Fraction(1, 10**9),
    "u": Fraction(1, 10**6),
    "m": Fraction(1, 1000),
    "": Fraction(1),
    "k": Fraction(1000),
    **{unit: Fraction(10) ** power for unit, power in zip("MGTPE", (6, 9, 12, 15, 18), strict=True)},
    **{f"{unit}i": Fraction(1024) ** power for power, unit in enumerate("KMGTPE", 1)},
}


@pytest.mark.parametrize(
    ("text", "count", "milli"),
    [
        ("2", 2, 2000),
        ("500m", 1, 500),
        ("0.1m", 1, 1),
        ("1.5Gi", 1610612736, 1610612736000),
        ("128974848", 128974848, 128974848000),
        ("129e6", 129000000, 129000000000),
        ("1E", 10**18, 10**21),
        ("1E3", 1000, 10**6),
        ("1e-3", 1, 1),
        (".5", 1, 500),
        ("5.", 5, 5000),
        ("+1Ki", 1024, 1024000),
        ("-1.5", -2, -1500),
        ("1000Ei", 2**63 - 1, (2**63 - 1) * 1000),
        (4, 4, 4000),
    ],
)
def test_a_quantity_is_read(text, count, milli):
    assert (parse_count(text), parse_cpu_milli(text)) == (count, milli)


@pytest.mark.parametrize("text", ["", "m", ".", "1 Gi", "1gi", "1Ki3", "1e", "0x1", "1,5", "١", "1" * 200, None, [1]])
def test_what_is_no_quantity_is_refused_by_field(text):
    with pytest.raises(QuantityUnreadable, match=r"spec\.x: .* is no quantity; write such as") as caught:
        parse_count(text, "spec.x")
    assert caught.value.field == "spec.x"


@given(
    whole=st.integers(0, 10**9),
    part=st.text("0123456789", max_size=12),
    unit=st.sampled_from(sorted(UNITS)),
    minus=st.booleans(),
)
def test_amounts_round_away_from_zero_at_the_nano(whole, part, unit, minus):
    exact = Fraction(f"{whole}.{part or '0'}") * UNITS[unit] * 10**9
    nanos = min(-(-exact.numerator // exact.denominator), (2**63 - 1) * 10**9)
    assert parse_nanos(f"{'-' if minus else ''}{whole}.{part}{unit}") == (-nanos if minus else nanos)


@given(amount=st.integers(0, 2**50))
def test_what_is_written_is_read_again(amount):
    assert parse_cpu_milli(format_cpu(amount)) == amount


def test_writing_is_short():
    assert (format_cpu(2000), format_cpu(2500), format_cpu(0)) == ("2", "2500m", "0")
