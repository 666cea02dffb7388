"""Real controllers, agents and eelctl runs: started on free ports, awaited by deadline, ended by pid.

Owns the life of child processes and how a test waits for them. Must not know
what a test is about. A wait polls what the system itself says (its API, its
metrics, its log) and fails at its deadline, or as soon as a child that should
live has died, with the last lines of every child's log. A child dies with the
test run, however that ends: it asks the kernel for it before it becomes our
program.

Our programs are forked from a process that has imported them (fork_server.py); tests of how they start from nothing say
so.

Ports lie below the range from which the kernel picks source ports: an agent
that knocks at a dead controller's port could otherwise be connected to itself,
and the controller could not come back.
"""

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import replace
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from tests import fork_server

from eelgrid_controller.replay.openb import write_fleet_file
from eelgrid_controller.replay.submitter import SubmitLimits, Submitter
from eelgrid_controller.replay.trace_loading import TraceSearch, locate_openb
from eelgrid_protos import catalogue, faults, rpc, transport
from eelgrid_protos.messages import GetPolicyRequest, GetSummaryRequest, UpdatePolicyRequest

TAIL_LINES = 25
START_S = 60.0
# The first controller of a fresh tree compiles its kernels, on a busy machine for minutes; a limit only for one that hangs.
KERNELS_S = 900.0
STOP_S = 15.0
POLL_S = 0.05
# PR_SET_PDEATHSIG is 1; exec keeps the process id and the request.
_UNTIL_PARENT_DIES = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)
_ENVIRONMENT = {key: value for key, value in os.environ.items() if not key.startswith(("EELGRID_", "NUMBA_DISABLE"))}


def free_port():
    """A loopback port that nobody has and that the kernel gives to nobody by itself."""
    drawn = random.SystemRandom()
    for _ in range(200):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", drawn.randrange(15_000, 32_000)))
            return probe.getsockname()[1]
    raise AssertionError("no free port in 200 draws")


def free_address():
    """A loopback address of such a port."""
    return f"127.0.0.1:{free_port()}"


def scrape(address):
    """Metric families of a Prometheus endpoint by name."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def metric(address, name):
    """The sum of one metric's samples."""
    family = scrape(address)[name.removesuffix("_total")]
    return sum(sample.value for sample in family.samples if sample.name == name)


def without_power(workload):
    """A workload as it is kept, without what its GPUs draw, which changes from one answer to the next."""
    return replace(workload, power_w=None)


def pages(call, request, items):
    """Everything that a listing has."""
    token, found = "", []
    while True:
        answer = call(replace(request, page_size=1000, page_token=token), timeout=10.0)
        found += getattr(answer, items)
        token = answer.next_page_token
        if not token:
            return found


class Child:
    """One process with its log; `expected` says that it may have ended. A cold one has an interpreter of its own."""

    def __init__(self, name, arguments, folder, *, cold=False):
        self.name = name
        self.log = folder / f"{name}.log"
        self.expected = False
        is_forked = not cold and arguments[0] == "-m" and arguments[1] in fork_server.PROGRAMS
        command = [sys.executable, "-I", "-S", "-c", _UNTIL_PARENT_DIES, *arguments]
        with self.log.open("wb") as out, Path(os.devnull).open("rb") as nothing:
            if is_forked:
                server = fork_server.find_server(arguments[1])
                self.process = server.start(arguments[2:], env=_ENVIRONMENT, cwd=folder, streams=(nothing, out, out))
            else:
                self.process = subprocess.Popen(
                    command, stdin=nothing, stdout=out, stderr=out, cwd=folder, env=_ENVIRONMENT
                )

    def text(self):
        """Everything that it said."""
        return self.log.read_text(errors="replace")

    def tail(self):
        """Its last lines."""
        return "\n".join(self.text().splitlines()[-TAIL_LINES:])

    def said(self, mark):
        """The first line that contains the mark, as its key=value pairs; None before."""
        for line in self.text().splitlines(keepends=True):
            if mark in line and line.endswith("\n"):
                return dict(part.split("=", 1) for part in line.split() if "=" in part)
        return None

    def signal(self, number):
        """Sends a signal; from here on it may end."""
        self.expected = True
        self.process.send_signal(number)

    def kill(self):
        """SIGKILL, and gone when this returns."""
        if self.process.poll() is None:
            self.signal(signal.SIGKILL)
        return self.process.wait(STOP_S)

    def stop(self):
        """SIGTERM; its exit code."""
        self.signal(signal.SIGTERM)
        return self.ended()

    def ended(self, within_s=STOP_S):
        """Its exit code, when it has ended or will soon."""
        self.expected = True
        try:
            return self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} did not end in {within_s:g} s\n{self.tail()}") from None


class Cluster:
    """A controller, agents and operators' calls; ends all that it started. In a cold one programs are not forked."""

    def __init__(self, folder, *, tls=None, cold=False):
        self.folder = folder
        self.tls = tls
        self.cold = cold
        self.address, self.metrics = free_address(), free_address()
        self.data = folder / "data"
        self.children = []
        self.agents = {}
        self._channels = contextlib.ExitStack()
        self._operators = None

    def __enter__(self):
        return self

    def __exit__(self, *reason):
        self.close()

    def close(self):
        """Nothing of ours runs when this returns."""
        self._channels.close()
        for child in self.children:
            child.kill()

    def run(self, name, *arguments):
        """Starts `python <arguments>`."""
        child = Child(f"{name}-{len(self.children)}", arguments, self.folder, cold=self.cold)
        self.children.append(child)
        return child

    def _tls_flags(self, tls):
        if tls is None:
            return ()
        names = ("--tls-certificate", "--tls-key", "--tls-authority")
        paths = (tls.certificate, tls.key, tls.authority)
        return tuple(str(part) for pair in zip(names, paths, strict=True) for part in pair)

    def begin_controller(self, *arguments, tls=None):
        """Starts the controller at this cluster's address and directory, and does not wait for it."""
        return self.run(
            "controller",
            "-m",
            "eelgrid_controller",
            "--listen",
            self.address,
            "--metrics",
            self.metrics,
            "--data",
            str(self.data),
            *self._tls_flags(tls or self.tls),
            *arguments,
        )

    def controller(self, *arguments, tls=None):
        """A controller that serves."""
        child = self.begin_controller(*arguments, tls=tls)
        # The serving line alone where the level of the log leaves the other out.
        self.until(
            lambda: child.said("kernels=warm") or child.said("serving listen="),
            within_s=KERNELS_S,
            what="the kernels are compiled",
        )
        self.until(lambda: child.said("serving listen="), within_s=START_S, what="the controller serves")
        self.answers()
        return child

    def answers(self):
        """Waits until a call arrives: the first one after a restart may still find the connection that broke."""
        self.until(self.summary, what="the controller answers")

    def agent(self, fleet, *arguments, tls=None):
        """An agent process over a fleet file, serving its own API."""
        child = self.run(
            "agent",
            "-m",
            "eelgrid_agent",
            "--controller",
            self.address,
            "--listen",
            "127.0.0.1:0",
            "--metrics",
            "127.0.0.1:0",
            "--simulate",
            str(fleet),
            *self._tls_flags(tls or self.tls),
            *arguments,
        )
        self.agents[child] = self.until(lambda: child.said("event=serving"), within_s=START_S, what="the agent serves")
        return child

    def eelctl_command(self, *arguments, address=None, tls=None):
        """What Python is given to run eelctl on this cluster."""
        words = ("--controller", address or self.address, *self._tls_flags(tls or self.tls), *map(str, arguments))
        return ("-m", "eelgrid_controller.cli", *words)

    def eelctl(self, *arguments, code=0, address=None, tls=None, stdin=None, env=None):
        """One run of eelctl, which ends with this code and never with a stack trace."""
        words, environment = self.eelctl_command(*arguments, address=address, tls=tls), _ENVIRONMENT | (env or {})
        if not self.cold:
            done = fork_server.run_program(words[1], words[2:], env=environment, cwd=self.folder, stdin=stdin or "")
        else:
            done = subprocess.run(
                [sys.executable, *words],
                capture_output=True,
                text=True,
                timeout=60,
                env=environment,
                cwd=self.folder,
                check=False,
                input=stdin,
            )
        said = f"eelctl {' '.join(map(str, arguments))}: {done.returncode}\n{done.stdout}{done.stderr}"
        assert done.returncode == code, said
        assert "Traceback" not in done.stderr, said
        return done

    @property
    def operators(self):
        """The operators' API as blocking calls."""
        if self._operators is None:
            channel = transport.open_blocking_channel(self.address, tls=self.tls)
            self._operators = rpc.build_client(rpc.OPERATOR_SERVICE, self._channels.enter_context(channel))
        return self._operators

    def reconnect(self):
        """The operators' API over a new connection, with the certificates of now."""
        self._operators = None
        return self.operators

    def node_api(self, agent):
        """An agent's own API as blocking calls."""
        channel = transport.open_blocking_channel(self.agents[agent]["listen"], tls=self.tls)
        return rpc.build_client(rpc.NODE_SERVICE, self._channels.enter_context(channel))

    def set_policy(self, **changes):
        """Changes the policy in force."""
        policy = self.operators.get_policy(GetPolicyRequest(), timeout=10.0).policy
        self.operators.update_policy(UpdatePolicyRequest(policy=replace(policy, **changes)), timeout=10.0)

    def summary(self):
        """The cluster at a glance; its counts of samples may be a fifth of a second old."""
        return self.operators.get_summary(GetSummaryRequest(), timeout=5.0).summary

    def until_ready(self, nodes):
        """So many nodes are ready."""
        self.until(lambda: self.summary().nodes_ready == nodes, what=f"{nodes} nodes are ready")

    def submit(self, requests, actions=()):
        """Submits as a replay does, with an action after each of the given numbers of answers; report and answers."""
        answers, due = [], dict(actions)

        def progress(report, workload):
            if workload is not None:
                answers.append(workload)
            if report.done in due:
                due.pop(report.done)()

        async def run():
            async with transport.open_channel(self.address, tls=self.tls) as channel:
                submitter = Submitter(
                    operators=rpc.build_client(rpc.OPERATOR_SERVICE, channel),
                    clock=time.monotonic,
                    sleep=asyncio.sleep,
                    jitter=random.random,
                    rules=SubmitLimits(call_timeout_s=5.0, silence_longest_s=60.0),
                )
                return await submitter.run(requests, progress)

        report = asyncio.run(run())
        assert due == {}, "an action never had its turn"
        return report, answers

    def until(self, condition, *, within_s=30.0, what=""):
        """What the condition gives once it is true; a controller that does not answer is waited for."""
        deadline_s = time.monotonic() + within_s
        while True:
            with contextlib.suppress(faults.Unavailable, faults.DeadlineExceeded, OSError):
                if found := condition():
                    return found
            dead = [child.name for child in self.children if not child.expected and child.process.poll() is not None]
            late = time.monotonic() > deadline_s
            if dead or late:
                why = f"{', '.join(dead)} died" if dead else f"not in {within_s:g} s"
                tails = "\n".join(f"--- {child.name}\n{child.tail()}" for child in self.children)
                raise AssertionError(f"{what or 'condition'}: {why}\n{tails}")
            time.sleep(POLL_S)


def fleet_of(path, nodes):
    """A fleet file with these nodes in the agent's own format."""
    path.write_text(json.dumps({"nodes": list(nodes)}))
    return path


def small_trace(folder, *, nodes, tasks):
    """A cut of the trace: the published one where it is at hand, else one with its marginals."""
    surroundings = replace(TraceSearch.from_environment(os.environ), cache=folder, fetch=None)
    return locate_openb("auto", surroundings).truncated(nodes=nodes, tasks=tasks)


def trace_fleet(path: Path, rows):
    """A fleet file of nodes of the trace."""
    write_fleet_file(path, rows, catalogue.load_catalogue().products)
    return path
