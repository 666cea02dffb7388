"""Metrics of the objectives: service levels, budgets, prices, control cycles and scraped pages."""

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from eelgrid_controller.objectives.control_loop import ControlLoop
from eelgrid_controller.objectives.power.budgets import BudgetUsage
from eelgrid_controller.objectives.power.control_events import (
    BudgetControlStatus,
    JobControlStatus,
    ServiceControlStatus,
)
from eelgrid_controller.objectives.status import AttainmentVerdict, objective_latency_s
from eelgrid_controller.runtime.scraper import Scraper
from eelgrid_controller.server.metrics.catalogue import SERIES_MOST, build_family
from eelgrid_protos.messages import Policy, Workload
from eelgrid_protos.openmetrics import MetricFamily

_One = TypeVar("_One")
_UNSTEERED = "unsteered"


def _worst(found: Sequence[_One], key: Callable[[_One], tuple[float, ...]]) -> list[_One]:
    return list(found) if len(found) <= SERIES_MOST else heapq.nsmallest(SERIES_MOST, found, key)


class ObjectiveMetrics:
    """Families of one steward and its scraper; asked on the event loop."""

    def __init__(self, steward: ControlLoop, pages: Scraper) -> None:
        self._steward, self._pages = steward, pages

    def families(self, workloads: Mapping[str, Workload], policy: Policy) -> Iterator[MetricFamily]:
        """All of them, as of the last turn."""
        standing = self._steward.objectives_status
        steering = standing.steering
        left_out = {"service": len(steering.services), "job": len(steering.jobs), "budget": len(steering.budgets)}
        yield from self._turns(steering.ignored)
        yield from _phases(steering.services, steering.jobs, standing.unsteered, workloads)
        yield from self._services(steering.services, workloads, steering.at_s)
        yield from _jobs(_worst(steering.jobs, _debt_key), workloads)
        yield from _budgets(_worst(steering.budgets, _fill_key), standing.drawn)
        yield build_family(
            "eelgrid_promise_series_left_out", {kind: max(0, count - SERIES_MOST) for kind, count in left_out.items()}
        )
        if policy.prices is not None and steering.price_per_j is not None:
            yield build_family("eelgrid_energy_price_per_joule", {policy.prices.currency: steering.price_per_j})
            yield build_family("eelgrid_energy_price_ratio", steering.price_weight)

    def _turns(self, ignored: Mapping[str, int]) -> Iterator[MetricFamily]:
        steward, counts, pages = self._steward, self._steward.counts, self._pages
        yield build_family("eelgrid_steward_cycles_total", steward.cycles)
        yield build_family("eelgrid_steward_failures_total", steward.failures)
        yield build_family("eelgrid_steward_faults_total", counts.faults)
        yield build_family(
            "eelgrid_steward_commands_total", {name: counts.done[name] for name in ("limit", "record", "scale")}
        )
        yield build_family("eelgrid_steward_refusals_total", dict(counts.refused))
        yield build_family(
            "eelgrid_steward_limits_answered_total", {name: counts.answered[name] for name in ("confirmed", "failed")}
        )
        yield build_family("eelgrid_steward_ignored_events_total", dict(ignored))
        yield build_family("eelgrid_scrape_pages", pages.target_count)
        yield build_family("eelgrid_scrape_pages_read_total", pages.pages)
        yield build_family(
            "eelgrid_scrape_failures_total", {kind.value: count for kind, count in pages.failures.items()}
        )
        total = counts.attainment.total
        yield build_family("eelgrid_promise_windows_total", {one.value: total[one] for one in AttainmentVerdict})

    def _services(
        self, found: Sequence[ServiceControlStatus], workloads: Mapping[str, Workload], now_s: float
    ) -> Iterator[MetricFamily]:
        attainment = self._steward.counts.attainment

        def kept(one: ServiceControlStatus) -> tuple[float, ...]:
            seen = attainment.window_counts(one.name)
            judged = seen.get(AttainmentVerdict.KEPT, 0) + seen.get(AttainmentVerdict.MISSED, 0)
            return (seen.get(AttainmentVerdict.KEPT, 0) / judged if judged else 2.0, -(one.at_s or 0.0))

        shown = _worst(found, kept)
        windows = {
            (one.name, verdict.value): float(attainment.window_counts(one.name).get(verdict, 0))
            for one in shown
            for verdict in AttainmentVerdict
        }
        objectives = {
            one.name: objective_latency_s(workload.spec.service)
            for one in shown
            if (workload := workloads.get(one.name)) is not None
        }
        replicas = {
            (one.name, state): float(count)
            for one in shown
            for state, count in (("wanted", one.target), ("serving", one.serving))
        }
        ages = {one.name: max(0.0, now_s - one.at_s) for one in shown if one.at_s is not None}
        yield build_family("eelgrid_service_windows_total", windows)
        yield build_family("eelgrid_service_latency_seconds", _known({one.name: one.live_s for one in shown}))
        yield build_family(
            "eelgrid_service_latency_objective_seconds", {key: at_s for key, at_s in objectives.items() if at_s}
        )
        yield build_family("eelgrid_service_window_age_seconds", ages)
        yield build_family("eelgrid_service_replicas", replicas)
        yield build_family("eelgrid_service_slowness_ratio", _known({one.name: one.factor for one in shown}))


def _known(values: Mapping[str, float | None]) -> dict[str, float]:
    """What is not known has no series."""
    return {key: value for key, value in values.items() if value is not None and math.isfinite(value)}


def _debt_key(one: JobControlStatus) -> tuple[float, ...]:
    return (math.inf if one.earned_s is None else one.earned_s,)


def _fill_key(one: BudgetControlStatus) -> tuple[float, ...]:
    level = 0.0 if "/" not in one.name else 1.0 if one.name.startswith("rack/") else 2.0
    return level, -one.claim_w / one.room_w if one.room_w > 0.0 else -math.inf


def _phases(
    services: Sequence[ServiceControlStatus],
    jobs: Sequence[JobControlStatus],
    unsteered: Mapping[str, str],
    workloads: Mapping[str, Workload],
) -> Iterator[MetricFamily]:
    of_services = Counter(one.phase.value for one in services)
    of_jobs = Counter(one.phase.value for one in jobs)
    for name in unsteered:
        workload = workloads.get(name)
        if workload is not None:
            (of_jobs if workload.spec.service is None else of_services)[_UNSTEERED] += 1
    yield build_family("eelgrid_services", {key: float(count) for key, count in sorted(of_services.items())})
    yield build_family("eelgrid_jobs", {key: float(count) for key, count in sorted(of_jobs.items())})


def _jobs(shown: Sequence[JobControlStatus], workloads: Mapping[str, Workload]) -> Iterator[MetricFamily]:
    promised = {
        one.name: training.slowdown_most
        for one in shown
        if (workload := workloads.get(one.name)) is not None and (training := workload.spec.training) is not None
    }
    yield build_family("eelgrid_job_slowdown_ratio", _known({one.name: one.slowdown for one in shown}))
    yield build_family("eelgrid_job_slowdown_promised_ratio", _known(promised))
    yield build_family("eelgrid_job_energy_saved_ratio", _known({one.name: one.saving for one in shown}))
    yield build_family("eelgrid_job_power_limit_watts", _known({one.name: one.limit_w for one in shown}))
    yield build_family("eelgrid_job_power_limit_wanted_watts", _known({one.name: one.target_w for one in shown}))


def _budgets(shown: Sequence[BudgetControlStatus], drawn: Mapping[str, BudgetUsage]) -> Iterator[MetricFamily]:
    read = {one.name: drawn[one.name] for one in shown if one.name in drawn}
    watts = {
        "limit": {one.name: one.room_w + one.other_w for one in shown},
        "claimed": {one.name: one.claim_w for one in shown},
        "others": {one.name: one.other_w for one in shown},
        "room": {one.name: one.room_w - one.claim_w for one in shown},
        "shortfall": {one.name: one.shortfall_w for one in shown},
        "drawn": {name: one.power_w for name, one in read.items()},
    }
    for what, values in watts.items():
        yield build_family(f"eelgrid_power_budget_{what}_watts", _known(values))
    yield build_family("eelgrid_power_budget_unread_gpus", {name: float(one.unread) for name, one in read.items()})
