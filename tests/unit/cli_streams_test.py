"""eelctl as a process: pipes that break, a full disk, closed streams, Ctrl-C, other encodings, and a lost controller."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import trustme
from tests.fakes.operators import FakeOperators, a_node, serving
from tests.waiting import poll_until

from eelgrid_protos import transport

EELCTL = [sys.executable, "-m", "eelgrid_controller.cli"]


@pytest.fixture
def crowd():
    """A controller with nodes for more than one write."""
    fake = FakeOperators(nodes=[a_node(f"node-{index:05}") for index in range(500)])
    with serving(fake) as address:
        yield address


def start(address, *arguments, closed="", **options):
    """Starts eelctl; `closed` are redirections of a shell, since this process has threads of gRPC.

    A function between fork and exec makes subprocess fork by itself, where gRPC's handlers abort the child now and then.
    """
    environment = {**os.environ, "EELGRID_CONTROLLER": address, **options.pop("env", {})}
    shell = ["/bin/sh", "-c", f'exec "$@" {closed}', "sh"] if closed else []
    return subprocess.Popen(
        [*shell, *EELCTL, *arguments], env=environment, text=True, stderr=subprocess.PIPE, **options
    )


def assert_error(process, code, *words):
    stderr = process.communicate(timeout=30)[1]
    assert process.returncode == code, stderr
    assert "Traceback" not in stderr
    assert "Exception ignored" not in stderr
    first, *_, last = stderr.splitlines()
    assert first.startswith("eelctl: ")
    assert last.startswith("  next: ")
    for word in words:
        assert word in stderr


def test_a_reader_that_has_gone_ends_the_command_silently(crowd):
    process = start(crowd, "nodes", stdout=subprocess.PIPE)
    process.stdout.close()
    process.stdout = None
    assert (process.communicate(timeout=30)[1], process.returncode) == ("", 128 + signal.SIGPIPE)


@pytest.mark.parametrize("arguments", [("nodes",), ("-o", "json", "nodes"), ("nodes", "-o", "yaml"), ("top",)])
def test_a_full_disk_is_an_error(crowd, arguments):
    with Path("/dev/full").open("w") as full:
        process = start(crowd, *arguments, stdout=full)
        stderr = process.communicate(timeout=30)[1]
    assert process.returncode == 1
    assert "No space left on device" in stderr
    assert "Traceback" not in stderr
    assert "Exception ignored" not in stderr


def test_a_full_disk_is_an_error_of_help(crowd):
    with Path("/dev/full").open("w") as full:
        assert_error(start(crowd, "--help", stdout=full), 1, "No space left on device", "free space")


def test_nothing_is_done_where_the_answer_would_be_lost():
    fake = FakeOperators()
    with serving(fake) as address:
        assert_error(start(address, "nodes", closed=">&-"), 1, "standard output", "closed")
    assert fake.calls == []


def test_closed_stdin_and_stderr_are_no_fault(crowd):
    process = start(crowd, "nodes", closed="<&- 2>&-", stdout=subprocess.PIPE)
    printed, said = process.communicate(timeout=30)
    assert (process.returncode, printed.count("\n"), said) == (0, 501, "")


def test_letters_that_an_encoding_lacks_are_replaced():
    with serving(FakeOperators()) as address:
        environment = {**os.environ, "EELGRID_CONTROLLER": address, "PYTHONIOENCODING": "latin-1", "PYTHONUTF8": "0"}
        named = ("--name", "job", "--user", "学", "--cpu", "1", "--id", "w")
        for arguments in (("submit", *named), ("workloads",), ("workloads", "-o", "json"), ("energy",)):
            done = subprocess.run([*EELCTL, *arguments], env=environment, capture_output=True, check=False)
            assert (done.returncode, done.stderr) == (0, b""), arguments
            if arguments[-1] == "json":
                assert json.loads(done.stdout)[0]["spec"]["user"] == "学"
            elif arguments[0] == "workloads":
                assert b"\\u5b66" in done.stdout
            elif arguments[0] == "energy":
                assert "±".encode("latin-1") in done.stdout


def test_ctrl_c_is_130_with_a_message():
    fake = FakeOperators(delay_s=60.0)
    with serving(fake) as address:
        process = start(address, "--timeout", "60", "submit", "--name", "a", "--cpu", "1", stdout=subprocess.DEVNULL)
        poll_until(lambda: fake.calls == ["submit_workload"])
        process.send_signal(signal.SIGINT)
        assert_error(process, 130, "interrupted")


def test_a_controller_that_goes_away_in_a_stream_is_unreachable():
    fake = FakeOperators(watch_closes=False)
    with serving(fake) as address:
        process = start(address, "workloads", "--watch", stdout=subprocess.DEVNULL)
        poll_until(lambda: "watch_workloads" in fake.calls)
    assert_error(process, 3, "no controller answers", "start eelgrid-controller")


def test_a_watch_ends_with_ctrl_c():
    fake = FakeOperators(watch_closes=False)
    with serving(fake) as address:
        process = start(address, "workloads", "--watch", stdout=subprocess.DEVNULL)
        poll_until(lambda: "watch_workloads" in fake.calls)
        process.send_signal(signal.SIGINT)
        assert (process.communicate(timeout=30)[1], process.returncode) == ("", 0)


@pytest.fixture(scope="module")
def tls(tmp_path_factory):
    """Certificates of one authority, the certificate of another, and what is no certificate."""
    folder = tmp_path_factory.mktemp("tls")
    ours, other = trustme.CA(), trustme.CA()
    ours.cert_pem.write_to_path(folder / "ca.pem")
    other.cert_pem.write_to_path(folder / "other-ca.pem")
    for name, authority in (("ours", ours), ("other", other)):
        made = authority.issue_cert("127.0.0.1")
        made.private_key_pem.write_to_path(folder / f"{name}.key")
        made.cert_chain_pems[0].write_to_path(folder / f"{name}.pem")
    (folder / "none.pem").write_text("no certificate\n")
    return folder


@pytest.mark.parametrize(
    ("certificate", "key", "authority", "words"),
    [
        ("none.pem", "ours.key", "ca.pem", ("do not fit each other", "PEM files")),
        ("ours.pem", "other.key", "ca.pem", ("do not fit each other", "PEM files")),
        ("ours.pem", "ours.key", "none.pem", ("do not fit each other", "PEM files")),
        ("missing.pem", "ours.key", "ca.pem", ("missing.pem", "readable PEM file")),
    ],
)
def test_a_wrong_tls_file_is_wrong_use(tls, certificate, key, authority, words):
    names = zip(("certificate", "key", "authority"), (certificate, key, authority), strict=True)
    options = [f"--tls-{option}={tls / name}" for option, name in names]
    assert_error(start("127.0.0.1:1", *options, "nodes", stdout=subprocess.DEVNULL), 2, *words)


def test_a_controller_that_another_authority_signed_is_told_from_none(tls):
    served = transport.TlsFiles(tls / "ours.pem", tls / "ours.key", tls / "ca.pem")
    options = [f"--tls-{name}={tls / file}" for name, file in
               (("certificate", "other.pem"), ("key", "other.key"), ("authority", "other-ca.pem"))]  # fmt: skip
    with serving(FakeOperators(), tls=served) as address:
        process = start(address, *options, "--timeout", "5", "nodes", stdout=subprocess.DEVNULL)
        assert_error(process, 3, "TLS", "--tls-authority", "eelctl doctor")
