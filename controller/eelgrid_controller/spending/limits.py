"""Spending limits in words, and whose work they are about.

Owns the key of a limit, which workloads belong to it, and how it is written. Must not know what
is spent.

Theory. A limit is one of a subject (a namespace, a user, a queue, a label with one value), a
quantity and a period; there is one of each. A workload belongs to a subject by its
specification, as the energy ledger charges it: its user is `user`, else its label `user`.
"""

from typing import NamedTuple

from eelgrid_protos.messages import (
    EnforcementMode,
    SpendingLimit,
    SpendingPeriod,
    SpendingQuantity,
    SpendingScope,
    WorkloadSpec,
)

__all__ = [
    "AMOUNTS", "WARN_RATIO", "Dimension", "Key", "amount_text", "amount_words", "dimension_of", "key_of", "limit_name",
    "limit_text", "subject_text", "subject_words", "value_of", "warn_ratio_of",
]  # fmt: skip

WARN_RATIO = 0.8


class Amount(NamedTuple):
    """How people write a quantity: its name in commands and in sentences, and what one of it is in SI units."""

    name: str
    words: str
    size: float


AMOUNTS = {
    SpendingQuantity.GPU_TIME: Amount("gpu-hours", "GPU-hours", 3600.0),
    SpendingQuantity.ENERGY: Amount("kwh", "kWh", 3.6e6),
    SpendingQuantity.MONEY: Amount("money", "money", 1.0),
    SpendingQuantity.CARBON: Amount("co2-kg", "kg of CO2", 1000.0),
}


class Dimension(NamedTuple):
    """What subjects of one sort are told apart by; `label` is the key of a label."""

    scope: SpendingScope
    label: str = ""

    @property
    def group(self) -> str:
        """The energy ledger's name for it."""
        return f"label:{self.label}" if self.scope is SpendingScope.LABEL else self.scope.name.lower()


class Key(NamedTuple):
    """What there is one limit of."""

    dimension: Dimension
    name: str
    quantity: SpendingQuantity
    period: SpendingPeriod


def dimension_of(limit: SpendingLimit) -> Dimension:
    """By what its subject is told apart."""
    return Dimension(limit.scope, limit.label)


def key_of(limit: SpendingLimit) -> Key:
    """What there is but one limit of."""
    return Key(dimension_of(limit), limit.name, limit.quantity, limit.period)


def value_of(spec: WorkloadSpec, dimension: Dimension) -> str:
    """The subject that a workload belongs to; empty for none."""
    match dimension.scope:
        case SpendingScope.NAMESPACE:
            return spec.namespace
        case SpendingScope.USER:
            return spec.user or spec.labels.get("user", "")
        case SpendingScope.QUEUE:
            return spec.queue
        case _:
            return spec.labels.get(dimension.label, "")


def warn_ratio_of(limit: SpendingLimit) -> float:
    """The share at which it counts as nearly spent."""
    return WARN_RATIO if limit.warn_ratio is None else limit.warn_ratio


def subject_text(limit: SpendingLimit) -> str:
    """The subject as commands have it: `namespace=research`, `label:team=vision`."""
    return f"{dimension_of(limit).group}={limit.name}"


def subject_words(limit: SpendingLimit) -> str:
    """The same in a sentence."""
    return f"label {limit.label}={limit.name}" if limit.label else f"{limit.scope.name.lower()} {limit.name}"


def amount_text(quantity: SpendingQuantity, amount: float) -> str:
    """An amount as people write it: whole numbers from a hundred on, three digits below."""
    shown = amount / AMOUNTS[quantity].size
    return f"{shown:,.0f}" if shown >= 100.0 else f"{shown:.3g}"


def amount_words(quantity: SpendingQuantity, currency: str) -> str:
    """The unit in a sentence."""
    is_money = quantity is SpendingQuantity.MONEY
    return currency or "money" if is_money else AMOUNTS[quantity].words


def limit_name(limit: SpendingLimit) -> str:
    """The limit without its amount, as metrics name it."""
    return f"{subject_text(limit)} {AMOUNTS[limit.quantity].name} per {limit.period.name.lower()}"


def limit_text(limit: SpendingLimit, most: float | None = None) -> str:
    """The limit as `eelctl policy set --spend` takes it, with another amount where one is given."""
    amount = AMOUNTS[limit.quantity]
    shown = (limit.most if most is None else most) / amount.size
    options = ", observe" if limit.mode is EnforcementMode.OBSERVE else ""
    if limit.warn_ratio is not None:
        options += f", warn at {100.0 * limit.warn_ratio:.6g}%"
    return f"{subject_text(limit)} {amount.name}={shown:.12g} per {limit.period.name.lower()}{options}"
