"""Generates `eelgrid_protos.wire` from our .proto files and the kubelet's, or checks that it is fresh.

Also the tables by which modules are loaded when they are needed: where each message and service of ours is in the wire
package (its `__init__`), and each name in `eelgrid_protos.messages` (`exports.py`, from the list in its `__init__`).

protoc writes imports by the path of the .proto file (`eelgrid.v1`), which buf's
layout rule fixes; the Python package is `eelgrid_protos.wire`, because a second
top-level package would be one more name to collide on a user's machine. The one
rewrite below joins the two, and refuses to guess: each import that it does not
know is an error. See docs/explanation/adr/0003-wire-package.md.

Run it with the grpcio-tools that the dev group pins: the oldest generator that
we support, since generated code must not be newer than the user's protobuf.
"""

import argparse
import ast
import filecmp
import re
import sys
import tempfile
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent
# Our contract, and those of the kubelet that the agent speaks; all land in one flat package.
KUBELET = ROOT / "kubelet"
SOURCES = (
    ROOT / "eelgrid" / "v1",
    KUBELET / "podresources" / "v1",
    KUBELET / "deviceplugin" / "v1beta1",
    KUBELET / "dra" / "v1",
    KUBELET / "pluginregistration" / "v1",
)
# Annotations of HTTP paths, as the installed googleapis-common-protos has them; committed, because buf and the tools of
# others need them beside our files.
ANNOTATIONS = ("google/api/annotations.proto", "google/api/http.proto")
THIRD_PARTY = ROOT / "third_party"
TARGET = ROOT / "eelgrid_protos" / "wire"
EXPORTS = ROOT / "eelgrid_protos" / "messages" / "exports.py"
PACKAGE = "eelgrid.v1"
IMPORT = re.compile(r"^from eelgrid\.v1 import (\w+_pb2) as (\w+)$", re.MULTILINE)
HEADER = '"""Generated from protos/eelgrid/v1 and protos/kubelet by protos/generate.py; do not edit."""\n'


def generate(target: Path) -> None:
    """Writes the generated package into `target`, which must exist."""
    with tempfile.TemporaryDirectory() as scratch:
        sources = sorted(str(path) for folder in SOURCES for path in folder.glob("*.proto"))
        well_known = str(resources.files("grpc_tools") / "_proto")
        status = protoc.main(
            [
                "protoc",
                *(f"-I{folder}" for folder in (ROOT, THIRD_PARTY, well_known)),
                f"--python_out={scratch}",
                f"--pyi_out={scratch}",
                f"--descriptor_set_out={scratch}/descriptors.binpb",
                *sources,
            ]
        )
        if status != 0:
            raise SystemExit(f"protoc failed with status {status}")
        made = sorted(path for folder in SOURCES for path in (Path(scratch) / folder.relative_to(ROOT)).iterdir())
        if len({path.name for path in made}) < len(made):
            raise SystemExit("two folders hold a .proto file of one name; rename one")
        for path in made:
            text = IMPORT.sub(r"from eelgrid_protos.wire import \1 as \2", path.read_text())
            if "from eelgrid.v1" in text or "from kubelet" in text:
                raise SystemExit(f"{path.name}: an import that the rewrite does not know")
            (target / path.name).write_text(text)
        descriptors = FileDescriptorSet.FromString((Path(scratch) / "descriptors.binpb").read_bytes())
    homes = {
        entry.name: f"{Path(file.name).stem}_pb2"
        for file in descriptors.file
        if file.package == PACKAGE
        for entry in (*file.message_type, *file.service)
    }
    (target / "__init__.py").write_text(
        f"{HEADER}\n# Of messages and services of {PACKAGE}.\n{write_table('MODULE_OF_NAME', homes)}"
    )


def write_table(name: str, entries: Mapping[str, str]) -> str:
    """Returns the source of a dictionary of texts."""
    rows = "".join(f'    "{key}": "{value}",\n' for key, value in sorted(entries.items()))
    return f"{name} = {{\n{rows}}}\n"


def list_exports() -> str:
    """Returns the source of `exports.py`: the module of each name that `eelgrid_protos.messages` lists."""
    modules = {
        alias.name: node.module.rpartition(".")[2]
        for node in ast.walk(ast.parse((EXPORTS.parent / "__init__.py").read_text()))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("eelgrid_protos.messages.")
        for alias in node.names
        if alias.name != "MODULE_OF_NAME"
    }
    return f'"""Generated from the list in `__init__.py` by protos/generate.py; do not edit."""\n\n{write_table("MODULE_OF_NAME", modules)}'


def installed_annotations() -> dict[Path, bytes]:
    """Returns the contents of the .proto files of others that ours import, by the path where they are committed."""
    return {THIRD_PARTY / name: (resources.files("google.api") / Path(name).name).read_bytes() for name in ANNOTATIONS}


def stale(target: Path) -> list[str]:
    """Names of committed files that differ from what protoc makes now."""
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        fresh = {path.name for path in Path(scratch).iterdir()}
        committed = {path.name for path in target.iterdir() if path.is_file()}
        _, differing, missing = filecmp.cmpfiles(scratch, target, fresh, shallow=False)
        return sorted({*differing, *missing, *(committed - fresh)})


def main() -> int:
    """Generates, or with --check compares."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    if parser.parse_args().check:
        names = stale(TARGET)
        names += [str(EXPORTS)] if not EXPORTS.exists() or EXPORTS.read_text() != list_exports() else []
        names += [str(path) for path, text in installed_annotations().items() if path.read_bytes() != text]
        for name in names:
            print(f"stale: {TARGET / name}; run `make proto`", file=sys.stderr)
        return 1 if names else 0
    for path, text in installed_annotations().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
    generate(TARGET)
    EXPORTS.write_text(list_exports())
    return 0


if __name__ == "__main__":
    sys.exit(main())
