"""Controller stream: the scheduler module's connection to the controller, in a thread beside the broker's reactor.

Owns connecting, and again after a loss. Must not know Flux: messages come and go by topic, as objects of JSON.

Theory. A broker module has one thread, which runs Flux's reactor, and gRPC must not block it. So a thread of ours reads
answers into a queue and writes a byte into a pipe, which the reactor watches; only the module's own thread handles answers.
What is sent before the controller has said welcome would be lost with a connection that never was one, so it is refused:
the module says everything once the stream is there. Pauses between attempts double up to a bound. What is sent while an
earlier message is on its way goes together with the next.
"""

import contextlib
import json
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

from eelgrid_controller.engines.flux.batches import (
    BATCH,
    READS_BATCHES,
    StreamMessage,
    encode_payload,
    pack_messages,
    unpack_messages,
)
from eelgrid_protos.errors import ContractError
from eelgrid_protos.faults import Fault
from eelgrid_protos.messages import FLUX_PAYLOAD_MOST, ScheduleFluxRequest, ScheduleFluxResponse
from eelgrid_protos.rpc import FLUX_SERVICE, build_client
from eelgrid_protos.transport import ListenError, TlsFiles, open_blocking_channel

_PAUSE_FIRST_S, _PAUSE_MOST_S = 0.2, 5.0
# Messages that go together at the most.
_BATCH_MOST = 1_000


class StreamAnswer(NamedTuple):
    """One answer; the topics `welcome` and `lost` are of the connection itself."""

    topic: str
    payload: Mapping[str, Any]


_Outgoing: TypeAlias = "queue.SimpleQueue[StreamMessage | None]"


class ControllerStream:
    """A stream that is opened again whenever it ends."""

    def __init__(self, address: str, *, tls: TlsFiles | None, insecure: bool) -> None:
        self._address, self._tls, self._insecure = address, tls, insecure
        self._answers: deque[StreamAnswer] = deque()
        self._outgoing: _Outgoing | None = None
        self._sends_batches = False
        self._is_over = threading.Event()
        self.fileno, self._wakes = os.pipe()
        os.set_blocking(self.fileno, False)
        os.set_blocking(self._wakes, False)
        self._thread = threading.Thread(target=self._run, name="eelgrid-stream", daemon=True)

    def start(self) -> None:
        """Begins to connect."""
        self._thread.start()

    def close(self) -> None:
        """Ends the stream; nothing comes after."""
        self._is_over.set()
        if (outgoing := self._outgoing) is not None:
            outgoing.put(None)

    def send(self, topic: str, payload: Mapping[str, Any]) -> bool:
        """Sends a message; returns False if there is no connection, or it is too long to be sent."""
        return self._outgoing is not None and self.send_text(topic, encode_payload(payload))

    def send_text(self, topic: str, text: str) -> bool:
        """Does the same with a payload that is text of JSON."""
        outgoing = self._outgoing
        if outgoing is None or len(text) > FLUX_PAYLOAD_MOST:
            return False
        outgoing.put(StreamMessage(topic, text))
        return True

    def take_answers(self) -> Iterator[StreamAnswer]:
        """Yields what has come; called when `fileno` is readable."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self.fileno, 4096):
                pass
        while self._answers:
            yield self._answers.popleft()

    def _put(self, *answers: StreamAnswer) -> None:
        self._answers.extend(answers)
        # A full pipe is readable already.
        with contextlib.suppress(BlockingIOError):
            os.write(self._wakes, b"\0")

    def _run(self) -> None:
        pause_s = _PAUSE_FIRST_S
        while not self._is_over.is_set():
            outgoing: _Outgoing = queue.SimpleQueue()
            reason = "the controller has ended the stream"
            try:
                channel = open_blocking_channel(self._address, tls=self._tls, insecure=self._insecure)
            except (ListenError, OSError) as error:
                channel, reason = None, str(error)
            if channel is not None:
                with channel:
                    is_welcome, reason = self._follow(
                        build_client(FLUX_SERVICE, channel).schedule_flux, outgoing, reason
                    )
                pause_s = _PAUSE_FIRST_S if is_welcome else pause_s
            self._put(StreamAnswer("lost", {"reason": reason}))
            self._is_over.wait(pause_s)
            pause_s = min(2.0 * pause_s, _PAUSE_MOST_S)

    def _follow(
        self,
        schedule: Callable[[Iterator[ScheduleFluxRequest]], Iterator[ScheduleFluxResponse]],
        outgoing: _Outgoing,
        reason: str,
    ) -> tuple[bool, str]:
        """Reads one stream to its end; returns whether it was one, and why it ended."""
        is_welcome, self._sends_batches = False, False
        try:
            for response in schedule(self._take_requests(outgoing)):
                if response.topic == BATCH:
                    self._put(*(StreamAnswer(*one) for one in unpack_messages(response.payload)))
                    continue
                payload = json.loads(response.payload or "{}")
                if not is_welcome:
                    self._sends_batches = payload.items() >= READS_BATCHES.items()
                    is_welcome, self._outgoing = True, outgoing
                self._put(StreamAnswer(response.topic, payload))
        except (Fault, ContractError, ValueError) as error:
            reason = str(error)
        finally:
            self._outgoing = None
            outgoing.put(None)
        return is_welcome, reason

    def _take_requests(self, outgoing: _Outgoing) -> Iterator[ScheduleFluxRequest]:
        """Yields what is to be sent, all that waits together; ends with None."""
        while (first := outgoing.get()) is not None:
            waiting, is_over = [first], False
            while self._sends_batches and len(waiting) < _BATCH_MOST:
                try:
                    one = outgoing.get_nowait()
                except queue.Empty:
                    break
                if one is None:
                    is_over = True
                    break
                waiting.append(one)
            for topic, payload in pack_messages(waiting):
                yield ScheduleFluxRequest(topic=topic, payload=payload)
            if is_over:
                return
