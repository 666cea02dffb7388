"""`mig` in plain text: a document of the inspection as lines for a terminal, for people and for grep.

On a terminal that is too narrow, what does not fit goes to a line of its own
and sentences are wrapped; into a file or a pipe (`width` None) every row is one
line. Knows the documents that the inspection makes and nothing behind them.
"""

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

__all__ = ["found_lines", "plan_lines", "printed"]

_GIVEN_UP = "given up: something else keeps changing this GPU; find out what, then apply a layout again"
_UNDER_WAY = MappingProxyType({
    "forward": "a change was cut off; the agent or the next `mig apply` goes on with it",
    "pending": "the MIG mode waits for a reset of the GPU or a reboot; the layout follows then",
    "undo": "a change is being undone; the agent or the next `mig apply` goes on with it",
    "stuck": "a change was neither reached nor undone; the agent tries again, `mig apply` at once",
})  # fmt: skip


def printed(document: Any, output: str) -> str:
    """A document as JSON or YAML."""
    if output == "json":
        return json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    import yaml

    return str(yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=120))


def found_lines(document: Mapping[str, Any], width: int | None = None) -> Iterator[str]:
    """What stands on the node, and under each device what is wanted of it."""
    kind = " (simulated)" if document["simulated"] else ""
    yield f"node {document['node']}{kind}   driver {document['driver']}   permission {document['permission']}"
    for note in document["notes"]:
        yield from _sentence("note: ", note, width, indent="")
    if not document["gpus"]:
        yield "no GPU"
    for gpu in document["gpus"]:
        yield ""
        yield from _gpu_lines(gpu, width)
        if "wanted" in gpu:
            yield from _wanted_lines(gpu, width)


def plan_lines(document: Mapping[str, Any], width: int | None = None) -> Iterator[str]:
    """The steps alone, by device."""
    for gpu in document["gpus"]:
        if "wanted" in gpu:
            yield f"GPU {gpu['index']}  {gpu['product']}  {gpu['uuid']}"
            yield from _wanted_lines(gpu, width)


def _gpu_lines(gpu: Mapping[str, Any], width: int | None) -> Iterator[str]:
    yield f"GPU {gpu['index']}  {gpu['product']}  {gpu['uuid']}  {_mode(gpu['mig'])}"
    if gpu["problem"]:
        yield from _sentence("problem: ", gpu["problem"], width)
    if gpu.get("processes"):
        yield from _sentence("processes on the whole GPU: ", ", ".join(map(str, gpu["processes"])), width)
    if gpu.get("instances"):
        rows = [row for instance in gpu["instances"] for row in _instance_rows(instance)]
        yield from _table(("ID", "PROFILE", "SLICES", "FROM", "COMPUTE", "GEN", "USED BY", "UUID"), rows, width)
    free = gpu.get("free")
    if free:
        room = "; ".join(f"{name} at {' '.join(map(str, starts))}" for name, starts in _plain(free["room"]).items())
        slices = ", ".join(_runs(free["memory_slices"])) or "none"
        has = f"slices {slices}, {free['compute_slices']} compute; {f'room for {room}' if room else 'no room'}"
        yield from _sentence("free: ", has, width)
    kept = gpu.get("kept")
    if kept and kept["given_up"]:
        yield from _sentence("", _GIVEN_UP, width)
    if kept and kept["under_way"]:
        yield from _sentence("under way: ", _UNDER_WAY[kept["under_way"]], width)


def _mode(mig: Mapping[str, bool]) -> str:
    if not mig["capable"]:
        return "no MIG"
    now = "on" if mig["enabled"] else "off"
    other = "off" if mig["enabled"] else "on"
    return f"MIG {now}, {other} after a reset" if mig["pending"] else f"MIG {now}"


def _instance_rows(instance: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    last = instance["start"] + instance["size"] - 1
    head: tuple[str, ...] = (
        str(instance["id"]), instance["profile"], f"{instance['start']}-{last}" if instance["size"] > 1 else str(last),
        instance["origin"],
    )  # fmt: skip
    held = ["a lease"] if instance["leased"] else []
    for child in instance["compute_instances"]:
        slices = "?" if child["slices"] is None else f"{child['slices']}c"
        used = ", ".join([*(f"pid {pid}" for pid in child["processes"]), *held])
        used = used or ("in use" if instance["in_use"] else "-")
        yield (*head, f"{child['id']} ({slices})", str(child["generation"]), used, child["uuid"] or "-")
        head = ("", "", "", "")
    if not instance["compute_instances"]:
        yield (*head, "none", "-", "in use" if instance["in_use"] else "-", "-")


def _plain(room: Mapping[str, Sequence[int]]) -> Mapping[str, Sequence[int]]:
    """Without the variants of media and graphics, which -o json has."""
    return {name: starts for name, starts in room.items() if "+" not in name and "-" not in name}


def _runs(numbers: Sequence[int]) -> Iterator[str]:
    """0, 1, 2, 5 is 0-2 and 5."""
    begin = 0
    for place, number in enumerate(numbers):
        if place + 1 == len(numbers) or numbers[place + 1] != number + 1:
            first = numbers[begin]
            yield str(first) if first == number else f"{first}-{number}"
            begin = place + 1


def _wanted_lines(gpu: Mapping[str, Any], width: int | None) -> Iterator[str]:
    goal = gpu["wanted"]
    yield from _sentence("wanted: ", f"{goal['layout']}   ({goal['because']})", width)
    if goal["refused"]:
        yield from _sentence(f"refused by rule {goal['refused']['rule']}: ", goal["refused"]["detail"], width)
    elif not goal["steps"]:
        yield "  stands already"
    longest = max((len(step["step"]) for step in goal["steps"]), default=0)
    reasons = max((len(step["why"]) for step in goal["steps"]), default=0)
    beside = width is None or len("  12. ") + longest + 3 + reasons <= width
    for number, step in enumerate(goal["steps"], 1):
        if beside:
            yield f"  {number:2}. {step['step']:<{longest}}   {step['why']}"
        else:
            yield f"  {number:2}. {step['step']}"
            yield f"        {step['why']}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], width: int | None) -> Iterator[str]:
    """Columns side by side; where they do not fit, the last one goes below its row."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    below = width is not None and sum(widths) + 2 * len(widths) > width
    beside = len(head) - below
    for row in (head, *rows):
        cells = zip(row[:beside], widths[:beside], strict=True)
        yield "  " + "  ".join(cell.ljust(size) for cell, size in cells).rstrip()
        if below:
            yield f"      {row[-1]}"


def _sentence(label: str, text: str, width: int | None, indent: str = "  ") -> Iterator[str]:
    """A line, or as many as it takes; nothing is cut and no word is broken."""
    if width is None:
        yield f"{indent}{label}{text}"
        return
    yield from textwrap.wrap(
        label + text, width, initial_indent=indent, subsequent_indent=f"{indent}  ", break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip
