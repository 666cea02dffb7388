"""The joint log of engines on one node: what each used when, read by somebody who knows nothing else.

Owns the lines and the two promises that are read out of them: no memory slice of a GPU is in two hands, nor taken away
from under one, and when all is quiet nothing is leased that nobody uses. Must not import the product: engines write what
they themselves do, from their own point of view, and this reader counts slices.

A line is JSON: {"at": n, "event": ..., "engine": ..., "job": ..., "gpu": ..., "slices": [first, past the last]}

    use, leave    an engine's job begins and ends to use these slices of a GPU
    change        somebody changed the MIG layout, and these slices were destroyed or made anew
    boot          the machine started anew: nobody uses anything
    quiet         nothing is under way, and `leased` lists what the agent says is leased, as [engine, job, gpu, first, past]
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any


class JointLog:
    """What engines write; one moment comes after the other."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def write(self, event: str, **fields: Any) -> None:
        """Adds a line."""
        self.lines.append(json.dumps({"at": len(self.lines), "event": event, **fields}))


def read_joint_log(lines: Iterable[str]) -> Iterator[str]:
    """Yields what was broken, by the line that shows it."""
    held: dict[tuple[str, int], tuple[str, str]] = {}
    for line in lines:
        entry = json.loads(line)
        event = entry["event"]
        if event == "boot":
            held.clear()
        elif event == "quiet":
            yield from _read_quiet(entry, held)
        else:
            who = entry["engine"], entry["job"]
            places = [(entry["gpu"], number) for number in range(*entry["slices"])]
            others = {held[place] for place in places if place in held} - {who}
            if event in {"use", "change"} and others:
                yield f"line {entry['at']}: {who} {event}s {entry['gpu']} {entry['slices']}, which {sorted(others)} use"
            for place in places:
                if event == "use":
                    held[place] = who
                elif event == "leave" and held.get(place) == who:
                    del held[place]


def _read_quiet(entry: dict[str, Any], held: dict[tuple[str, int], tuple[str, str]]) -> Iterator[str]:
    leased = {
        ((gpu, number), (engine, job))
        for engine, job, gpu, first, past in entry["leased"]
        for number in range(first, past)
    }
    for place, who in sorted(leased - set(held.items())):
        yield f"line {entry['at']}: {place} is leased to {who}, who does not use it: leaked"
    for place, who in sorted(set(held.items()) - leased):
        yield f"line {entry['at']}: {who} uses {place} without a lease"
