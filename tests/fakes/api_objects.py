"""An API server over HTTPS for what a node's driver asks: objects by path, versions, conflicts, and faults by order.

Owns the objects, the tokens that it takes and what it was asked. Knows no kind of object: the
name of a collection is whatever stands before an object's name.
"""

import json
import ssl
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import trustme


class ApiObjects:
    """`objects` by path; `faults` are (status, headers) given once each, before anything is done."""

    def __init__(self, folder):
        self.folder = folder
        self.objects = {}
        self.faults = []
        self.asked = []
        self.token = "first"
        self.clients = []  # closed with the server
        self.denied = set()  # (verb, path)
        self._version = 0
        self._uid = 0
        self._lock = threading.Lock()
        authority = trustme.CA()
        authority.cert_pem.write_to_path(str(folder / "ca.crt"))
        self._certificate = authority.issue_cert("localhost")
        self.write_token("first")

    def write_token(self, token):
        (self.folder / "token").write_text(f"{token}\n")

    @contextmanager
    def serving(self):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._certificate.configure_cert(context)
        server = ThreadingHTTPServer(("localhost", 0), self._handler())
        server.daemon_threads = True
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"https://localhost:{server.server_address[1]}"
        finally:
            for client in self.clients:
                client.close()
            server.shutdown()
            thread.join()
            server.server_close()

    def put(self, path, thing):
        """As somebody else would."""
        with self._lock:
            return self._stored(path, dict(thing))

    def _stored(self, path, thing):
        self._version += 1
        metadata = {"uid": f"uid-{self._version}", **thing.get("metadata", {}), "resourceVersion": str(self._version)}
        self.objects[path] = {**thing, "metadata": metadata}
        return self.objects[path]

    def answer(self, verb, target, authorization, body):
        with self._lock:
            parts = urlsplit(target)
            self.asked.append((verb, parts.path))
            if self.faults:
                return self.faults.pop(0)
            if authorization != f"Bearer {self.token}":
                return 401, {}
            if (verb, parts.path) in self.denied:
                return 403, {}
            return self._served(verb, parts.path, parse_qs(parts.query), body)

    def _served(self, verb, path, query, body):
        if verb == "POST":
            place = f"{path}/{body['metadata']['name']}"
            return (409, {}) if place in self.objects else (201, self._stored(place, body))
        if verb == "GET" and path not in self.objects:
            below = [one for name, one in sorted(self.objects.items()) if name.rpartition("/")[0] == path]
            if not below and not path.endswith("slices"):
                return 404, {"message": f"{path} not found"}
            wanted = dict(item.split("=") for item in query.get("fieldSelector", [""])[0].split(",") if item)
            below = [one for one in below if all(_field(one, name) == value for name, value in wanted.items())]
            return 200, {"items": below}
        if path not in self.objects:
            return 404, {}
        if verb == "PUT":
            if body["metadata"].get("resourceVersion") != self.objects[path]["metadata"]["resourceVersion"]:
                return 409, {"message": "the object has been modified"}
            return 200, self._stored(path, body)
        if verb == "DELETE":
            return 200, self.objects.pop(path)
        return 200, self.objects[path]

    def _handler(self):
        objects = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _serve(self):
                length = int(self.headers.get("Content-Length", 0))
                body = json.loads(self.rfile.read(length)) if length else None
                status, answer = objects.answer(self.command, self.path, self.headers.get("Authorization"), body)
                if status == "cut":
                    self.close_connection = True
                    return
                headers = answer.pop("_headers", {}) if isinstance(answer, dict) else {}
                content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                for name, value in {"Content-Length": str(len(content)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = do_PUT = do_DELETE = _serve  # noqa: N815

            def log_message(self, *_):
                pass

        return Handler


def _field(thing, name):
    for part in name.split("."):
        thing = thing[part]
    return thing
