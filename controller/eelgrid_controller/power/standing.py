"""How each limit stands: its time and energy with their errors, from windows and from the prior.

Owns the estimates. Must not know which limit comes next.

Theory: a limit's measured logarithm of time has the error s / sqrt(n) of its
windows; its prior says ln t_0 + m with variance v, to which the error of t_0
adds. The two are weighed by their precision. Without a prior, and for the
reference limit, windows speak alone.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from eelgrid_controller.power.evidence import Arm, Noise
from eelgrid_controller.power.priors import Prior, Ratio

__all__ = ["Standing", "standings"]


class Standing(NamedTuple):
    """One limit as far as is known; errors are relative, one standard deviation."""

    limit_w: float
    windows: int
    time_s: float  # per unit of work
    time_error: float
    energy_j: float  # per unit of work
    energy_error: float
    ratio: float  # time over the reference's
    ratio_error: float

    @property
    def power_w(self) -> float:
        """Mean watts of all the job's GPUs."""
        return self.energy_j / self.time_s


def _joined(seen: tuple[float, float] | None, prior: tuple[float, float] | None) -> tuple[float, float] | None:
    """Two (logarithm, error) pairs by their precision."""
    if seen is None or prior is None:
        return seen if prior is None else prior
    ours, theirs = seen[1] ** -2, prior[1] ** -2
    return (ours * seen[0] + theirs * prior[0]) / (ours + theirs), (ours + theirs) ** -0.5


def _from_prior(ratio: Ratio | None, reference: float, error: float) -> tuple[float, float] | None:
    return None if ratio is None else (math.log(reference) + ratio.mean, math.hypot(ratio.scatter, error))


def standings(arms: Sequence[Arm], reference: int, noise: Noise, prior: Prior | None) -> tuple[Standing | None, ...]:
    """One for each limit; None where neither windows nor a prior say anything.

    `reference` is the limit, measured at least once, that slowdowns are relative to.
    """
    base = arms[reference]
    time_share, energy_share = noise.time_share, noise.energy_share
    base_time_s, base_energy_j = base.time_per_work, base.energy_per_work
    time_error = time_share / math.sqrt(base.windows)
    energy_error = energy_share / math.sqrt(base.windows)
    found: list[Standing | None] = []
    for index, arm in enumerate(arms):
        time = energy = None
        if arm.windows:
            root = math.sqrt(arm.windows)
            time = math.log(arm.time_per_work), time_share / root
            energy = math.log(arm.energy_per_work), energy_share / root
        if prior is not None and index != reference:
            time = _joined(time, _from_prior(prior.time[index], base_time_s, time_error))
            energy = _joined(energy, _from_prior(prior.energy[index], base_energy_j, energy_error))
        if time is None or energy is None:
            found.append(None)
            continue
        time_s = math.exp(time[0])
        ratio_error = 0.0 if index == reference else math.hypot(time[1], time_error)
        found.append(
            Standing(
                arm.limit_w, arm.windows, time_s, time[1], math.exp(energy[0]), energy[1],
                time_s / base_time_s, ratio_error,
            )
        )  # fmt: skip
    return tuple(found)
