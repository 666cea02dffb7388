"""Parses amounts as people write them on a command line or in a file: CPUs, memory and GPU shares.

formatting.py writes them. Internally, amounts are thousandths of a CPU or GPU, and bytes.
Knows nothing of requests.
"""

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

_NUMBER = re.compile(r"(\d{1,18}(?:\.\d{1,9})?)\s*([A-Za-z]*)")
_BYTES: dict[str, float] = {"": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12} | {
    f"{letter}{end}": 1024**power for power, letter in enumerate("kmgt", start=1) for end in ("i", "ib")
}


def _number(text: str, what: str) -> tuple[float, str]:
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not {what}")
    return float(match[1]), match[2].lower()


def parse_cpu_milli(text: str) -> int:
    """Parses `2.5` or `2500m` into thousandths of a CPU; raises ValueError."""
    number, unit = _number(text, "a number of CPUs: write 2.5 or 2500m")
    if unit not in {"", "m"}:
        raise ValueError(f"{text!r} has an unknown unit: write 2.5 or 2500m")
    return round(number if unit == "m" else number * 1000)


def parse_memory_bytes(text: str) -> int:
    """Parses `16GiB`, `16Gi`, `16GB` or a number of bytes into bytes; raises ValueError."""
    number, unit = _number(text, "an amount of memory: write 16GiB, 16GB or bytes")
    if unit not in _BYTES:
        raise ValueError(f"{text!r} has an unknown unit: write 16GiB, 16GB or bytes")
    return round(number * _BYTES[unit])


def parse_gpu_milli(text: str) -> int:
    """Parses `0.5` or `50%` of a GPU into thousandths; raises ValueError."""
    percent = text.strip().endswith("%")
    number, unit = _number(text.strip().removesuffix("%"), "a share of a GPU: write 0.5 or 50%")
    milli = round(number * (10 if percent else 1000))
    if unit or not 1 <= milli <= 1000:
        raise ValueError(f"{text!r} is not a share of a GPU: write more than 0 and at most 1, such as 0.5 or 50%")
    return milli


# click's ParamType takes a type argument for the checker alone; older releases refuse one when run.
if TYPE_CHECKING:
    _IntType = click.ParamType[int]
else:
    _IntType = click.ParamType


class AmountType(_IntType):
    """A click parameter type for an amount."""

    def __init__(self, name: str, read: Callable[[str], int]) -> None:
        self.name = name
        self._read = read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Returns the amount; fails with a usage error that shows how to write one."""
        if isinstance(value, int):
            return value
        try:
            return self._read(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


CPU = AmountType("CPUs", parse_cpu_milli)
MEMORY = AmountType("SIZE", parse_memory_bytes)
SHARE = AmountType("SHARE", parse_gpu_milli)
