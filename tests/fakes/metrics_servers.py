"""HTTP servers of metrics pages, as inference servers and training jobs have them; and servers that misbehave.

Owns a listening socket in a thread, what each kind of server writes on its page, and the
counters behind it, which a test drives. Must not know who asks.
"""

import socketserver
import threading
import time

BORDERS_S = (0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


def answer(body, *, status=b"200 OK", fields=(), length=True):
    """An HTTP answer of these bytes."""
    lines = [b"HTTP/1.1 " + status, *fields, *([b"Content-Length: %d" % len(body)] if length else [])]
    return b"\r\n".join((*lines, b"", body))


class _Handler(socketserver.BaseRequestHandler):
    def handle(self):
        head = b""
        while b"\r\n\r\n" not in head:
            piece = self.request.recv(4096)
            if not piece:
                return
            head += piece
        self.server.asked.append(head)
        for piece in self.server.reply(head.split(b" ")[1].decode()):
            if isinstance(piece, float):
                time.sleep(piece)
            else:
                try:
                    self.request.sendall(piece)
                except OSError:
                    return


class Listener(socketserver.ThreadingTCPServer):
    """Answers each request with the pieces that `reply(path)` gives; a number among them is a wait in seconds."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, reply, port=0, host="127.0.0.1"):
        self.reply = reply
        self.asked = []
        super().__init__((host, port), _Handler)
        self.url = f"http://{host}:{self.server_address[1]}/metrics"
        self._thread = threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def __exit__(self, *reason):
        self.shutdown()
        self._thread.join()
        self.server_close()


def _histogram(name, labels, counts, total_s):
    lines, seen = [f"# TYPE {name} histogram"], 0
    for border, count in zip((*BORDERS_S, "+Inf"), counts, strict=True):
        seen += count
        lines.append(f'{name}_bucket{{{labels}le="{border}"}} {seen}')
    bare = f"{{{labels.rstrip(',')}}}" if labels else ""
    return [*lines, f"{name}_count{bare} {seen}", f"{name}_sum{bare} {total_s}"]


class Replica:
    """The counters of one server, and its page in the dialect of a kind."""

    def __init__(self, kind="vllm", model="m"):
        self.kind = kind
        self.model = model
        self.restart()

    def restart(self):
        """All counters begin anew."""
        self.started_s = time.time()
        self.finished = self.waiting = self.running = self.output = self.context = 0
        self.response = [0] * (len(BORDERS_S) + 1)
        self.inter = [0] * (len(BORDERS_S) + 1)

    def served(self, requests, *, response_s=0.2, inter_s=0.015, tokens=100, context=50):
        """So many requests came and went, each alike."""
        self.finished += requests
        self.output += requests * tokens
        self.context += requests * context
        self.response[self._bucket(response_s)] += requests
        self.inter[self._bucket(inter_s)] += requests * tokens

    @staticmethod
    def _bucket(value_s):
        return next((at for at, border in enumerate(BORDERS_S) if value_s <= border), len(BORDERS_S))

    def page(self):
        """The text of its page."""
        lines = [f"process_start_time_seconds {self.started_s}"]
        if self.kind == "generic":
            lines += _histogram("app_latency_seconds", "", self.response, self.finished * 0.2)
            lines += [f"app_waiting {self.waiting}", f"app_running {self.running}"]
        else:
            of = f'model_name="{self.model}",'
            waiting, running = {
                "vllm": ("vllm:num_requests_waiting", "vllm:num_requests_running"),
                "sglang": ("sglang:num_queue_reqs", "sglang:num_running_reqs"),
            }[self.kind]
            finished = {"vllm": "vllm:request_success_total", "sglang": "sglang:num_requests_total"}[self.kind]
            lines += _histogram(f"{self.kind}:e2e_request_latency_seconds", of, self.response, self.finished * 0.2)
            lines += _histogram(f"{self.kind}:inter_token_latency_seconds", of, self.inter, self.output * 0.015)
            values = {
                finished: self.finished,
                waiting: self.waiting,
                running: self.running,
                f"{self.kind}:generation_tokens_total": self.output,
                f"{self.kind}:prompt_tokens_total": self.context,
            }
            lines += [f"{name}{{{of.rstrip(',')}}} {value}" for name, value in values.items()]
        return "\n".join(lines) + "\n"

    def reply(self, _path="/metrics"):
        """The page as an answer."""
        return (answer(self.page().encode()),)
