"""Batches: several messages of the scheduler module's stream, or several answers, as one message.

Owns the topic and the form of such a message, and who may be sent one. Must not know what the messages mean.

Theory. A job of Flux is some ten messages, and one message of gRPC costs both sides as much as handling a few of ours. So
what waits to be sent goes together, in its order, as a list of pairs of topic and payload; nothing waits for more to come. A
side that is older would not understand it: the controller says by `welcome`, and the module by `hello`, that it reads batches,
and is sent none before.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from eelgrid_controller.engines.flux.resource_sets import FluxUnreadable
from eelgrid_protos.messages import FLUX_PAYLOAD_MOST

BATCH = "batch"
# What a side says of itself that reads batches.
READS_BATCHES = {"batches": True}


class StreamMessage(NamedTuple):
    """A message as it is sent: its topic, and its payload as text of JSON."""

    topic: str
    payload: str


def encode_payload(value: Any) -> str:
    """Returns a payload as text."""
    return json.dumps(value, separators=(",", ":"))


def pack_messages(messages: Iterable[StreamMessage], *, most: int = FLUX_PAYLOAD_MOST) -> Iterator[StreamMessage]:
    """Yields the messages in as few as their payloads of at most so many characters allow; one alone stays as it is."""
    packed: list[StreamMessage] = []
    size = 0
    for one in messages:
        # Its brackets, quotation marks and commas.
        added = len(one.topic) + len(one.payload) + 8
        if packed and size + added > most:
            yield _join(packed)
            packed, size = [], 0
        packed.append(one)
        size += added
    if packed:
        yield _join(packed)


def _join(messages: list[StreamMessage]) -> StreamMessage:
    if len(messages) == 1:
        return messages[0]
    return StreamMessage(BATCH, f"[{','.join(f'[{encode_payload(topic)},{text}]' for topic, text in messages)}]")


def unpack_messages(text: str) -> list[tuple[str, Any]]:
    """Returns the topics and payloads of a batch, as values; what is no such pair has an empty topic. Raises FluxUnreadable."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FluxUnreadable(f"{BATCH} is no JSON: {error}") from None
    if not isinstance(found, list):
        raise FluxUnreadable(f"{BATCH} has {str(found)[:40]!r} where a list is expected")
    return [
        (one[0], one[1]) if isinstance(one, list) and len(one) == 2 and isinstance(one[0], str) else ("", None)
        for one in found
    ]
