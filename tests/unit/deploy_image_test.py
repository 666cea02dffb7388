"""Images without a registry: whole, the same each time, without the optimizer in the agent's, and they start."""

import gzip
import hashlib
import io
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tarfile
import tomllib

import pytest
from packaging.requirements import Requirement
from tests.deploy_rig import ROOT, build

NODE = {"name": "solo", "cpu_milli": 8000, "memory_bytes": 2**35, "gpus": [{"product": "a10", "count": 2}]}
HEAVY = {"numpy", "numba", "llvmlite", "scipy", "scikit-learn", "click", "rich"}


def _opened(path):
    """Configuration and layers of an image, each digest checked."""
    with tarfile.open(path) as archive:
        blobs = {}
        for member in archive.getmembers():
            if member.isfile():
                blobs[member.name] = archive.extractfile(member).read()
    for name, content in blobs.items():
        if name.startswith("blobs/"):
            assert name == f"blobs/sha256/{hashlib.sha256(content).hexdigest()}"

    def blob(descriptor):
        content = blobs["blobs/" + descriptor["digest"].replace(":", "/")]
        assert len(content) == descriptor["size"]
        return content

    (named,) = json.loads(blobs["index.json"])["manifests"]
    manifest = json.loads(blob(named))
    config = json.loads(blob(manifest["config"]))
    layers = [gzip.decompress(blob(one)) for one in manifest["layers"]]
    assert config["rootfs"]["diff_ids"] == ["sha256:" + hashlib.sha256(layer).hexdigest() for layer in layers]
    return config, layers


def _base(path):
    """A base as another machine would have saved it: an index, and a layer that is not compressed."""
    layer = build.Layer()
    layer.add("usr/bin/python3", b"an interpreter", mode=0o755)
    content = layer.tar()
    config = build._json({"config": {"Env": ["PATH=/usr/bin", "BASE=1"]}})
    manifest = build._json(
        {
            "schemaVersion": 2,
            "config": build._descriptor(build._CONFIG, config),
            "layers": [build._descriptor("application/vnd.oci.image.layer.v1.tar", content)],
        }
    )
    foreign = {"platform": {"architecture": "s390x"}, "digest": "sha256:0", "size": 0}
    layout = build.Layer()
    index = {"manifests": [foreign, build._descriptor(build._MANIFEST, manifest)]}
    layout.add("index.json", build._json(index))
    for one in (content, config, manifest):
        layout.add(f"blobs/sha256/{hashlib.sha256(one).hexdigest()}", one)
    path.write_bytes(layout.tar())
    return content


def test_an_image_on_a_base_is_the_same_each_time(tmp_path):
    below = _base(tmp_path / "base.tar")
    digests = {build.build("agent", tmp_path / f"{n}.tar", base=tmp_path / "base.tar", level=1) for n in range(2)}
    assert len(digests) == 1
    assert (tmp_path / "0.tar").read_bytes() == (tmp_path / "1.tar").read_bytes()
    config, layers = _opened(tmp_path / "0.tar")
    assert config["config"]["User"] == "65532:65532"
    assert config["config"]["Entrypoint"] == ["/usr/local/bin/eelgrid-agent"]
    assert "BASE=1" in config["config"]["Env"]
    assert layers[0] == below
    with tarfile.open(fileobj=io.BytesIO(layers[1])) as archive:
        members = archive.getmembers()
    assert {(one.uid, one.gid, one.mtime) for one in members} == {(0, 0, 0)}
    packages = {one.name.split("/")[3] for one in members if one.name.startswith("opt/eelgrid/site/")}
    assert {"eelgrid_agent", "eelgrid_protos", "grpc"} <= packages
    assert not (HEAVY | {"eelgrid_controller", "eelgrid_kernels"}) & packages


def test_a_base_that_is_damaged_or_none_is_refused(tmp_path):
    path = tmp_path / "base.tar"
    _base(path)
    path.write_bytes(path.read_bytes().replace(b"an interpreter", b"no interpreter"))
    with pytest.raises(build.BuildError, match="damaged"):
        build.build("agent", tmp_path / "out.tar", base=path)
    with tarfile.open(path, "w"):
        pass
    with pytest.raises(build.BuildError, match="no OCI layout"):
        build.build("agent", tmp_path / "out.tar", base=path)


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("chroot") is None, reason="chroot needs root")
def test_the_agent_starts_from_its_image_alone(tmp_path):
    """As nobody, below a root that holds the image and nothing else."""
    build.build("agent", tmp_path / "agent.tar", level=1)
    config, layers = _opened(tmp_path / "agent.tar")
    root = tmp_path / "root"
    for layer in layers:
        with tarfile.open(fileobj=io.BytesIO(layer)) as archive:
            # Debian's Python 3.11 has no filters yet, and passes this over.
            archive.extraction_filter = getattr(tarfile, "tar_filter", None)
            archive.extractall(root)
    user, _, group = config["config"]["User"].partition(":")
    environment = dict(entry.split("=", 1) for entry in config["config"]["Env"])
    (root / "dev").mkdir()
    for minor, name in ((3, "null"), (9, "urandom")):
        # What every container runtime gives.
        os.mknod(root / "dev" / name, stat.S_IFCHR | 0o666, os.makedev(1, minor))
        (root / "dev" / name).chmod(0o666)
    (root / "fleet.json").write_text(json.dumps({"nodes": [NODE]}))

    def run(*command):
        inside = [shutil.which("chroot"), f"--userspec={user}:{group}", str(root), *command]
        return subprocess.run(inside, capture_output=True, text=True, check=False, env=environment, timeout=60)

    (program,) = config["config"]["Entrypoint"]
    assert run(program, "--version").stdout.startswith("eelgrid-agent 0.2.0")
    # It builds its nodes and is refused by its own rule at last: every module that it needs is there.
    done = run(program, "--simulate", "/fleet.json", "--listen", "0.0.0.0:7444")
    assert done.returncode == 2
    assert "0.0.0.0:7444 can be reached from other machines" in done.stderr, done.stderr
    # The process that holds the driver is started by module.
    assert "No module" not in run("/usr/local/bin/python3", "-P", "-m", "eelgrid_agent.devices.process.child").stderr


@pytest.mark.parametrize("program", build.PROGRAMS)
def test_an_images_lock_is_a_part_of_the_projects(program):
    def pins(path):
        return dict(re.findall(r"^([\w.-]+)==([\w.+-]+)", path.read_text(), re.MULTILINE))

    whole = pins(ROOT / "requirements-dev.lock")
    assert pins(ROOT / "requirements.lock").items() <= whole.items()
    path = ROOT / "deploy" / "docker" / f"requirements-{program}.lock"
    mine = pins(path)
    assert mine.items() <= whole.items()
    assert path.read_text().count("--hash=sha256:") >= len(mine)
    assert (not HEAVY & mine.keys()) == (program == "agent")
    assert mine.keys() >= build.locked(program).keys()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {"agent": ("agent",), "controller": ("controller", "tracing", "postgresql")}[program]
    asked = [*project["dependencies"], *(one for extra in extras for one in project["optional-dependencies"][extra])]
    assert {Requirement(one).name.lower() for one in asked} <= mine.keys()


@pytest.mark.parametrize("program", build.PROGRAMS)
def test_the_dockerfiles_are_pinned_and_nobodys(program):
    lines = (ROOT / "deploy" / "docker" / f"{program}.Dockerfile").read_text().splitlines()
    bases = {line.split()[1] for line in lines if line.startswith("FROM ")}
    assert bases == {"${BASE}"}
    (base,) = [line.removeprefix("ARG BASE=") for line in lines if line.startswith("ARG BASE=")]
    assert re.fullmatch(r"python:3\.\d+-slim-\w+", base)
    assert "USER 65532:65532" in lines
    assert f'ENTRYPOINT ["eelgrid-{program}"]' in lines
    text = "\n".join(lines)
    assert f"--require-hashes -r requirements-{program}.lock" in text
    # Whatever pip fetches is one of the locked files, with its hashes; what it installs besides was built here.
    for install in re.findall(r"pip install ([^&]*)", text.replace("\\\n", " ")):
        assert "--require-hashes -r requirements-" in install or "--no-index" in install, install
    for copied in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE):
        assert all((ROOT / name).exists() for name in copied.split()), copied


@pytest.mark.parametrize("program", build.PROGRAMS)
@pytest.mark.parametrize(
    ("release", "base", "is_built"),
    [
        ("", "python:3.13-slim-bookworm", True),
        ("1", "python:3.13-slim-bookworm", False),
        ("1", "python:3.13-slim-bookworm@sha256:123", False),
        ("1", f"python:3.13-slim-bookworm@sha256:{'0' * 64}", True),
        ("1", f"registry.example:5000/python@sha256:{'f' * 64}", True),
    ],
)
def test_a_release_is_built_on_a_base_by_digest_alone(program, release, base, is_built):
    """No registry can be asked here, so no digest stands in the file: a release must bring it, or is refused."""
    text = (ROOT / "deploy" / "docker" / f"{program}.Dockerfile").read_text().replace("\\\n", " ")
    before, check = re.search(r"^(.*?)^RUN (test -z .*?)$", text, re.MULTILINE | re.DOTALL).groups()
    assert "pip" not in before.partition("FROM")[2], "it is refused before anything is fetched"
    environment = {"PATH": os.environ["PATH"], "RELEASE": release, "BASE": base}
    done = subprocess.run(["sh", "-c", check], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == is_built, done.stderr
    assert is_built or "@sha256:DIGEST" in done.stderr


def test_what_builds_the_packages_is_locked_with_its_hashes():
    """The Makefile and the images install from files with hashes, and from nothing else."""
    whole = dict(re.findall(r"^([\w.-]+)==([\w.+-]+)", (ROOT / "requirements-dev.lock").read_text(), re.MULTILINE))
    for name, wanted in (("build", {"hatchling", "editables"}), ("kernels", {"numba", "numpy"})):
        lock = (ROOT / f"requirements-{name}.lock").read_text()
        pins = dict(re.findall(r"^([\w.-]+)==([\w.+-]+)", lock, re.MULTILINE))
        assert wanted <= pins.keys()
        assert pins.items() <= whole.items()
        assert lock.count("--hash=sha256:") >= len(pins)
        assert "index-url" not in lock
    installs = re.findall(r"^\t.*(?:pip install|\$\(PIP_INSTALL\)) (.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert len(installs) >= 5
    for install in installs:
        assert "--require-hashes -r requirements" in install or "--no-deps --no-build-isolation" in install, install


@pytest.mark.slow
def test_an_image_from_a_wheelhouse(tmp_path):
    """Wheels are fetched once; the build itself asks no index."""
    lock = ROOT / "deploy" / "docker" / "requirements-agent.lock"
    wheels = tmp_path / "wheels"
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "-q", "--require-hashes", "-r", str(lock), "-d", str(wheels)],
        check=True,
    )
    _base(tmp_path / "base.tar")
    build.build("agent", tmp_path / "out.tar", base=tmp_path / "base.tar", wheelhouse=wheels)
    _, layers = _opened(tmp_path / "out.tar")
    assert b"opt/eelgrid/site/grpc/__init__.py" in layers[1]
    next(wheels.glob("psutil*")).unlink()
    with pytest.raises(build.BuildError, match="psutil"):
        build.build("agent", tmp_path / "out.tar", base=tmp_path / "base.tar", wheelhouse=wheels)
