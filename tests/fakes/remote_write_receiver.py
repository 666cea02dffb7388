"""A receiver of Prometheus remote write: decodes requests by their specifications, and answers as it is told."""

import contextlib
import http.server
import threading
from collections import deque
from typing import NamedTuple

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory


class ReceivedSample(NamedTuple):
    """One sample; labels in the order in which they came."""

    labels: tuple[tuple[str, str], ...]
    time_ms: int
    value: float

    @property
    def name(self):
        """The metric."""
        return dict(self.labels)["__name__"]


def _message_class():
    """WriteRequest of the specification."""
    string, double, int64, message = 9, 1, 3, 11
    once, many = 1, 3
    file = descriptor_pb2.FileDescriptorProto(name="remote.proto", package="test", syntax="proto3")
    for name, fields in {
        "Label": (("name", 1, string, once, None), ("value", 2, string, once, None)),
        "Sample": (("value", 1, double, once, None), ("timestamp", 2, int64, once, None)),
        "TimeSeries": (("labels", 1, message, many, ".test.Label"), ("samples", 2, message, many, ".test.Sample")),
        "WriteRequest": (("timeseries", 1, message, many, ".test.TimeSeries"),),
    }.items():
        made = file.message_type.add(name=name)
        for field, number, kind, label, of in fields:
            made.field.add(name=field, number=number, type=kind, label=label, type_name=of)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("test.WriteRequest"))


_WriteRequest = _message_class()


def unpack_snappy(block):
    """What a snappy block unpacks to; raises for one that is not as the format has it."""
    at = length = 0
    while True:
        length |= (block[at] & 0x7F) << (7 * at)
        at += 1
        if not block[at - 1] & 0x80:
            break
    out = bytearray()
    while at < len(block):
        tag = block[at]
        at += 1
        kind = tag & 3
        if kind == 0:
            size = tag >> 2
            if size >= 60:
                extra = size - 59
                size = int.from_bytes(block[at : at + extra], "little")
                at += extra
            out += block[at : at + size + 1]
            at += size + 1
        else:
            size, extra = {1: ((tag >> 2 & 7) + 4, 1), 2: ((tag >> 2) + 1, 2), 3: ((tag >> 2) + 1, 4)}[kind]
            offset = int.from_bytes(block[at : at + extra], "little") | (tag >> 5 << 8 if kind == 1 else 0)
            at += extra
            assert 0 < offset <= len(out), "a copy of what is not there"
            for _ in range(size):
                out.append(out[-offset])
    assert len(out) == length, "another length than announced"
    return bytes(out)


def decode_request(body):
    """The samples of a request."""
    request = _WriteRequest.FromString(unpack_snappy(body))
    found = []
    for series in request.timeseries:
        labels = tuple((label.name, label.value) for label in series.labels)
        assert list(labels) == sorted(labels), "labels must be sorted"
        assert all(value for _, value in labels), "an empty label is none"
        assert len(dict(labels)) == len(labels)
        found += [ReceivedSample(labels, sample.timestamp, sample.value) for sample in series.samples]
    return found


class RemoteWriteReceiver:
    """Listens on loopback; `answers` are (status, headers) of the next requests, or a function of their samples."""

    def __init__(self, address=("127.0.0.1", 0)):
        self.samples = []
        self.requests = []  # headers
        self.answers = deque()
        self.judge = lambda _samples: 204
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                """One request."""
                samples = decode_request(self.rfile.read(int(self.headers["Content-Length"])))
                outer.requests.append((self.path, dict(self.headers)))
                status, headers = outer.answers.popleft() if outer.answers else (outer.judge(samples), {})
                if status < 300:
                    outer.samples += samples
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_):
                """Says nothing."""

        self._server = http.server.ThreadingHTTPServer(address, Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/api/v1/write"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def series(self, name):
        """Times and values by labels without the metric's name."""
        found = {}
        for sample in self.samples:
            if sample.name == name:
                key = tuple((label, value) for label, value in sample.labels if label != "__name__")
                found.setdefault(key, []).append((sample.time_ms, sample.value))
        return found


@contextlib.contextmanager
def receiving(**settings):
    """A receiver with these attributes."""
    with RemoteWriteReceiver() as receiver:
        for name, value in settings.items():
            setattr(receiver, name, value)
        yield receiver
