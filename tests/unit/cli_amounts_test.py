"""Amounts: what people write is read, what is read is spelled back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eelgrid_controller import formatting
from eelgrid_protos.quantities import parse_watts


@pytest.mark.parametrize(("text", "milli"), [("2.5", 2500), ("2500m", 2500), ("0", 0), ("96", 96_000), ("0.1", 100)])
def test_cpus(text, milli):
    assert formatting.parse_cpu_milli(text) == milli


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("16GiB", 16 * 2**30),
        ("16Gi", 16 * 2**30),
        ("16GB", 16 * 10**9),
        ("17179869184", 2**34),
        ("1048576", 2**20),
        ("512B", 512),
        ("0", 0),
        ("1.5 KiB", 1536),
        ("2t", None),
    ],
)
def test_memory(text, amount):
    if amount is None:
        with pytest.raises(ValueError, match="unknown unit"):
            formatting.parse_memory_bytes(text)
    else:
        assert formatting.parse_memory_bytes(text) == amount


@pytest.mark.parametrize("text", ["8", "1", "64", "8.5", " 8 ", "1048575"])
def test_bare_numbers_of_which_nobody_means_bytes(text):
    with pytest.raises(ValueError, match=f"write {text.strip()}GiB"):
        formatting.parse_memory_bytes(text)


@pytest.mark.parametrize(
    ("text", "power_w"),
    [("100W", 100.0), ("100kW", 1e5), ("1.3MW", 1.3e6), ("0.5 kW", 500.0), (" 20.5kW ", 20_500.0), ("0W", 0.0)],
)
def test_watts_have_a_unit(text, power_w):
    assert parse_watts(text) == power_w


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("100", "write 100W or 100kW"),
        ("5.6", "write 5.6W or 5.6kW"),
        ("20k", "write 20kW$"),
        ("20KW", "write for example"),
        ("-1W", "write for example"),
        ("", "write for example"),
        ("1e3W", "write for example"),
        ("100mW", "write for example"),
    ],
)
def test_what_is_no_amount_of_power(text, remedy):
    with pytest.raises(ValueError, match=remedy):
        parse_watts(text)


@pytest.mark.parametrize(("text", "milli"), [("0.5", 500), ("50%", 500), ("1", 1000), ("0.001", 1), ("100%", 1000)])
def test_shares(text, milli):
    assert formatting.parse_gpu_milli(text) == milli


@pytest.mark.parametrize("text", ["0", "1.1", "-0.5", "half", "500m", "", "nan", "1e3", "0.5GiB"])
def test_what_is_no_share(text):
    with pytest.raises(ValueError, match="share of a GPU"):
        formatting.parse_gpu_milli(text)


@pytest.mark.parametrize("read", [formatting.parse_cpu_milli, formatting.parse_memory_bytes])
@pytest.mark.parametrize("text", ["", "-1", "nan", "inf", "1e9", "x", "1x", "1,5", "9" * 19])
def test_what_is_no_amount(read, text):
    with pytest.raises(ValueError, match="write"):
        read(text)


@given(st.integers(0, 999_999))
def test_cpus_round_trip(milli):
    assert formatting.parse_cpu_milli(formatting.format_cpu(milli)) == milli


@given(st.integers(0, 2**50))
def test_memory_comes_back_within_its_four_digits(amount):
    assert formatting.parse_memory_bytes(formatting.format_memory(amount)) == pytest.approx(amount, rel=5e-4, abs=1.0)


@pytest.mark.parametrize(
    ("power_w", "text"),
    [(None, "-"), (0.0, "0.0 W"), (83.25, "83.2 W"), (2040.0, "2,040 W"), (54_210.0, "54.2 kW"), (2.5e7, "25.0 MW")],
)
def test_watts(power_w, text):
    assert formatting.format_power(power_w) == text


def test_a_missing_reading_is_a_dash():
    assert formatting.format_percent(1, 0) == "-"
    assert formatting.format_milliseconds(None) == "-"
    assert formatting.format_milliseconds(0.00123) == "1.23 ms"
