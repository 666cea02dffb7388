"""The driver process: opens one adapter and serves port calls over one connection.

Started as `python -m eelgrid_agent.devices.process.child`. It imports only the adapter that its arguments name: nvml,
amd or simulated. Each driver factory receives a text argument and the `visit` callback, which a listing calls before it
reads a device. The process ends with the agent, by parent-death signal or when the connection closes.
"""

import ctypes
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from eelgrid_agent.devices.port import DeviceError, VisitCallback
from eelgrid_agent.devices.process.protocol import (
    MAX_OPERATIONS,
    PORT_CALLS,
    FrameError,
    FrameReader,
    PortCall,
    ProgressBoard,
    encode_error,
    pack_frame,
    pack_json_frame,
)
from eelgrid_agent.settled_memory import settle_memory
from eelgrid_protos.values import dataclass


@dataclass(frozen=True, slots=True)
class OpenedDriver:
    """A driver's devices; `control` makes the other port when it is first needed: most agents only read."""

    device: Any
    control: Callable[[], Any]


DriverFactory = Callable[[str, VisitCallback], OpenedDriver]


def _nvml(_argument: str, visit: VisitCallback) -> OpenedDriver:
    from eelgrid_agent.devices.nvml.device import NvmlDevice

    device = NvmlDevice(visit=visit)

    def control() -> Any:
        from eelgrid_agent.devices.nvml.control import NvmlControl

        return NvmlControl(device)

    return OpenedDriver(device, control)


def _amd(_argument: str, visit: VisitCallback) -> OpenedDriver:
    from eelgrid_agent.devices.amd.device import AmdControl, AmdDevice
    from eelgrid_agent.devices.amd.session import load_binding

    device = AmdDevice(load_binding(), visit=visit)
    return OpenedDriver(device, lambda: AmdControl(device))


def _simulated(argument: str, visit: VisitCallback) -> OpenedDriver:
    from eelgrid_agent.simulation.driver_scene import SimulatedChildDevice

    device = SimulatedChildDevice(Path(argument), visit)
    return OpenedDriver(device, device.control)


DRIVER_FACTORIES: Mapping[str, DriverFactory] = {"nvml": _nvml, "amd": _amd, "simulated": _simulated}


_PR_SET_PDEATHSIG = 1
_CHUNK = 65536
# An answer must find room on the board; the largest there is, a node's topology, takes a quarter of this.
_ANSWER_BYTES_MOST = 2**20 - 4096


class _Stop(BaseException):
    """SIGTERM came."""


class PortServer:
    """Serves one driver over one connection; the driver is opened at once, and where that fails, at each call again."""

    def __init__(
        self,
        connection: socket.socket,
        board: ProgressBoard,
        opening: Callable[[], OpenedDriver],
        passed_over: set[int],
    ) -> None:
        self._connection = connection
        self._board = board
        self._opening = opening
        self._passed_over = passed_over
        self._opened: OpenedDriver | None = None
        self._reader = FrameReader()
        self._control: Any = None

    def serve_requests(self) -> None:
        """Serves until the other side closes; raises FrameError for an invalid request."""
        try:
            # Before any request is taken up: to import an adapter is part of starting, and no call's time.
            self._open()
        except DeviceError:
            # Whoever asks is told.
            self._opened = None
        while (request := self._next()) is not None:
            identity, operations = _check_request(request)
            answers = []
            self._board.begin_request(identity)
            for index, operation in enumerate(operations):
                self._board.begin_operation(index)
                answer = self._answer_operation(operation)
                self._board.add_answer(answer)
                answers.append(answer)
            self._connection.sendall(pack_json_frame(b"[%d,[%b]]" % (identity, b",".join(answers))))

    def _next(self) -> Any:
        """The next request; None when the other side closed."""
        while True:
            try:
                return self._reader.read_frame()
            except EOFError:
                data = self._connection.recv(_CHUNK)
                if not data:
                    return None
                self._reader.feed_data(data)

    def _answer_operation(self, operation: Sequence[Any]) -> bytes:
        """The JSON of one answer: [0, value, seconds] or [1, class, message, seconds]."""
        name, *arguments = operation
        began_s = time.perf_counter()
        answer: tuple[Any, ...]
        try:
            answer = (0, self._call(name, arguments))
        except Exception as error:  # noqa: BLE001  # the agent decides what an adapter's fault means
            answer = (1, *encode_error(error))
        elapsed_s = time.perf_counter() - began_s
        packed = pack_frame((*answer, elapsed_s))[4:]
        if len(packed) > _ANSWER_BYTES_MOST:
            excess = DeviceError(f"{name} answers {len(packed)} bytes; the most is {_ANSWER_BYTES_MOST}")
            return pack_frame((1, *encode_error(excess), elapsed_s))[4:]
        return packed

    def close(self) -> None:
        """Closes the driver session."""
        if self._opened is not None:
            self._opened.device.close()

    def _call(self, name: str, arguments: list[Any]) -> Any:
        call = PORT_CALLS.get(name)
        if call is None:
            raise FrameError(f"no call {name!r}")
        if name == "pass_over":
            self._passed_over.clear()
            self._passed_over.update(arguments)
            return None
        function = getattr(self._port(call), name)
        if call.keyword:
            *arguments, last = arguments
            return call.encode(function(*arguments, **{call.keyword: last}))
        return call.encode(function(*arguments))

    def _port(self, call: PortCall) -> Any:
        opened = self._opened or self._open()
        if not call.control:
            return opened.device
        if self._control is None:
            self._control = opened.control()
        return self._control

    def _open(self) -> OpenedDriver:
        self._opened = opened = self._opening()
        settle_memory()
        return opened


def _check_request(request: Any) -> tuple[int, list[Any]]:
    """A request in its parts; raises FrameError."""
    match request:
        case [int(identity), list(operations)] if len(operations) <= MAX_OPERATIONS:
            if all(isinstance(one, list) and one and isinstance(one[0], str) for one in operations):
                return identity, operations
    raise FrameError("a request is [number, [[call, argument, ...], ...]]")


def _end_with(parent: int) -> None:
    """Has the kernel kill this process with the thread that started it; ends it if that is gone already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(0)


def _stop(_number: int, _frame: object) -> None:
    raise _Stop


def main(arguments: Sequence[str]) -> int:
    """Serves until it is stopped; supervisor.py writes the arguments."""
    factory, argument, connection_fd, board_fd, parent, passed_over = arguments
    _end_with(int(parent))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _stop)
    board = ProgressBoard(int(board_fd))
    passed = {int(place) for place in passed_over.split(",") if place}

    def visit(place: int) -> bool:
        """Called by the adapter before a listing asks a device."""
        if place in passed:
            return False
        board.begin_device(place)
        return True

    connection = socket.socket(fileno=int(connection_fd))
    server = PortServer(connection, board, lambda: DRIVER_FACTORIES[factory](argument, visit), passed)
    try:
        server.serve_requests()
    except (FrameError, ConnectionError) as error:
        sys.stderr.write(f"eelgrid-agent worker: {error}\n")
        return 3
    except _Stop:
        return 0
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        server.close()
        connection.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
