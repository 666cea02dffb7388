"""Kubernetes' quantities, to whole numbers and back.

Owns the grammar and its rounding. Must not know which field holds which amount.

Theory. A quantity is a decimal number with one suffix: n, u, m, k, M, G, T, P, E (powers of
ten), Ki to Ei (powers of 1024) or an exponent (1e3, 1E3; a bare E is exa). It is kept to
nanos, finer digits round away from zero, and at most 2**63 - 1. Where a whole number is
needed it rounds away from zero, too: a pod that asks for 0.1 bytes holds one.

Source: k8s.io/apimachinery/pkg/api/resource/quantity.go.
"""

import re
from functools import lru_cache

from eelgrid_controller.kubernetes.errors import QuantityUnreadable

__all__ = ["bytes_text", "ceiling", "count_of", "cpu_milli_of", "cpu_text", "nanos_of"]

_MOST = 2**63 - 1
_NANO = 10**9
_SHAPE = re.compile(r"([+-]?)([0-9]*)(?:\.([0-9]*))?(?:[eE]([+-]?[0-9]{1,4})|([numkMGTPE]|[KMGTPE]i)?)")
_DECIMAL = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY = {"Ki": 1, "Mi": 2, "Gi": 3, "Ti": 4, "Pi": 5, "Ei": 6}
# No quantity of an API server is longer; a text of a million digits is no quantity.
_LONGEST = 128


def count_of(quantity: object, field: str = "quantity") -> int:
    """The whole number of a quantity: bytes, devices, pods; raises QuantityUnreadable."""
    return ceiling(nanos_of(quantity, field))


def cpu_milli_of(quantity: object, field: str = "quantity") -> int:
    """Thousandths of a quantity of CPUs; raises QuantityUnreadable."""
    return ceiling(nanos_of(quantity, field) * 1000)


def cpu_text(cpu_milli: int) -> str:
    """Thousandths of a CPU as Kubernetes writes them: `2`, `2500m`."""
    whole, rest = divmod(cpu_milli, 1000)
    return f"{cpu_milli}m" if rest else str(whole)


def bytes_text(memory_bytes: int) -> str:
    """Bytes as Kubernetes writes them: the largest binary unit that leaves a whole number."""
    for unit, power in reversed(_BINARY.items()):
        if memory_bytes and memory_bytes % 1024**power == 0:
            return f"{memory_bytes // 1024**power}{unit}"
    return str(memory_bytes)


def ceiling(nanos: int) -> int:
    """The whole number of these nanos, away from zero."""
    return -(-nanos // _NANO) if nanos >= 0 else nanos // _NANO


def nanos_of(quantity: object, field: str = "quantity") -> int:
    """Billionths of a quantity, exact as Kubernetes keeps it; raises QuantityUnreadable."""
    return _nanos(str(quantity), field)


@lru_cache(maxsize=4096)
def _nanos(text: str, field: str) -> int:
    found = _SHAPE.fullmatch(text) if len(text) <= _LONGEST else None
    if found is None or not (found[2] or found[3]):
        raise QuantityUnreadable(field, f"{text[:40]!r} is no quantity", "write such as 500m, 2, 1.5, 16Gi or 1e3")
    sign, whole, part, exponent, suffix = found.groups(default="")
    digits, power = int(whole + part or "0"), 9 - len(part)
    if suffix in _BINARY:
        digits *= 1024 ** _BINARY[suffix]
    else:
        power += int(exponent) if exponent else _DECIMAL[suffix]
    # Ceiling: what is finer than a nano rounds away from zero.
    nanos: int = digits * 10**power if power >= 0 else -(digits // -(10**-power))
    return (-1 if sign == "-" else 1) * min(nanos, _MOST * _NANO)
