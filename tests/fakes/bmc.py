"""BMCs for tests: a Redfish server over HTTP, and an ipmitool that is a script; both shut down and start nodes, slowly or not.

Owns what a BMC answers and which faults it has. Must not know our adapters.
"""

import base64
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

USER, PASSWORD = "eelgrid", "secret word"
SYSTEM = "/redfish/v1/Systems/1"
_RESET = f"{SYSTEM}/Actions/ComputerSystem.Reset"


class SimulatedBmc:
    """The state of one node: what it was told, and `faults`, codes or bodies that the next answers have instead."""

    def __init__(self, power="On", boot=None, shut_down=None):
        self.power = power
        self.orders = []
        self.faults = []
        self._does = {"On": boot, "Off": shut_down}

    def reset(self, kind):
        self.orders.append(kind)
        self.power = {"On": "On", "GracefulShutdown": "Off"}[kind]
        if self._does[self.power] is not None:
            self._does[self.power]()


@contextmanager
def serve_redfish(bmc):
    """Serves one BMC; yields its URL."""
    expected = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *arguments):
            del arguments

        def answer(self, code, body, **headers):
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(code)
            for name, value in {"Content-Length": len(content), **headers}.items():
                self.send_header(name, str(value))
            self.end_headers()
            self.wfile.write(content)

        def is_refused(self):
            if self.headers["Authorization"] != expected:
                self.answer(401, {})
                return True
            if bmc.faults:
                fault = bmc.faults.pop(0)
                if isinstance(fault, bytes):
                    self.answer(200, fault)
                elif fault == 302:
                    self.answer(302, {}, Location="http://127.0.0.1:1/")
                else:
                    self.answer(fault, {"error": {}})
                return True
            return False

        def do_GET(self):
            if self.is_refused():
                return
            known = {
                "/redfish/v1/Systems": {"Members": [{"@odata.id": SYSTEM}]},
                SYSTEM: {"PowerState": bmc.power, "Id": "1"},
            }
            found = known.get(self.path)
            self.answer(200 if found else 404, found or {})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.is_refused():
                return
            if self.path != _RESET:
                self.answer(404, {})
                return
            bmc.reset(body["ResetType"])
            self.answer(204, b"")

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def write_ipmitool(folder):
    """Writes a program named ipmitool that keeps one node's power in a file beside it, and what it was called with."""
    path = folder / "ipmitool"
    path.write_text(
        """#!/bin/sh
here=$(dirname "$0")
echo "$@" >> "$here/calls"
[ "$IPMI_PASSWORD" = "secret word" ] || { echo "Error: Unable to establish IPMI v2 / RMCP+ session" >&2; exit 1; }
for last in "$@"; do :; done
case $last in
  status) echo "Chassis Power is $(cat "$here/power")" ;;
  on) echo on > "$here/power"; echo "Chassis Power Control: Up/On" ;;
  soft) echo off > "$here/power"; echo "Chassis Power Control: Soft" ;;
  *) exit 1 ;;
esac
"""
    )
    path.chmod(0o755)
    (folder / "power").write_text("on\n")
