"""Gangs: workloads that ask for different things and start in one step; mirrored by gang.proto."""

from collections.abc import Iterator
from typing import Annotated

from eelgrid_protos.errors import Violation
from eelgrid_protos.quantities import Name, Range
from eelgrid_protos.values import dataclass

# Parts of one gang, which are decided in one step.
GANG_PARTS_MOST = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class GangPart:
    """The gang of its namespace and owner with whose other parts a workload starts in one step."""

    name: Name
    parts: Annotated[int, Range(2, GANG_PARTS_MOST)]
    # The first by submission, which must start together; 0 for all.
    parts_least: Annotated[int, Range(0, GANG_PARTS_MOST)] = 0

    @property
    def required_parts(self) -> int:
        """How many parts must start together."""
        return self.parts_least or self.parts

    def violations(self) -> Iterator[Violation]:
        """Checks that no more parts must start together than there are."""
        if self.parts_least > self.parts:
            yield Violation("parts_least", f"is {self.parts_least} of {self.parts} parts", "give at most parts, or 0")

    def check_part(self, *, has_deadline: bool, is_sliced: bool) -> Iterator[Violation]:
        """Checks that nothing is asked of a part that is decided for it alone."""
        if has_deadline:
            remedy = "set deadline.best_effort: the start of a whole gang is not promised"
            yield Violation("deadline", "is set for a part of a gang", remedy)
        if is_sliced:
            yield Violation(
                "gang", "is set for a service in slices", "leave it out: the partition planner places these"
            )
