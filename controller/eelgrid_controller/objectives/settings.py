"""Settings of the control loop and of the objective controller, each with the reason for its value."""

from dataclasses import dataclass, field

from eelgrid_controller.errors import ControllerConfigError
from eelgrid_controller.objectives.power.power_cap_controller import ControlSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveSettings:
    """Thresholds of the control loop."""

    # Agents send every 5 s by default; looking more often would see the same readings.
    cycle_s: float = 5.0
    # A p95 needs 20 requests in a window (serving.live): 15 s of 1.3 a second, and Prometheus' own usual interval.
    scrape_s: float = 15.0
    # A fall looks back so far and waits so long for the next (serving.scaler has the theory).
    hold_s: float = 300.0
    cool_s: float = 60.0
    # Rounds without a page until a service is blind: one lost page is chance, four are not.
    stale_rounds: int = 4
    # Windows of a job: a limit shows in throughput within seconds, and Zeus measured 40 s for each.
    window_s: float = 30.0
    # A job whose progress or power stays away so long has missed a window.
    missed_s: float = 180.0
    # A limit moves by 50 W a cycle of the guard (1 s) after a plan of 0.1 s: 15 s at most from one end to the other.
    confirm_s: float = 60.0
    # A node that comes back tells its limits with its first samples; after a restart jobs are taken up with them.
    readings_s: float = 30.0
    # Watts of GPUs that are not steered change with placements; summing 10,000 nodes takes 50 ms in slices.
    others_s: float = 30.0
    # A resize must pay within so long, and no job is resized more often: an hour is 60 restarts of a minute a month.
    elastic_s: float = 3600.0
    away_grace_s: float = 10.0  # the loop's: a lost node's lease began to run out so long before
    # Promised workloads that are steered; more are placed as ever, and told so.
    workloads_most: int = 20_000
    # A division of 64 jobs takes a tenth of a second of a turn, one of 1,000 would keep everything else waiting.
    steering: ControlSettings = field(default_factory=lambda: ControlSettings(divided_inside=64))

    def __post_init__(self) -> None:
        """Refuses what no control loop can run with."""
        for name in (
            "cycle_s",
            "scrape_s",
            "hold_s",
            "window_s",
            "missed_s",
            "confirm_s",
            "readings_s",
            "others_s",
            "elastic_s",
        ):
            if not 0.0 < getattr(self, name) <= 86_400.0:
                raise ControllerConfigError(f"{name} is {getattr(self, name)}", "give seconds above 0, at most 86400")
        if not 0.0 <= self.cool_s <= 86_400.0 or not 0.0 <= self.away_grace_s <= 86_400.0:
            raise ControllerConfigError(f"cool_s is {self.cool_s}", "give seconds between 0 and 86400")
        if self.stale_rounds < 1 or self.workloads_most < 1:
            raise ControllerConfigError("stale_rounds or workloads_most is below 1", "give at least 1")
