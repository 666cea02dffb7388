"""Spans as plain values, from where they are noticed to where they are sent.

Owns their shape. Must not know OpenTelemetry: whoever notices a span is on the loop's thread, where
making the SDK's own spans took four times as long as filling these (measured); the sender makes
them of these in its thread.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

__all__ = ["Kind", "Root", "Span", "Values"]

Values = Mapping[str, str | int | float]


class Kind(Enum):
    """Who a span's work is for, by the names that OpenTelemetry gives."""

    INTERNAL = "INTERNAL"
    SERVER = "SERVER"
    CLIENT = "CLIENT"


@dataclass(frozen=True, slots=True)
class Root:
    """What a trace goes on from: its id, the caller's span (0 for none) and the caller's tracestate."""

    trace_id: int
    parent_id: int = 0
    state: str = ""


@dataclass(slots=True)
class Span:
    """One span; `end_ns` is 0 while it is open, `error` says why it is one."""

    name: str
    root: Root
    span_id: int
    parent_id: int
    start_ns: int
    kind: Kind = Kind.INTERNAL
    attributes: dict[str, str | int | float] = field(default_factory=dict)
    events: list[tuple[int, str, Values]] = field(default_factory=list)
    error: str | None = None
    end_ns: int = 0
