"""Pagination of listings: page sizes, tokens bound to their filters, and elements that had to be omitted.

Follows Google AIP-158. Elements that break the contract are left out of a page and counted.
"""

import base64
import binascii
import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from eelgrid_controller.server.metrics.catalogue import build_family
from eelgrid_protos.codec import MESSAGE_BYTES_MOST, encode_element, encode_message
from eelgrid_protos.errors import ContractError, Violation
from eelgrid_protos.faults import InvalidArgument
from eelgrid_protos.messages import PAGE_SIZE_DEFAULT, PAGE_SIZE_MOST
from eelgrid_protos.openmetrics import MetricFamily
from eelgrid_protos.rpc import Encoded
from eelgrid_protos.schema import omit_broken

# For each call: an element that is broken stays so, and is asked for again and again.
_LINE_EVERY_S = 60.0


class OmissionCounter:
    """Of one server; give `note` to its handlers."""

    def __init__(self, *, monotonic_s: Callable[[], float], log: logging.Logger) -> None:
        self.counts: Counter[str] = Counter()
        self._monotonic_s = monotonic_s
        self._log = log
        self._quiet_until_s: dict[str, float] = {}

    def record_omission(self, call: str, count: int, reasons: tuple[Violation, ...]) -> None:
        """So many elements were left out of an answer to a call."""
        self.counts[call] += count
        now_s = self._monotonic_s()
        if now_s >= self._quiet_until_s.get(call, now_s):
            self._quiet_until_s[call] = now_s + _LINE_EVERY_S
            self._log.error(
                "call=%s omitted=%d omitted_total=%d reason=%r",
                call,
                count,
                self.counts[call],
                str(reasons[0]) if reasons else "",
            )

    def families(self) -> Iterator[MetricFamily]:
        """What the page of metrics tells."""
        yield build_family("eelgrid_answer_omitted_elements_total", dict(self.counts))


# Well under the 4 MB that gRPC's clients take unless told otherwise; a thousand nodes of eight GPUs have 1.4 MB.
PAGE_BYTES_MOST = 2 * 1024 * 1024
# An item that is longer than a page stands on one of its own, while an answer can carry it.
_ITEM_BYTES_MOST = MESSAGE_BYTES_MOST - 64 * 1024

_Item = TypeVar("_Item")
PagePosition = tuple[int | str, ...]
_NOT_FILTERS = ("page_size", "page_token")


def _digest(request: Any) -> str:
    filters = [type(request).__name__]
    filters += [
        f"{entry.name}={getattr(request, entry.name)!r}" for entry in fields(request) if entry.name not in _NOT_FILTERS
    ]
    return hashlib.blake2b("\n".join(filters).encode(), digest_size=6).hexdigest()


def _refusal(problem: str, remedy: str) -> InvalidArgument:
    return InvalidArgument("the page cannot be found", (Violation("page_token", problem, remedy),))


def parse_page_request(
    request: Any, *, default: int = PAGE_SIZE_DEFAULT, most: int = PAGE_SIZE_MOST
) -> tuple[int, PagePosition | None]:
    """Size of the page asked for, and the place after which it begins; raises InvalidArgument."""
    size = min(request.page_size, most) if request.page_size else default
    if not request.page_token:
        return size, None
    try:
        digest, *place = json.loads(base64.urlsafe_b64decode(request.page_token.encode("ascii")))
    except (ValueError, TypeError, binascii.Error, RecursionError):
        raise _refusal("is no token of this listing", "pass next_page_token on as it came") from None
    if digest != _digest(request):
        raise _refusal("belongs to other filters", "keep the filters of the first page, or begin without a token")
    # Databases have no larger numbers.
    if not place or not all(isinstance(part, str) or (type(part) is int and abs(part) < 2**63) for part in place):
        raise _refusal("is no token of this listing", "pass next_page_token on as it came")
    return size, tuple(place)


def next_page_token(request: Any, place: PagePosition) -> str:
    """The token with which the page after this place is asked for."""
    text = json.dumps([_digest(request), *place], separators=(",", ":"), ensure_ascii=False)
    return base64.urlsafe_b64encode(text.encode()).decode()


def _is_before(place: PagePosition, after: PagePosition | None) -> bool:
    try:
        return after is not None and place <= after
    except TypeError:
        raise _refusal("is no token of this listing", "pass next_page_token on as it came") from None


@dataclass(slots=True)
class _Elements:
    """The encoded elements of one page, as they gather."""

    response: type
    chunks: list[bytes] = field(default_factory=list)
    size: int = 0
    omitted: int = 0
    reasons: list[Violation] = field(default_factory=list)

    def add(self, name: str, element: Any) -> bool:
        """Takes an element in, or leaves it out where it cannot be sent; False where the page is full."""
        data = element if isinstance(element, bytes) else self._encode_element(name, element)
        if data is None:
            return True
        if self.chunks and self.size + len(data) > PAGE_BYTES_MOST:
            return False
        self.chunks.append(data)
        self.size += len(data)
        return True

    def _encode_element(self, name: str, element: Any) -> bytes | None:
        try:
            data = encode_element(self.response, name, element)
        except ContractError:
            salvaged = omit_broken(element)
            self.omitted += salvaged.omitted
            self.reasons.extend(salvaged.reasons[:1])
            if salvaged.message is None:
                return None
            data = encode_element(self.response, name, salvaged.message)
        if len(data) <= _ITEM_BYTES_MOST:
            return data
        self.omitted += 1
        self.reasons.append(
            Violation(name, f"has an element of {len(data)} bytes", f"keep it under {_ITEM_BYTES_MOST}")
        )
        return None


def build_page(
    request: Any,
    response: type,
    items: Iterable[_Item],
    *,
    place_of: Callable[[_Item], PagePosition],
    element_of: Callable[[_Item], tuple[str, Any]],
    default: int = PAGE_SIZE_DEFAULT,
    most: int = PAGE_SIZE_MOST,
    **others: Any,
) -> Encoded:
    """The page that `request` asks for, of items in strictly rising order of `place_of`.

    Elements, each with the response's list that it belongs to, are made for the page's items alone, or are bytes that
    `encode_element` made; `others` are the response's other fields.
    """
    size, after = parse_page_request(request, default=default, most=most)
    elements = _Elements(response)
    total = 0
    last: PagePosition | None = None
    is_full = False
    for item in items:
        total += 1
        if is_full or _is_before(place := place_of(item), after):
            continue
        is_full = len(elements.chunks) >= size or not elements.add(*element_of(item))
        if not is_full:
            last = place
    token = next_page_token(request, last) if is_full and last is not None else ""
    rest = response(next_page_token=token, total=total, omitted=elements.omitted, **others)
    return Encoded(b"".join([encode_message(rest), *elements.chunks]), elements.omitted, tuple(elements.reasons))
