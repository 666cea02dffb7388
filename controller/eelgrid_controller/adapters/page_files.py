"""The live page's files as they are sent: read once, packed once.

Owns how index.html and the style sheet become one answer, the packing, and the tags by which a
browser knows that it has a file already. Must not know requests.

Theory. What a browser needs for its first picture is one answer that fits into the first window
of a TCP connection (ten segments, RFC 6928), so the style sheet stands inside index.html and is
let in by its hash. The modules are named there too, so that they are asked for at once and not
one import after the other.
"""

import base64
import gzip
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources

__all__ = ["PageFile", "page_files", "style_source"]

_KINDS = {".html": "text/html", ".js": "text/javascript", ".svg": "image/svg+xml"}
_STYLE_LINK = b'<link rel="stylesheet" href="page.css">\n'


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file: as it is, packed by gzip, and a tag of its content."""

    kind: str
    plain: bytes
    packed: bytes
    tag: str


def page_files() -> Mapping[str, PageFile]:
    """The files by name; index.html holds the style sheet."""
    folder = resources.files("eelgrid_controller.page") / "files"
    found = {
        item.name: _file(kind, item.read_bytes())
        for item in folder.iterdir()
        if (kind := _KINDS.get(f".{item.name.rpartition('.')[2]}"))
    }
    index = found["index.html"].plain
    assert index.count(_STYLE_LINK) == 1, "the style sheet goes in where its link stands"
    found["index.html"] = _file(_KINDS[".html"], index.replace(_STYLE_LINK, b"<style>%b</style>\n" % _style()))
    return found


def style_source() -> str:
    """What a content security policy says to let in the style sheet that stands in index.html, and no other."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(_style()).digest()).decode()}'"


def _style() -> bytes:
    return (resources.files("eelgrid_controller.page") / "files" / "page.css").read_bytes()


def _file(kind: str, plain: bytes) -> PageFile:
    return PageFile(kind, plain, gzip.compress(plain, 9, mtime=0), f'"{hashlib.sha256(plain).hexdigest()[:24]}"')
