"""`eelgrid-agent mig` as operators run it: separate programs, one after the other, over a node that stays."""

import json

from tests.fork_server import run_program

GPUS = [{"product": "a100-sxm4-40gb", "mig": []}, {"product": "h100-sxm5-80gb", "count": 2}]
FLEET = {"nodes": [{"name": "n", "cpu_milli": 1000, "memory_bytes": 1, "gpus": GPUS}]}
SITE = """
version: v1
mig-configs:
  mixed:
    - device-filter: "0x20B010DE"
      devices: all
      mig-enabled: true
      mig-devices: {"1g.5gb": 2, "2g.10gb": 1, "3g.20gb": 1}
    - device-filter: "0x233010DE"
      devices: [1]
      mig-enabled: true
      mig-devices: {"1c.3g.40gb": 3, "1g.10gb+me": 1}
    - device-filter: "0x233010DE"
      devices: [2]
      mig-enabled: false
"""


def test_the_life_of_a_layout(tmp_path):
    (tmp_path / "fleet.json").write_text(json.dumps(FLEET))
    (tmp_path / "site.yaml").write_text(SITE)

    def mig(command, *arguments, stdin="", code=0):
        """One program."""
        words = ("mig", command, "--simulate", "fleet.json", *arguments)
        done = run_program("eelgrid_agent", words, cwd=tmp_path, stdin=stdin)
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done

    assert "it is requested and does not exist" in mig("plan", "site.yaml").stdout
    assert "is selected" not in mig("assert", "site.yaml", code=3).stderr
    assert "GPU 1: read back: 1g.10gb+me@0, 3g.40gb@4" in mig("apply", "--yes", "-", stdin=SITE).stderr
    export = mig("export").stdout
    assert mig("assert", "-", stdin=export).stdout == "the layout exists\n"
    results = json.loads(mig("apply", "-", "--yes", "-o", "json", stdin=export).stdout)["results"]
    assert [result["status"] for result in results] == ["applied"] * 3
    assert all(result["detail"].startswith("exists already") for result in results)
    gpus = json.loads(mig("show", "-o", "json").stdout)["gpus"]
    assert sorted(i["start"] for i in gpus[0]["instances"]) == [0, 2, 3, 4]
    assert [len(i["compute_instances"]) for i in gpus[1]["instances"] if i["profile"] == "3g.40gb"] == [3]
