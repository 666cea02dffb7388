"""Builds an image of the agent or the controller with nothing but Python: no registry, no daemon, no root.

Owns the image's layers and its OCI layout. Must not know what the programs do.

    python deploy/build.py agent --out eelgrid-agent.tar                 runs here and on machines like this one
    python deploy/build.py agent --base python-3.13.tar --out ...        on a base that was saved elsewhere
    ctr -n k8s.io images import eelgrid-agent.tar                        or podman load, docker load, kind load

Theory. An image is a list of tar files and a JSON file that names them by digest. The layers:

  base      with --base, the layers of an OCI layout in a tar file (`skopeo copy docker://... oci-archive:FILE`,
            `docker save` of version 25 or later). It must bring Python of this interpreter's minor version, for this
            architecture, as `python3` on its PATH. Without --base, this machine's own: the interpreter, its standard
            library, and the shared libraries that these and the packages need, as `ldd` finds them.
  program   the packages that deploy/docker/requirements-PROGRAM.lock names, copied from this environment, which must
            have just those versions, or installed from --wheelhouse with their hashes; Eelgrid's own modules; one
            script to start it.

Files are sorted, owned by 0:0 and dated 0, so the same inputs are the same digest. The result is for trials
and for places without a registry; deploy/docker builds images for others.
"""

import argparse
import gzip
import hashlib
import io
import json
import platform
import re
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from host_base import base_files

__all__ = ["BuildError", "Layer", "build", "locked"]

ROOT = Path(__file__).resolve().parent.parent
# Program: its own packages, and where each lies.
PROGRAMS = {
    "agent": {"eelgrid_agent": "agent", "eelgrid_protos": "protos"},
    "controller": {"eelgrid_controller": "controller", "eelgrid_kernels": "kernels", "eelgrid_protos": "protos"},
}
ENTRIES = {
    "agent": {"eelgrid-agent": "eelgrid_agent.__main__"},
    "controller": {"eelgrid-controller": "eelgrid_controller.__main__", "eelctl": "eelgrid_controller.cli.__main__"},
}
SITE = "opt/eelgrid/site"
NOBODY = "65532:65532"
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
_INDEX, _MANIFEST = "application/vnd.oci.image.index.v1+json", "application/vnd.oci.image.manifest.v1+json"
_CONFIG, _LAYER = "application/vnd.oci.image.config.v1+json", "application/vnd.oci.image.layer.v1.tar+gzip"


class BuildError(Exception):
    """The image cannot be built; the message says what to do."""


class Layer:
    """A tar file under construction: paths to content, each once."""

    def __init__(self) -> None:
        self._files: dict[str, tuple[bytes | str, int]] = {}

    def add(self, path: str, content: bytes, *, mode: int = 0o644) -> None:
        """A file; the first of a name stays."""
        self._files.setdefault(path.strip("/"), (content, mode))

    def link(self, path: str, target: str) -> None:
        """A symbolic link."""
        self._files.setdefault(path.strip("/"), (target, 0o777))

    def tar(self) -> bytes:
        """The layer, uncompressed, with every folder that its files need."""
        folders = {str(parent) for path in self._files for parent in Path(path).parents} - {"."}
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for path in sorted(folders | self._files.keys()):
                entry = tarfile.TarInfo(path)
                entry.uname = entry.gname = ""
                content, entry.mode = self._files.get(path, (b"", 0o1777 if path == "tmp" else 0o755))
                if isinstance(content, str):
                    entry.type, entry.linkname = tarfile.SYMTYPE, content
                    archive.addfile(entry)
                elif path in self._files:
                    entry.size = len(content)
                    archive.addfile(entry, io.BytesIO(content))
                else:
                    entry.type = tarfile.DIRTYPE
                    archive.addfile(entry)
        return out.getvalue()


def locked(program: str) -> dict[str, str]:
    """Names and versions in the program's lock file, as far as they are for this platform."""
    from packaging.requirements import Requirement

    path = ROOT / "deploy" / "docker" / f"requirements-{program}.lock"
    found = {}
    for line in re.sub(r"\\\n\s*--hash=\S+", "", path.read_text()).splitlines():
        text = line.strip().removesuffix("\\").strip()
        if not text or text.startswith(("#", "--")):
            continue
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate():
            found[requirement.name] = str(requirement.specifier).removeprefix("==")
    return found


def _from_environment(program: str) -> Iterator[tuple[str, Path]]:
    """Files of the locked packages, from where this interpreter has them."""
    for name, version in locked(program).items():
        try:
            package = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            raise BuildError(f"{name} is not installed here; install the lock file, or give --wheelhouse") from None
        if package.version != version:
            raise BuildError(
                f"{name} is {package.version} here and {version} in the lock file; install that, or give --wheelhouse"
            )
        for file in package.files or ():
            path = Path(str(file.locate()))
            # Scripts lie outside and carry this machine's paths.
            if ".." not in file.parts and "__pycache__" not in file.parts and path.is_file():
                yield str(file), path


def _from_wheelhouse(program: str, wheelhouse: Path, folder: Path) -> Iterator[tuple[str, Path]]:
    """The same, installed offline and with their hashes from a folder of wheels."""
    lock = ROOT / "deploy" / "docker" / f"requirements-{program}.lock"
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-index",
        "--no-compile",
    ]
    where = ["--find-links", str(wheelhouse), "--require-hashes", "-r", str(lock), "--target", str(folder)]
    done = subprocess.run([*command, *where], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildError(f"--wheelhouse {wheelhouse}: {done.stderr.strip()[-600:]}")
    for path in folder.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            yield str(path.relative_to(folder)), path


def _program_layer(program: str, wheelhouse: Path | None, python: str) -> Layer:
    layer = Layer()
    with tempfile.TemporaryDirectory() as folder:
        found = (
            _from_environment(program) if wheelhouse is None else _from_wheelhouse(program, wheelhouse, Path(folder))
        )
        for name, path in found:
            layer.add(f"{SITE}/{name}", path.read_bytes())
    for package, parent in PROGRAMS[program].items():
        for path in (ROOT / parent / package).rglob("*"):
            if path.is_file() and path.suffix != ".pyc":
                layer.add(f"{SITE}/{path.relative_to(ROOT / parent)}", path.read_bytes())
    for name, module in ENTRIES[program].items():
        start = f'#!{python} -sP\nimport runpy\n\nrunpy.run_module("{module}", run_name="__main__", alter_sys=True)\n'
        layer.add(f"usr/local/bin/{name}", start.encode(), mode=0o755)
    return layer


def _base_layers(base: Path) -> tuple[list[bytes], dict[str, Any]]:
    """Layers, uncompressed, and the configuration of the first image in an OCI layout."""
    with tarfile.open(base) as archive:
        names = {name.removeprefix("./"): name for name in archive.getnames()}

        def blob(descriptor: dict[str, Any]) -> bytes:
            member = names.get("blobs/" + descriptor["digest"].replace(":", "/"))
            held = None if member is None else archive.extractfile(member)
            if held is None:
                raise BuildError(f"{base} lacks {descriptor['digest']}; save the image as a whole")
            content = held.read()
            if "sha256:" + hashlib.sha256(content).hexdigest() != descriptor["digest"]:
                raise BuildError(f"{base}: {descriptor['digest']} is damaged; save the image again")
            return content

        index = archive.extractfile(names["index.json"]) if "index.json" in names else None
        if index is None:
            raise BuildError(f"{base} is no OCI layout; make one with skopeo copy ... oci-archive:FILE")
        found = json.loads(index.read())
        while "manifests" in found:
            wanted = [one for one in found["manifests"] if _fits(one.get("platform"))]
            if not wanted:
                raise BuildError(f"{base} has no image for {_architecture()}")
            found = json.loads(blob(wanted[0]))
        layers = [blob(one) for one in found["layers"]]
        return [gzip.decompress(one) if one[:2] == b"\x1f\x8b" else one for one in layers], json.loads(
            blob(found["config"])
        )


def _fits(told: dict[str, str] | None) -> bool:
    return told is None or told.get("architecture") in {_architecture(), None, ""}


def _architecture() -> str:
    return _MACHINES.get(platform.machine(), platform.machine())


def build(
    program: str,
    out: Path,
    *,
    base: Path | None = None,
    wheelhouse: Path | None = None,
    tag: str = "0.2.0",
    level: int = 6,
) -> str:
    """Writes the image as an OCI layout in a tar file and returns its manifest's digest; raises BuildError."""
    config: dict[str, Any] = {"Env": ["PATH=/usr/local/bin:/usr/bin:/bin", "LANG=C.UTF-8"]}
    if base is None:
        host = Layer()
        native = [path for _, path in _from_environment(program) if ".so" in path.name]
        python = base_files(host, native)
        layers = [host.tar()]
    else:
        layers, held = _base_layers(base)
        config["Env"] = held.get("config", {}).get("Env") or config["Env"]
        python = "/usr/bin/env -S python3"
    layers.append(_program_layer(program, wheelhouse, python).tar())
    config |= {"User": NOBODY, "WorkingDir": "/", "Entrypoint": [f"/usr/local/bin/eelgrid-{program}"]}
    # Processes that the agent starts for the driver find the packages the same way.
    config["Env"] = [*config["Env"], f"PYTHONPATH=/{SITE}", "PYTHONUNBUFFERED=1", "PYTHONDONTWRITEBYTECODE=1"]
    blobs: list[bytes] = [gzip.compress(layer, compresslevel=level, mtime=0) for layer in layers]
    image = {
        "architecture": _architecture(),
        "os": "linux",
        "config": config,
        "rootfs": {"type": "layers", "diff_ids": ["sha256:" + hashlib.sha256(layer).hexdigest() for layer in layers]},
    }
    described = _json(image)
    manifest = _json(
        {
            "schemaVersion": 2,
            "mediaType": _MANIFEST,
            "config": _descriptor(_CONFIG, described),
            "layers": [_descriptor(_LAYER, blob) for blob in blobs],
        }
    )
    named = _descriptor(_MANIFEST, manifest) | {
        "annotations": {
            "io.containerd.image.name": f"docker.io/library/eelgrid-{program}:{tag}",
            "org.opencontainers.image.ref.name": tag,
        },
    }
    layout = Layer()
    layout.add("oci-layout", _json({"imageLayoutVersion": "1.0.0"}))
    layout.add("index.json", _json({"schemaVersion": 2, "mediaType": _INDEX, "manifests": [named]}))
    for blob in (*blobs, described, manifest):
        layout.add(f"blobs/sha256/{hashlib.sha256(blob).hexdigest()}", blob)
    out.write_bytes(layout.tar())
    return str(named["digest"])


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _descriptor(kind: str, blob: bytes) -> dict[str, Any]:
    return {"mediaType": kind, "digest": "sha256:" + hashlib.sha256(blob).hexdigest(), "size": len(blob)}


def main() -> int:
    """Builds one image, or fills a folder of wheels for a machine without a network."""
    parser = argparse.ArgumentParser(description="Build an image without a registry.")
    parser.add_argument("program", choices=PROGRAMS)
    parser.add_argument("--out", type=Path, required=True, help="the image's tar file")
    parser.add_argument("--base", type=Path, help="an OCI layout in a tar file (default: this machine's Python)")
    parser.add_argument("--wheelhouse", type=Path, help="take packages from these wheels, by their hashes")
    parser.add_argument("--tag", default="0.2.0")
    flags = parser.parse_args()
    try:
        digest = build(flags.program, flags.out, base=flags.base, wheelhouse=flags.wheelhouse, tag=flags.tag)
    except BuildError as error:
        sys.stderr.write(f"build: {error}\n")
        return 1
    size_mb = flags.out.stat().st_size / 1e6
    sys.stdout.write(
        f"eelgrid-{flags.program}:{flags.tag} {digest} {size_mb:.0f} MB python {sysconfig.get_python_version()}\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
