"""Job arrays: many jobs of one submission, which differ in their index and parameters; mirrored by job_array.proto."""

import re
from collections.abc import Iterator
from typing import Annotated

from eelgrid_protos.errors import Violation
from eelgrid_protos.quantities import Identifier, Many, OptionalIdentifier, Range, Text
from eelgrid_protos.values import dataclass

# Elements of one array, and its parameters.
ARRAY_ELEMENTS_MOST = 10_000
PARAMETERS_MOST = 64
INDEX_VARIABLE = "EELGRID_ARRAY_INDEX"
ARRAY_VARIABLE_PREFIX = "EELGRID_ARRAY_"
PARAMETER_VARIABLE_PREFIX = "EELGRID_PARAM_"

# As in an argument of a command, in which values are substituted.
_TEXT = Text(65_536, False, re.compile(r"[^\x00\ud800-\udfff]*"), "no NUL characters")
IndexList = Annotated[str, _TEXT]
ParameterText = Annotated[str, _TEXT]
ArrayIndex = Annotated[int, Range(0, 999_999_999)]
ElementCount = Annotated[int, Range(0, ARRAY_ELEMENTS_MOST)]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobArrayRequest:
    """Which elements a submission has: indexes, or the product of parameters, or those of an array that run again."""

    indexes: IndexList = ""
    parameters: Annotated[tuple[ParameterText, ...], Many(PARAMETERS_MOST)] = ()
    rerun_of: OptionalIdentifier = ""

    def violations(self) -> Iterator[Violation]:
        """Checks that it has elements of one kind."""
        if not (self.indexes or self.parameters or self.rerun_of):
            yield Violation("indexes", "is empty", "write indexes such as 0-9, or give parameters")
        if self.parameters and self.rerun_of:
            yield Violation("parameters", "are given with rerun_of", "keep one of the two: elements keep their values")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayElement:
    """Which element of which array a workload is; at most `running_most` of it hold resources at once, 0 for any."""

    array_id: Identifier
    index: ArrayIndex = 0
    size: ElementCount = 1
    running_most: ArrayIndex = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayStatus:
    """The elements of an array by phase; those that were forgotten since they ended are in none."""

    size: ElementCount = 0
    pending: ElementCount = 0
    placed: ElementCount = 0
    succeeded: ElementCount = 0
    failed: ElementCount = 0
    cancelled: ElementCount = 0
    running_most: ArrayIndex = 0
    # Elements that hold resources, or once did, or of which that is not known any more.
    started: ElementCount = 0
