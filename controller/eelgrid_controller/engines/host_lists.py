"""Host lists: n[0-3,7],m1 as names of hosts, as Slurm and Flux write them.

Owns their syntax, and that of the ranges of numbers in them. Must not know any engine: names are bounded, and not looked up.

Theory. A list is expanded completely or refused, since half of one is another job's nodes. Its size is bounded before a name
is made, so that n[0-999999999] costs nothing.

Sources: man scontrol (show hostnames), flux-framework/rfc 29; r[1-2]n[1-2] is a product, n[08-11] keeps its zeros, and a
step as in n[0-8:4] is Slurm's alone.
"""

import itertools
import re
from collections.abc import Iterator

from eelgrid_controller.engines.element_lists import UnreadableAnswer

_HOSTS_MOST = 65_536
HOST_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?(?::([0-9]{1,9}))?")


def expand_hosts(text: str) -> tuple[str, ...]:
    """Expands a host list such as n[0-3,7],m1 in its order; raises UnreadableAnswer."""
    found: list[str] = []
    for part in _split_outside_brackets(text):
        names = [""]
        for piece in re.findall(r"[^\[\]]+|\[[^\[\]]*\]", part):
            ranges = expand_ranges(piece[1:-1]) if piece[0] == "[" else (piece,)
            endings = list(itertools.islice(ranges, _HOSTS_MOST + 1))
            if len(names) * len(endings) + len(found) > _HOSTS_MOST:
                raise UnreadableAnswer(f"names more than {_HOSTS_MOST} hosts")
            names = [name + ending for name in names for ending in endings]
        found += names
    for name in found:
        if not HOST_NAME.fullmatch(name):
            raise UnreadableAnswer(f"names {name[:64]!r}, which is no host")
    return tuple(found)


def _split_outside_brackets(text: str) -> Iterator[str]:
    depth, begin = 0, 0
    for place, character in enumerate(text):
        depth += {"[": 1, "]": -1}.get(character, 0)
        if depth not in (0, 1):
            raise UnreadableAnswer(f"has {text[:64]!r} where hosts are expected")
        if character == "," and not depth:
            yield text[begin:place]
            begin = place + 1
    if depth:
        raise UnreadableAnswer(f"has {text[:64]!r} where hosts are expected")
    if text[begin:]:
        yield text[begin:]


def expand_ranges(text: str) -> Iterator[str]:
    """Yields the numbers of 0-3,08,10-20:5 as they are written, with their zeros; raises UnreadableAnswer."""
    for part in text.split(","):
        matched = _RANGE.fullmatch(part)
        if matched is None:
            raise UnreadableAnswer(f"has {part[:40]!r} where numbers are expected")
        first, last, step = matched[1], matched[2] or matched[1], int(matched[3] or 1)
        if int(last) < int(first) or not step or (int(last) - int(first)) // step >= _HOSTS_MOST:
            raise UnreadableAnswer(f"has {part[:40]!r} where a range is expected")
        for number in range(int(first), int(last) + 1, step):
            yield str(number).zfill(len(first))
