"""Messages of the scheduler module in a Flux broker, and questions about its jobs; mirrored by flux_service.proto.

What Flux says is passed on as its own JSON, since its RFCs own that; only its size is bounded here.
"""

from typing import Annotated

from eelgrid_protos.messages.reading import GPUS_PER_NODE_MOST
from eelgrid_protos.quantities import Count, Label, Many, Nanoseconds, RequiredLabel, Seconds, Sentence, Text, Uint32
from eelgrid_protos.values import dataclass

# Of one message, in characters: the R of 10,000 different nodes has some 700,000.
FLUX_PAYLOAD_MOST = 1_000_000
FLUX_SPANS_MOST = 10_000
_Payload = Annotated[str, Text(FLUX_PAYLOAD_MOST)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleFluxRequest:
    """One message of the module."""

    topic: RequiredLabel
    payload: _Payload = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleFluxResponse:
    """One answer to the module."""

    topic: RequiredLabel
    payload: _Payload = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviseFluxRequest:
    """A jobspec that is about to be submitted."""

    jobspec: _Payload
    user: Label = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviseFluxResponse:
    """A constraint for it; empty if there is nothing to advise, for this reason."""

    constraint: _Payload = ""
    reason: Sentence = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListFluxSpansRequest:
    """A period; its end is now if it is 0."""

    begin_ns: Nanoseconds = 0
    end_ns: Nanoseconds = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FluxSpan:
    """What a job held of one host, and from when to when; its end is 0 while it holds it."""

    job: Label
    user: Label = ""
    hostname: Label = ""
    gpus: Annotated[tuple[Count, ...], Many(GPUS_PER_NODE_MOST)] = ()
    cores: Count = 0
    begin_ns: Nanoseconds = 0
    end_ns: Nanoseconds = 0
    wait_s: Seconds = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ListFluxSpansResponse:
    """The newest spans of a period, by their beginning."""

    spans: Annotated[tuple[FluxSpan, ...], Many(FLUX_SPANS_MOST)] = ()
    omitted: Uint32 = 0
