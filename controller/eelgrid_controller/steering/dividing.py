"""A division of watts as a value: what is known when it is found due, to be worked out then or elsewhere.

Owns the question and the way to its answer. Must not know when one is due, who works it
out, or what becomes of the answer.

Theory. A division takes a millisecond for each job, half of it to find what each would run
at without budgets. All that it rests on is frozen, so it need not be made in the call that
finds it due: the question goes out as an instruction, `Divide`, the answer comes back as an
event, `Divided`, as tasks do in dask.distributed. An answer that is late harms no budget:
ceilings only allow, and every raise is held against the claims of the moment at which it is
given (eelgrid_controller.power.changes).
"""

from collections.abc import Sequence
from typing import NamedTuple

from eelgrid_controller.power.budgets import Budgets
from eelgrid_controller.power.planner import Want
from eelgrid_controller.steering.sharing import Asking, Shared, share
from eelgrid_controller.steering.wishes import Wish

__all__ = ["Problem", "imagined", "solved"]


class Problem(NamedTuple):
    """Who shares which budgets; `wishes` are in the order of `asking`, whose own wishes are not worked out yet."""

    asking: tuple[Asking, ...]
    wishes: tuple[Wish, ...]
    budgets: Budgets
    fixed_w: tuple[float, ...]  # what each budget gives to GPUs that cannot be changed
    want: Want


def _wished(problem: Problem) -> tuple[Asking, ...]:
    """The jobs with what each would run at without budgets."""
    return tuple(one._replace(wish_w=wish.limit_w()) for one, wish in zip(problem.asking, problem.wishes, strict=True))


def _shared(asking: Sequence[Asking], problem: Problem) -> Shared:
    return share([one for one in asking if one.gpus], problem.budgets, problem.fixed_w, problem.want)


def solved(problem: Problem) -> Shared:
    """Ceilings of all jobs that have a GPU which can be changed, and what budgets lack."""
    return _shared(_wished(problem), problem)


def imagined(problem: Problem) -> Shared:
    """The limit of every job, a wish or what budgets allow, in the place of a ceiling."""
    asking = _wished(problem)
    found = _shared(asking, problem)
    limits_w = {one.name: min(one.wish_w, found.ceilings_w.get(one.name) or one.wish_w) for one in asking}
    return Shared(dict(limits_w), found.shortfalls)
