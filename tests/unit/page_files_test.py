"""The live page's files: what stands between a browser and its first picture, in bytes and in order."""

import gzip
import itertools
import json
import math
import re

from bench.page_fleet import LOG, PageFleet

from eelgrid_controller.server.http.live_hub import LiveHub
from eelgrid_controller.server.http.live_server import load_static_files, style_csp_source

# Ten segments of an Ethernet, which a sender may send before it hears anything (RFC 6928), less the answer's headers.
FIRST_WINDOW_BYTES = 10 * 1460 - 1000


def test_the_first_picture_needs_one_answer_of_one_window():
    index = load_static_files()["index.html"]
    assert len(index.packed) < FIRST_WINDOW_BYTES
    assert gzip.decompress(index.packed) == index.plain
    text = index.plain.decode()
    assert 'rel="stylesheet"' not in text, "a style sheet elsewhere keeps the first picture waiting"
    assert text.count("<style>") == 1
    # Scripts of modules wait until the document is there; any other kind would stop it.
    assert re.findall(r"<script[^>]*>", text) == ['<script type="module" src="main.js">']
    assert "Waiting for the controller." in text
    assert style_csp_source().startswith("'sha256-")


def test_every_module_is_asked_for_at_once():
    files = load_static_files()
    modules = {name for name in files if name.endswith(".js")}
    asked = re.findall(r'(?:modulepreload" href|src)="([a-z_]+\.js)"', files["index.html"].plain.decode())
    assert sorted(asked) == sorted(modules)
    imported = {name for one in modules for name in re.findall(r'from "\./([a-z_]+\.js)"', files[one].plain.decode())}
    assert imported | {"main.js"} == modules


def test_all_that_ten_thousand_gpus_need_is_small():
    """A second at 1 Mbit/s, of a tunnel to a far cluster, carries 125 kB."""
    files = load_static_files()
    fleet = PageFleet(1250)
    fleet.fill(0.1)
    fleet.report()
    hub = LiveHub(fleet, log=LOG)
    state = fleet.state
    hub.board.sync_nodes(state)
    for name, record in state.nodes.items():
        tick = fleet.telemetry.fresh_tick(name, now_s=fleet.now_s(), now_ns=fleet.now_ns())
        hub.board.fleet.update_node(record, tick)
    hub.board.delta_frame(state, fleet.budgets(), now_ns=1)
    whole = hub._whole_now()
    assert whole.plain.count(b"node-") >= 1250
    assert sum(len(one.packed) for one in files.values()) < 50_000
    assert len(whole.packed) < 60_000


def test_the_files_fetch_nothing_from_elsewhere():
    files = load_static_files()
    assert {"index.html", "main.js"} <= set(files)
    for name, file in files.items():
        text = file.plain.decode().replace("http://www.w3.org/2000/svg", "")
        for word in ("http:", "https:", "innerHTML", "<script>", "style="):
            assert word not in text, (name, word)
        assert text.count("\n") <= 400, name


def _luminance(colour):
    parts = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(one, other):
    high, low = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_texts_can_be_read_in_both_themes():
    """WCAG 2.2, 1.4.3: 4.5 to 1; and 1.4.11 for what tells one mark from another: 3 to 1."""
    files = load_static_files()
    style = files["index.html"].plain.decode()
    light, dark = (dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", part)) for part in style.split("@media", 2)[:2])
    assert light["ground"] != dark["ground"]
    for theme in (light, dark):
        for ground in ("ground", "raised"):
            for ink in ("ink", "quiet", "accent", "good", "bad", "warn"):
                assert _contrast(theme[ink], theme[ground]) >= 4.5, (ink, ground)
    script = files["colour.js"].plain.decode()
    for line in re.findall(r"const (?:LIGHT|DARK) = \{.*?\};", script, re.DOTALL):
        found = dict(re.findall(r'(\w+): "(#[0-9a-f]{6})"', line))
        for ink in ("ink", "quiet"):
            assert _contrast(found[ink], found["ground"]) >= 4.5, ink
        assert _contrast(found["ink"], found["none"]) >= 4.5
        assert _contrast(found["ground"], found["mark"]) >= 4.5, "a held slice's name"
        for mark in ("bad", "good", "mark"):
            assert _contrast(found[mark], found["ground"]) >= 3.0, mark
        stops = [_luminance(stop) for stop in re.findall(r"#[0-9a-f]{6}", line.partition("]")[0])]
        assert stops in (sorted(stops), sorted(stops, reverse=True)), "a scale that goes one way"


# What eyes without one kind of cones see of linear red, green and blue (Machado, Oliveira and Fernandes 2009).
_VISION = {
    "all": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}


def _lab(colour, matrix):
    """CIE Lab of a colour as eyes with this matrix see it."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    red, green, blue = (min(1.0, max(0.0, sum(a * b for a, b in zip(row, linear, strict=True)))) for row in matrix)
    x = (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505
    y = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    z = (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.089
    fx, fy, fz = (value ** (1 / 3) if value > 0.008856 else 7.787 * value + 16 / 116 for value in (x, y, z))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


def test_colours_of_kinds_are_told_apart_by_every_kind_of_eyes():
    """A difference of 2.3 is just noticed; small cells need several times that."""
    script = load_static_files()["colour.js"].plain.decode()
    found = re.findall(r"kinds: (\[[^]]*\])", script)
    assert len(found) == 2
    for kinds in map(json.loads, found):
        assert len(set(kinds)) == 9
        for name, matrix in _VISION.items():
            labs = {colour: _lab(colour, matrix) for colour in kinds}
            for one, other in itertools.combinations(kinds, 2):
                assert math.dist(labs[one], labs[other]) > 10.0, (name, one, other)


def test_nothing_moves_by_itself():
    """prefers-reduced-motion asks for no more than what everybody has."""
    for file in load_static_files().values():
        assert not re.search(
            r"transition:|animation:|@keyframes|scroll-behavior|scrollIntoView|\.animate\(", file.plain.decode()
        )
