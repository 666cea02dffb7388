"""The exchange of `eelctl attach` and of interactive `eelctl run`: bytes between this terminal and a job's process.

Theory. A job's terminal does everything that a terminal does, so this one is put into raw mode: every key goes to the
job, Ctrl-C too, and only the escape is looked for here, as ssh does: `~.` at the beginning of a line detaches. The mode
is restored however the command ends.

Two threads feed one queue: the calls' answers, and what is typed. Messages of input are sent one after another, each as
the one before is taken by the process, so a process that does not read holds up its sender, and nothing else.
"""

import contextlib
import os
import queue
import select
import signal
import sys
import termios
import threading
import time
import tty
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeAlias

from eelgrid_controller.cli.connection import CliError
from eelgrid_controller.cli.output import echo
from eelgrid_protos.messages import (
    INPUT_BYTES_MOST,
    AttachInput,
    AttachOpening,
    AttachRequest,
    AttachResponse,
    StandardInput,
    TerminalSize,
    Workload,
)
from eelgrid_protos.values import dataclass

ESCAPE, DETACH = b"~", b"."
# Messages of input that were read and not sent; a terminal has less, and a file waits.
_QUEUED_MOST = 4
_EVENTS_MOST = 16
# A controller that restarts is waited for.
AWAY_MOST_S = 120.0
_AGAIN_S = 0.5
ATTACH_TAIL_LINES = 10


class InputLost(CliError):
    """The connection ended while input was on its way."""


@dataclass(frozen=True, slots=True)
class _Detached:
    """The escape was typed."""


@dataclass(frozen=True, slots=True)
class _CallEnded:
    """The call ended, by itself or with a fault."""

    error: Exception | None


_Event: TypeAlias = AttachResponse | _Detached | _CallEnded


class EscapeReader:
    """Finds `~.` at the beginning of a line in what is typed; `~~` is one `~`."""

    def __init__(self) -> None:
        self._is_line_begin, self._is_held = True, False

    def filter(self, typed: bytes) -> tuple[bytes, bool]:
        """Returns what goes to the job, and whether to detach, which drops what follows."""
        kept = bytearray()
        for key in (typed[index : index + 1] for index in range(len(typed))):
            if self._is_held:
                self._is_held = False
                if key == DETACH:
                    return bytes(kept), True
                kept += ESCAPE if key == ESCAPE else ESCAPE + key
            elif key == ESCAPE and self._is_line_begin:
                self._is_held = True
                continue
            else:
                kept += key
            self._is_line_begin = key in (b"\r", b"\n")
        return bytes(kept), False


class InputQueue:
    """Messages of input between the thread that reads them and the call that sends them; of the newest call only."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._messages: deque[AttachInput] = deque()
        self._call = 0
        self._sent: deque[int] = deque()
        self._taken = 0

    def put(self, message: AttachInput) -> None:
        """Waits for room and adds a message."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._messages) < _QUEUED_MOST)
            self._messages.append(message)
            self._changed.notify_all()

    def begin_call(self, opening: AttachOpening) -> Iterator[AttachRequest]:
        """Ends the requests of the call before, and returns those of a new one; they end with `end_call`."""
        with self._changed:
            self._call += 1
            self._sent.clear()
            self._taken = 0
            self._changed.notify_all()
            return self._requests(opening, self._call)

    def end_call(self) -> None:
        """Ends the requests of the call."""
        with self._changed:
            self._call += 1
            self._changed.notify_all()

    def on_taken(self, count: int) -> None:
        """The process has taken so many messages since the call began."""
        with self._changed:
            while self._sent and self._taken < count:
                self._taken += 1
                self._sent.popleft()

    @property
    def bytes_in_doubt(self) -> int:
        """Bytes that were sent and not taken: after a lost connection nobody knows of them."""
        with self._changed:
            return sum(self._sent)

    def _requests(self, opening: AttachOpening, call: int) -> Iterator[AttachRequest]:
        yield AttachRequest(message=opening)
        while opening.sends_input:
            with self._changed:
                self._changed.wait_for(lambda: self._messages or self._call != call)
                if self._call != call:
                    return
                message = self._messages.popleft()
                # An end counts, too: whether it arrived matters as much.
                self._sent.append(max(1, len(message.data)) if message.size is None else 0)
                self._changed.notify_all()
            yield AttachRequest(message=message)
        with self._changed:
            # Output alone: the stream stays open.
            self._changed.wait_for(lambda: self._call != call)


class LocalInput:
    """Standard input of this command, in raw mode if it is a terminal and the job has one."""

    def __init__(self, messages: InputQueue, events: "queue.Queue[_Event]", *, is_terminal: bool) -> None:
        self._messages, self._events = messages, events
        self._is_terminal = is_terminal
        self.is_raw = is_terminal and sys.stdin.isatty()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Reads in a thread; restores the terminal and the signals at the end."""
        kept: dict[int, Any] = {}
        mode = termios.tcgetattr(0) if self.is_raw else None
        try:
            if self.is_raw:
                # The default of these would end the command in raw mode.
                for number in (signal.SIGTERM, signal.SIGHUP):
                    kept[number] = signal.signal(number, _leave)
                kept[signal.SIGWINCH] = signal.signal(signal.SIGWINCH, self._on_resize)
                # What was typed meanwhile is the job's, too.
                tty.setraw(0, termios.TCSADRAIN)
            threading.Thread(target=self._read, name="stdin", daemon=True).start()
            yield
        finally:
            if mode is not None:
                termios.tcsetattr(0, termios.TCSADRAIN, mode)
            for kept_number, handler in kept.items():
                signal.signal(kept_number, handler)
            with contextlib.suppress(OSError):
                os.write(self._wake_write, b"x")

    def _on_resize(self, _number: int, _frame: object) -> None:
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b"s")

    def _read(self) -> None:
        escapes = EscapeReader()
        if self.is_raw:
            # Another size and then the right one, so that a program draws its screen again.
            size = read_terminal_size()
            self._messages.put(AttachInput(size=replace(size, rows=max(1, size.rows - 1))))
            self._messages.put(AttachInput(size=size))
        while True:
            ready, _, _ = select.select((0, self._wake_read), (), ())
            if self._wake_read in ready:
                if b"x" in os.read(self._wake_read, 64):
                    return
                self._messages.put(AttachInput(size=read_terminal_size()))
            if 0 not in ready:
                continue
            try:
                data = os.read(0, INPUT_BYTES_MOST // 2)
            except OSError:
                data = b""
            if not data:
                self._messages.put(AttachInput(is_end=True))
                return
            kept, is_detached = escapes.filter(data) if self.is_raw else (data, False)
            if kept:
                self._messages.put(AttachInput(data=kept))
            if is_detached:
                self._events.put(_Detached())
                return


def _leave(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


def read_terminal_size() -> TerminalSize:
    """Returns the size of this terminal; the usual one if it has none."""
    for descriptor in (0, 1, 2):
        with contextlib.suppress(OSError):
            found = os.get_terminal_size(descriptor)
            if found.lines and found.columns:
                return TerminalSize(rows=min(found.lines, 10_000), columns=min(found.columns, 10_000))
    return TerminalSize()


def exchange(client: Any, opening: AttachOpening, *, is_terminal: bool) -> bool:
    """Copies a job's output here, and standard input to it; returns False if somebody detached from it.

    Goes on after a lost connection unless input of a pipe may be lost. Raises InputLost, and a Fault.
    """
    from eelgrid_protos import faults

    events: queue.Queue[_Event] = queue.Queue(_EVENTS_MOST)
    messages = InputQueue()
    local = LocalInput(messages, events, is_terminal=is_terminal) if opening.sends_input else None
    away_since_s: float | None = None
    try:
        with local.reading() if local is not None else contextlib.nullcontext():
            _begin_call(client, messages, opening, events)
            while True:
                match events.get():
                    case AttachResponse() as response:
                        away_since_s = None
                        opening = _show(response, opening)
                        messages.on_taken(response.inputs_taken)
                    case _Detached():
                        return False
                    case _CallEnded(None):
                        return True
                    case _CallEnded(faults.Unavailable() as error):
                        if not is_terminal and messages.bytes_in_doubt:
                            raise _input_lost(opening, messages.bytes_in_doubt)
                        now_s = time.monotonic()
                        away_since_s = away_since_s or now_s
                        if now_s - away_since_s > AWAY_MOST_S:
                            raise error
                        time.sleep(_AGAIN_S)
                        _begin_call(client, messages, opening, events)
                    case _CallEnded(error):
                        assert error is not None
                        raise error
    finally:
        messages.end_call()


def _begin_call(client: Any, messages: InputQueue, opening: AttachOpening, events: "queue.Queue[_Event]") -> None:
    requests = messages.begin_call(opening)

    def follow() -> None:
        error: Exception | None = None
        try:
            for response in client.attach(requests):
                events.put(response)
        except Exception as found:  # noqa: BLE001  # the main thread raises it
            error = found
        events.put(_CallEnded(error))

    threading.Thread(target=follow, name="attach", daemon=True).start()


def _show(response: AttachResponse, opening: AttachOpening) -> AttachOpening:
    """Writes output; returns the opening that continues after it."""
    if not response.data:
        return opening
    sys.stdout.buffer.write(response.data)
    sys.stdout.buffer.flush()
    return replace(opening, offset=response.next_offset, attempt=response.attempt, tail_lines=None)


def _input_lost(opening: AttachOpening, count: int) -> InputLost:
    return InputLost(
        f"the connection to {opening.workload_id} was lost, and up to {count} bytes of input with it",
        f"see what it has (eelctl logs {opening.workload_id}), and cancel and start it again if it needs all of it",
    )


def announce_detached(workload_id: str) -> None:
    """Says how to come back."""
    echo(f"detached, it goes on: eelctl attach {workload_id}, eelctl cancel {workload_id}", err=True)


def reads_input(workload: Workload) -> bool:
    """Returns whether a job's process has a standard input, a pipe or a terminal."""
    process = workload.spec.process
    return process is not None and process.standard_input is not StandardInput.UNSPECIFIED


def has_terminal(workload: Workload) -> bool:
    """Returns whether a job's process has a terminal."""
    process = workload.spec.process
    return process is not None and process.standard_input is StandardInput.TERMINAL
