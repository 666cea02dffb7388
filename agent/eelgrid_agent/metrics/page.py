"""What a request for a page is answered: /metrics, /livez and /readyz.

Owns paths, the choice of format and encoding, and that a page is rendered at
most once for each tick and second, however many scrape. Must not know sockets,
nor what is on the page. Nobody scrapes, nobody renders.
"""

import gzip
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from eelgrid_agent.metrics.frame import Frame
from eelgrid_agent.metrics.render import Rendered, Renderer

__all__ = ["OPENMETRICS", "PROMETHEUS", "Answer", "Frames", "Page", "accepts_gzip", "prefers_openmetrics"]

PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
# The event loop is taken for dead when nothing was sampled for this long and four intervals.
SILENCE_S_MOST = 60.0
SILENCE_INTERVALS = 4.0

_OPENMETRICS_TYPE = "application/openmetrics-text"
_OPENMETRICS_VERSIONS = ("", "0.0.1", "1.0.0")
# A header that lists more than any client does is not read to its end.
_CHOICES_MOST = 32
# Labels repeat: the first level makes 20 kB of 500, and the higher ones little less for a lot more.
_GZIP_LEVEL = 1


class Frames(Protocol):
    """Where frames come from."""

    def frame(self) -> Frame:
        """What is known now."""

    def oldest_s(self) -> float | None:
        """Age of the oldest newest tick; None before every node has one."""

    def slowest_interval_s(self) -> float:
        """The longest sample interval of any node."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP answer without its transport; `encoding` is empty for plain bytes."""

    status: int
    content_type: str
    body: bytes
    encoding: str = ""


class Page:
    """The rendered page, in each form that was asked for."""

    def __init__(self, frames: Frames, *, ticks: Callable[[], int], monotonic_ns: Callable[[], int]) -> None:
        self._frames = frames
        self._ticks = ticks
        self._monotonic_ns = monotonic_ns
        self._lock = threading.Lock()
        self._renderer = Renderer()
        self._key: tuple[int, int] | None = None
        self._rendered = Rendered(())
        self._forms: dict[tuple[bool, bool], bytes] = {}
        self.renders_total = 0

    def answer(self, path: str, *, accept: str = "", accept_encoding: str = "") -> Answer:
        """The answer to a GET with these headers."""
        match path.partition("?")[0]:
            case "/metrics":
                openmetrics, gzipped = prefers_openmetrics(accept), accepts_gzip(accept_encoding)
                body = self._metrics(openmetrics=openmetrics, gzipped=gzipped)
                return Answer(200, OPENMETRICS if openmetrics else PROMETHEUS, body, "gzip" if gzipped else "")
            case "/livez":
                return self._live()
            case "/readyz":
                ready = self._frames.oldest_s() is not None
                return _plain(200, "ready") if ready else _plain(503, "not every node has been sampled yet")
            case _:
                return _plain(404, "ask for /metrics, /livez or /readyz")

    def _live(self) -> Answer:
        age_s = self._frames.oldest_s()
        bound_s = max(SILENCE_S_MOST, SILENCE_INTERVALS * self._frames.slowest_interval_s())
        if age_s is not None and age_s > bound_s:
            return _plain(503, f"nothing was sampled for {age_s:.0f} s")
        return _plain(200, "alive")

    def _metrics(self, *, openmetrics: bool, gzipped: bool) -> bytes:
        with self._lock:
            key = (self._ticks(), self._monotonic_ns() // 1_000_000_000)
            if key != self._key:
                self._rendered = self._renderer.render(self._frames.frame())
                self._forms.clear()
                self._key = key
                self.renders_total += 1
            return self._form(openmetrics=openmetrics, gzipped=gzipped)

    def _form(self, *, openmetrics: bool, gzipped: bool) -> bytes:
        form = (openmetrics, gzipped)
        body = self._forms.get(form)
        if body is None:
            if gzipped:
                body = gzip.compress(self._form(openmetrics=openmetrics, gzipped=False), _GZIP_LEVEL, mtime=0)
            else:
                body = self._rendered.openmetrics() if openmetrics else self._rendered.prometheus()
            self._forms[form] = body
        return body


def _plain(status: int, text: str) -> Answer:
    return Answer(status, "text/plain; charset=utf-8", f"{text}\n".encode())


def prefers_openmetrics(accept: str) -> bool:
    """Whether an Accept header likes OpenMetrics at least as well as plain text."""
    liked, plain = 0.0, 0.0
    for name, parameters, quality in _choices(accept):
        if name == _OPENMETRICS_TYPE and parameters.get("version", "") in _OPENMETRICS_VERSIONS:
            liked = max(liked, quality)
        elif name == "text/plain":
            plain = max(plain, quality)
    return liked > 0.0 and liked >= plain


def accepts_gzip(accept_encoding: str) -> bool:
    """Whether an Accept-Encoding header takes gzip."""
    qualities = {name: quality for name, _, quality in _choices(accept_encoding)}
    return qualities.get("gzip", qualities.get("*", 0.0)) > 0.0


def _choices(header: str) -> list[tuple[str, dict[str, str], float]]:
    """The choices of a header: name, parameters and quality, 0 where the quality is no number."""
    choices = []
    for choice in header.split(",")[:_CHOICES_MOST]:
        name, *rest = (part.strip() for part in choice.split(";"))
        parameters = {
            key.strip().lower(): value.strip(' "') for key, _, value in (part.partition("=") for part in rest)
        }
        try:
            quality = float(parameters.get("q", "1"))
        except ValueError:
            quality = 0.0
        choices.append((name.lower(), parameters, quality if 0.0 <= quality <= 1.0 else 0.0))
    return choices
