"""The physics of training jobs: work, watts, checkpoints and the noise of their progress.

Owns what a job does at the limits that its GPUs have. Must not know who set them.

A unit of work at limit l takes the measured seconds at the measured watts (Zeus, NSDI
2023), one GPU's times the gang's; the slowest part of a gang paces it, and the others
draw what they draw at their own limit. A job writes a checkpoint every CHECKPOINT_S and
goes on from the last one if a node of it is lost; a start takes START_S in which it draws
idle watts. Windows of progress are off by independent normal noise of 2 % of time and
1 % of energy, as Zeus's own sweeps are.
"""

from dataclasses import dataclass, field

import numpy as np

from bench.loop.scene import Job
from eelgrid_controller.objectives.power.estimates import MeasurementWindow

__all__ = ["CHECKPOINT_S", "NOISE", "Running", "begun"]

CHECKPOINT_S = 600.0
START_S = 30.0
NOISE = (0.02, 0.01)  # relative scatter of a window's time and energy
_SAME_W = 0.5


@dataclass
class Running:
    """One job from its first placement to its end."""

    job: Job
    limits_w: dict[str, float] = field(default_factory=dict)  # by node, as they are
    gpus: dict[str, list[int]] = field(default_factory=dict)  # places in the fleet by node
    from_s: float = 0.0  # work goes on from this moment
    done: float = 0.0
    saved: float = 0.0  # at the last checkpoint
    saved_s: float = 0.0
    redone: float = 0.0  # work that failures took
    working_s: float = 0.0
    first_s: float | None = None
    ended_s: float | None = None
    restarts: int = 0
    pace_s: float = 0.0  # seconds a unit of work now: the slowest part's
    power_w: float = 0.0  # of all its GPUs while it works
    # Since the last window was closed.
    window_s: float = 0.0
    window_work: float = 0.0
    window_j: float = 0.0
    is_window_clean: bool = False

    @property
    def is_placed(self) -> bool:
        """Whether it holds GPUs."""
        return bool(self.gpus)

    def gpu_w(self, node: str) -> float:
        """Watts of each GPU on a node while it works."""
        return self.job.curve.interpolate(self.limits_w[node]).power_w

    def _read_curve(self) -> None:
        self.pace_s = max(self.job.curve.interpolate(limit_w).time_s for limit_w in self.limits_w.values())
        self.power_w = sum(self.gpu_w(node) * len(gpus) for node, gpus in self.gpus.items())

    def put(self, gpus: dict[str, list[int]], limit_w: float, now_s: float) -> None:
        """It begins, or goes on from its checkpoint, at this limit."""
        self.gpus = gpus
        self.limits_w = dict.fromkeys(gpus, limit_w)
        self.from_s = now_s + START_S
        self.saved_s = self.from_s
        if self.first_s is None:
            self.first_s = now_s
        self._read_curve()
        self.forget_window()

    def lost(self) -> None:
        """A node of it is gone: what came after the checkpoint is lost, and it holds nothing."""
        self.redone += self.done - self.saved
        self.done = self.saved
        self.restarts += 1
        self.gpus, self.limits_w = {}, {}
        self.forget_window()

    def set_limit(self, node: str, limit_w: float) -> None:
        """A limit took effect on a node's GPUs."""
        if node in self.limits_w and abs(self.limits_w[node] - limit_w) > _SAME_W:
            self.limits_w[node] = limit_w
            self._read_curve()
            self.forget_window()

    def forget_window(self) -> None:
        """What was gathered is of no one limit."""
        self.window_s = self.window_work = self.window_j = 0.0
        self.is_window_clean = False

    def step(self, now_s: float, step_s: float) -> bool:
        """Works for a step; whether it came to its end in it."""
        if now_s < self.from_s:
            return False
        left_s = (self.job.work - self.done) * self.pace_s
        spent_s = min(step_s, left_s)
        self.done += spent_s / self.pace_s
        self.working_s += spent_s
        self.window_s += spent_s
        self.window_work += spent_s / self.pace_s
        self.window_j += spent_s * self.power_w
        if now_s + step_s - self.saved_s >= CHECKPOINT_S:
            self.saved, self.saved_s = self.done, now_s + step_s
        return left_s <= step_s * (1.0 + 1e-12)

    def read_window(self, rng: np.random.Generator) -> MeasurementWindow | None:
        """The window since the last reading, as it is measured; None where its limit changed in it or parts differ."""
        limits = set(self.limits_w.values())
        found = None
        if len(limits) == 1 and self.window_work > 0.0 and self.is_window_clean:
            time, energy = np.maximum(0.05, 1.0 + rng.standard_normal(2) * NOISE).tolist()
            time_s = self.window_s * time
            found = MeasurementWindow(limits.pop(), self.window_work, time_s, self.window_j * time * energy)
        self.window_s = self.window_work = self.window_j = 0.0
        self.is_window_clean = True
        return found


def begun(job: Job) -> Running:
    """A job that has not been placed yet."""
    return Running(job)
