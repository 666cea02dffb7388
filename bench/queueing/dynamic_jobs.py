"""Jobs whose batch size changes while they run, counted in steps as Shockwave's simulator counts them.

Owns a job, how far it is, and when its batch size changes. A job knows its rate in steps a second for each batch size.
At the end of every round a rule looks at its epoch and may request another batch size; the request is granted at the end
of the next round that the job runs in, so that a job runs a round longer with the old size than its plan says. On a
change the number of epochs stays, and an epoch that had begun counts as done. Must not know rounds or other jobs.

The rules are those of the published simulator (Zheng et al., NSDI 2023): Accordion keeps the first batch size in the
epochs that are critical for accuracy, by model, and takes the largest in all others; GNS doubles the size towards a
plan. The time alone that fairness is judged by (`alone_s`) follows the job's plan and not these rules, as published.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

from bench.queueing.gangs import Numbers

# What the published profiles end at; no model goes beyond.
LARGEST_BATCH = {"ResNet-18": 256, "ResNet-50": 128, "Transformer": 128, "LM": 80, "Recommendation": 8192}
# A job that was given this many rounds in a row without a step to do is removed.
_EMPTY_ROUNDS_MOST = 5
# A job that has run this many times its time alone is ended, wherever it is.
_OVERTIME = 1.5


class BatchRule(Enum):
    """What changes the batch size."""

    STATIC = "static"
    ACCORDION = "accordion"
    GNS = "gns"


@dataclass(frozen=True)
class DynamicJob:
    """A job: `epochs_s` is the planned time of each epoch alone, `planned` its planned batch size, `rates` steps/s."""

    index: int
    arrival_s: float
    gpus: int
    model: str
    rule: BatchRule
    batch_size: int  # the first
    steps: int  # at the first batch size
    samples: int  # of an epoch
    epochs_s: Numbers
    planned: tuple[int, ...]
    rates: Mapping[int, float]

    @cached_property
    def alone_s(self) -> float:
        """The time of the job alone on its GPUs, by its plan."""
        return float(self.epochs_s.sum())

    def steps_of_epoch(self, batch_size: int) -> int:
        """Returns the steps of an epoch."""
        return math.ceil(self.samples / batch_size)

    def request_batch_size(self, epoch: int, batch_size: int) -> int:
        """Returns the batch size that the rule wants in an epoch, given the present one."""
        largest = LARGEST_BATCH.get(self.model, self.batch_size)
        if self.rule is BatchRule.GNS:
            last = len(self.planned) - 1
            ahead = max(self.planned[min(epoch, last)], self.planned[min(epoch + 1, last)])
            wanted = 2 * batch_size if ahead > batch_size and batch_size != largest else batch_size
        elif self.rule is BatchRule.ACCORDION and self.model != "Transformer":
            wanted = self.batch_size if is_critical(self.model, self.batch_size, epoch) else largest
        else:
            wanted = batch_size
        return wanted if wanted in self.rates else batch_size


def is_critical(model: str, batch_size: int, epoch: int) -> bool:
    """Returns whether Accordion keeps the first batch size in an epoch, by its simulator (not by its plan)."""
    if model == "ResNet-50":
        return epoch % 30 < 10
    if model == "ResNet-18":
        return epoch < (20 if batch_size == 256 else 10) or 150 <= epoch < 160 or 250 <= epoch < 260
    if model == "Recommendation":
        return epoch < {512: 30, 1024: 30, 2048: 40}.get(batch_size, 10)
    return epoch < 10


@dataclass
class JobProgress:
    """How far a job is."""

    job: DynamicJob
    batch_size: int = field(init=False)
    steps: int = field(init=False)  # at the present batch size
    steps_run: int = 0
    run_s: float = 0.0  # without what was lost to restarts
    last_run_s: float = 0.0  # in the last round that it ran in
    requested: int = field(init=False)
    empty_rounds: int = 0

    def __post_init__(self) -> None:
        self.batch_size = self.requested = self.job.batch_size
        self.steps = self.job.steps

    @property
    def rate(self) -> float:
        """Steps a second at the present batch size."""
        return self.job.rates[self.batch_size]

    @property
    def left_steps(self) -> int:
        """Steps to do at the present batch size; negative where a change counted an epoch too many as done."""
        return self.steps - self.steps_run

    @property
    def left_s(self) -> float:
        """The rest of the run time if the present batch size stays."""
        return self.left_steps / self.rate

    @property
    def planned_left_s(self) -> float:
        """The rest of the run time by the planned batch sizes of the epochs to come."""
        done, part = divmod(self.steps_run, self.job.steps_of_epoch(self.batch_size))
        rest_s = float(self.job.epochs_s[done:].sum())
        part_of_epoch = part / self.job.steps_of_epoch(self.batch_size)
        return rest_s - part_of_epoch * float(self.job.epochs_s[done]) if done < len(self.job.epochs_s) else 0.0

    def end_round(self, steps: int, run_s: float) -> bool:
        """Counts a round that the job ran in and grants the batch size it requested; returns whether it has ended."""
        self.run_s += run_s
        self.last_run_s = run_s
        if steps <= 0 and run_s <= 0.0:
            self.empty_rounds += 1
            is_done = self.empty_rounds >= _EMPTY_ROUNDS_MOST
        else:
            self.empty_rounds = 0
            self.steps_run += steps
            is_done = self.left_steps <= 0 or self.run_s > int(int(self.job.alone_s) * _OVERTIME)
        if self.requested != self.batch_size:
            self._change_batch_size(self.requested)
        return is_done

    def request_batch_size(self) -> None:
        """Requests what the rule wants in the present epoch, be the job running or not."""
        epoch = math.ceil(self.steps_run / self.job.steps_of_epoch(self.batch_size))
        self.requested = self.job.request_batch_size(epoch, self.batch_size)

    def _change_batch_size(self, batch_size: int) -> None:
        before, after = self.job.steps_of_epoch(self.batch_size), self.job.steps_of_epoch(batch_size)
        epochs = math.ceil(self.steps / before)
        steps = math.ceil(self.steps * self.batch_size / batch_size)
        self.steps = steps if math.ceil(steps / after) == epochs else after * epochs
        self.steps_run = math.ceil(self.steps_run / before) * after
        self.batch_size = batch_size
