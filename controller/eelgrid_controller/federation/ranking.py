"""Which cluster gets a workload: the offers of clusters, ranked by one cost, with its terms for people.

Theory. Each controller is asked by a dry run, which is an answer of the same decision that a submission gets: the workload
would start now, by a promised time, at an expected one, or nobody knows when; or it is refused there. The cost of an offer is money:

    energy + carbon  =  integral over the run of  P * PUE(t) * (price(t) + carbon price * intensity(t))  dt
    wait             =  GPUs * hours until it starts * price of a GPU's hour of waiting

P is the power of busy GPUs of the models that the workload may have, as the catalogue has them, weighted by how many of each
the cluster has: a dry run says on which node a replica would be, not how many watts it adds. The run begins when the offer says,
and lasts as long as its user expects, an hour if nobody says. A cluster without prices counts as the dearest of the others: it
is not preferred for saying nothing. Prices in different currencies are not compared: those in another currency than most
clusters have count as none.

Differences in speed between models are not modelled: who needs a model names it.

Pure: no I/O, no clock. Must not know how clusters are asked, nor what becomes of the ranking (`dispatch`).
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from eelgrid_controller.objectives.power.tariffs import policy_tariff
from eelgrid_protos.messages import EnergyPrices, Workload, WorkloadPhase, WorkloadSpec

_HOUR_S = 3600.0
_JOULES_A_KWH = 3.6e6
# An unknown wait counts as an hour, and a minute more for each workload that waits already; both are assumptions.
_UNKNOWN_WAIT_S = 3600.0
_BEHIND_S = 60.0
_WAIT_MOST_S = 7 * 24 * _HOUR_S
_RUN_MOST_S = 7 * 24 * _HOUR_S


@dataclass(frozen=True, slots=True, kw_only=True)
class RankingWeights:
    """What the operator of the front sets."""

    # Currency for an hour in which one GPU's work waits. A busy GPU of 700 W at 0.20 a kWh costs 0.14 in an hour: by
    # default work waits some forty minutes to halve its price, and no longer.
    wait_price_per_gpu_h: float = 0.1
    # Currency a kilogram; None takes each cluster's own.
    carbon_price_per_kg: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOffer:
    """What a cluster's controller answered about one workload."""

    cluster: str
    # When it would start, in nanoseconds since 1970; None if nobody knows.
    start_ns: int | None
    # By then at the latest; otherwise it is expected, by the run times that the cluster knows.
    is_promised: bool = False
    # Why it would wait; empty if it would not.
    reason: str = ""
    # Workloads that wait there.
    pending: int = 0
    # GPUs that it has, by model.
    models: Mapping[str, int] = field(default_factory=dict)
    prices: EnergyPrices | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedOffer:
    """An offer with its cost; terms add up to it, in currency."""

    offer: ClusterOffer
    wait_s: float
    # None where the catalogue has none of the models.
    power_w: float | None
    energy: float
    carbon: float
    wait: float
    # The prices are assumed: those of the dearest other cluster.
    is_assumed: bool = False
    currency: str = ""

    @property
    def cost(self) -> float:
        """What the offers are ranked by."""
        return self.energy + self.carbon + self.wait

    def describe(self) -> str:
        """Returns the offer in one sentence, for people."""
        if self.wait_s <= 0:
            start = "starts now"
        elif self.offer.start_ns is not None:
            minutes = f"{self.wait_s / 60:.0f} min"
            start = f"starts in {minutes} at the latest" if self.offer.is_promised else f"should start in {minutes}"
        else:
            start = (
                f"waits, nobody knows how long ({self.offer.reason or 'no reason given'}; {self.offer.pending} wait)"
            )
        power = "" if self.power_w is None else f", {self.power_w / 1000:.2f} kW"
        assumed = ", without prices: as the dearest" if self.is_assumed else ""
        unit = f" {self.currency}" if self.currency else ""
        return (
            f"{self.offer.cluster} {start}{power}{assumed}: energy {self.energy:.4g} + carbon {self.carbon:.4g} + "
            f"wait {self.wait:.4g} = {self.cost:.4g}{unit}"
        )


def make_offer(
    cluster: str,
    preview: Workload,
    *,
    pending: int,
    models: Mapping[str, int],
    prices: EnergyPrices | None,
    now_ns: int,
) -> ClusterOffer:
    """Makes an offer of the answer to a dry run."""
    promise = preview.promise
    if preview.phase is WorkloadPhase.PLACED:
        start_ns: int | None = now_ns
    else:
        start_ns = promise.start_ns if promise is not None else preview.expected_start_ns or None
    return ClusterOffer(
        cluster=cluster,
        start_ns=start_ns,
        is_promised=promise is not None,
        reason=preview.reason,
        pending=pending,
        models=models,
        prices=prices,
    )


def join_offers(offers: Sequence[ClusterOffer]) -> ClusterOffer:
    """Returns one cluster's offers for several workloads that start together as one: the first, from when the last starts."""
    starts = [one.start_ns for one in offers]
    late = max(offers, key=lambda one: math.inf if one.start_ns is None else one.start_ns)
    start_ns = None if None in starts else late.start_ns
    return replace(offers[0], start_ns=start_ns, reason=late.reason)


def estimate_power_w(spec: WorkloadSpec, models: Mapping[str, int], busy_w: Mapping[str, float]) -> float | None:
    """Estimates the watts of a workload on a cluster's GPUs; None without a known model. `busy_w` is by model."""
    request = spec.request
    shares = request.gpu_count * request.gpu_milli / 1000.0 * spec.replicas
    if not shares:
        return 0.0
    eligible = {
        model: count
        for model, count in models.items()
        if count > 0 and model in busy_w and (not request.gpu_models or model in request.gpu_models)
    }
    total = sum(eligible.values())
    if not total:
        return None
    return shares * sum(busy_w[model] * count for model, count in sorted(eligible.items())) / total


def rank_offers(
    spec: WorkloadSpec,
    offers: Sequence[ClusterOffer],
    *,
    busy_w: Mapping[str, float],
    weights: RankingWeights,
    now_ns: int,
) -> tuple[RankedOffer, ...]:
    """Ranks offers by cost, then by wait, queue and name."""
    priced = Counter(one.prices.currency for one in offers if one.prices is not None)
    # Of equally many, the first by name, so that the order of answers does not matter.
    currency = min(priced, key=lambda name: (-priced[name], name), default="")
    ranked = [_price_offer(spec, one, currency, busy_w=busy_w, weights=weights, now_ns=now_ns) for one in offers]
    known = [one for one in ranked if not one.is_assumed]
    most_energy = max((one.energy for one in known), default=0.0)
    most_carbon = max((one.carbon for one in known), default=0.0)
    ranked = [replace(one, energy=most_energy, carbon=most_carbon) if one.is_assumed else one for one in ranked]
    return tuple(sorted(ranked, key=lambda one: (one.cost, one.wait_s, one.offer.pending, one.offer.cluster)))


def _find_wait_s(offer: ClusterOffer, now_ns: int) -> float:
    if offer.start_ns is None:
        wait_s = _UNKNOWN_WAIT_S + _BEHIND_S * offer.pending
    else:
        wait_s = (offer.start_ns - now_ns) / 1e9
    return min(max(0.0, wait_s), _WAIT_MOST_S)


def _price_offer(
    spec: WorkloadSpec,
    offer: ClusterOffer,
    currency: str,
    *,
    busy_w: Mapping[str, float],
    weights: RankingWeights,
    now_ns: int,
) -> RankedOffer:
    wait_s = _find_wait_s(offer, now_ns)
    power_w = estimate_power_w(spec, offer.models, busy_w)
    gpus = max(1.0, spec.request.gpu_count * spec.request.gpu_milli / 1000.0 * spec.replicas)
    ranked = RankedOffer(
        offer=offer,
        wait_s=wait_s,
        power_w=power_w,
        energy=0.0,
        carbon=0.0,
        wait=gpus * wait_s / _HOUR_S * weights.wait_price_per_gpu_h,
        currency=currency,
    )
    prices = offer.prices
    if prices is None or prices.currency != currency or power_w is None:
        return replace(ranked, is_assumed=True)
    if weights.carbon_price_per_kg is not None:
        prices = replace(prices, carbon_price_per_kg=weights.carbon_price_per_kg)
    begin_s = now_ns / 1e9 + wait_s
    run_s = min(spec.expected_runtime_s or _HOUR_S, _RUN_MOST_S)
    energy = power_w * _integrate_price(replace(prices, carbon_price_per_kg=0.0), begin_s, run_s)
    both = power_w * _integrate_price(prices, begin_s, run_s)
    return replace(ranked, energy=energy, carbon=both - energy)


def _integrate_price(prices: EnergyPrices, begin_s: float, run_s: float) -> float:
    """Returns what a watt costs over a run."""
    tariff = policy_tariff(prices)
    assert tariff is not None
    return math.fsum(one.price * one.seconds for one in tariff.price_slices(begin_s, run_s))


def price_now(prices: EnergyPrices, now_ns: int) -> tuple[float, float]:
    """Returns the price of a kWh and the kilograms of carbon dioxide of a kWh, both with the PUE, at a time."""
    tariff = policy_tariff(prices)
    assert tariff is not None
    since_s = now_ns / 1e9 - tariff.begins_s
    pue = tariff.pue.value_at(since_s)
    return (
        pue * tariff.price.value_at(since_s) * _JOULES_A_KWH,
        pue * tariff.carbon.value_at(since_s) * _JOULES_A_KWH / 1000.0,
    )
