"""HTTP/2 by hand, for clients that no library would be: floods, resets, header bombs, half-open connections.

Owns frames and the little of HPACK that such a client needs (RFC 9113, 4.1 and 6; RFC 7541, 6: literals and
indexed fields, no Huffman). A rig for tests on loopback; what it sends is bounded by its caller.
"""

import contextlib
import select
import socket
import ssl
import struct
import threading

__all__ = ["PREFACE", "RawClient", "field", "frame", "indexed", "kept_field", "request_fields"]

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, END_HEADERS, ACK = 1, 4, 1
CANCEL = 8


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One frame."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _integer(value: int, prefix: int, first: int) -> bytes:
    most = (1 << prefix) - 1
    if value < most:
        return bytes([first | value])
    out, value = bytearray([first | most]), value - most
    while value >= 128:
        out.append(value % 128 + 128)
        value //= 128
    return bytes([*out, value])


def _text(value: bytes) -> bytes:
    return _integer(len(value), 7, 0) + value


def field(name: str, value: str) -> bytes:
    """A literal that is not kept in the table."""
    return b"\x00" + _text(name.encode()) + _text(value.encode())


def kept_field(name: str, value: str) -> bytes:
    """A literal that both sides keep: the newest is index 62."""
    return b"\x40" + _text(name.encode()) + _text(value.encode())


def indexed(index: int) -> bytes:
    """A field of the table."""
    return _integer(index, 7, 0x80)


def request_fields(path: str) -> bytes:
    """The fields of a gRPC call."""
    pairs = {
        ":method": "POST",
        ":scheme": "https",
        ":path": path,
        ":authority": "localhost",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    return b"".join(field(name, value) for name, value in pairs.items())


class RawClient:
    """One connection; what the server says is counted by frame kind and else thrown away."""

    def __init__(self, port, tls=None, *, preface=True):
        raw = socket.create_connection(("127.0.0.1", port), timeout=20.0)
        if tls is not None:
            context = ssl.create_default_context(cafile=tls.authority)
            context.load_cert_chain(tls.certificate, tls.key)
            context.set_alpn_protocols(["h2"])
            raw = context.wrap_socket(raw, server_hostname="127.0.0.1")
        raw.setblocking(False)
        self._socket = raw
        self.heard = {}
        self.closed = threading.Event()
        self._next = 1
        # OpenSSL's connection is not for two threads at once; neither waits for the other side while it holds this.
        self._using = threading.Lock()
        self._sending = threading.Lock()
        self._reader = threading.Thread(target=self._read, daemon=True)
        if preface:
            self.send(PREFACE + frame(SETTINGS, 0, 0))
            self._reader.start()

    @property
    def address(self):
        """Ours."""
        return self._socket.getsockname()[:2]

    def send(self, data: bytes):
        """Raises OSError once the server closed."""
        left = memoryview(data)
        with self._sending:
            while left:
                try:
                    with self._using:
                        left = left[self._socket.send(left[:16384]) :]
                except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
                    select.select([], [self._socket], [], 0.1)

    def streams(self, number: int) -> range:
        """Fresh stream ids."""
        first, self._next = self._next, self._next + 2 * number
        return range(first, self._next, 2)

    def open(self, path: str, number: int = 1, *, block: bytes = b"", reset: bool = False, ended: bool = False):
        """Begins so many calls, in one write; resets each at once where asked."""
        fields = request_fields(path) + block
        flags = END_HEADERS | (END_STREAM if ended else 0)
        reset_by = struct.pack(">I", CANCEL)
        self.send(
            b"".join(
                frame(HEADERS, flags, stream, fields) + (frame(RST_STREAM, 0, stream, reset_by) if reset else b"")
                for stream in self.streams(number)
            )
        )

    def call(self, path: str, message: bytes = b"") -> int:
        """Begins one call with its message; its stream."""
        (stream,) = self.streams(1)
        body = b"\x00" + struct.pack(">I", len(message)) + message
        self.send(frame(HEADERS, END_HEADERS, stream, request_fields(path)) + frame(DATA, END_STREAM, stream, body))
        return stream

    def _read(self):
        try:
            while True:
                head = self._exactly(9)
                kind, flags, stream = struct.unpack(">BBI", head[3:])
                payload = self._exactly(int.from_bytes(head[:3], "big"))
                self.heard.setdefault(kind, []).append((stream, payload[:256]))
                if kind == SETTINGS and not flags & ACK:
                    self.send(frame(SETTINGS, ACK, 0))
                elif kind == PING and not flags & ACK:
                    self.send(frame(PING, ACK, 0, payload))
                elif kind == DATA and payload:
                    # Keeps the connection's window open; a stream's is what the server may fill.
                    self.send(frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", len(payload))))
        except (OSError, EOFError, ValueError):
            self.closed.set()

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            try:
                with self._using:
                    piece = self._socket.recv(size - len(data))
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                select.select([self._socket], [], [], 0.1)
                continue
            if not piece:
                raise EOFError
            data += piece
        return data

    def close(self):
        """Ends the connection."""
        with self._using, contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._reader.join(5.0)
        self._socket.close()
