"""Ray's dashboard without Ray: nodes, jobs and the actors that hold their GPUs, as its HTTP answers have them.

Written after answers of 2.60 (tests/contracts/ray_answers); the suite in tests/contracts/cluster_engines_contract_test.py drives
this one and a real Ray alike. A job has one actor for each GPU, all on one node, as soon as that has room.
"""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

CPUS, GPUS = 8, 4


class FakeRay:
    """One cluster, served on loopback until it is closed; `names` are its nodes."""

    def __init__(self, names=("n0", "n1")):
        self.names, self.jobs, self._lock = tuple(names), {}, threading.Lock()
        cluster = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self._send(cluster.answer(self.path.partition("?")[0]))

            def do_POST(self):
                key = self.path.removeprefix("/api/jobs/").removesuffix("/stop")
                assert self.path == f"/api/jobs/{key}/stop", self.path
                cluster.end(key, "STOPPED")
                self._send({"stopped": True})

            def _send(self, answer):
                body = json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self):
        """Ends the server."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def submit(self, gpus):
        """Submits a job; returns its submission id."""
        with self._lock:
            number = 1 + len(self.jobs)
            key = f"raysubmit_{number}"
            self.jobs[key] = {
                "number": number, "gpus": gpus, "status": "RUNNING", "code": None, "node": "", "indexes": [], "starts": 0,
                "begun_ms": int(1000 * time.time()), "ended_ms": 0,
            }  # fmt: skip
            self._start()
        return key

    def end(self, key, status, code=None):
        """Its driver ends, and with it its actors."""
        with self._lock:
            if self.jobs[key]["status"] == "RUNNING":
                ended_ms = int(1000 * time.time())
                self.jobs[key] |= {"status": status, "code": code, "node": "", "indexes": [], "ended_ms": ended_ms}
            self._start()

    def _start(self):
        for job in self.jobs.values():
            for name in self.names if job["status"] == "RUNNING" and not job["indexes"] else ():
                taken = {index for one in self.jobs.values() if one["node"] == name for index in one["indexes"]}
                free = [index for index in range(GPUS) if index not in taken]
                if len(free) >= job["gpus"]:
                    job |= {"node": name, "indexes": free[: job["gpus"]], "starts": job["starts"] + 1}
                    break

    def devices(self):
        """The GPUs that jobs hold, as pairs of a node and an index, each with its jobs."""
        with self._lock:
            return {(job["node"], index): [key] for key, job in self.jobs.items() for index in job["indexes"]}

    def answer(self, path):
        """What is answered at a path."""
        with self._lock:
            if path == "/api/jobs/":
                return [self._show_job(key, job) for key, job in self.jobs.items()]
            if path == "/api/v0/nodes":
                return _list([_show_node(name) for name in self.names])
            if path == "/api/v0/actors":
                return _list([actor for job in self.jobs.values() for actor in _show_actors(job)])
            if path.startswith("/nodes/"):
                return self._show_statistics(path.removeprefix("/nodes/id-"))
            assert path in ("/api/v0/tasks", "/api/v0/placement_groups"), path
            return _list([])

    @staticmethod
    def _show_job(key, job):
        return {
            "type": "SUBMISSION", "job_id": _job_id(job), "submission_id": key, "status": job["status"],
            "entrypoint": "python train.py", "message": None, "start_time": job["begun_ms"], "end_time": job["ended_ms"],
            "metadata": {}, "driver_exit_code": job["code"],
        }  # fmt: skip

    def _show_statistics(self, name):
        workers = [
            {"pid": pid, "coreWorkerStats": [{"pid": pid, "usedResources": {"GPU": {"resourceSlots": [slot]}}}]}
            for job in self.jobs.values() if job["node"] == name
            for index in job["indexes"]
            for pid, slot in [(_pid(job, index), {"slot": str(index), "allocation": 1.0})]
        ]  # fmt: skip
        return {
            "result": True,
            "data": {"detail": {"workers": workers, "raylet": {"stateSnapshot": {"state": "ALIVE"}}}},
        }


def _list(found):
    counts = dict.fromkeys(("total", "num_after_truncation", "num_filtered"), len(found))
    return {"result": True, "msg": "", "data": {"result": {**counts, "result": found, "partial_failure_warning": ""}}}


def _job_id(job):
    return f"{job['number']:02x}000000"


def _pid(job, index):
    return 1000 * job["number"] + index


def _show_node(name):
    return {
        "node_id": f"id-{name}", "node_ip": "192.0.2.2", "is_head_node": False, "state": "ALIVE", "node_name": "192.0.2.2",
        "resources_total": {"memory": 2.0**34, "GPU": float(GPUS), "CPU": float(CPUS)}, "start_time_ms": 1, "end_time_ms": 0,
        "labels": {"ray.io/accelerator-type": "A100", "eelgrid.io/node": name},
    }  # fmt: skip


def _show_actors(job):
    return [
        {
            "actor_id": f"{_job_id(job)}-{index}", "state": "ALIVE", "job_id": _job_id(job), "node_id": f"id-{job['node']}",
            "pid": _pid(job, index), "required_resources": {"GPU": 1.0}, "serialized_runtime_env": "{}", "name": "",
            "placement_group_id": None,
        }
        for index in job["indexes"]
    ]  # fmt: skip
