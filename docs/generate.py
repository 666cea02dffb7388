"""Writes the reference pages of commands, files, gRPC API and metrics from the programs themselves, or checks them.

Owns docs/reference/{eelctl,eelgrid-controller,eelgrid-front,eelgrid-agent,grpc,gpu-names,workload-file,fleet-file,agent-metrics,
controller-metrics}.md; the programs, the .proto files, the messages, the GPU catalogue and the catalogues of metrics are the only truth. Programs are found by `[project.scripts]` of pyproject.toml. Must not know any option or message by name.

    python docs/generate.py [--check]     exit code 1 where --check finds a page that is stale
"""

import argparse
import importlib
import os
import re
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn

import click
from google.api import annotations_pb2
from google.protobuf import descriptor_pb2 as pb
from grpc_tools import protoc

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from docs.file_pages import fleet_file_page, workload_file_page
from docs.metric_pages import HEAD, agent_metrics_page, controller_metrics_page

from eelgrid_protos.catalogue import load_catalogue

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "reference"
PROTOS = ROOT / "protos"
# Our own contract; the kubelet's, which the agent speaks, is Kubernetes' to explain.
CONTRACT = PROTOS / "eelgrid" / "v1"


def program(name: str) -> Any:
    """The entry point of a program by its name in [project.scripts]."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts[name].partition(":")
    return getattr(importlib.import_module(module), function), importlib.import_module(module)


def shown(text: str) -> str:
    """Text in which what looks like HTML is shown as it is, and pages that it names are links; code spans stay."""
    plain = (part.replace("<", "&lt;") for part in re.split("`[^`]*`", text))
    linked = (re.sub(r"\bdocs/([\w/-]+/([\w-]+)\.md)", r"[\2](../\1)", part) for part in plain)
    spans = [*re.findall("`[^`]*`", text), ""]
    return "".join(part for pair in zip(linked, spans, strict=True) for part in pair)


def cell(text: str) -> str:
    """Text as it may stand in a cell of a table."""
    return shown(" ".join(text.split())).replace("|", "\\|")


def span(text: str) -> str:
    """A code span in a cell of a table."""
    return cell(f"`{text}`")


def prose(text: str) -> str:
    """The help of a click command: paragraphs, and those that keep their lines (marked by backspace) as blocks."""
    parts = []
    for paragraph in re.split(r"\n\s*\n", text.replace("\f", "").strip()):
        if paragraph.lstrip().startswith("\b"):
            lines = paragraph.replace("\b", "").strip("\n").splitlines()
            parts.append("```text\n" + "\n".join(line.strip() for line in lines if line.strip()) + "\n```")
        else:
            parts.append(shown(" ".join(paragraph.split())))
    return "\n\n".join(parts)


# Commands made by click.


def _commands(command: click.Command, context: click.Context) -> Iterator[tuple[click.Command, click.Context]]:
    """A command and all below it, each with its context, in the order in which help lists them."""
    yield command, context
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            if below is not None and not below.hidden:
                yield from _commands(below, click.Context(below, parent=context, info_name=name))


def click_section(command: click.Command, context: click.Context, level: int) -> str:
    """One command: its usage, its help, and a table of its options."""
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    parts = [f"{'#' * level} {context.command_path}", prose(command.help or ""), f"```text\n{usage}\n```"]
    rows = []
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is None or "--help" in parameter.opts:
            continue
        rows.append(f"| {span(record[0])} | {cell(record[1])} |")
    if rows:
        parts.append("\n".join(["| option | meaning |", "|---|---|", *rows]))
    if isinstance(command, click.Group):
        named = [(name, command.get_command(context, name)) for name in command.list_commands(context)]
        rows = [
            f"| [`{name}`](#{slug(f'{context.command_path} {name}')}) | {cell(below.get_short_help_str(200))} |"
            for name, below in named
            if below is not None and not below.hidden
        ]
        parts.append("\n".join(["| command | what it does |", "|---|---|", *rows]))
    return "\n\n".join(part for part in parts if part)


def click_page(name: str, command: click.Command, introduction: str) -> str:
    """The page of a program that click makes."""
    sections = [
        click_section(one, context, level=2 if context.parent is None or context.parent.parent is None else 3)
        for one, context in _commands(command, click.Context(command, info_name=name))
    ]
    return "\n\n".join([f"# {name}", HEAD.format(source="the command").strip(), introduction, *sections]) + "\n"


# Commands made by argparse.


class _Reached(Exception):
    """Help was asked for; carries the parser that would have printed it."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        super().__init__(parser.prog)
        self.parser = parser


def parser_of(run: Any, *words: str) -> argparse.ArgumentParser:
    """The parser that answers `--help` after these words, wherever the program makes it."""

    def reach(self: argparse.ArgumentParser, _file: object = None) -> NoReturn:
        raise _Reached(self)

    kept = argparse.ArgumentParser.print_help
    argparse.ArgumentParser.print_help = reach  # type: ignore[assignment]
    try:
        run([*words, "--help"])
    except _Reached as reached:
        return reached.parser
    finally:
        argparse.ArgumentParser.print_help = kept
    raise RuntimeError(f"nothing answered --help after {words}")


def _value(action: argparse.Action) -> str:
    """What stands behind an option on the command line."""
    if action.nargs == 0:
        return ""
    if isinstance(action.metavar, str):
        return f" {action.metavar}"
    if action.choices is not None:
        return " " + "|".join(map(str, action.choices))
    return f" {action.dest.upper()}"


def argparse_section(parser: argparse.ArgumentParser, level: int) -> str:
    """One parser: its description, a table of its arguments, then each command below it."""
    parts = [f"{'#' * level} {parser.prog}", prose(parser.description or "")]
    rows, below = [], []
    for action in parser._actions:  # argparse has no public list of them
        if action.help == argparse.SUPPRESS or "--help" in action.option_strings:
            continue
        if isinstance(action, argparse._SubParsersAction):
            below = list(dict.fromkeys(action.choices.values()))
            continue
        names = ", ".join(action.option_strings) or str(action.metavar or action.dest)
        meaning = (action.help or "") % {**vars(action), "prog": parser.prog}
        rows.append(f"| {span(names + (_value(action) if action.option_strings else ''))} | {cell(meaning)} |")
    if rows:
        parts.append("\n".join(["| option | meaning |", "|---|---|", *rows]))
    parts += [argparse_section(one, level + 1) for one in below]
    return "\n\n".join(part for part in parts if part)


# Calls.


def slug(text: str) -> str:
    """The anchor of a heading, as MkDocs makes it."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", text).strip().lower())


def descriptors() -> list[pb.FileDescriptorProto]:
    """The contract's files with their comments, in the order of their names."""
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch) / "contract.binpb"
        well_known = str(resources.files("grpc_tools") / "_proto")
        sources = [str(path) for path in sorted(CONTRACT.glob("*.proto"))]
        folders = [f"-I{folder}" for folder in (PROTOS, PROTOS / "third_party", well_known)]
        flags = [*folders, "--include_source_info", f"--descriptor_set_out={made}"]
        if protoc.main(["protoc", *flags, *sources]) != 0:
            raise SystemExit("protoc failed")
        found = pb.FileDescriptorSet.FromString(made.read_bytes())
    ours = [file for file in found.file if file.name.startswith(CONTRACT.relative_to(PROTOS).as_posix())]
    return sorted(ours, key=lambda file: file.name)


class _Comments:
    """What stands above and beside each element of a file."""

    def __init__(self, file: pb.FileDescriptorProto) -> None:
        self._at = {tuple(location.path): location for location in file.source_code_info.location}

    def of(self, *path: int) -> str:
        """The comment at a path of descriptor.proto's field numbers and indexes; empty without one."""
        location = self._at.get(path)
        return "" if location is None else " ".join(f"{location.leading_comments} {location.trailing_comments}".split())

    def of_file(self) -> str:
        """What the file says of itself, above its package."""
        return self.of(2)


_MESSAGES, _ENUMS, _SERVICES, _FIELDS, _NESTED, _NESTED_ENUMS, _METHODS, _VALUES = 4, 5, 6, 2, 3, 4, 2, 2


def _type(field: pb.FieldDescriptorProto, entries: dict[str, pb.DescriptorProto]) -> str:
    """A field's type, with a link where it is one of ours."""
    repeated = field.label == pb.FieldDescriptorProto.LABEL_REPEATED
    if not field.type_name:
        name = f"`{pb.FieldDescriptorProto.Type.Name(field.type).removeprefix('TYPE_').lower()}`"
    elif field.type_name in entries:
        key, value = entries[field.type_name].field
        return f"map of {_type(key, entries)} to {_type(value, entries)}"
    elif field.type_name.startswith(".eelgrid.v1."):
        short = field.type_name.removeprefix(".eelgrid.v1.")
        name = f"[{short}](#{slug(short)})"
    else:
        name = f"`{field.type_name.removeprefix('.')}`"
    return f"repeated {name}" if repeated else f"optional {name}" if field.proto3_optional else name


def _enum(enum: pb.EnumDescriptorProto, name: str, comments: _Comments, path: tuple[int, ...]) -> Iterator[str]:
    rows = [
        f"| `{value.name}` | {value.number} | {cell(comments.of(*path, _VALUES, number))} |"
        for number, value in enumerate(enum.value)
    ]
    yield f"### {name}"
    yield cell(comments.of(*path))
    yield "\n".join(["| value | number | meaning |", "|---|---|---|", *rows])


def _message(message: pb.DescriptorProto, name: str, comments: _Comments, path: tuple[int, ...]) -> Iterator[str]:
    entries = {f".eelgrid.v1.{name}.{one.name}": one for one in message.nested_type if one.options.map_entry}
    rows = []
    for number, field in enumerate(message.field):
        grouped = field.HasField("oneof_index") and not field.proto3_optional
        choice = f"one of `{message.oneof_decl[field.oneof_index].name}`; " if grouped else ""
        meaning = cell(choice + comments.of(*path, _FIELDS, number)).removesuffix("; ")
        rows.append(f"| `{field.name}` | {_type(field, entries)} | {field.number} | {meaning} |")
    yield f"### {name}"
    yield cell(comments.of(*path))
    yield "\n".join(["| field | type | number | meaning |", "|---|---|---|---|", *rows]) if rows else "No fields."
    for number, nested in enumerate(message.nested_type):
        if not nested.options.map_entry:
            yield from _message(nested, f"{name}.{nested.name}", comments, (*path, _NESTED, number))
    for number, enum in enumerate(message.enum_type):
        yield from _enum(enum, f"{name}.{enum.name}", comments, (*path, _NESTED_ENUMS, number))


def _http(method: pb.MethodDescriptorProto) -> str:
    """The HTTP methods and paths of a call, one on each line of a cell."""
    rule = method.options.Extensions[annotations_pb2.http]
    found = [(verb, one) for one in (rule, *rule.additional_bindings) if (verb := one.WhichOneof("pattern"))]
    return "<br>".join(span(f"{verb.upper()} {getattr(one, verb)}") for verb, one in found)


def _service(service: pb.ServiceDescriptorProto, comments: _Comments, path: tuple[int, ...]) -> Iterator[str]:
    yield f"## {service.name}"
    yield cell(comments.of(*path))
    rows = []
    for number, method in enumerate(service.method):
        asked, answered = (name.removeprefix(".eelgrid.v1.") for name in (method.input_type, method.output_type))
        asks = f"{'stream of ' if method.client_streaming else ''}[{asked}](#{slug(asked)})"
        answers = f"{'stream of ' if method.server_streaming else ''}[{answered}](#{slug(answered)})"
        meaning = cell(comments.of(*path, _METHODS, number))
        rows.append((f"| `{method.name}` | {asks} | {answers} | {meaning} |", _http(method)))
    if any(path for _, path in rows):
        lines = ["| call | request | answer | meaning | HTTP |", "|---|---|---|---|---|"]
        yield "\n".join([*lines, *(f"{row} {path} |" for row, path in rows)])
    else:
        yield "\n".join(["| call | request | answer | meaning |", "|---|---|---|---|", *(row for row, _ in rows)])


def grpc_page() -> str:
    """Every service, message and enumeration of the contract with its comments."""
    services, rest = [], []
    for file in descriptors():
        comments = _Comments(file)
        for number, service in enumerate(file.service):
            services += _service(service, comments, (_SERVICES, number))
        parts: list[str] = []
        for number, message in enumerate(file.message_type):
            parts += _message(message, message.name, comments, (_MESSAGES, number))
        for number, enum in enumerate(file.enum_type):
            parts += _enum(enum, enum.name, comments, (_ENUMS, number))
        if parts:
            rest += [f"## {Path(file.name).name}", cell(comments.of_file()), *parts]
    introduction = (
        "Every call of the controller's and the agent's gRPC servers, and every message, with the comments of"
        " `protos/eelgrid/v1`. Units stand in field names: `_w` watts, `_s` seconds, `_ns` nanoseconds since 1970 in UTC,"
        " `_mj` millijoules, `_milli` thousandths. Who may call what is in the [security model](security.md#what-each-role-may-call);"
        " health and reflection are on, so `grpcurl` works. The column HTTP has the path of a call in the"
        " [HTTP API](../how-to/http-api.md), where the controller serves that."
    )
    head = ["# gRPC API", HEAD.format(source="the .proto files").strip(), introduction]
    return "\n\n".join(part for part in [*head, *services, *rest] if part) + "\n"


_GPU_NAMES = """A GPU model has one name in Eelgrid, which nodes report and which the API, the journal and the metrics
keep. People may write it in other ways, wherever a model is asked for: `eelctl submit --gpu-model` and workload files,
`eelctl gpus` and `nodes --gpu-model`, `whatif --add`, `capacity --node`, `frontier`, `profile`, the fleet file, traces,
and the annotation `eelgrid.io/gpu-models`.

- Upper and lower case, the brand (`NVIDIA`, `Tesla`), spaces, dashes and underscores do not matter. So what NVML prints
  (`NVIDIA H100 80GB HBM3`) and what GPU feature discovery labels a node with (`NVIDIA-H100-80GB-HBM3`) will do.
- So will the key, the aliases, and any beginning or parts of these that fit one model alone: `h100-sxm`, `a100-sxm4-8`.
- Of several models that fit in part, those that registered nodes report come first: `h100` is the `H100-PCIe` of a
  cluster that has no other H100. Where nodes of several are registered, it is refused.
- A model that a node reports and the catalogue does not know goes by its own name. So does one in a file that says its
  watts.
- What fits several models or none is refused with the field, the candidates and the nearest names. While no node is
  registered, and in files of measured points, a name that fits none stays as it is.
"""


def gpu_names_page() -> str:
    """The page of GPU names: the rules, and the names of each model of the catalogue."""
    rows = [
        f"| {span(product.model)} | {', '.join(map(span, product.nvml_names))} "
        f"| {', '.join(map(span, (product.key, *product.aliases)))} |"
        for product in load_catalogue().products.values()
    ]
    table = "\n".join(["| model | NVML | key and aliases |", "|---|---|---|", *rows])
    about = " ".join(_GPU_NAMES.split("\n\n", 1)[0].split("\n"))
    rules = re.sub(r"\n  ", " ", _GPU_NAMES.split("\n\n", 1)[1])
    return "\n\n".join(["# GPU names", HEAD.format(source="the catalogue").strip(), about, rules.strip(), table]) + "\n"


def pages() -> dict[Path, str]:
    """Each generated page with its text."""
    _, eelctl = program("eelctl")
    controller, _ = program("eelgrid-controller")
    front, _ = program("eelgrid-front")
    agent, _ = program("eelgrid-agent")
    agents = [argparse_section(parser_of(agent, *words), 2) for words in ((), ("mig",), ("energy",), ("lease",))]
    return {
        PAGES / "eelctl.md": click_page(
            "eelctl",
            eelctl.cli,
            "Every command of `eelctl` with its options. Options of `eelctl` itself go before the command,"
            " `-o` and `--no-headers` also after it. `kubectl eelgrid` takes the same commands.\n\n"
            "Exit codes: 0 done, 1 failed, 2 wrong use, 3 the controller does not answer, 4 there is no such object,"
            " 5 invalid or refused, 130 interrupted by Ctrl-C, 141 nobody reads the output any more. An error is written to stderr with what to do next; under `-o json` it is one object"
            " with `reason` (`failed`, `usage`, `unreachable`, `not_found`, `refused`, `interrupted`, `aborted`), `message`, `remedy` and"
            " `violations`, each with `field`, `problem` and `remedy`. A workload's name is accepted wherever its id is,"
            " if it is unique. A command that ends running work or changes several things asks on a terminal, and needs"
            " `--yes` without one. On a terminal tables fit its width and show bars; NO_COLOR turns colours and bars off."
            " Shells complete names that the controller knows: `eelctl completion --help`.",
        ),
        PAGES / "eelgrid-controller.md": click_page(
            "eelgrid-controller",
            controller,
            "Every option of the controller. How to run it: [run the controller](../how-to/operations.md).",
        ),
        PAGES / "eelgrid-front.md": click_page(
            "eelgrid-front",
            front,
            "Every option of a front of several clusters. How to use it: [several clusters](../how-to/several-clusters.md).",
        ),
        PAGES / "eelgrid-agent.md": "\n\n".join(
            [
                "# eelgrid-agent",
                HEAD.format(source="the command").strip(),
                "What the agent needs, changes and refuses: [the agent](agent.md). Every option of it and of its commands:",
                *agents,
            ]
        )
        + "\n",
        PAGES / "grpc.md": grpc_page(),
        PAGES / "gpu-names.md": gpu_names_page(),
        PAGES / "workload-file.md": workload_file_page(),
        PAGES / "fleet-file.md": fleet_file_page(),
        PAGES / "agent-metrics.md": agent_metrics_page(),
        PAGES / "controller-metrics.md": controller_metrics_page(),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the pages; with --check compares them."""
    parser = argparse.ArgumentParser(description="Writes the generated pages of the reference.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a page is stale")
    check = parser.parse_args(arguments).check
    stale = 0
    for path, wanted in pages().items():
        if path.is_file() and path.read_text(encoding="utf-8") == wanted:
            continue
        if check:
            sys.stderr.write(f"{os.path.relpath(path, ROOT)} is stale; run python docs/generate.py\n")
            stale += 1
        else:
            path.write_text(wanted, encoding="utf-8")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
