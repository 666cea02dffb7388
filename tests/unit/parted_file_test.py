"""mig-parted's configuration file: what sites write, what comes back, and what is said of a mistake."""

import contextlib
import json

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from eelgrid_agent.enforce.mig.layout import MigName, PciId
from eelgrid_agent.enforce.mig.parted_file import (
    InvalidPartedField,
    NoSuchConfig,
    PartedEntry,
    PartedFile,
    PartedFileUnreadable,
    format_parted_file,
    parse_parted_file,
    to_parted_document,
)

A100 = PciId(0x20B2, 0x10DE)

# The example that mig-parted's README shows, shortened.
README = """
version: v1
mig-configs:
  all-disabled:
    - devices: all
      mig-enabled: false

  all-enabled:
    - devices: all
      mig-enabled: true
      mig-devices: {}

  all-1g.5gb.me:
    - devices: all
      mig-enabled: true
      mig-devices:
        "1g.5gb+me": 1

  custom-config:
    - devices: [0,1,2,3]
      mig-enabled: false
    - devices: [4]
      mig-enabled: true
      mig-devices:
        "1g.5gb": 2
        "2g.10gb": 1
        "3g.20gb": 1
"""
# A workstation whose display card must stay whole, with the shares of one half.
STATION = """
version: v1
mig-configs:
  station:
    # Training
    - device-filter: ["0x20B210DE", "0x20B510DE:0x153310DE"]
      devices: []
      mig-enabled: true
      mig-devices: {"1c.3g.40gb": 2, 2c.3g.40gb: 1, 1g.10gb: 1}
    - device-filter: "0x1FB010DE"
      devices: all
      mig-enabled: no
      mig-devices: {}
"""
ANCHORS = """
version: v1
mig-configs:
  a: &a
    - &rest {devices: all, mig-enabled: false}
    - <<: *rest
      devices: [1]
      mig-enabled: true
      mig-devices: {4g.96gb+gfx: 1}
  b: *a
"""
BLACKWELL = '{"version": "v1", "mig-configs": {"x": [{"device-filter": "", "devices": "all", "mig-enabled": true, \
"mig-devices": {"1g.24gb-me": 2, "1g.24gb+me.all": 1, "1g.24gb": 0}}]}}'


def name(text):
    parsed = MigName.parse(text)
    assert parsed is not None
    return parsed


def test_the_readme_is_read():
    file = parse_parted_file(README, "config.yaml")
    assert list(file.configs) == ["all-disabled", "all-enabled", "all-1g.5gb.me", "custom-config"]
    assert file.get_config("all-disabled")[1] == (entry(devices=None, enabled=False),)
    assert file.get_config("all-enabled")[1] == (entry(devices=None, enabled=True),)
    whole, fourth = file.get_config("custom-config")[1]
    assert (whole.devices, whole.mig_enabled, whole.mig_devices) == ((0, 1, 2, 3), False, ())
    assert dict(fourth.mig_devices) == {name("1g.5gb"): 2, name("2g.10gb"): 1, name("3g.20gb"): 1}
    assert fourth.place == "config.yaml:22: mig-configs.custom-config[1]"


def entry(*, devices, enabled):
    return PartedEntry(devices=devices, mig_enabled=enabled)


def test_boards_and_shares_are_read():
    first, second = parse_parted_file(STATION, "s").get_config(None)[1]
    assert first.filters == (A100, PciId(0x20B5, 0x10DE, (0x1533, 0x10DE)))
    assert (first.devices, second.devices) == ((), None)
    assert dict(first.mig_devices) == {name("1c.3g.40gb"): 2, name("2c.3g.40gb"): 1, name("1g.10gb"): 1}
    assert not second.mig_enabled


def test_anchors_and_merges_are_read():
    file = parse_parted_file(ANCHORS, "s")
    assert file.configs["a"] == file.configs["b"]
    whole, one = file.configs["a"]
    assert (whole.devices, whole.mig_enabled) == (None, False)
    assert (one.devices, one.mig_enabled, one.mig_devices) == ((1,), True, ((name("4g.96gb+gfx"), 1),))


def test_json_is_yaml_and_a_count_of_nothing_is_nothing():
    (only,) = parse_parted_file(BLACKWELL, "s").get_config("x")[1]
    assert only.filters == ()
    assert only.mig_devices == ((name("1g.24gb-me"), 2), (name("1g.24gb+me.all"), 1))


def test_a_filter_lets_boards_through():
    first = parse_parted_file(STATION, "s").get_config(None)[1][0]
    assert first.matches_board(PciId(0x20B2, 0x10DE, (1, 2)))
    assert first.matches_board(PciId(0x20B5, 0x10DE, (0x1533, 0x10DE)))
    assert not first.matches_board(PciId(0x20B5, 0x10DE, (0x1533, 0x10DF)))
    assert not first.matches_board(PciId(0x20B5, 0x10DE))
    assert entry(devices=None, enabled=False).matches_board(A100)


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("1c.1g.5gb", "1g.5gb"),
        ("1c.3g.20gb", "1c.3g.20gb"),
        ("1g.5gb+me", "1g.5gb+me"),
        ("1g.24gb+me.all", "1g.24gb+me.all"),
        ("1g.24gb-me", "1g.24gb-me"),
        ("2g.10gb+me,gfx", "2g.10gb+gfx,me"),
    ],
)
def test_names_are_taken_apart_and_put_together(text, same):
    assert str(name(text)) == same


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1g",
        "5gb",
        "1g.5",
        "g.5gb",
        "1g.5GB",
        " 1g.5gb",
        "1g.5gb+",
        "1g.5gb+me-gfx",
        "1g.5gb+me,me",
        "1g.5gb+1me",
        "1g.5gb+me.",
        "2c.1g.5gb",
        "0c.1g.5gb",
        "0g.0gb",
        "1g.5gb@0",
        "٣g.5gb",
    ],
)
def test_what_is_no_name(text):
    assert MigName.parse(text) is None


@pytest.mark.parametrize("text", ["", "A100-SXM4-40GB", "0x", "0x20B210DE:", "0x1:0x2:0x3", "0x20B210DE0", "20B210DE"])
def test_what_is_no_board(text):
    assert PciId.parse(text) is None


def one(**fields):
    return json.dumps({"version": "v1", "mig-configs": {"x": [{"devices": "all", "mig-enabled": True} | fields]}})


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("version: [", PartedFileUnreadable, r"site.yaml:1: is not valid YAML"),
        ("a\n\tb: c", PartedFileUnreadable, "is not valid YAML"),
        ("--- a\n--- b", PartedFileUnreadable, "is not valid YAML"),
        ("\0", PartedFileUnreadable, "is not valid YAML"),
        ("[" * 2000, PartedFileUnreadable, "is not valid YAML"),
        ("# " + "x" * 300_000, PartedFileUnreadable, "is larger than"),
        ("", InvalidPartedField, "the file: is empty; write a mapping"),
        ("[]", InvalidPartedField, "site.yaml:1: the file: is a list"),
        ("mig-configs: {}", InvalidPartedField, "version: is missing; write version: v1"),
        ("version: v2", InvalidPartedField, "version: is 'v2'; write v1"),
        ("version: 1", InvalidPartedField, "version: is a number"),
        (
            "version: v1\nmig-config: {}",
            InvalidPartedField,
            "mig-config: is no field; correct the spelling; there are: version",
        ),
        ("version: v1\nmig-configs: {}", InvalidPartedField, "site.yaml:2: mig-configs: has 0 configurations"),
        ("version: v1\nmig-configs:\n  x: []", InvalidPartedField, "site.yaml:3: mig-configs.x: has 0 entries"),
        ("version: v1\nmig-configs:\n  x: {}", InvalidPartedField, "mig-configs.x: is a mapping; write a list"),
        ("version: v1\nmig-configs: {x: [{}]}", InvalidPartedField, r"x\[0\].devices: is missing; add it"),
        ("version: v1\nversion: v1", InvalidPartedField, "version: appears twice"),
        (
            "version: v1\nmig-configs:\n  x: []\n  x: []",
            InvalidPartedField,
            "site.yaml:4: mig-configs.x: appears twice",
        ),
        ("version: v1\n? [a]\n: b", InvalidPartedField, "has a list for a name"),
        (one(), InvalidPartedField, "mig-devices: is missing and mig-enabled is true; add it; mig-devices: {}"),
        (one(**{"mig-device": {}, "mig-devices": {}}), InvalidPartedField, r"x\[0\].mig-device: is no field"),
        (one(**{"mig-enabled": "true"}), InvalidPartedField, "mig-enabled: is a text; write true or false"),
        (
            one(**{"mig-enabled": False, "mig-devices": {"1g.5gb": 1}}),
            InvalidPartedField,
            "is there and mig-enabled is false",
        ),
        (one(devices="0", **{"mig-devices": {}}), InvalidPartedField, "devices: is '0'; write all, or a list"),
        (one(devices=0, **{"mig-devices": {}}), InvalidPartedField, "devices: is a number; write all, or a list"),
        (one(devices=None, **{"mig-devices": {}}), InvalidPartedField, "devices: is empty; write all"),
        (
            one(devices=[-1], **{"mig-devices": {}}),
            InvalidPartedField,
            "devices: is -1; write a whole number from 0 to 255",
        ),
        (one(devices=["0"], **{"mig-devices": {}}), InvalidPartedField, "devices: is a text; write a whole number"),
        (
            one(**{"mig-devices": {"1g5gb": 1}}),
            InvalidPartedField,
            "'1g5gb' is not a MIG device; write it as nvidia-smi mig -lgip",
        ),
        (
            one(**{"mig-devices": {"1g.5gb": "7"}}),
            InvalidPartedField,
            r"mig-devices.1g.5gb: is a text; write a whole number",
        ),
        (one(**{"mig-devices": {"1g.5gb": True}}), InvalidPartedField, "is true or false; write a whole number"),
        (one(**{"mig-devices": {"1g.5gb": 1.5}}), InvalidPartedField, "is a number; write a whole number from 0 to 64"),
        (one(**{"mig-devices": {"1g.5gb": 65}}), InvalidPartedField, "is 65; write a whole number from 0 to 64"),
        (one(**{"mig-devices": {"1g.5gb": 10**40}}), InvalidPartedField, "write a whole number from 0 to 64"),
        (one(**{"mig-devices": {"1g.5gb": 0}}), InvalidPartedField, "has only counts of 0; write {} for MIG without"),
        (one(**{"mig-devices": {"1g.5gb": 1, "1c.1g.5gb": 1}}), InvalidPartedField, "appears twice under two names"),
        (one(**{"mig-devices": ["1g.5gb"]}), InvalidPartedField, "mig-devices: is a list; write a mapping"),
        (
            one(**{"device-filter": "A100-SXM4-40GB", "mig-devices": {}}),
            InvalidPartedField,
            "is not a PCI id; write PCI device",
        ),
        (
            one(**{"device-filter": 0x20B210DE, "mig-devices": {}}),
            InvalidPartedField,
            "device-filter: is a number; write a text",
        ),
        (one(**{"device-filter": [""], "mig-devices": {}}), InvalidPartedField, "'' is not a PCI id"),
        ("version: v1\nx: &x {<<: *x}\nmig-configs: *x", InvalidPartedField, "merges more than 4 deep|is no field"),
    ],
)
def test_a_mistake_names_the_line_the_field_and_the_remedy(text, error, message):
    with pytest.raises(error, match=message) as caught:
        parse_parted_file(text, "site.yaml")
    assert str(caught.value).startswith("site.yaml:")
    assert "\n" not in str(caught.value)
    assert caught.value.violation.remedy


def test_lines_are_counted_as_editors_do():
    with pytest.raises(InvalidPartedField) as caught:
        parse_parted_file(README.replace('"2g.10gb": 1', '"2g.10gb": many'), "config.yaml")
    assert caught.value.line == README[: README.index('"2g.10gb"')].count("\n") + 1


def test_aliases_do_not_make_a_file_large():
    lists = "".join(f"  c{n}: *many\n" for n in range(900))
    entries = "\n".join("    - *one" for _ in range(200))
    text = f"version: v1\nmig-configs:\n  a: &many\n    - &one {{devices: all, mig-enabled: false}}\n{entries}\n{lists}"
    with pytest.raises(PartedFileUnreadable, match="aliases written out"):
        parse_parted_file(text, "s")


def test_which_configuration():
    file = parse_parted_file(README, "s")
    assert file.get_config("all-enabled")[0] == "all-enabled"
    with pytest.raises(
        NoSuchConfig, match="holds 4 configurations; say which with --config: all-disabled, all-enabled"
    ):
        file.get_config(None)
    with pytest.raises(NoSuchConfig, match="has no 'none'; choose one of: all-disabled"):
        file.get_config("none")
    with pytest.raises(NoSuchConfig, match="holds no configuration"):
        parse_parted_file("version: v1", "s").get_config(None)


attributes = st.lists(st.sampled_from(["me", "gfx", "me.all"]), unique=True, max_size=2).map(
    lambda extras: tuple(sorted(extras))
)
names = st.builds(
    lambda slices, share, memory, extras, lacks: MigName(
        compute=min(share, slices), slices=slices, memory_gb=memory, extras=extras, lacks=() if extras else lacks
    ),
    st.integers(1, 7),
    st.integers(1, 7),
    st.integers(1, 300),
    attributes,
    attributes,
)
half = st.integers(0, 0xFFFF)
boards = st.builds(PciId, half, half, st.none() | st.tuples(half, half))
entries = st.builds(
    lambda filters, devices, counts, enabled: PartedEntry(
        filters=tuple(filters),
        devices=devices,
        mig_enabled=enabled,
        mig_devices=tuple(counts.items()) if enabled else (),
    ),
    st.lists(boards, max_size=3),
    st.none() | st.lists(st.integers(0, 255), max_size=4).map(tuple),
    st.dictionaries(names, st.integers(1, 64), max_size=4),
    st.booleans(),
)
labels = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1, max_size=12)
files = st.dictionaries(labels, st.lists(entries, min_size=1, max_size=3).map(tuple), min_size=1, max_size=3)


@settings(deadline=None, max_examples=50)
@given(files)
def test_what_is_written_is_read_back(configs):
    text = format_parted_file(PartedFile(configs=configs))
    assert parse_parted_file(text, "s").configs == configs


@settings(deadline=None, max_examples=50)
@given(files)
def test_any_yaml_reader_gets_the_same(configs):
    file = PartedFile(configs=configs)
    assert yaml.safe_load(format_parted_file(file)) == to_parted_document(file)
    assert parse_parted_file(json.dumps(to_parted_document(file), ensure_ascii=False), "s").configs == configs


@settings(deadline=None, max_examples=50)
@given(st.text(max_size=200) | st.text("{}[]:,-&*<\"'v1 \n", max_size=60).map(lambda text: "version: v1\n" + text))
def test_any_text_is_read_or_refused(text):
    with contextlib.suppress(PartedFileUnreadable, InvalidPartedField):
        assert isinstance(parse_parted_file(text, "s"), PartedFile)
