"""Head of an HTTP request: request line and headers, read within limits.

`http.server` would read them too, with the e-mail package and the tables of HTML, which are 1.6 MB of a small daemon.
Bodies are not read: the endpoint answers GET and HEAD. Must not know sockets or what is served.
"""

import re
from collections.abc import Mapping
from typing import Protocol

from eelgrid_protos.values import dataclass

# Request line and headers together; Prometheus sends some 400 bytes.
HEAD_BYTES_MOST = 16 * 1024
_HEADERS_MOST = 100
_VERSION = re.compile(r"HTTP/(\d)\.\d")
# A token of RFC 9110, section 5.6.2.
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


class RequestRefused(Exception):
    """What was sent is not a request that can be answered; `status` says why."""

    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(status)


@dataclass(frozen=True, slots=True)
class RequestHead:
    """Method, target and headers; names of headers in lower case, and of a repeated one the first."""

    method: str
    target: str
    headers: Mapping[str, str]


class LineReader(Protocol):
    """The part of a binary file that is read from."""

    def readline(self, size: int, /) -> bytes:
        """Returns a line with its end, or `size` bytes of it; without an end if the file ends."""


def read_request(file: LineReader) -> RequestHead | None:
    """Reads a head; None if the client sent none, or closed within it. Raises RequestRefused, and what `file` raises."""
    line = file.readline(HEAD_BYTES_MOST + 1)
    left = HEAD_BYTES_MOST - len(line)
    if left < 0:
        raise RequestRefused(414)
    words = line.decode("latin-1").split()
    if not words:
        return None
    version = _VERSION.fullmatch(words[-1])
    if len(words) != 3 or version is None:
        raise RequestRefused(400)
    if version[1] != "1":
        raise RequestRefused(505)
    headers: dict[str, str] = {}
    for _ in range(_HEADERS_MOST + 1):
        line = file.readline(left + 1)
        left -= len(line)
        if left < 0:
            raise RequestRefused(431)
        if not line.endswith(b"\n"):
            return None
        text = line.decode("latin-1").rstrip("\r\n")
        if not text:
            return RequestHead(words[0], words[1], headers)
        name, colon, value = text.partition(":")
        name = name.lower()
        # Of two hosts neither can be trusted to be the one that the client meant.
        if not colon or not _NAME.fullmatch(name) or (name == "host" and name in headers):
            raise RequestRefused(400)
        headers.setdefault(name, value.strip())
    raise RequestRefused(431)
