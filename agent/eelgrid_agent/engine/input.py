"""The agent's end of a process's standard input: passes chunks to the launcher, and says when each was taken.

The launcher owns the pipe or the terminal (see `launcher.JobInput`) and answers each packet once the process's side has
taken it, so what waits is bounded here, by chunks, and nowhere else. One connection serves all who are attached. It is
opened when the first chunk comes and again by the next agent; what was not answered then is not known to be taken.

Used on one event loop.
"""

import asyncio
import os
import socket
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

from eelgrid_agent.engine.launcher import INPUT_SOCKET
from eelgrid_protos.messages import InputChunk, InputResult

# Of one process; each attached client has one under way.
CHUNKS_MOST = 64
_ANSWER_BYTES = 16
OnResult = Callable[[InputResult], None]


class InputConnection:
    """A connection to the launcher of one attempt; `on_output` is called when there is output."""

    def __init__(self, folder: Path, on_output: Callable[[], object]) -> None:
        """Connects; raises OSError where no launcher listens."""
        self._on_output = on_output
        # Packets to be sent; what they are parts of is answered when the last of them is.
        self._unsent: deque[bytes] = deque()
        self._awaited: deque[tuple[InputChunk, OnResult, int]] = deque()
        self._problem = ""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            # Through a descriptor: the path of the folder may be too long for an address.
            directory = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                self._socket.connect(f"/proc/self/fd/{directory}/{INPUT_SOCKET}")
            finally:
                os.close(directory)
        except OSError:
            self._socket.close()
            raise
        # An engine that nobody uses any more leaves it; the launcher waits for the next.
        weakref.finalize(self, self._socket.close)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self._receive)

    @property
    def is_closed(self) -> bool:
        """Returns whether the launcher has ended it."""
        return self._socket.fileno() < 0

    def write(self, chunk: InputChunk, on_result: OnResult) -> None:
        """Passes a chunk on; `on_result` is called once it is taken, or cannot be."""
        if len(self._awaited) >= CHUNKS_MOST:
            on_result(InputResult(request_id=chunk.request_id, problem=f"{CHUNKS_MOST} chunks of input wait already"))
            return
        packets = list(_packets(chunk))
        self._awaited.append((chunk, on_result, len(packets)))
        self._unsent += packets
        self._flush()

    def close(self, problem: str) -> None:
        """Ends the connection; what is not answered is answered with the problem."""
        if self.is_closed:
            return
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        self._socket.close()
        while self._awaited:
            chunk, on_result, _ = self._awaited.popleft()
            on_result(InputResult(request_id=chunk.request_id, problem=problem))

    def _flush(self) -> None:
        try:
            while self._unsent:
                self._socket.send(self._unsent[0])
                self._unsent.popleft()
        except BlockingIOError:
            self._loop.add_writer(self._socket.fileno(), self._flush)
        except OSError as error:
            self.close(f"the launcher is gone: {error.strerror}")
        else:
            self._loop.remove_writer(self._socket.fileno())

    def _receive(self) -> None:
        has_output = False
        while not self.is_closed:
            try:
                letter = self._socket.recv(_ANSWER_BYTES)
            except BlockingIOError:
                break
            except OSError:
                letter = b""
            if not letter:
                self.close("the process has ended")
            elif letter == b"o":
                has_output = True
            elif self._awaited:
                self._on_answer("" if letter == b"a" else "the process has closed its standard input")
        if has_output:
            self._on_output()

    def _on_answer(self, problem: str) -> None:
        chunk, on_result, left = self._awaited[0]
        self._problem = self._problem or problem
        if left > 1:
            self._awaited[0] = (chunk, on_result, left - 1)
            return
        self._awaited.popleft()
        problem, self._problem = self._problem, ""
        on_result(InputResult(request_id=chunk.request_id, problem=problem))


def _packets(chunk: InputChunk) -> Iterator[bytes]:
    if chunk.size is not None:
        yield f"s{chunk.size.rows} {chunk.size.columns}".encode()
    if chunk.data or (chunk.size is None and not chunk.is_end):
        yield b"d" + chunk.data
    if chunk.is_end:
        yield b"e"
