"""A real API server from the binaries of KUBEBUILDER_ASSETS, as controller-runtime's envtest starts it.

Owns processes and a folder that end with this process: etcd, kube-apiserver and, where they
is there, kube-controller-manager, on free loopback ports; no scheduler, for tests bind themselves. Not part
of the fake; here because tests alone use it.
"""

import atexit
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from ssl import create_default_context

import trustme

_STARTED = {}
_UP_S = 90.0


def _free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def running_control_plane(assets):
    """The path of a kubeconfig with all permissions; started at the first call."""
    if assets not in _STARTED:
        _STARTED[assets] = _start(Path(assets))
    return _STARTED[assets]


def _start(assets):
    folder = Path(tempfile.mkdtemp(prefix="eelgrid-api-"))
    processes = []

    def run(name, *flags):
        with (folder / f"{name}.log").open("wb") as log:
            processes.append(subprocess.Popen([assets / name, *flags], stdout=log, stderr=log, cwd=folder))

    def end():
        for process in reversed(processes):
            process.terminate()
        for process in reversed(processes):
            try:
                process.wait(10.0)
            except subprocess.TimeoutExpired:
                process.kill()
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(end)
    client, peer, api = _free_port(), _free_port(), _free_port()
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1", "localhost")
    authority.cert_pem.write_to_path(folder / "ca.crt")
    certificate.private_key_and_cert_chain_pem.write_to_path(folder / "api.pem")
    certificate.private_key_pem.write_to_path(folder / "sa.key")
    token = secrets.token_hex(16)
    (folder / "tokens.csv").write_text(f'{token},admin,admin,"system:masters"\n')
    url = f"http://127.0.0.1:{client}"
    run(
        "etcd",
        f"--data-dir={folder}/etcd",
        f"--listen-client-urls={url}",
        f"--advertise-client-urls={url}",
        f"--listen-peer-urls=http://127.0.0.1:{peer}",
        "--unsafe-no-fsync",
    )
    run(
        "kube-apiserver",
        f"--etcd-servers={url}",
        "--bind-address=127.0.0.1",
        f"--secure-port={api}",
        "--tls-cert-file=api.pem",
        "--tls-private-key-file=api.pem",
        "--token-auth-file=tokens.csv",
        "--authorization-mode=Node,RBAC",
        "--service-account-issuer=https://kubernetes.default.svc",
        "--service-account-key-file=sa.key",
        "--service-account-signing-key-file=sa.key",
        "--service-cluster-ip-range=10.96.0.0/16",
        "--endpoint-reconciler-type=none",
        "--allow-privileged=true",
        f"--cert-dir={folder}",
        *os.environ.get("EELGRID_APISERVER_FLAGS", "").split(),
    )
    kubeconfig = _kubeconfig(folder, f"https://127.0.0.1:{api}", token)
    _wait(f"https://127.0.0.1:{api}/readyz", folder, token, processes)
    if (assets / "kube-controller-manager").exists():
        flags = [f"--{which}kubeconfig={kubeconfig}" for which in ("", "authentication-", "authorization-")]
        keys = ["--service-account-private-key-file=sa.key", "--root-ca-file=ca.crt", "--secure-port=0"]
        run("kube-controller-manager", *flags, *keys, "--leader-elect=false", "--use-service-account-credentials=false")
        sign = "api/v1/namespaces/kube-system/configmaps/kube-root-ca.crt"  # it writes this into each namespace
        _wait(f"https://127.0.0.1:{api}/{sign}", folder, token, processes)
    return str(kubeconfig)


def _kubeconfig(folder, server, token):
    path = folder / "kubeconfig"
    path.write_text(
        f"""apiVersion: v1
kind: Config
clusters: [{{name: c, cluster: {{server: "{server}", certificate-authority: ca.crt}}}}]
users: [{{name: u, user: {{token: "{token}"}}}}]
contexts: [{{name: x, context: {{cluster: c, user: u}}}}]
current-context: x
"""
    )
    return path


def _wait(url, folder, token, processes):
    context = create_default_context(cafile=str(folder / "ca.crt"))
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    until_s = time.monotonic() + _UP_S
    while True:
        try:
            with urllib.request.urlopen(request, context=context, timeout=2.0) as answer:
                if answer.status == 200:
                    return
        except OSError:
            pass
        dead = [process.args[0].name for process in processes if process.poll() is not None]
        assert not dead, f"{dead} ended; see the logs in {folder}"
        assert time.monotonic() < until_s, f"no answer from {url}; see the logs in {folder}"
        time.sleep(0.1)
