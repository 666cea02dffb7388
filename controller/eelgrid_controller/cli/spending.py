"""eelctl spending: what is spent of the policy's spending limits, and how limits are written.

Owns `namespace=research gpu-hours=2000 per month` and the table. Must not know how spending is counted.
"""

import re
from collections.abc import Iterable, Iterator

import click

from eelgrid_controller.cli.connection import operators
from eelgrid_controller.cli.settings import Settings, printing
from eelgrid_controller.cli.tables import Column, coloured, document, text_table
from eelgrid_controller.spending.limits import (
    AMOUNTS,
    amount_text,
    amount_words,
    key_of,
    limit_text,
    subject_text,
    warn_ratio_of,
)
from eelgrid_controller.spending.periods import Stretch, moment_words, stretch_words
from eelgrid_protos.messages import (
    SPENDING_LIMITS_MOST,
    EnforcementMode,
    ListSpendingRequest,
    ListSpendingResponse,
    Policy,
    SpendingLimit,
    SpendingPeriod,
    SpendingScope,
    SpendingStatus,
)

__all__ = ["limits_with", "spending", "spending_lines"]

_QUANTITIES = {amount.name: quantity for quantity, amount in AMOUNTS.items()}
_PERIODS = {period.name.lower(): period for period in SpendingPeriod if period}
_LIMIT = re.compile(
    r"(?P<scope>namespace|user|queue|label:(?P<label>[^=]+))=(?P<name>.+?)\s+"
    rf"(?P<what>{'|'.join(_QUANTITIES)})=(?P<amount>\S+)\s+per\s+(?P<period>{'|'.join(_PERIODS)})(?P<options>\s*,.*)?"
)
_AMOUNT = re.compile(r"\d{1,15}(?:\.\d{1,9})?")
_WARN = re.compile(r"warn at (\d{1,3}(?:\.\d{1,6})?) ?%")
_HINT = "--spend"
_NS = 10**9


def _options(text: str) -> tuple[EnforcementMode, float | None]:
    mode, warn_ratio = EnforcementMode.ENFORCE, None
    for option in filter(None, (part.strip() for part in text.split(","))):
        match = _WARN.fullmatch(option)
        if option in ("observe", "enforce"):
            mode = EnforcementMode[option.upper()]
        elif match is not None and float(match[1]) <= 100.0:
            warn_ratio = float(match[1]) / 100.0
        else:
            raise click.BadParameter(f"{option!r}; write observe, enforce or warn at 90%", param_hint=_HINT)
    return mode, warn_ratio


def _limit(text: str) -> tuple[SpendingLimit, bool]:
    """One limit, and whether it is to stand; raises BadParameter."""
    match = _LIMIT.fullmatch(text.strip())
    if match is None:
        raise click.BadParameter(
            f"{text!r}; write 'namespace=NAME gpu-hours=2000 per month': namespace, user, queue or label:KEY; "
            f"{', '.join(_QUANTITIES)}; per {', '.join(_PERIODS)}",
            param_hint=_HINT,
        )
    amount, is_kept = match["amount"], match["amount"] != "none"
    if is_kept and (not _AMOUNT.fullmatch(amount) or not float(amount)):
        raise click.BadParameter(f"{amount!r}; write a number above 0 such as 2000, or none", param_hint=_HINT)
    mode, warn_ratio = _options(match["options"] or "")
    scope = "label" if match["label"] else match["scope"]
    quantity = _QUANTITIES[match["what"]]
    limit = SpendingLimit(
        scope=SpendingScope[scope.upper()], name=match["name"], label=match["label"] or "", quantity=quantity,
        most=float(amount) * AMOUNTS[quantity].size if is_kept else 1.0, period=_PERIODS[match["period"]],
        warn_ratio=warn_ratio, mode=mode,
    )  # fmt: skip
    return limit, is_kept


def limits_with(policy: Policy, texts: Iterable[str]) -> tuple[SpendingLimit, ...]:
    """The limits of a policy with those named changed, added or taken away; raises BadParameter."""
    limits = {key_of(one): one for one in policy.spending}
    for text in texts:
        limit, is_kept = _limit(text)
        if is_kept:
            limits[key_of(limit)] = limit
        elif limits.pop(key_of(limit), None) is None:
            raise click.BadParameter(f"{text!r} takes away a limit that is not there", param_hint=_HINT)
    if len(limits) > SPENDING_LIMITS_MOST:
        raise click.BadParameter(
            f"makes {len(limits)} limits; {SPENDING_LIMITS_MOST} are kept at the most, so take some away with =none",
            param_hint=_HINT,
        )
    return tuple(limits.values())


def spending_lines(policy: Policy) -> Iterator[str]:
    """The limits for a person, as they are set."""
    for limit in policy.spending:
        yield f"spending           {limit_text(limit)}"


def _share(one: SpendingStatus) -> str:
    return "" if one.spent is None else f"{100.0 * one.spent / one.limit.most:.1f} %"


def _state(one: SpendingStatus) -> str:
    if one.spent is None:
        return "not known"
    if one.spent >= one.limit.most:
        return "spent, observed" if one.limit.mode is EnforcementMode.OBSERVE else "spent"
    return "nearly spent" if one.spent >= warn_ratio_of(one.limit) * one.limit.most else "under"


def _colour(one: SpendingStatus) -> str | None:
    return {"under": "green", "nearly spent": "yellow"}.get(_state(one), "red")


def _columns(found: ListSpendingResponse) -> tuple[Column[SpendingStatus], ...]:
    offset = found.utc_offset_minutes

    def amount(one: SpendingStatus, value: float | None) -> str:
        if value is None:
            return ""
        return f"{amount_text(one.limit.quantity, value)} {amount_words(one.limit.quantity, found.currency)}"

    def period(one: SpendingStatus) -> str:
        return stretch_words(one.limit.period, Stretch(one.begin_ns // _NS, one.end_ns // _NS), offset)

    def since(one: SpendingStatus) -> str:
        return moment_words(one.over_since_ns / _NS, offset) if one.over_since_ns else ""

    return (
        Column("WHOSE", lambda one: subject_text(one.limit)),
        Column("PERIOD", period),
        Column("LIMIT", lambda one: amount(one, one.limit.most), right=True),
        Column("SPENT", lambda one: amount(one, one.spent), right=True),
        Column("SHARE", _share, right=True),
        Column("FORECAST", lambda one: amount(one, one.forecast), right=True),
        Column("STATE", _state, colour=_colour),
        Column("SINCE", since),
        Column("WAITING", lambda one: str(one.waiting), right=True),
        Column("ENDS", lambda one: moment_words(one.end_ns / _NS, offset)),
    )


def _lines(settings: Settings, found: ListSpendingResponse) -> Iterator[str]:
    if not found.limits:
        yield "nothing is limited; eelctl policy set --spend 'namespace=NAME gpu-hours=2000 per month'"
        return
    yield from text_table(_columns(found), found.limits, headers=settings.headers, colour=coloured())


@click.command()
@printing
@click.pass_obj
def spending(settings: Settings) -> None:
    """Show what is spent of each spending limit, and how much work waits for it.

    FORECAST is by the end of the period: of GPU-hours by the GPUs held now, else by the mean of the last 24 hours.
    """
    with operators(settings) as client:
        found = client.list_spending(ListSpendingRequest(), timeout=settings.timeout_s)
    document(settings, found, _lines(settings, found))
