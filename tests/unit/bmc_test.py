"""BMCs: each adapter against a BMC that answers as its standard says, and the file that names them."""

import socket

import pytest
from tests.fakes.bmc import PASSWORD, USER, SimulatedBmc, serve_redfish, write_ipmitool

from eelgrid_controller.engines.bmc import (
    BmcError,
    BmcFileError,
    CommandBmc,
    IpmiBmc,
    RedfishBmc,
    WakeOnLan,
    load_bmcs,
)
from eelgrid_controller.engines.slurm.node_power import main, set_power, set_power_of_all


@pytest.fixture
def redfish():
    bmc = SimulatedBmc()
    with serve_redfish(bmc) as address:
        yield bmc, RedfishBmc(address=address, user=USER, password=PASSWORD, timeout_s=5.0)


@pytest.fixture
def ipmi(tmp_path, monkeypatch):
    write_ipmitool(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return tmp_path, IpmiBmc(address="n1-bmc", user=USER, password=PASSWORD)


def test_redfish_shuts_the_system_down_and_starts_it(redfish):
    bmc, port = redfish
    assert port.read_power() is True
    port.power_off()
    assert (bmc.orders, port.read_power()) == (["GracefulShutdown"], False)
    port.power_on()
    assert (bmc.orders, port.read_power()) == (["GracefulShutdown", "On"], True)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (500, "answers 500"),
        (302, "answers 302"),
        (b"<html>", "no JSON"),
        (b"[]", "names no system"),
        (b"x" * 2**21, "more than"),
    ],
)
def test_a_bmc_that_answers_otherwise_is_named_and_nothing_is_guessed(redfish, fault, said):
    bmc, port = redfish
    bmc.faults = [fault]
    with pytest.raises(BmcError, match=said):
        port.read_power()


def test_a_system_elsewhere_than_redfish_is_not_asked(redfish):
    bmc, port = redfish
    bmc.faults = [b'{"Members": [{"@odata.id": "http://elsewhere/"}]}']
    with pytest.raises(BmcError, match="names no system"):
        port.power_off()
    assert bmc.orders == []


def test_a_wrong_password_and_a_bmc_that_is_away_are_told(redfish):
    _, port = redfish
    with pytest.raises(BmcError, match="401"):
        RedfishBmc(address=port.address, user=USER, password="other").read_power()
    with pytest.raises(BmcError, match="refused"):
        RedfishBmc(address="http://127.0.0.1:1", user=USER, password=PASSWORD).read_power()


def test_ipmitool_is_asked_for_a_soft_shutdown_and_never_sees_the_password(ipmi):
    folder, port = ipmi
    assert port.read_power() is True
    port.power_off()
    assert port.read_power() is False
    port.power_on()
    assert port.read_power() is True
    calls = (folder / "calls").read_text()
    assert "chassis power soft" in calls
    assert PASSWORD not in calls
    with pytest.raises(BmcError, match="Unable to establish"):
        IpmiBmc(address="n1-bmc", user=USER, password="other").power_on()


def test_wake_on_lan_sends_the_magic_packet_and_sleeps_by_a_command(tmp_path):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as card:
        card.bind(("127.0.0.1", 0))
        card.settimeout(5.0)
        port = WakeOnLan(
            mac="01:23:45:67:89:ab",
            off=("touch", str(tmp_path / "slept")),
            broadcast="127.0.0.1",
            port=card.getsockname()[1],
        )
        port.power_on()
        packet = card.recv(1024)
    assert packet == b"\xff" * 6 + bytes.fromhex("0123456789ab") * 16
    assert set_power(port, on=False) == ""
    assert (tmp_path / "slept").exists()


def test_an_order_is_for_a_state_and_is_tried_again(redfish):
    bmc, port = redfish
    assert set_power(port, on=True) == ""
    assert bmc.orders == []
    bmc.faults, pauses = [500, 503], []
    assert set_power(port, on=False, sleep=pauses.append) == ""
    assert (bmc.orders, pauses) == (["GracefulShutdown"], [2.0, 4.0])
    bmc.faults = [500] * 9
    assert "answers 500" in set_power(port, on=True, sleep=pauses.append)
    assert len(pauses) == 4


def test_a_node_that_fails_costs_the_others_nothing(redfish):
    bmc, port = redfish
    broken = CommandBmc(on=("false",), off=("false",))
    failed = set_power_of_all(["n1", "n2", "n3"], {"n1": port, "n2": broken}, on=False, sleep=lambda _: None)
    assert failed.keys() == {"n2", "n3"}
    assert "is not in the file" in failed["n3"]
    assert bmc.power == "Off"


def test_a_command_that_hangs_is_ended():
    with pytest.raises(BmcError, match=r"did not end in 0\.1 s"):
        CommandBmc(on=("sleep", "60"), off=("true",), timeout_s=0.1).power_on()


# The file


@pytest.fixture
def written(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text(PASSWORD + "\n")
    secret.chmod(0o600)

    def write(text):
        path = tmp_path / "bmcs.toml"
        path.write_text(text.replace("SECRET", str(secret)).replace("FOLDER", str(tmp_path)))
        path.chmod(0o644)
        return path

    return write


def test_each_node_has_its_own_bmc_with_defaults(written):
    found = load_bmcs(
        written("""
        [defaults]
        kind = "redfish"
        user = "eelgrid"
        password_file = "SECRET"
        timeout_s = 3
        [nodes.n1]
        address = "https://n1-bmc"
        [nodes.n2]
        kind = "ipmi"
        address = "10.0.0.2"
        [nodes.n3]
        kind = "wake-on-lan"
        mac = "aa-bb-cc-dd-ee-ff"
        off = ["ssh", "n3", "poweroff"]
        """)
    )
    assert found == {
        "n1": RedfishBmc(address="https://n1-bmc", user=USER, password=PASSWORD, timeout_s=3),
        "n2": IpmiBmc(address="10.0.0.2", user=USER, password=PASSWORD, timeout_s=3),
        "n3": WakeOnLan(mac="aa-bb-cc-dd-ee-ff", off=("ssh", "n3", "poweroff"), timeout_s=3),
    }
    assert PASSWORD not in repr(found)


GOOD = 'user = "u"\npassword_file = "SECRET"\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nodes = 3", "nodes: must be tables"),
        ("[nodes", "is no TOML"),
        ("[nodes.a]", "nodes.a: kind: 'None' is not one of"),
        ('[nodes.a]\nkind = "redfish"\naddress = "http://bmc"\n' + GOOD, "must begin with https"),
        ('[nodes.a]\nkind = "redfish"\naddress = "https://u:p@bmc"\n' + GOOD, "must be https://HOST"),
        ('[nodes.a]\nkind = "redfish"\naddress = "https://[bmc"\n' + GOOD, "is no URL"),
        ('[nodes.a]\nkind = "ipmi"\naddress = "-x"\n' + GOOD, "is no host"),
        ('[nodes.a]\nkind = "ipmi"\naddress = "bmc"\nuser = "u"\npassword_file = "/nowhere"', "cannot be read"),
        ('[nodes.a]\nkind = "ipmi"\naddress = "bmc"\nuser = "u"\npassword_file = "FOLDER/bmcs.toml"', "everybody may read"),
        ('[nodes.a]\nkind = "wake-on-lan"\nmac = "aa"\noff = ["x"]', "is no address of a network card"),
        ('[nodes.a]\nkind = "command"\non = "reboot"\noff = ["x"]', "on: must be a command as a list"),
        ('[nodes.a]\nkind = "command"\non = ["x"]\noff = ["x"]\nofff = 1', "offf: is no field"),
        ('[nodes.a]\nkind = "command"\non = ["x"]\noff = ["x"]\ntimeout_s = 0', "timeout_s: must be in"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_used_names_the_field(written, text, said):
    with pytest.raises(BmcFileError, match=said):
        load_bmcs(written(text))


def test_the_programs_say_what_failed_and_go_on(written, tmp_path, capsys):
    path = written("""
        [nodes.n1]
        kind = "command"
        on = ["touch", "FOLDER/on"]
        off = ["touch", "FOLDER/off"]
        """)
    assert main(["off", "n[1-2]", "--bmcs", str(path)]) == 1
    assert (tmp_path / "off").exists()
    assert "n2: is not in the file of BMCs" in capsys.readouterr().err
    assert main(["on", "n1", "--bmcs", str(path)]) == 0
    assert (tmp_path / "on").exists()
    assert main(["on", "n[1-", "--bmcs", str(path)]) == 2
    path.chmod(0o666)
    assert main(["on", "n1", "--bmcs", str(path)]) == 2
    assert "others may write it" in capsys.readouterr().err
