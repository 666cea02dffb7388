"""What the steward has done and seen so far, as numbers that only grow; and how services kept their promises.

Owns the counting. Must not know how numbers are shown.

A window of a service is kept if its live quantile is within the objective, missed if it is
above, unjudged if there were too few answers to tell. What a service counted is forgotten
when it ends; the sums over all services are not.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from eelgrid_controller.steering.standing import ServiceStanding
from eelgrid_protos.errors import ContractError
from eelgrid_protos.faults import Fault

__all__ = ["Attainment", "Counts", "Verdict", "rule_of"]


class Verdict(Enum):
    """What a window says of a promise."""

    KEPT = "kept"
    MISSED = "missed"
    UNJUDGED = "unjudged"


def rule_of(error: Exception) -> str:
    """Which rule refused a command: its gRPC status, or a fault of ours."""
    if isinstance(error, Fault):
        return error.code.name.lower()
    return "invalid_argument" if isinstance(error, ContractError) else "internal"


class Attainment:
    """Windows of each service by verdict."""

    def __init__(self) -> None:
        self.total: Counter[Verdict] = Counter()
        self._services: dict[str, Counter[Verdict]] = {}
        self._heard_s: dict[str, float] = {}

    def of(self, name: str) -> Mapping[Verdict, int]:
        """A service's own."""
        return self._services.get(name, {})

    def look(self, services: Iterable[ServiceStanding], objectives_s: Mapping[str, float]) -> None:
        """Counts each window once; services that are not there any more are forgotten."""
        known, heard_s = self._services, self._heard_s
        self._services, self._heard_s = {}, {}
        for one in services:
            counted = self._services[one.name] = known.get(one.name) or Counter()
            if one.at_s is None:
                continue
            self._heard_s[one.name] = one.at_s
            if heard_s.get(one.name) == one.at_s:
                continue
            objective_s = objectives_s.get(one.name, 0.0)
            verdict = Verdict.UNJUDGED
            if one.live_s is not None and objective_s > 0.0:
                verdict = Verdict.KEPT if one.live_s <= objective_s else Verdict.MISSED
            counted[verdict] += 1
            self.total[verdict] += 1


@dataclass(slots=True)
class Counts:
    """Since the start of this process."""

    faults: int = 0  # workloads that were passed over in a turn, for an error
    done: Counter[str] = field(default_factory=Counter)  # commands that were carried out
    refused: Counter[tuple[str, str]] = field(default_factory=Counter)  # commands, by the rule that refused them
    answered: Counter[str] = field(default_factory=Counter)  # limits that nodes confirmed, or failed at
    attainment: Attainment = field(default_factory=Attainment)
