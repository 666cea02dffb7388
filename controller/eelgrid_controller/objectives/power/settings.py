"""Settings of power control: how long to measure, how far to try, when to divide watts anew."""

import math
from dataclasses import dataclass, field

from eelgrid_controller.errors import ControllerError
from eelgrid_controller.objectives.power.bandit import BanditSettings
from eelgrid_controller.objectives.power.limit_allocation import AllocationGoal

ALLOCATION_JOBS = 1000


class InvalidSetting(ControllerError):
    """A setting of steering that is none; `field` is the one at fault."""

    def __init__(self, field: str, problem: str, remedy: str) -> None:
        self.field = field
        super().__init__(f"{field}: {problem}", remedy)


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlSettings:
    """Thresholds of one steering."""

    manner: BanditSettings = field(default_factory=BanditSettings)  # of all explorations
    want: AllocationGoal = (
        AllocationGoal.THROUGHPUT
    )  # what a division is good at, where what jobs wish for does not fit
    repeat_s: float = 60.0  # a Scale whose replicas do not come is said again; placing and starting takes as long
    stale_after_s: float = (
        180.0  # without a window a job counts one as missed: windows last 10 to 60 s, and one may fail
    )
    divide_every_s: float = 30.0  # at most so often with DIVIDED jobs, which take a second or two, oftener with fewer
    # A division of more jobs is not made in the call that finds it due but asked for: it takes a millisecond a job.
    divided_inside: int = 100_000
    divided_within_s: float = 600.0  # an answer that does not come by then is asked for again
    retry_after_s: float = 300.0  # a holding that refused a limit is tried again: a driver reload takes minutes
    reprice: float = 0.02  # change of a price's weight that is worth looking at jobs anew: less moves no limit
    horizon_s: float = 86_400.0  # of prices: a day, over which they repeat
    services_most: int = 10_000
    jobs_most: int = 100_000

    def __post_init__(self) -> None:
        for name in ("repeat_s", "stale_after_s", "retry_after_s", "divided_within_s", "horizon_s"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise InvalidSetting(name, f"{getattr(self, name)}", "give seconds above 0")
        if not 0.0 <= self.divide_every_s < math.inf or not 0.0 <= self.reprice < math.inf:
            raise InvalidSetting("divide_every_s", "a negative number", "give 0 or more")
        if self.services_most < 1 or self.jobs_most < 1 or self.divided_inside < 0:
            raise InvalidSetting("jobs_most", "less than 1", "give how many there may be at most")
