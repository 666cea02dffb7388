"""Pods of the chart started without a kubelet: the command, user, volumes and read-only root that a manifest asks for.

Owns what a kubelet and a runtime would make of one container: a root of its own that holds nothing but the interpreter,
the project and what is mounted, in one network namespace for all pods, where the services' names lead to this machine.
Must not know what is started. Needs root and util-linux; nothing of it is left when it ends.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from eelgrid_kernels.compilation import cache_folder
from tests.entry_points import PACKAGES, ROOT, build_entry_point
from tests.waiting import poll_until

# What an image would have, read-only: the machine's programs and libraries, the interpreter and the project.
_SHARED = sorted({"/usr", "/etc/ssl", sys.base_prefix, sys.prefix, str(ROOT)})
# Links into /usr, or folders where the machine keeps them apart.
_APART = [name for name in ("/bin", "/sbin", "/lib", "/lib64") if Path(name).exists()]
# SIOCSIFFLAGS with IFF_UP and IFF_RUNNING; it ends with its parent (PR_SET_PDEATHSIG).
_HOLD_NETWORK = """
import ctypes, fcntl, signal, socket, struct
ctypes.CDLL(None).prctl(1, 9)
with socket.socket() as one:
    fcntl.ioctl(one, 0x8914, struct.pack("16sh22x", b"lo", 0x41))
print("up", flush=True)
signal.pause()
"""
# Where the chart has compiled kernels.
_CACHE = "/var/cache/eelgrid"
# A limit only for one that hangs: the first controller of a fresh tree compiles its kernels.
READY_S = 900.0


def find_obstacle():
    """Why pods cannot be started here; None if they can."""
    if os.geteuid() != 0:
        return "only root can make namespaces"
    if not all(map(shutil.which, ("unshare", "nsenter", "setpriv", "mount"))):
        return "no util-linux"
    tried = subprocess.run(["unshare", "--mount", "--net", "mount", "-t", "tmpfs", "none", "/mnt"], check=False)
    return None if tried.returncode == 0 else "this machine gives no namespaces"


class Pods:
    """Pods that reach each other; a context. `names` are those of services, which all lead to them."""

    def __init__(self, folder, names):
        self._folder = folder
        self._hosts = folder / "hosts"
        self._hosts.write_text("".join(f"127.0.0.1 {name}\n" for name in ("localhost", *names)))
        self._root = folder / "root"
        self._root.mkdir()
        self._network = None
        self._processes = []

    def __enter__(self):
        command = ["unshare", "--net", sys.executable, "-c", _HOLD_NETWORK]
        self._network = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._network.stdout.readline() == "up\n"
        return self

    def __exit__(self, *reason):
        for process in (*self._processes, self._network):
            process.kill()
            process.wait()
        self._network.stdout.close()

    def start(self, found, secrets, *, ports):
        """Starts the one container of a Deployment or StatefulSet.

        `secrets` has the files of each Secret by its name, `ports` those that its arguments moved elsewhere.
        """
        name, pod = found["metadata"]["name"], found["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        context = {**pod["securityContext"], **container["securityContext"]}
        volumes = {one["name"]: one for one in pod.get("volumes", ())}
        mounts = []
        for mount in container["volumeMounts"]:
            secret = volumes.get(mount["name"], {}).get("secret")
            files, mode = (secrets[secret["secretName"]], secret["defaultMode"]) if secret else ({}, 0)
            source = self.make_volume(f"{name}-{mount['name']}", files, mode=mode, group=context["fsGroup"])
            if mount["mountPath"] == _CACHE:
                self._fill_cache(source, context)
            mounts.append((source, mount["mountPath"], mount.get("readOnly", False)))
        fields = {"metadata.name": f"{name}-0", "metadata.namespace": found["metadata"]["namespace"]}
        env = {
            one["name"]: one["value"] if "value" in one else fields[one["valueFrom"]["fieldRef"]["fieldPath"]]
            for one in container.get("env") or ()
        }
        args = [re.sub(r"\$\((\w+)\)", lambda found: env[found[1]], one) for one in container["args"]]
        # An image's entry point has its name.
        (program,) = container.get("command") or [container["image"].partition(":")[0].rpartition("/")[2]]
        pod = self.run(name, [sys.executable, "-c", build_entry_point(program), *args], env, mounts, context)
        pod.ports = {one["name"]: one["containerPort"] for one in container["ports"]} | ports
        pod.probes = {probe: container[probe]["httpGet"] for probe in ("readinessProbe", "livenessProbe")}
        return pod

    def _fill_cache(self, folder, context):
        """Puts the kernels that the tests have compiled there, as another start would have left them."""
        shutil.copytree(cache_folder(), folder / cache_folder().name)
        for path in (folder, *folder.rglob("*")):
            os.chown(path, context["runAsUser"], context["fsGroup"])

    def run(self, name, words, env=None, mounts=(), context=None):
        """Starts a program among the pods, as root where no security context says otherwise; returns a Pod.

        `mounts` are (folder, path, whether it may not be written).
        """
        script = "\n".join(self._build_script(words, env or {}, mounts, context))
        log = self._folder / f"{name}.log"
        command = ["nsenter", f"--net=/proc/{self._network.pid}/ns/net", "unshare", "--mount", "bash", "-c", script]
        with log.open("wb") as out:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        self._processes.append(process)
        return Pod(self, process, log)

    def make_volume(self, name, files, *, mode=0o400, group=0):
        """A folder that is empty, or has these files, as its group may read them."""
        path = self._folder / name
        path.mkdir()
        for key, content in files.items():
            (path / key).write_bytes(content)
            (path / key).chmod(mode)
            os.chown(path / key, 0, group)
        os.chown(path, 0, group)
        path.chmod(0o2775)
        return path

    def _build_script(self, words, env, mounts, context):
        """The commands that make the root and start the program in it."""
        yield "set -e"
        yield f"mount -t tmpfs -o mode=755 none {self._root}"
        # First: the project may lie below one of them, as below /tmp.
        for source, path, read_only in mounts:
            yield self._build_mount(source, path, read_only=read_only)
        for path in _APART:
            if Path(path).is_symlink():
                yield f"ln -s {Path(path).readlink()} {self._root}{path}"
            else:
                yield self._build_mount(path, path, read_only=True)
        for path in _SHARED:
            yield self._build_mount(path, path, read_only=True)
        yield f"mkdir -p {self._root}/proc {self._root}/dev {self._root}/etc"
        yield f"mount --rbind /proc {self._root}/proc"
        yield f"mount --rbind /dev {self._root}/dev"
        yield f"cp {self._hosts} {self._root}/etc/hosts"
        given = {"PATH": "/usr/bin:/bin", "PYTHONPATH": os.pathsep.join(map(str, PACKAGES)), **env}
        rights = ["setpriv", "--pdeathsig=KILL"]
        if context:
            if context["readOnlyRootFilesystem"]:
                yield f"mount -o remount,ro {self._root}"
            assert context["capabilities"] == {"drop": ["ALL"]}
            rights += [f"--reuid={context['runAsUser']}", f"--regid={context['runAsGroup']}"]
            rights += [f"--groups={context['fsGroup']}", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"]
        environment = [f"{key}={value}" for key, value in given.items()]
        yield shlex.join(["exec", "chroot", str(self._root), *rights, "env", "-i", *environment, *map(str, words)])

    def _build_mount(self, source, path, *, read_only):
        target = shlex.quote(f"{self._root}{path}")
        bound = f"mkdir -p {target}\nmount --bind {shlex.quote(str(source))} {target}"
        return f"{bound}\nmount -o remount,bind,ro {target}" if read_only else bound


class Pod:
    """A program among the pods; `probes` and `ports` are those of its manifest."""

    def __init__(self, pods, process, log):
        self._pods = pods
        self.process, self.log = process, log
        self.ports, self.probes = {}, {}

    def answers(self, probe):
        """Whether a probe is answered well; fails if the program has ended."""
        assert self.process.poll() is None, self.log.read_text()
        get = self.probes[probe]
        url = f"http://127.0.0.1:{self.ports[get['port']]}{get['path']}"
        asked = f"import urllib.request; urllib.request.urlopen({url!r}, timeout=5)"
        return self._pods.run("probe", [sys.executable, "-I", "-c", asked]).process.wait() == 0

    def until_ready(self):
        """Waits until all its probes are answered."""
        for probe in self.probes:
            poll_until(
                lambda probe=probe: self.answers(probe), f"{self.log.stem} answers its {probe}", within_s=READY_S
            )
