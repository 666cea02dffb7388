"""The port of engines that run processes: standard input by pipes and terminals, with real processes."""

import asyncio
import signal
import sys

import pytest
from tests.builders.attempts import assignment, ended, output, run_one, shell, status, until_said
from tests.waiting import wait_until

from eelgrid_agent.engine.input import CHUNKS_MOST
from eelgrid_agent.engine.local import LocalEngine
from eelgrid_agent.engine.port import attempt_key
from eelgrid_protos.messages import INPUT_BYTES_MOST, InputChunk, LogRequest, StandardInput, TerminalSize


@pytest.fixture
def engine(tmp_path):
    return LocalEngine(tmp_path)


def interactive(*argv, terminal=True, size=None, **known):
    kind = StandardInput.TERMINAL if terminal else StandardInput.PIPE
    return assignment(*argv, standard_input=kind, terminal_size=size, **known)


def send(engine, item, data=b"", **known):
    """Sends input; returns the answers that came and will come."""
    answers = []
    chunk = InputChunk(
        request_id=9,
        workload_id=item.workload_id,
        replica=item.replica,
        attempt=item.attempt,
        data=data,
        **known,
    )
    engine.write_input(chunk, answers.append)
    return answers


async def taken(engine, item, data=b"", **known):
    """Sends input as soon as the process has been started, and waits until it is taken."""
    answers = send(engine, item, data, **known)
    while not answers or answers[-1].is_early:
        if answers:
            answers = send(engine, item, data, **known)
        await asyncio.sleep(0.01)
    return answers[-1].problem


def test_a_pipe_passes_input_on_and_its_end_ends_the_process(engine):
    item = interactive("/bin/cat", terminal=False)

    async def scene():
        engine.start(item)
        assert await taken(engine, item, b"one\n") == ""
        await until_said(engine, item, "one")
        assert not status(engine, item).is_over
        assert await taken(engine, item, b"two\n", is_end=True) == ""
        found = await ended(engine, item)
        return found, output(engine, item).text, await taken(engine, item, b"late")

    found, text, late = asyncio.run(scene())
    assert (found.exit_code, text) == (0, "one\ntwo\n")
    assert late == "the process has ended"


def test_a_process_without_input_reads_an_end_and_takes_none(engine):
    item = shell("cat; echo done; sleep 60")

    async def scene():
        engine.start(item)
        await until_said(engine, item, "done")
        problem = await taken(engine, item, b"x")
        engine.stop(attempt_key(item))
        await ended(engine, item)
        return problem

    assert asyncio.run(scene()) == "the process has no standard input"


def test_input_that_a_process_does_not_read_is_not_taken_and_is_bounded(engine):
    item = interactive(
        sys.executable, "-c", "import sys, time; time.sleep(1.5); print(len(sys.stdin.read()))", terminal=False
    )
    part = b"x" * INPUT_BYTES_MOST

    async def scene():
        engine.start(item)
        await taken(engine, item)
        answers = [send(engine, item, part) for _ in range(80)]
        refused = [one for one in answers if one]
        await wait_until(lambda: sum(map(len, answers)) == 80)
        assert await taken(engine, item, is_end=True) == ""
        await ended(engine, item)
        return len(refused), [one[0].problem for one in answers], output(engine, item).text

    refused, problems, text = asyncio.run(scene())
    assert refused == 80 - CHUNKS_MOST
    assert problems.count("") == CHUNKS_MOST
    # What was answered as taken has arrived whole.
    assert int(text) == CHUNKS_MOST * INPUT_BYTES_MOST


def test_a_process_that_closes_its_input_is_told_of_by_the_answer(engine):
    item = interactive("/bin/sh", "-c", "exec 0</dev/null; echo closed; sleep 60", terminal=False)

    async def scene():
        engine.start(item)
        await until_said(engine, item, "closed")
        first = await taken(engine, item, b"x")
        second = await taken(engine, item, b"x")
        engine.stop(attempt_key(item))
        await ended(engine, item)
        return first, second

    assert asyncio.run(scene()) == ("the process has closed its standard input",) * 2


def test_a_terminal_is_the_controlling_one_of_its_process_and_has_the_size_that_was_asked_for(engine):
    item = interactive(
        "/bin/sh",
        "-c",
        "tty; stty size; ps -o tpgid= -p $$ >/dev/null; echo $$ >/dev/tty",
        size=TerminalSize(rows=31, columns=97),
    )
    found = asyncio.run(run_one(engine, item))
    lines = output(engine, item).text.splitlines()
    assert found.exit_code == 0
    assert lines[0].startswith("/dev/pts/")
    assert lines[1] == "31 97"
    assert lines[2].isdigit()


def test_a_new_size_of_a_terminal_is_signalled_to_its_process(engine):
    text = "import os, signal, time\ndef tell(*_):\n print(*os.get_terminal_size(), flush=True)\nsignal.signal(signal.SIGWINCH, tell)\nprint('ready', flush=True)\nwhile True: time.sleep(1)"
    item = interactive(sys.executable, "-c", text)

    async def scene():
        engine.start(item)
        await until_said(engine, item, "ready")
        await taken(engine, item, size=TerminalSize(rows=50, columns=132))
        await until_said(engine, item, "132 50")
        engine.stop(attempt_key(item))
        return await ended(engine, item)

    assert asyncio.run(scene()).signal == signal.SIGTERM


def test_a_terminal_echoes_interrupts_and_ends_at_an_end_of_file(engine):
    item = interactive("/bin/sh", "-c", "trap 'echo interrupted' INT; echo ready; cat; cat; echo over; exit 5")

    async def scene():
        engine.start(item)
        await until_said(engine, item, "ready")
        await taken(engine, item, b"hello\r")
        await until_said(engine, item, "hello\r\nhello\r\n")
        await taken(engine, item, b"\x03")
        await until_said(engine, item, "interrupted")
        # Within a line: it ends the line, and then the input.
        await taken(engine, item, b"begun", is_end=True)
        return await ended(engine, item)

    assert asyncio.run(scene()).exit_code == 5
    assert "over" in output(engine, item).text


def test_a_terminal_stays_when_the_agent_is_replaced(tmp_path):
    item = interactive("/bin/sh", "-c", "read -r one; echo [$one]; read -r two; echo [$two]; exit 4")

    async def first():
        engine = LocalEngine(tmp_path)
        engine.start(item)
        await taken(engine, item, b"before\r")
        await until_said(engine, item, "[before]")

    async def second():
        engine = LocalEngine(tmp_path)
        engine.adopt()
        await taken(engine, item, b"after\r")
        found = await ended(engine, item)
        return found, output(engine, item).text

    asyncio.run(first())
    found, text = asyncio.run(second())
    assert found.exit_code == 4
    assert "[after]" in text


def test_output_of_an_attached_process_is_told_at_once_and_in_bytes(engine):
    item = interactive("/bin/cat", terminal=False)
    heard = []

    async def scene():
        engine.on_output = lambda: heard.append(1)
        engine.start(item)
        await taken(engine, item, b"\xff\x00\n")
        await wait_until(lambda: heard)
        request = LogRequest(request_id=1, workload_id=item.workload_id, attempt=1, raw=True)
        await wait_until(lambda: engine.read_output(request).data)
        chunk = engine.read_output(request)
        await taken(engine, item, is_end=True)
        await ended(engine, item)
        return chunk

    chunk = asyncio.run(scene())
    assert (chunk.data, chunk.text, chunk.next_offset) == (b"\xff\x00\n", "", 3)
