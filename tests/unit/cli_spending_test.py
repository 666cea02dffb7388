"""eelctl about spending limits: how they are written, shown, changed and taken away, and what is spent of them."""

import json
import re

import pytest
import yaml
from tests.builders.cluster import build_spending_limit

from eelgrid_protos.messages import (
    EnforcementMode,
    ListSpendingResponse,
    SpendingPeriod,
    SpendingQuantity,
    SpendingScope,
    SpendingStatus,
)

NS = 10**9
# 1 November 2026, 00:00 UTC.
BEGIN_NS = 1_793_491_200 * NS
END_NS = BEGIN_NS + 30 * 86_400 * NS
GPU_HOURS = build_spending_limit(2000.0, period=SpendingPeriod.MONTH)
MONEY = build_spending_limit(
    scope=SpendingScope.LABEL,
    label="team",
    name="vision",
    quantity=SpendingQuantity.MONEY,
    most=5000.0,
    period=SpendingPeriod.MONTH,
    warn_ratio=0.9,
    mode=EnforcementMode.OBSERVE,
)


def test_limits_are_set_changed_shown_and_taken_away(eelctl, fake):
    text = "label:team=vision money=5000 per month, observe, warn at 90%"
    eelctl("policy", "set", "--spend", "namespace=research gpu-hours=2000 per month", "--spend", text)
    assert fake.policy.spending == (GPU_HOURS, MONEY)
    shown = eelctl("policy", "get").stdout.splitlines()
    assert "spending           namespace=research gpu-hours=2000 per month" in shown
    assert f"spending           {text}" in shown
    eelctl("policy", "set", "--spend", "namespace=research gpu-hours=2500.5 per month")
    assert [one.most for one in fake.policy.spending] == [2500.5 * 3600.0, 5000.0]
    eelctl("policy", "set", "--spend", "label:team=vision money=none per month")
    assert [one.name for one in fake.policy.spending] == ["research"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("research gpu-hours=2000 per month", "write 'namespace=NAME gpu-hours=2000 per month'"),
        ("namespace=research gpu-hours=2000", "per day, week, month"),
        ("namespace=research watts=2000 per month", "gpu-hours, kwh, money, co2-kg"),
        ("namespace=research kwh=2,000 per month", "write a number above 0 such as 2000, or none"),
        ("namespace=research kwh=0 per month", "write a number above 0"),
        ("namespace=research kwh=5 per month, softly", "write observe, enforce, stop or warn at 90%"),
        ("namespace=research kwh=5 per month, warn at 101%", "write observe, enforce, stop or warn at 90%"),
        ("namespace=research kwh=none per month", "removes a limit that does not exist"),
    ],
)
def test_what_is_no_limit_is_reported_with_the_remedy(eelctl, fake, text, said):
    refused = eelctl("policy", "set", "--spend", text, code=2)
    assert said in " ".join(refused.stderr.split())
    assert fake.policy.spending == ()


def test_no_more_limits_than_are_kept(eelctl, fake):
    words = [word for number in range(257) for word in ("--spend", f"user=u{number} kwh=1 per day")]
    refused = eelctl("policy", "set", *words, code=2)
    assert "at most 256 are allowed" in refused.stderr
    eelctl("policy", "set", *words[2:])
    assert len(fake.policy.spending) == 256


def test_what_is_spent_is_a_table_or_a_document(eelctl, fake):
    assert "no spending limit is set; set one with eelctl policy set --spend" in eelctl("spending").stdout
    fake.limited.answer = ListSpendingResponse(
        limits=(
            SpendingStatus(
                limit=GPU_HOURS,
                begin_ns=BEGIN_NS,
                end_ns=END_NS,
                spent=2013 * 3600.0,
                forecast=2400.4 * 3600.0,
                over_since_ns=BEGIN_NS + 21 * 86_400 * NS,
                waiting=3,
            ),
            SpendingStatus(limit=MONEY, begin_ns=BEGIN_NS, end_ns=END_NS, spent=4600.0, forecast=5100.0),
            SpendingStatus(limit=MONEY, begin_ns=BEGIN_NS, end_ns=END_NS),
        ),
        currency="EUR",
        utc_offset_minutes=60,
    )
    header, first, second, third = eelctl("spending").stdout.splitlines()
    assert header.split() == [
        "WHOSE",
        "PERIOD",
        "LIMIT",
        "SPENT",
        "SHARE",
        "FORECAST",
        "STATE",
        "SINCE",
        "WAITING",
        "ENDS",
    ]
    assert first.split("  ")[0] == "namespace=research"
    for part in (
        "November",
        "2,000 GPU-hours",
        "2,013 GPU-hours",
        "100.7 %",
        "2,400 GPU-hours",
        "spent",
        "22 November 01:00",
        "1 December 01:00",
    ):
        assert f"  {part}" in first
    assert re.split(" {2,}", second)[3:7] == ["4,600 EUR", "92.0 %", "5,100 EUR", "nearly spent"]
    assert "not known" in third
    for form, read in (("json", json.loads), ("yaml", yaml.safe_load)):
        told = read(eelctl("spending", "-o", form).stdout)
        assert told["limits"][0]["spent"] == 2013 * 3600.0
        assert told["limits"][0]["limit"]["quantity"] == "gpu_time"
        assert "spent" not in told["limits"][2]
