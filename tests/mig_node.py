"""A simulated node for `eelgrid-agent mig`, which runs in this process; what it keeps between runs can be changed."""

import json
from contextlib import contextmanager

from eelgrid_agent.__main__ import main

FLEET = {
    "nodes": [
        {
            "name": "gpu-7",
            "cpu_milli": 1000,
            "memory_bytes": 1,
            "gpus": [
                {"product": "a100-sxm4-40gb", "mig": ["3g@4", "1g@0"]},
                {"product": "h100-sxm5-80gb"},
                {"product": "t4"},
            ],
        }
    ]
}
SITE = """
version: v1
mig-configs:
  halves:
    - {device-filter: "0x20B010DE", devices: all, mig-enabled: true, mig-devices: {3g.20gb: 2}}
    - {device-filter: "0x233010DE", devices: all, mig-enabled: true, mig-devices: {3g.40gb: 2}}
  off:
    - {devices: all, mig-enabled: false}
"""


class MigNode:
    """Runs `mig` on the node gpu-7; a call returns the exit code, what was printed and what was said on stderr."""

    def __init__(self, folder, capsys):
        self.fleet, self._site, self._capsys = folder / "fleet.json", folder / "site.yaml", capsys
        self.state = folder / "fleet.json.state" / "gpu-7"
        self.fleet.write_text(json.dumps(FLEET))
        self._site.write_text(SITE)

    def __call__(self, command, *arguments):
        places = {"FLEET": str(self.fleet), "SITE": str(self._site)}
        words = [places.get(item, item) for item in arguments]
        code = main(["mig", command, "--simulate", str(self.fleet), *words])
        out, err = self._capsys.readouterr()
        return code, out, err

    @contextmanager
    def changed(self):
        """The devices as the file keeps them, to be changed as the world would."""
        path = self.state / "devices.json"
        state = json.loads(path.read_text())
        yield state
        path.write_text(json.dumps(state))


def shown(mig, *arguments):
    code, out, err = mig("show", "-o", "json", *arguments)
    assert (code, err) == (0, "")
    return json.loads(out)


def layout(document, index=0):
    return [(i["profile"], i["start"], i["origin"]) for i in document["gpus"][index]["instances"]]
