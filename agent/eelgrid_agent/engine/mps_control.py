"""Commands to a control daemon of CUDA's Multi-Process Service (MPS), given by the program that it is itself.

Imports the standard library only, since the launcher uses it. What the commands do: nvidia-cuda-mps-control(1), and
NVIDIA's "Multi-Process Service", appendix "Tools and interface reference".
"""

import os

PROGRAM = "nvidia-cuda-mps-control"
# As the kernel cuts the names of control daemons and of their servers.
PROCESS_NAME = PROGRAM[:15]
PID_FILE = f"{PROGRAM}.pid"
# Of one batch of commands; a job of more processes is killed without the rest of them.
_CLIENTS_MOST = 1000


def find_daemon(pipes: str) -> int:
    """Returns the process id of the control daemon of a pipe directory; 0 if none runs.

    The file is the user's, who may put anything in its place.
    """
    try:
        descriptor = os.open(os.path.join(pipes, PID_FILE), os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            pid = int(os.read(descriptor, 32))
        finally:
            os.close(descriptor)
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            is_daemon = file.read().startswith(PROCESS_NAME)
        with open(f"/proc/{pid}/stat", "rb") as file:
            is_running = file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
        is_own = os.stat(f"/proc/{pid}").st_uid == os.stat(pipes).st_uid
    except (OSError, ValueError):
        return 0
    return pid if is_daemon and is_running and is_own else 0


def send_commands(program: str, pipes: str, commands: str, timeout_s: float) -> str:
    """Gives a daemon commands, one in each line, and returns what it answers; empty if it cannot be asked in time.

    The program runs as the user of the directory, who may let the names in it lead anywhere.
    """
    # Not loaded by the fork server, which is small.
    import subprocess

    try:
        owner = os.stat(pipes)
        is_other = owner.st_uid != os.geteuid()
        done = subprocess.run(  # noqa: S603
            [program],
            input=commands.encode("ascii"),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"PATH": os.environ.get("PATH", os.defpath), "CUDA_MPS_PIPE_DIRECTORY": pipes},
            timeout=timeout_s,
            check=False,
            user=owner.st_uid if is_other else None,
            group=owner.st_gid if is_other else None,
            extra_groups=() if is_other else None,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode("ascii", "replace")


def terminate_clients(program: str, pipes: str, pids: "list[int]", timeout_s: float) -> None:
    """Ends the GPU work of processes that are about to be killed.

    A client that is killed with work on the GPU may leave the server, and whoever shares it, in any state. The daemon
    passes over what is no client of its.
    """
    answer = send_commands(program, pipes, "get_server_list\n", timeout_s)
    servers = [word for word in answer.split() if word.isdecimal()]
    lines = [f"terminate_client {server} {pid}\n" for server in servers for pid in pids[:_CLIENTS_MOST]]
    if lines:
        send_commands(program, pipes, "".join(lines), timeout_s)
