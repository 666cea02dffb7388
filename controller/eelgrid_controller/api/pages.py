"""Pages of a listing: sizes, and tokens that belong to their filters.

Owns how a token looks: the place after the last item, and a digest of the
filters it was made under. A token says where to go on, not what was there, so
a listing needs no memory on the server and goes on sensibly when items come
and go in between. Knows nothing of what is listed.
"""

import base64
import binascii
import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

from eelgrid_protos.errors import Violation
from eelgrid_protos.faults import InvalidArgument
from eelgrid_protos.messages import PAGE_SIZE_DEFAULT, PAGE_SIZE_MOST

__all__ = ["Page", "cut", "page_of", "token_after"]

_Item = TypeVar("_Item")
Place = tuple[int | str, ...]
_NOT_FILTERS = ("page_size", "page_token")


@dataclass(frozen=True, slots=True)
class Page(Generic[_Item]):
    """A piece of a listing."""

    items: tuple[_Item, ...]
    next_token: str
    total: int


def _digest(request: Any) -> str:
    filters = [type(request).__name__]
    filters += [
        f"{entry.name}={getattr(request, entry.name)!r}" for entry in fields(request) if entry.name not in _NOT_FILTERS
    ]
    return hashlib.blake2b("\n".join(filters).encode(), digest_size=6).hexdigest()


def _refusal(problem: str, remedy: str) -> InvalidArgument:
    return InvalidArgument("the page cannot be found", (Violation("page_token", problem, remedy),))


def page_of(request: Any) -> tuple[int, Place | None]:
    """Size of the page asked for, and the place after which it begins; raises InvalidArgument."""
    size = min(request.page_size or PAGE_SIZE_DEFAULT, PAGE_SIZE_MOST)
    if not request.page_token:
        return size, None
    try:
        digest, *place = json.loads(base64.urlsafe_b64decode(request.page_token.encode("ascii")))
    except (ValueError, TypeError, binascii.Error):
        raise _refusal("is no token of this listing", "pass next_page_token on as it came") from None
    if digest != _digest(request):
        raise _refusal("belongs to other filters", "keep the filters of the first page, or begin without a token")
    if not place or not all(isinstance(part, int | str) for part in place):
        raise _refusal("is no token of this listing", "pass next_page_token on as it came")
    return size, tuple(place)


def token_after(request: Any, place: Place) -> str:
    """The token with which the page after this place is asked for."""
    parts = [_digest(request), *place]
    return base64.urlsafe_b64encode(json.dumps(parts, separators=(",", ":")).encode()).decode()


def cut(request: Any, matching: Iterable[_Item], place_of: Callable[[_Item], Place]) -> Page[_Item]:
    """The page that `request` asks for, of items in strictly rising order of `place_of`."""
    size, after = page_of(request)
    items: list[_Item] = []
    total = 0
    more = False
    for item in matching:
        total += 1
        try:
            is_before = after is not None and place_of(item) <= after
        except TypeError:
            raise _refusal("is no token of this listing", "pass next_page_token on as it came") from None
        if is_before:
            continue
        if len(items) < size:
            items.append(item)
        else:
            more = True
    token = ""
    if more:
        token = token_after(request, place_of(items[-1]))
    return Page(items=tuple(items), next_token=token, total=total)
