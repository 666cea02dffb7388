"""Chooses the request that costs a job the fewest joules while its promise holds.

A size s on GPU model m does T(s, m) units of work a second at P(s, m) watts, so E(s, m) = P(s, m) / T(s, m) joules a
unit. A size is admissible if on every model T_low(s, m) (1 + slowdown) >= T_high(asked, m) and
T_low(s, m) >= work / time left. Of these the size of the least rho(s) = max over m of E_high(s, m) / E_low(asked, m)
is chosen, and only if rho < 1 - SAVINGS_MARGIN.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

SAVINGS_MARGIN = 0.02  # of the energy: less is within what two runs of one job differ by
_HAIR = 1e-9  # of a speed, for rounding


class JobSize(NamedTuple):
    """What a job asks for."""

    pods: int
    gpus: int  # of one pod; slices where a profile is named
    mig_profile: str = ""

    @property
    def description(self) -> str:
        """For people."""
        each = f"{self.gpus} x {self.mig_profile}" if self.mig_profile else f"{self.gpus} GPU"
        return each if self.pods == 1 else f"{self.pods} pods of {each}"


class SizeMeasurement(NamedTuple):
    """How a profile runs on so many GPUs or slices; the ends of 90 % intervals, alike where it was measured."""

    gpu_model: str
    mig_profile: str
    gpus: int  # of all that run together
    throughput_low_hz: float
    throughput_high_hz: float
    power_low_w: float
    power_high_w: float
    basis: str = "measured"


class _Run(NamedTuple):
    """One size on one model."""

    low_hz: float
    high_hz: float
    energy_low_j: float  # of a unit of work
    energy_high_j: float
    basis: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SizingProblem:
    """A job that has not started."""

    asked: JobSize
    # Sizes that its people allow, each with the models of the nodes that could hold it; what it asks for among them.
    sizes: Mapping[JobSize, Sequence[str]]
    is_together: bool = False  # its pods are one run
    slowdown_most: float | None = None
    need_hz: float | None = None  # work over the time left; inf where there is none
    known: Sequence[SizeMeasurement] = ()


class SizeChoice(NamedTuple):
    """The size to take, which may be the one that was asked for."""

    size: JobSize
    ratio: float  # energy of the same work over that of what was asked, at the worst end on the worst model
    speed: float  # likewise, at the slowest
    energy_j: Mapping[str, tuple[float, float]]  # by model: of a unit of work as asked and as chosen
    bases: tuple[str, ...]
    why: str


class SizeUnknown(NamedTuple):
    """Nothing can be chosen."""

    why: str
    remedy: str = ""


def choose_size(question: SizingProblem) -> SizeChoice | SizeUnknown:
    """The size of the fewest joules that keeps the promise, or why none can be named."""
    models = question.sizes.get(question.asked, ())
    if not models:
        why = f"no node that it may come to has {question.asked.description} of a known model"
        return SizeUnknown(
            why, "look at its node selector and tolerations, and at the labels nvidia.com/gpu.product of nodes"
        )
    asked: dict[str, _Run] = {}
    for model in models:
        run = _run(question, question.asked, model)
        if isinstance(run, str):
            return SizeUnknown(
                f"what it asks for, {question.asked.description}, {run} on {model or 'a GPU of no known model'}",
                _MEASURE,
            )
        asked[model] = run
    best, refused = question.asked, dict[str, int]()
    best_key = _key(question, question.asked, 1.0)
    for size in question.sizes:
        if size == question.asked:
            continue
        found = _ratio(question, size, asked)
        if isinstance(found, str):
            refused[found] = refused.get(found, 0) + 1
            continue
        key = _key(question, size, found)
        if found < 1.0 - SAVINGS_MARGIN and key < best_key:
            best, best_key = size, key
    if best == question.asked:
        return _kept(question, asked, refused)
    return _choice(question, best, asked, best_key[0])


_MEASURE = "measure it there (eelctl profile import), or name fewer models by eelgrid.io/gpu-models"


def _key(question: SizingProblem, size: JobSize, ratio: float) -> tuple[float, int, int, str]:
    """The order of sizes: joules first, then who changes least and holds least."""
    return ratio, abs(size.pods - question.asked.pods), size.pods * size.gpus, size.mig_profile


def _ratio(question: SizingProblem, size: JobSize, asked: Mapping[str, _Run]) -> float | str:
    """The worst energy of a size over that of what was asked; or why it is not admissible."""
    slowdown = question.slowdown_most
    if slowdown is None and question.need_hz is None:
        slowdown = 0.0
    worst = 0.0
    for model in question.sizes[size]:
        before, run = _before(asked, model), _run(question, size, model)
        if isinstance(run, str):
            return run
        if slowdown is not None and run.low_hz * (1.0 + slowdown) < before.high_hz * (1.0 - _HAIR):
            return "may become slower than it is allowed to"
        if question.need_hz is not None and run.low_hz < question.need_hz * (1.0 - _HAIR):
            return "may miss its deadline"
        worst = max(worst, run.energy_high_j / before.energy_low_j)
    return worst or "no node can hold"


def _before(asked: Mapping[str, _Run], model: str) -> _Run:
    """What is compared with on a model: the same there, or the best anywhere if it could not have come there."""
    if model in asked:
        return asked[model]
    runs = list(asked.values())
    return _Run(
        max(run.low_hz for run in runs),
        max(run.high_hz for run in runs),
        min(run.energy_low_j for run in runs),
        min(run.energy_high_j for run in runs),
        runs[0].basis,
    )


def _run(question: SizingProblem, size: JobSize, model: str) -> _Run | str:
    """How a size runs on a model, the fastest of what is known; or why that is not known."""
    gpus, share = (size.pods * size.gpus, 1) if question.is_together else (size.gpus, size.pods)
    found = [
        one
        for one in question.known
        if one.gpu_model == model and one.mig_profile == size.mig_profile and one.gpus == gpus
    ]
    fit = [one for one in found if one.throughput_low_hz > 0.0 and one.power_low_w > 0.0]
    if not fit:
        return "was measured without watts" if found else "was measured nowhere"
    one = max(fit, key=lambda known: (known.throughput_low_hz, -known.power_high_w))
    return _Run(
        share * one.throughput_low_hz,
        share * one.throughput_high_hz,
        one.power_low_w / one.throughput_high_hz,
        one.power_high_w / one.throughput_low_hz,
        one.basis,
    )


def _kept(question: SizingProblem, asked: Mapping[str, _Run], refused: Mapping[str, int]) -> SizeChoice | SizeUnknown:
    """What is asked for stays; why."""
    others = sum(size != question.asked for size in question.sizes)
    if not others:
        return SizeUnknown("no other size is allowed that a node there could hold", "allow more by eelgrid.io/gpus")
    if sum(count for why, count in refused.items() if why.startswith("was ")) == others:
        why = "no other size that is allowed was measured with watts on every model that it may come to"
        return SizeUnknown(why, _MEASURE)
    reasons = [f"{count} {why}" for why, count in sorted(refused.items())]
    fewer = others - sum(refused.values())
    if fewer:
        reasons.insert(0, f"{fewer} would not save {100 * SAVINGS_MARGIN:g} % for certain")
    return _choice(question, question.asked, asked, 1.0, f"of {others} other sizes {', '.join(reasons)}")


def _choice(
    question: SizingProblem, size: JobSize, asked: Mapping[str, _Run], ratio: float, why: str = ""
) -> SizeChoice:
    energies, speeds, bases = dict[str, tuple[float, float]](), list[float](), set[str]()
    for model in question.sizes[size]:
        before, after = _before(asked, model), _run(question, size, model)
        assert not isinstance(after, str), "what is chosen is known"
        energies[model] = (_middle(before), _middle(after))
        speeds.append(after.low_hz / before.high_hz)
        bases |= {before.basis, after.basis}
    speed = 1.0 if size == question.asked else min(speeds)
    if not why:
        saved, left = 100.0 * (1.0 - ratio), 100.0 * speed
        why = f"{saved:.0f} % fewer joules for the same work, at {left:.0f} % of the speed, at the worst"
    return SizeChoice(size, ratio, speed, energies, tuple(sorted(bases)), why)


def _middle(run: _Run) -> float:
    return math.sqrt(run.energy_low_j * run.energy_high_j)
