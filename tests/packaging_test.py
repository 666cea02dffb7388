"""The wheel in a clean environment: its names only, no foreign package touched, the agent without the optimizer."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.docs_rig import blocks_of

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"eelgrid", "eelgrid_agent", "eelgrid_controller", "eelgrid_kernels", "eelgrid_protos"}

# Blocks what the agent's extra does not bring, and YAML, which only `mig` reads; then starts the agent's program.
AGENT_ALONE = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"numpy", "numba", "llvmlite", "scipy", "sklearn", "click", "rich", "yaml"}:
            raise ModuleNotFoundError(f"{name} is not part of the agent")
sys.meta_path.insert(0, Absent())
from eelgrid_agent.__main__ import main
try:
    main(["--version"])
except SystemExit as stop:
    assert not stop.code, stop.code
assert not {"numpy", "numba", "eelgrid_kernels"} & set(sys.modules)
"""

# Blocks what extras bring, and the other packages of the wheel; then asks a controller that is not there.
CLIENT_ALONE = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {
            "aiohttp", "bcrypt", "click", "llvmlite", "msgspec", "numba", "numpy", "prometheus_client", "psutil", "pynvml", "rich",
            "scipy", "sklearn", "yaml", "eelgrid_agent", "eelgrid_controller", "eelgrid_kernels",
        }:
            raise ModuleNotFoundError(f"{name} is not what the client needs")
sys.meta_path.insert(0, Absent())
import asyncio
import eelgrid
async def ask():
    async with eelgrid.AsyncClient("127.0.0.1:1", retries=eelgrid.Retries(attempts=1)) as client:
        await client.get_summary()
try:
    asyncio.run(ask())
except eelgrid.errors.UnavailableError as error:
    print(eelgrid.__file__, error)
"""
TYPED = """
from typing import assert_type
from eelgrid import AsyncClient, Client, Node, Recommendation, Violation, Workload, errors
def blocking(client: Client) -> None:
    with client as same:
        assert_type(same, Client)
    assert_type(client.get_workload("w"), Workload)
    assert_type(next(client.list_nodes()), Node)
    assert_type(client.wait("w", until=lambda workload: workload.revision > 1), Workload)
    assert_type(client.recommend_moves(), Recommendation)
    assert_type(errors.InvalidArgumentError("m").violations, tuple[Violation, ...])
async def waiting(client: AsyncClient) -> None:
    assert_type(await client.get_workload("w"), Workload)
    async for node in client.list_nodes():
        assert_type(node, Node)
    async for workload in client.watch_workloads():
        assert_type(workload.revision, int)
"""
MISTYPED = """
from eelgrid import Client
client = Client()
client.scale_workload("w", "three")
client.submit_workload("train")
print(client.get_summary().nodes_reddy)
"""


def _run(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    _run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out), cwd=ROOT)
    (made,) = out.glob("*.whl")
    return made


def test_the_wheel_holds_our_packages_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == PACKAGES
    for needed in (
        "eelgrid_protos/wire/node_pb2.py",
        "eelgrid_protos/py.typed",
        "eelgrid/py.typed",
        "eelgrid_protos/catalogue/mig.json",
    ):
        assert needed in names
    assert not [name for name in names if "test" in name.lower()]


def test_extras_keep_the_agent_small(wheel):
    archive = zipfile.ZipFile(wheel)
    (metadata,) = (name for name in archive.namelist() if name.endswith("METADATA"))
    lines = archive.read(metadata).decode().splitlines()
    requires = [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist")]
    agent = [line for line in requires if "extra ==" not in line or "extra == 'agent'" in line]
    assert not [line for line in agent if line.startswith(("numba", "numpy", "scikit-learn", "scipy", "click"))]
    for needed in ("grpcio", "protobuf", "psutil", "nvidia-ml-py", "prometheus-client"):
        assert any(line.startswith(needed) for line in agent), needed
    assert "License-Expression: Apache-2.0" in lines


def _clean(folder):
    """A new environment, and its folder of packages."""
    environment = folder / "venv"
    _run(sys.executable, "-m", "venv", str(environment))
    (site,) = (environment / "lib").glob("python3.*/site-packages")
    return environment / "bin", site


def test_a_clean_environment(wheel, tmp_path):
    """Installed beside a foreign `kernels`, which must stay as it was; the programs answer."""
    programs, site = _clean(tmp_path)
    foreign = site / "kernels"
    foreign.mkdir()
    (foreign / "__init__.py").write_text("FOREIGN = True\n")
    before = {path: path.read_bytes() for path in site.rglob("*.py")}
    _run(programs / "python", "-m", "pip", "install", "-q", "--no-deps", "--no-index", str(wheel))
    assert all(path.read_bytes() == content for path, content in before.items())
    # Only the dependencies come from here: this environment's own copy of Eelgrid is behind a .pth file,
    # which Python does not read on this path.
    environment = {**os.environ, "PYTHONPATH": sysconfig.get_path("purelib")}
    code = "import kernels, eelgrid_agent; print(kernels.FOREIGN, eelgrid_agent.__file__)"
    assert _run(programs / "python", "-c", code, cwd=tmp_path, env=environment).startswith(f"True {site}")
    for program in ("eelgrid-agent", "eelgrid-controller", "eelctl"):
        assert "0.2.0" in _run(programs / program, "--version", cwd=tmp_path, env=environment)
    _run(programs / "python", "-c", AGENT_ALONE, cwd=tmp_path, env=environment)


def test_the_client_needs_no_extra_and_is_typed(wheel, tmp_path):
    """Nothing but the wheel is in the environment that mypy looks at: not even gRPC's stubs."""
    programs, site = _clean(tmp_path)
    _run(programs / "python", "-m", "pip", "install", "-q", "--no-deps", "--no-index", str(wheel))
    environment = {key: value for key, value in os.environ.items() if key not in {"MYPYPATH", "PYTHONPATH"}}
    dependencies = environment | {"PYTHONPATH": sysconfig.get_path("purelib")}
    said = _run(programs / "python", "-c", CLIENT_ALONE, cwd=tmp_path, env=dependencies)
    assert said.startswith(f"{site}/eelgrid/__init__.py no controller answers at 127.0.0.1:1")
    sources = tmp_path / "programs"
    sources.mkdir()
    blocks = blocks_of(ROOT / "docs" / "how-to" / "python-client.md")
    texts = {block.title: block.text for block in blocks if block.language == "python"} | {"typed.py": TYPED}
    assert len(texts) > 5
    for name, text in texts.items():
        (sources / name).write_text(text)
    mypy = (sys.executable, "-m", "mypy", "--strict", "--python-executable", str(programs / "python"))
    cache = ("--cache-dir", str(tmp_path / "cache"))
    _run(*mypy, *cache, *sorted(texts), cwd=sources, env=environment)
    (sources / "mistyped.py").write_text(MISTYPED)
    done = subprocess.run(
        [*mypy, *cache, "mistyped.py"], capture_output=True, text=True, check=False, cwd=sources, env=environment
    )
    assert [line.rpartition("[")[2] for line in done.stdout.splitlines() if "error:" in line] == [
        "arg-type]",
        "arg-type]",
        "attr-defined]",
    ]


@pytest.mark.slow
def test_the_client_alone_from_the_index(wheel, tmp_path):
    """What a program really gets without an extra."""
    programs, site = _clean(tmp_path)
    _run(programs / "python", "-m", "pip", "install", "-q", str(wheel))
    installed = {path.name.partition("-")[0].lower() for path in site.glob("*.dist-info")}
    assert not {"numpy", "numba", "llvmlite", "scipy", "click", "rich", "psutil", "prometheus_client"} & installed
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    said = _run(programs / "python", "-c", CLIENT_ALONE, cwd=tmp_path, env=environment)
    assert "no controller answers" in said


@pytest.mark.slow
def test_the_agent_alone_from_the_index(wheel, tmp_path):
    """What a node really gets: no numpy, no numba, and the agent runs."""
    programs, site = _clean(tmp_path)
    _run(programs / "python", "-m", "pip", "install", "-q", f"{wheel}[agent]")
    installed = {path.name.partition("-")[0].lower() for path in site.glob("*.dist-info")}
    assert not {"numpy", "numba", "llvmlite", "scipy", "scikit_learn", "click", "rich"} & installed
    assert "0.2.0" in _run(programs / "eelgrid-agent", "--version", cwd=tmp_path)


def test_generated_code_is_fresh():
    _run(sys.executable, str(ROOT / "protos" / "generate.py"), "--check")
    _run(sys.executable, str(ROOT / "client" / "generate.py"), "--check")


def test_the_buf_rules_hold():
    _run(str(Path(sys.executable).parent / "buf"), "lint", cwd=ROOT)


def test_the_layers_hold():
    _run(str(Path(sys.executable).parent / "lint-imports"), cwd=ROOT)
