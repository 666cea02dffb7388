"""Job arrays: which elements an array of jobs has, what each of them runs, and how many of them may run at once.

`parse_array` reads indexes (`0-9%2`), `parse_sweep` parameters (`lr=1e-3,1e-4`, `seed=0-3`); both give the closed
description of an array, whose elements are listed in order. Owns the syntax and the bounds. Must not know how elements are
submitted, wait or run.

Theory. An array is counted before it is listed, so that one of a million elements is refused without work. Indexes are the
union of disjoint ranges, in ascending order. A sweep is the product of its parameters, the last one varying fastest, and its
indexes count from 0. A value that is a range of whole numbers is all of them; any other is itself. Values are substituted in one pass over each argument, so that a value is never itself substituted, and
only names of parameters in braces are replaced: any other brace of a command stays.
"""

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from eelgrid_protos.errors import Violation
from eelgrid_protos.faults import InvalidArgument
from eelgrid_protos.messages import (
    ARRAY_ELEMENTS_MOST,
    PARAMETER_VARIABLE_PREFIX,
    PARAMETERS_MOST,
    JobArrayRequest,
)

_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9})(?::([0-9]{1,9}))?)?")
_NUMBERS = re.compile(r"(0|[1-9][0-9]{0,8})-([1-9][0-9]{0,8})(?::([1-9][0-9]{0,8}))?")
_LIMIT = re.compile(r"[0-9]{1,9}")
_PARAMETER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_INDEXES_REMEDY = "write indexes and ranges such as 0-9, 0-8:2 or 1,3,5-7, and %N for at most N at once"
_SHOWN = 40


@dataclass(frozen=True, slots=True)
class ElementParameters:
    """One element of an array: its index and its value of each parameter."""

    index: int
    parameters: Mapping[str, str]

    @property
    def variables(self) -> dict[str, str]:
        """The variables in which its process finds its parameters."""
        return {PARAMETER_VARIABLE_PREFIX + name.upper(): value for name, value in self.parameters.items()}

    def substitute_arguments(self, argv: Sequence[str]) -> tuple[str, ...]:
        """Returns a command with the values of the parameters that it names in braces."""
        if not self.parameters:
            return tuple(argv)
        named = re.compile("{(" + "|".join(map(re.escape, self.parameters)) + ")}")
        return tuple(named.sub(lambda found: self.parameters[found[1]], argument) for argument in argv)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobArray:
    """The elements of an array in order, and how many of them may run at once; None for any number."""

    elements: tuple[ElementParameters, ...]
    running_most: int | None = None


def parse_job_array(request: JobArrayRequest) -> JobArray:
    """Parses what a submission says; of an array that runs again, its limit and the elements that are named, maybe none."""
    if request.parameters:
        return parse_sweep(request.parameters, request.indexes)
    if request.rerun_of and request.indexes.partition("%")[0] == "":
        return JobArray(elements=(), running_most=_split_limit(request.indexes)[1])
    return parse_array(request.indexes)


def parse_array(text: str) -> JobArray:
    """Parses indexes and a limit, such as 0-9%2; raises InvalidArgument, which names the field."""
    written, limit = _split_limit(text)
    _check_count("array.indexes", written.count(",") + 1, "write ranges, or split it into several arrays")
    found: list[range] = []
    for part in written.split(","):
        matched = _RANGE.fullmatch(part)
        if matched is None:
            raise _refuse("array.indexes", f"has {_shorten(part)}, which is no index or range", _INDEXES_REMEDY)
        first, step = int(matched[1]), int(matched[3] or 1)
        last = int(matched[2] or first)
        if last < first or step < 1:
            raise _refuse("array.indexes", f"has {_shorten(part)}, which is empty", _INDEXES_REMEDY)
        found.append(range(first, last + 1, step))
    _check_count("array.indexes", sum(map(len, found)), "split it into several arrays")
    indexes = sorted(itertools.chain.from_iterable(found))
    twice = next((one for one, other in itertools.pairwise(indexes) if one == other), None)
    if twice is not None:
        raise _refuse("array.indexes", f"has the index {twice} twice", "name each index once")
    return JobArray(elements=tuple(ElementParameters(index, {}) for index in indexes), running_most=limit)


def parse_sweep(parameters: Sequence[str], limit: str = "") -> JobArray:
    """Parses parameters such as lr=1e-3,1e-4, and a limit such as %2; raises InvalidArgument, which names the field."""
    written, running_most = _split_limit(limit)
    if written:
        remedy = "leave --array out, or give only a limit of those that run at once: --array %2"
        raise _refuse("array.indexes", "has indexes beside parameters, which number the elements", remedy)
    if not parameters:
        raise _refuse("array.parameters", "is not given", "name at least one: --param lr=1e-3,1e-4")
    if len(parameters) > PARAMETERS_MOST:
        raise _refuse("array.parameters", f"is given {len(parameters)} times", f"give {PARAMETERS_MOST} at the most")
    values: dict[str, list[range | str]] = {}
    variables: dict[str, str] = {}
    for text in parameters:
        name, equals, listed = text.partition("=")
        if not equals or not listed or _PARAMETER.fullmatch(name) is None:
            raise _refuse("array.parameters", f"is {_shorten(text)}", "write a name, = and its values: lr=1e-3,1e-4")
        other = variables.setdefault(name.upper(), name)
        if name in values or other != name:
            problem = f"has {name} beside {other}, of the same variable" if other != name else f"has {name} twice"
            raise _refuse("array.parameters", problem, "give each parameter one name, and all its values at once")
        _check_count("array.parameters", listed.count(",") + 1, "write ranges, or split it into several sweeps")
        values[name] = [_parse_values(part) for part in listed.split(",")]
    counts = (sum(len(one) if isinstance(one, range) else 1 for one in found) for found in values.values())
    _check_count("array.parameters", math.prod(counts), "leave values out, or split it into several sweeps")
    lists = {name: list(itertools.chain.from_iterable(map(_list_values, found))) for name, found in values.items()}
    for name, found in lists.items():
        if len(set(found)) < len(found):
            raise _refuse("array.parameters", f"has a value of {name} twice", "name each value once")
    return JobArray(elements=tuple(_list_products(lists)), running_most=running_most)


def _parse_values(text: str) -> range | str:
    """Returns the whole numbers of a range such as 0-3, or the value itself."""
    matched = _NUMBERS.fullmatch(text)
    if matched is None or int(matched[2]) < int(matched[1]):
        return text
    return range(int(matched[1]), int(matched[2]) + 1, int(matched[3] or 1))


def _list_values(values: range | str) -> Iterable[str]:
    return (values,) if isinstance(values, str) else map(str, values)


def _list_products(values: Mapping[str, Sequence[str]]) -> Iterator[ElementParameters]:
    for index, chosen in enumerate(itertools.product(*values.values())):
        yield ElementParameters(index, dict(zip(values, chosen, strict=True)))


def _split_limit(text: str) -> tuple[str, int | None]:
    """Returns what stands before % and the limit after it; raises InvalidArgument."""
    written, percent, limit = text.partition("%")
    if not percent:
        return written, None
    if _LIMIT.fullmatch(limit) is None or int(limit) < 1:
        raise _refuse(
            "array.indexes", f"has the limit {_shorten(limit)}", "write %N, at most N at once, with N of 1 or more"
        )
    return written, int(limit)


def _check_count(field: str, count: int, remedy: str) -> None:
    if count > ARRAY_ELEMENTS_MOST:
        raise _refuse(field, f"makes {count} elements", f"{remedy}: {ARRAY_ELEMENTS_MOST} at the most")


def _refuse(field: str, problem: str, remedy: str) -> InvalidArgument:
    return InvalidArgument("this is no array of jobs", (Violation(field, problem, remedy),))


def _shorten(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")
