"""Savings monitor: compares the controller's placement with plain best fit, in a thread beside the controller."""

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from eelgrid_controller.clock import Clock
from eelgrid_controller.core.core import CommitResult, Core
from eelgrid_controller.energy.savings import InitialCluster, PlacementSavings, SavingsFigures
from eelgrid_controller.placement.power import PriorPowerModel
from eelgrid_controller.runtime.loop import ControllerLoop
from eelgrid_controller.server.metrics.catalogue import build_family
from eelgrid_controller.state.events import Event, PointsMeasured, PricesQuoted, SpendingJudged, WorkloadDeferred
from eelgrid_protos.catalogue.loader import Catalogue
from eelgrid_protos.openmetrics import MetricFamily

_TURN_S = 1.0
_AGAIN_S = 60.0
# Events that wait for a turn; beyond, to begin anew costs no more.
_BEHIND_MOST = 50_000
_OF_NO_ACCOUNT = (PricesQuoted, WorkloadDeferred, PointsMeasured, SpendingJudged)


class SavingsMonitor:
    """At most one comparison at a time; used from the event loop."""

    def __init__(self, *, loop: ControllerLoop, catalogue: Catalogue, clock: Clock, log: logging.Logger) -> None:
        self.figures: SavingsFigures | None = None
        self.failures = Counter({"behind": 0, "fault": 0})
        self._loop, self._clock, self._log = loop, clock, log
        self._watts = PriorPowerModel(catalogue).gpu
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="savings")
        self._waiting: list[Event] = []
        self._is_following = False
        self._offset_ns = 0
        self._savings: PlacementSavings | None = None
        # Joules of the comparisons before this one.
        self._before_j: defaultdict[str, float] = defaultdict(float)
        loop.listeners.append(self._on_commit)

    async def run(self) -> None:
        """Follow what is committed, until cancelled."""
        try:
            while True:
                is_well = await self._follow_backlog()
                await asyncio.sleep(_TURN_S if is_well else _AGAIN_S)
        finally:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def families(self) -> Iterator[MetricFamily]:
        """As of the last turn; before the first there are no figures."""
        yield build_family("eelgrid_savings_failures_total", dict(self.failures))
        found = self.figures
        if found is None:
            return
        yield build_family("eelgrid_saved_power_watts", {"placement": found.saved_w, "limits": found.limits_w})
        yield build_family("eelgrid_compared_power_watts", dict(found.power_w))
        yield build_family(
            "eelgrid_compared_energy_joules_total",
            {plan: self._before_j[plan] + energy_j for plan, energy_j in found.energy_j.items()},
        )
        yield build_family("eelgrid_compared_replicas", dict(found.replicas))
        yield build_family("eelgrid_compared_gpus", {where: milli / 1000.0 for where, milli in found.gpu_milli.items()})
        yield build_family("eelgrid_compared_since_timestamp_seconds", found.began_ns / 1e9)

    def _on_commit(self, committed: CommitResult) -> None:
        if not self._is_following:
            return  # it will begin from the state, which has these
        self._waiting.extend(event for event in committed.events if not isinstance(event, _OF_NO_ACCOUNT))
        if len(self._waiting) > _BEHIND_MOST:
            self._end("behind")

    def _start_following(self, core: Core) -> InitialCluster:
        self._is_following = True
        self._offset_ns = self._clock.now_ns() - int(self._clock.monotonic_s() * 1e9)
        return InitialCluster.from_state(core.state, self._now_ns())

    def _now_ns(self) -> int:
        """Unix time of a comparison that is not led astray by a clock that is set meanwhile: watts are summed over it."""
        return self._offset_ns + int(self._clock.monotonic_s() * 1e9)

    def _end(self, why: str) -> None:
        self.failures[why] += 1
        if self.figures is not None:
            for plan, energy_j in self.figures.energy_j.items():
                self._before_j[plan] += energy_j
        self._is_following = False
        self._savings = self.figures = None
        self._waiting = []

    async def _follow_backlog(self) -> bool:
        """Follow what came since the last one; false where that failed."""
        in_thread = asyncio.get_running_loop().run_in_executor
        try:
            if self._savings is None:
                beginning = await self._loop.read(self._start_following)
                made = await in_thread(self._thread, PlacementSavings, beginning, self._watts)
                if not self._is_following:
                    return True  # ended while it was made
                self._savings = made
            savings, events, self._waiting = self._savings, self._waiting, []
            figures = await in_thread(self._thread, _follow_events, savings, events, self._now_ns())
        except Exception:  # noqa: BLE001  # whatever it was, nothing else of the controller stands on it
            self._log.exception("savings=failed action=begin_anew seconds=%g", _AGAIN_S)
            self._end("fault")
            return False
        if savings is self._savings:  # else it was ended meanwhile
            self.figures = figures
        return True


def _follow_events(savings: PlacementSavings, events: Sequence[Event], now_ns: int) -> SavingsFigures:
    for event in events:
        savings.follow_event(event)
    savings.advance_to(now_ns)
    return savings.figures()
