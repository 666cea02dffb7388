"""How a program reaches the operators' API: the addresses of controllers and the pages of a listing.

Shared by eelctl and the Python client. `PageCursor` does no I/O, so that blocking and asynchronous callers use the same
one: it says what to ask next and when to stop. grpc and the messages are not imported here, because they take longer to
load than everything else that `eelctl --help` does.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, Protocol, TypeVar

DEFAULT_CONTROLLER = "127.0.0.1:7443"
CONTROLLER_VARIABLE = "EELGRID_CONTROLLER"
# Certificate, key and authority, in this order.
TLS_VARIABLES = ("EELGRID_TLS_CERTIFICATE", "EELGRID_TLS_KEY", "EELGRID_TLS_AUTHORITY")

# Of controllers that one program knows.
ADDRESSES_MOST = 16

_Item = TypeVar("_Item")
_Page = TypeVar("_Page", bound="Page")


def parse_addresses(*texts: str) -> tuple[str, ...]:
    """Splits HOST:PORT,HOST:PORT; each address once, in the order given. Raises ValueError for none, or too many."""
    found = tuple(dict.fromkeys(one.strip() for text in texts for one in text.split(",")))
    if not found or not all(found):
        raise ValueError(f"{','.join(texts)!r} has an empty address; write HOST:PORT, or several with commas")
    if len(found) > ADDRESSES_MOST:
        raise ValueError(f"{','.join(texts)!r} has {len(found)} addresses; give at most {ADDRESSES_MOST}")
    return found


class Page(Protocol):
    """What the answers of all paged listings have in common."""

    @property
    def next_page_token(self) -> str:
        """Token of the page after this one; empty on the last."""

    @property
    def omitted(self) -> int:
        """How many elements were left out because they break the contract."""


class PageCursor:
    """Walks the pages of a listing; stops early at `limit` items, or at a page that repeats its token.

    Pages are as large as the contract allows (of summaries, `page_size_most` says so), or as the server chooses if
    `is_sized` is false.
    """

    def __init__(
        self, request: Any, *, limit: int | None = None, is_sized: bool = True, page_size_most: int | None = None
    ) -> None:
        self._request = request
        self._left = limit
        self._token = ""
        self._is_sized = is_sized
        self._page_size_most = page_size_most
        self.is_done = limit is not None and limit <= 0

    def next_request(self) -> Any:
        """Returns the request for the next page."""
        if not self._is_sized:
            return replace(self._request, page_token=self._token)
        from eelgrid_protos.messages import PAGE_SIZE_MOST

        most = self._page_size_most or PAGE_SIZE_MOST
        size = most if self._left is None else min(self._left, most)
        return replace(self._request, page_size=size, page_token=self._token)

    def take_items(self, page: Page, items: Sequence[_Item]) -> Sequence[_Item]:
        """Moves on to the next page and returns the items of this one, at most as many as are wanted."""
        if self._left is not None:
            items = items[: self._left]
            self._left -= len(items)
        self.is_done = page.next_page_token in {"", self._token} or self._left == 0
        self._token = page.next_page_token
        return items


def join_pages(pages: Sequence[_Page]) -> _Page:
    """Joins the lists of a listing's pages into one answer; fields that are not lists are the last page's."""
    last: Any = pages[-1]
    lists = {
        entry.name: tuple(item for page in pages for item in getattr(page, entry.name))
        for entry in fields(last)
        if isinstance(getattr(last, entry.name), tuple)
    }
    joined: _Page = replace(last, **lists)
    return joined
