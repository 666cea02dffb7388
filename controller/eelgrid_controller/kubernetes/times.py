"""Points in time as objects of Kubernetes write them.

Owns the texts and their reading. Must not know a clock.

Source: `k8s.io/apimachinery/pkg/apis/meta/v1`, Time and MicroTime.
"""

from datetime import UTC, datetime

__all__ = ["micro_time", "stamp_of", "stamp_text"]

_NANOSECONDS = 1_000_000_000


def stamp_text(at_s: int) -> str:
    """Seconds since 1970 as a Time: `2026-11-22T07:30:00Z`."""
    return f"{datetime.fromtimestamp(at_s, UTC):%Y-%m-%dT%H:%M:%SZ}".rjust(20, "0")


def stamp_of(text: object) -> int | None:
    """Whole seconds since 1970 of such a time; None where it is none."""
    try:
        at = datetime.fromisoformat(text) if isinstance(text, str) else None
        return int(at.timestamp()) if at is not None and at.tzinfo is not None else None
    except (ValueError, OverflowError):
        return None


def micro_time(at_ns: int) -> str:
    """Nanoseconds since 1970 as a MicroTime: `2026-11-22T07:30:00.000001Z`."""
    return f"{stamp_text(at_ns // _NANOSECONDS)[:-1]}.{at_ns % _NANOSECONDS // 1000:06d}Z"
