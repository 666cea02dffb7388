"""Steering as a driver, and the same blind to energy.

Owns nothing but the handing over. Must not know the world.

Blind: the Core weighs performance, services are scaled by the same models, and no limit is
ever lowered: jobs promise no slowdown at all, there are no prices and no budgets.
"""

from collections.abc import Sequence
from dataclasses import replace

from bench.loop.scene import Job
from eelgrid_controller.objectives.control_cycle import ObjectiveController
from eelgrid_controller.objectives.power.budgets import Holding
from eelgrid_controller.objectives.power.control_events import (
    BudgetsSet,
    ControlEvent,
    ControlInstruction,
    ControlSettings,
    JobMeasured,
    JobStarted,
    PricesSet,
    ServiceStarted,
    SetPowerLimit,
)
from eelgrid_controller.objectives.power.power_model import BestEffort

__all__ = ["AtOnce", "Blind", "Ours"]


class Ours:
    """Steering as it is."""

    placement, objective = "eelgrid", "energy"

    def __init__(self, settings: ControlSettings | None = None, band: float | None = None) -> None:
        """`band` is that of every service's scaler; its own where None."""
        self.steering = ObjectiveController(settings)
        self._band = band
        self._earned_s: dict[str, float] = {}

    def on(self, event: ControlEvent) -> Sequence[ControlInstruction]:
        """What steering asks for."""
        if self._band is not None and isinstance(event, ServiceStarted):
            limits = replace(event.promised.limits, band=self._band)
            event = event._replace(promised=replace(event.promised, limits=limits))
        return self.steering.handle_event(event)

    def opening_w(self, job: Job, holdings: Sequence[Holding]) -> float | None:
        """What the budgets leave; a job that was promised something waits for its largest limit, which that is told by."""
        limit_w = self.steering.initial_limit_w(job.limits_w, tuple(holdings))
        if limit_w is None or isinstance(job.promise, BestEffort) or limit_w >= max(job.limits_w):
            return limit_w
        return None

    def earned_s(self, job: str) -> float:
        """From the last standing that knew the job."""
        for one in self.steering.controller_status().jobs:
            if one.name == job and one.earned_s is not None:
                self._earned_s[job] = one.earned_s
        return self._earned_s.get(job, 0.0)


class AtOnce(Ours):
    """Every job begins at the limit that the budgets leave, whatever it was promised."""

    def opening_w(self, job: Job, holdings: Sequence[Holding]) -> float | None:
        """What the budgets leave."""
        return self.steering.initial_limit_w(job.limits_w, tuple(holdings))


class Blind(Ours):
    """The same without a thought of watts."""

    objective = "performance"

    def on(self, event: ControlEvent) -> Sequence[ControlInstruction]:
        """Services alone."""
        if isinstance(event, BudgetsSet | PricesSet | JobStarted | JobMeasured):
            return []
        return [one for one in self.steering.handle_event(event) if not isinstance(one, SetPowerLimit)]

    def opening_w(self, job: Job, holdings: Sequence[Holding]) -> float | None:
        """The largest."""
        del holdings
        return max(job.limits_w)

    def earned_s(self, job: str) -> float:
        """Nothing is held back, so nothing is earned."""
        del job
        return 0.0
