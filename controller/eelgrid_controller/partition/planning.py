"""From a problem to a plan: which search, and its result as GPUs.

Owns the choice of the search. Must not know running fleets (change.py does).
"""

from eelgrid_controller.partition.exact import FIRST_NODES_MOST, Solution, exact
from eelgrid_controller.partition.fleet import Memory, fleet
from eelgrid_controller.partition.plan import PROVEN, Plan, drawn
from eelgrid_controller.partition.problem import Problem
from eelgrid_controller.partition.programme import compiled

__all__ = ["EXACT_DEMANDS_MOST", "EXACT_OPTIONS_MOST", "plan"]

# Up to here the whole programme is solved at once: 40 services on one model, or twelve on any number of models.
EXACT_OPTIONS_MOST, EXACT_DEMANDS_MOST = 200, 12


def plan(problem: Problem, memory: Memory | None = None, nodes_most: int = FIRST_NODES_MOST) -> Plan:
    """The least plan, with its bound; raises Unservable, FleetTooSmall, SearchExhausted, BadProblem.

    The memory is that of a plan for a like problem (`Plan.memory`): a fleet's search starts from it.
    """
    programme = compiled(problem, known=None if memory is None else memory.known)
    if len(programme.options) > EXACT_OPTIONS_MOST and len(programme.rate_hz) > EXACT_DEMANDS_MOST:
        return drawn(programme, *fleet(programme, memory))
    solution = exact(programme, nodes_most)
    if solution.proofs[0].gap > PROVEN:
        solution = _better(solution, fleet(programme)[0])
    return drawn(programme, solution)


def _better(one: Solution, other: Solution) -> Solution:
    """Of two solutions of a programme the one with less, under the higher bound of the two."""
    best = min(one, other, key=lambda solution: solution.proofs[0].value)
    first = best.proofs[0]._replace(bound=max(one.proofs[0].bound, other.proofs[0].bound))
    return best._replace(proofs=(first, *best.proofs[1:]))
