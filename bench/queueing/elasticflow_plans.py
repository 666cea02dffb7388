"""ElasticFlow's own plans: how many GPUs a job gets over time, in what the jobs before it left free.

Owns the profile of free GPUs (a plan is taken from it or given back) and the plan itself, by the rules of the published
simulator (Gu et al., ASPLOS 2023, scheduler.py). Must not know events, nor who is admitted.

Profiles and plans are step functions: GPUs from each moment to the next, no two alike in a row. A profile's last step
has no end, a plan's ends with the plan. The plan of a job is laid from its deadline backwards: the least number of GPUs
is sought with which the slots before the deadline suffice, then as few of the last slots as possible get it and all
earlier ones the next smaller number. A job that no number of GPUs can save gets all it can use, and goes on after its
deadline. A job that is to have more GPUs at once has them until the profile changes.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from bench.queueing.elastic_jobs import LEVELS


class Steps(NamedTuple):
    """A step function of time: GPUs from each moment to the next."""

    times_s: tuple[float, ...]
    gpus: tuple[int, ...]


class GpuPlan(NamedTuple):
    """A job's GPUs over time: the plan ends with its last slot, the work is done at `done_s`."""

    steps: Steps
    end_s: float
    done_s: float

    @property
    def gpu_s(self) -> float:
        """GPU-seconds, as published: a step counts to the next one even where the job ends before."""
        times_s, gpus = self.steps.times_s, self.steps.gpus
        whole = sum(gpus[step] * (times_s[step + 1] - times_s[step]) for step in range(len(gpus) - 1))
        return whole + gpus[-1] * (self.end_s - times_s[-1])


class PlannedWork(NamedTuple):
    """What is planned: iterations to do by a deadline, at iterations a second by level, on `most` GPUs at most."""

    left: float
    deadline_s: float
    rates: Sequence[float]
    most: int

    def rate_of(self, gpus: int) -> float:
        """Iterations a second on a number of GPUs that is a level."""
        return self.rates[gpus.bit_length() - 1]


def align_up(begin_s: float, at_s: float, slot_s: float) -> float:
    """Returns the first end of a slot, counted from `begin_s`, that is not before `at_s`."""
    return begin_s - (begin_s - at_s) // slot_s * slot_s


def shift_profile(profile: Steps, plan: GpuPlan, sign: int) -> Steps:
    """Returns a profile plus `sign` times a plan, which begins with it."""
    (times_s, free), (plan_s, plan_gpus) = profile, plan.steps
    found_s, found = list[float](), list[int]()
    at = step = 0
    now_s, last = times_s[0], -1
    times_s, plan_s = (*times_s, math.inf), (*plan_s, plan.end_s)
    while now_s < plan.end_s:
        value = free[at] + sign * plan_gpus[step]
        if value != last:
            found_s.append(now_s)
            found.append(value)
            last = value
        now_s = min(times_s[at + 1], plan_s[step + 1], plan.end_s)
        at += times_s[at + 1] == now_s
        step += plan_s[step + 1] == now_s and step + 1 < len(plan_gpus)
    if free[at] != last:
        found_s.append(now_s)
        found.append(free[at])
    return Steps((*found_s, *times_s[at + 1 : -1]), (*found, *free[at + 1 :]))


# The largest level that fits into a number of GPUs.
_FIT = (0, *(1 << (gpus.bit_length() - 1) for gpus in range(1, LEVELS[-1] + 1)))


def plan_work(profile: Steps, work: PlannedWork, slot_s: float, at_once: int = 0) -> GpuPlan:
    """Plans a job from the beginning of a profile on, with `at_once` GPUs until it changes, 0 for as many as needed."""
    now_s = profile.times_s[0]
    due_s = align_up(now_s, work.deadline_s, slot_s)
    times_s, free = list(profile.times_s), list(profile.gpus)
    until = bisect_left(times_s, due_s)
    if due_s > now_s and (until == len(times_s) or times_s[until] != due_s):
        times_s.insert(until, due_s)
        free.insert(until, free[until - 1])
    left, gpus, begin = work.left, [0] * len(times_s), 0
    if at_once:
        next_s = profile.times_s[1] if len(profile.times_s) > 1 else due_s
        done_s = math.ceil(now_s + left / work.rate_of(at_once))
        end_s = align_up(now_s, done_s, slot_s)
        if end_s <= next_s and done_s <= work.deadline_s:
            return GpuPlan(Steps((now_s,), (at_once,)), end_s, done_s)
        left -= ((work.deadline_s if next_s == due_s else next_s) - now_s) * work.rate_of(at_once)
        begin = bisect_left(times_s, next_s)
        gpus[:begin] = [at_once] * begin
    # When each piece before the deadline ends; the last ends with the deadline, not with its slot.
    ends_s = [*times_s[1:until], work.deadline_s] if until else []
    level, first = _find_level(times_s[begin:until], ends_s[begin:], free[begin:until], work, left)
    for piece in range(begin, until):
        limit = work.most if not level else level if piece >= begin + first else level // 2
        gpus[piece] = _FIT[min(limit, free[piece])]
        if not gpus[piece]:
            continue
        rate, span_s = work.rate_of(gpus[piece]), ends_s[piece] - times_s[piece]
        if level and piece >= begin + first and (span_s * rate >= left or piece == until - 1):
            run_s = math.ceil(left / rate)
            end_s = times_s[piece] + align_up(0.0, run_s, slot_s)
            return GpuPlan(_merge(times_s[:until], gpus), end_s, times_s[piece] + run_s)
        left -= span_s * rate
    # What cannot be done by the deadline runs on with all that is free.
    for piece in range(max(until, begin), len(times_s)):
        is_last = piece == len(times_s) - 1
        gpus[piece] = work.most if is_last else _FIT[min(work.most, free[piece])]
        if not gpus[piece]:
            continue
        rate = work.rate_of(gpus[piece])
        if is_last or (times_s[piece + 1] - times_s[piece]) * rate >= left:
            done_s = math.ceil(times_s[piece] + max(left, 0.0) / rate)
            return GpuPlan(_merge(times_s[: piece + 1], gpus), align_up(now_s, done_s, slot_s), done_s)
        left -= (times_s[piece + 1] - times_s[piece]) * rate
    raise ValueError("the last step of a profile has no GPU free")


def _find_level(
    times_s: list[float], ends_s: list[float], free: list[int], work: PlannedWork, left: float
) -> tuple[int, int]:
    """Returns the least GPUs that suffice, with the last piece from which they do; 0 if none does."""
    whole_s = sum(ends_s) - sum(times_s)
    level = 1
    while level <= work.most:
        done = 0.0
        # A level that would not do even alone is passed over, with room for rounding.
        alone = whole_s * work.rate_of(level) * (1.0 + 1e-9)
        for piece in range(len(times_s) - 1 if alone >= left else -1, -1, -1):
            fitting = _FIT[min(level, free[piece])]
            if fitting:
                done += (ends_s[piece] - times_s[piece]) * work.rates[fitting.bit_length() - 1]
                if done >= left:
                    return level, piece
        level *= 2
    return 0, 0


def _merge(times_s: list[float], gpus: list[int]) -> Steps:
    kept = [place for place in range(len(times_s)) if not place or gpus[place] != gpus[place - 1]]
    return Steps(tuple(times_s[place] for place in kept), tuple(gpus[place] for place in kept))
