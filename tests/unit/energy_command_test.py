"""`eelgrid-agent energy` against agents on loopback: what it prints, refuses and returns."""

import asyncio
import json
import os
import sys

import grpc.aio
import pytest
import trustme
from tests.builders.energy import EnergyNode, run_jobs, serve_nodes

from eelgrid_agent.__main__ import main
from eelgrid_agent.cli.energy import format_energy_lines
from eelgrid_protos import codec, plain_messages, transport
from eelgrid_protos.messages import EnergyStatus, GetNodeEnergyResponse, OwnerKind


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    return run_jobs(tmp_path_factory.mktemp("proc"))


@pytest.fixture
def energy(capsys):
    """Runs the command beside the server; the exit code, what was printed and what was said on stderr."""

    async def run(*arguments):
        code = await asyncio.to_thread(main, ["energy", *map(str, arguments)])
        return code, *capsys.readouterr()

    return run


def rows(lines, head):
    """The table under a heading, as cells; no cell of ours holds two spaces."""
    begin = next(index for index, line in enumerate(lines) if line.split()[: len(head)] == head)
    end = next((index for index in range(begin, len(lines)) if not lines[index]), len(lines))
    return [[cell.strip() for cell in line.strip().split("  ") if cell.strip()] for line in lines[begin + 1 : end]]


async def test_the_table_reports_devices_owners_and_anomalies(site, energy):
    async with serve_nodes([site.node], site.clock) as port:
        code, out, err = await energy("--address", f"127.0.0.1:{port}")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "node n0 (simulated)   joules since the agent started, up to its last sample"
    devices = rows(lines, ["GPU", "ENERGY", "J", "+-"])
    assert [(row[0], row[3], row[4], row[-1]) for row in devices] == [
        ("0", "counter", "599", site.uuid(0)),
        ("1", "counter", "599", site.uuid(1)),
        ("2", "integrated", "599", site.uuid(2)),
    ]
    for _, total, _, _, _, owned, unowned, _ in devices:
        parts_mj = [round(float(word) * 1000) for word in [owned, *unowned.replace(",", "").split()[::2]]]
        assert sum(parts_mj) == round(float(total) * 1000)
    owners = rows(lines, ["GPU", "ENERGY", "J", "BARE"])
    busy = site.node.inventory.gpus[1].gpu_instances[0].id
    assert sorted((row[0], *row[5:]) for row in owners) == [
        ("0", "process_sm", "medium", "slurm job=1 step=0"),
        ("0", "process_sm", "medium", "slurm job=2 step=0"),
        (f"1:{busy}", "mig_activity", "medium", "slurm job=3 step=0"),
        ("2", "exclusive", "medium", "workload workload=train"),
    ]
    joules = [float(row[1]) for row in owners]
    assert joules == sorted(joules, reverse=True)
    assert all(float(row[1]) == pytest.approx(sum(map(float, row[2:5])), abs=1e-6) for row in owners)
    anomalies = rows(lines, ["ANOMALY", "GPU"])
    assert ("held_idle", "2", "535", "workload workload=train") in [(*row[:3], row[4]) for row in anomalies]


async def test_json_is_the_whole_answer(site, energy):
    async with serve_nodes([site.node], site.clock) as port:
        code, out, err = await energy("--address", f"127.0.0.1:{port}", "--node", "n0", "-o", "json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert document.pop("node") == "n0"
    answer = plain_messages.from_plain(GetNodeEnergyResponse, document)
    assert answer.status is EnergyStatus.KNOWN
    assert {row.owner.pid for row in answer.recent if row.owner.kind is OwnerKind.SLURM} == {11, 12, 21}
    assert answer == codec.decode_message(GetNodeEnergyResponse, codec.encode_message(answer))


@pytest.mark.parametrize("width", [None, 80, 120])
def test_nothing_is_cut_at_any_width(site, width):
    from eelgrid_agent.energy.report import build_energy_response

    answer = build_energy_response(site.node.energy.build_report(), now_ns=site.clock.now_ns)
    lines = list(format_energy_lines(answer, site.node.inventory, width))
    assert sorted(" ".join(lines).split()) == sorted(" ".join(format_energy_lines(answer, site.node.inventory)).split())
    assert any(line.startswith("      GPU-") for line in lines) == (width is not None)


async def test_before_the_first_look_it_says_so(tmp_path, energy):
    early = EnergyNode(tmp_path)
    async with serve_nodes([early.node], early.clock) as port:
        code, out, _ = await energy("--address", f"127.0.0.1:{port}")
        assert (code, out.splitlines()[1:]) == (0, ["nothing was sampled yet; retry in a few seconds"])
        early.run(5)
        code, out, _ = await energy("--address", f"127.0.0.1:{port}")
        assert code == 0
        assert [line for line in out.splitlines() if line.startswith("no ")] == ["no owner", "no anomaly"]


async def test_a_mistake_is_one_line_that_says_what_to_do(site, tmp_path, energy):
    other = EnergyNode(tmp_path, "n1")
    empty = grpc.aio.server()
    foreign = f"127.0.0.1:{empty.add_insecure_port('127.0.0.1:0')}"
    await empty.start()
    async with serve_nodes([site.node, other.node], site.clock) as port:
        here = f"127.0.0.1:{port}"
        for arguments, code, message in [
            (["--address", here], 2, "--node: is empty and this agent has 2 nodes; name one of them: n0, n1"),
            (["--address", here, "--node", "x"], 2, "--node: this agent has no node x; it has n0, n1"),
            (["--node", "a b"], 2, "--node: 'a b' is not a valid name; use letters"),
            (["--address", "gpu-7"], 2, "--address: 'gpu-7' is not an address; write HOST:PORT"),
            (["--address", "192.0.2.1:7444"], 2, "192.0.2.1:7444 is another machine; give --tls-certificate"),
            (["--tls-key", "k"], 2, "--tls-*: mutual TLS needs three files; give"),
            (
                ["--tls-key=k", "--tls-certificate=c", "--tls-authority=a"],
                2,
                "k: No such file or directory; name a readable",
            ),
            (["--address", foreign], 1, f"{foreign}: answers UNIMPLEMENTED"),
            (["--address", "127.0.0.1:1"], 1, "127.0.0.1:1: no agent can be reached"),
        ]:
            found = await energy(*arguments)
            assert (found[0], found[1], found[2].count("\n")) == (code, "", 1), found
            assert found[2].startswith(f"eelgrid-agent energy: {message}"), found
            assert ";" in found[2], "a remedy follows"
    await empty.stop(None)


async def test_the_answer_comes_over_mutual_tls(site, tmp_path, energy):
    authority = trustme.CA()
    leaf = authority.issue_cert("localhost", "127.0.0.1")
    leaf.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    leaf.cert_chain_pems[0].write_to_path(str(tmp_path / "certificate.pem"))
    authority.cert_pem.write_to_path(str(tmp_path / "authority.pem"))
    paths = {name: tmp_path / f"{name}.pem" for name in ("certificate", "key", "authority")}
    async with serve_nodes([site.node], site.clock, tls=transport.TlsFiles(**paths)) as port:
        flags = [word for name, path in paths.items() for word in (f"--tls-{name}", path)]
        code, out, err = await energy("--address", f"127.0.0.1:{port}", *flags)
        assert (code, err, out.split()[:2]) == (0, "", ["node", "n0"])
        code, _, err = await energy("--address", f"127.0.0.1:{port}")
        assert code == 1
        assert "and its --tls-* files if it has any" in err


async def test_an_output_that_cannot_be_written(site, capsys):
    async with serve_nodes([site.node], site.clock) as port:
        command = [sys.executable, "-m", "eelgrid_agent", "energy", "--address", f"127.0.0.1:{port}"]
        full = os.open("/dev/full", os.O_WRONLY)
        child = await asyncio.create_subprocess_exec(*command, stdout=full, stderr=asyncio.subprocess.PIPE)
        os.close(full)
        said = (await child.communicate())[1].decode()
        assert (child.returncode, said) == (
            1,
            "eelgrid-agent energy: the output: No space left on device; make room, or write it elsewhere\n",
        )
        read, write = os.pipe()
        os.close(read)
        child = await asyncio.create_subprocess_exec(*command, stdout=write, stderr=asyncio.subprocess.PIPE)
        os.close(write)
        assert (await child.communicate())[1] == b""
        assert child.returncode == 1
