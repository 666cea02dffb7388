"""Every dashboard goes into the Grafana that a user names, and comes back whole.

    EELGRID_GRAFANA=http://user:password@host:3000 python -m pytest tests/e2e/dashboards_import_test.py

The user may be an Editor. What is imported has a uid of its own and is deleted again, so that nobody's
dashboards change; those that this Grafana provisions from files are read as they are.
"""

import base64
import json
import os
import urllib.error
import urllib.parse
import urllib.request

import pytest
from deploy.dashboards.reading import FOLDER

GRAFANA = os.environ.get("EELGRID_GRAFANA", "")
needed = pytest.mark.skipif(not GRAFANA, reason="EELGRID_GRAFANA=http://user:password@host:port names no Grafana")
TIMEOUT_S = 60.0
DOCUMENTS = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}


def call(method, path, value=None):
    """Status and body of one call to Grafana's API."""
    parts = urllib.parse.urlsplit(GRAFANA)
    host = parts.hostname + (f":{parts.port}" if parts.port else "")
    user = f"{urllib.parse.unquote(parts.username or '')}:{urllib.parse.unquote(parts.password or '')}"
    request = urllib.request.Request(
        urllib.parse.urlunsplit((parts.scheme, host, parts.path.rstrip("/") + path, "", "")),
        method=method,
        data=None if value is None else json.dumps(value).encode(),
        headers={
            "Content-Type": "application/json",
            "Authorization": "Basic " + base64.b64encode(user.encode()).decode(),
        },
    )
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read() or b"null")


def lost(ours, theirs, place=""):
    """Where what we wrote is missing or another in what came back; more may be there."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return [at for key, value in ours.items() for at in lost(value, theirs.get(key), f"{place}/{key}")]
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        return [at for number, value in enumerate(ours) for at in lost(value, theirs[number], f"{place}/{number}")]
    return [] if ours == theirs else [place]


def shown(document):
    """The part that has to come back: panels with their targets, and variables."""
    return {key: document[key] for key in ("title", "description", "tags", "time", "links", "panels", "templating")}


@needed
@pytest.mark.parametrize("name", DOCUMENTS)
def test_an_import_comes_back_whole(name):
    uid = f"eelgrid-test-{name}"
    document = DOCUMENTS[name] | {"uid": uid, "title": f"Eelgrid test of an import / {name}"}
    status, told = call("POST", "/api/dashboards/db", {"dashboard": document, "overwrite": True})
    assert status == 200, told
    try:
        status, told = call("GET", f"/api/dashboards/uid/{uid}")
        assert status == 200, told
        assert lost(shown(document), told["dashboard"]) == []
    finally:
        assert call("DELETE", f"/api/dashboards/uid/{uid}")[0] == 200


@needed
@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_provisioned_one_is_the_file(name):
    status, told = call("GET", f"/api/dashboards/uid/{DOCUMENTS[name]['uid']}")
    if status == 404 or not told["meta"].get("provisioned"):
        pytest.skip("this Grafana provisions no dashboards of ours")
    assert status == 200, told
    assert lost(shown(DOCUMENTS[name]), told["dashboard"]) == []
    assert told["meta"]["folderTitle"] == "Eelgrid"


def test_what_is_lost_is_found():
    ours = {"panels": [{"title": "a", "targets": [{"expr": "x"}]}, {"title": "b"}]}
    assert lost(ours, json.loads(json.dumps(ours)) | {"id": 3}) == []
    assert lost(ours, {"panels": [{"title": "a", "targets": []}, {"title": "b"}]}) == ["/panels/0/targets"]
    assert lost(ours, {"panels": [{"title": "a", "targets": [{"expr": "y"}]}, {}]}) == [
        "/panels/0/targets/0/expr",
        "/panels/1/title",
    ]
