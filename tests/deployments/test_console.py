"""The console's files as they are served, packed and linked."""

from __future__ import annotations

import re
import zipfile
from importlib import resources
from pathlib import Path

import httpx2
import pytest
from hatchling.builders.wheel import WheelBuilder
from starlette.applications import Starlette
from starlette.routing import Mount

from shoal.config import AuthSettings, ServeSettings
from shoal_deployments.console import CONSOLE_PATHS
from shoal_deployments.console.page import FILES
from tests.deployments.server import Served, serve

REPOSITORY = Path(__file__).parents[2]
TYPES = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}


def _content(name: str) -> str:
    return (resources.files("shoal_deployments.console") / "static" / name).read_text()


def test_every_file_is_served_and_nothing_else(served: Served) -> None:
    folder = resources.files("shoal_deployments.console") / "static"
    assert sorted(FILES) == sorted(file.name for file in folder.iterdir())
    assert len(CONSOLE_PATHS) == len(FILES)
    for name in FILES:
        path = "/" if name == "index.html" else f"/console/{name}"
        answer = served.http.get(path)
        assert answer.status_code == 200
        assert answer.text == _content(name)
        assert answer.headers["content-type"] == TYPES[name.rpartition(".")[2]]
    for path in ("/console/", "/console/none.js", "/console/../app.py", "/index.html"):
        assert served.http.get(path).status_code == 404
    assert "/console" not in served.http.get("/openapi.json").text


def test_pages_link_to_what_there_is_and_load_nothing_from_elsewhere() -> None:
    linked = set(re.findall(r'(?:src|href)="(?!#)([^"]+)"', _content("index.html")))
    for name in FILES:
        text = _content(name)
        if name.endswith(".js"):
            linked |= {f"console/{other}" for other in re.findall(r'from "\./([^"]+)"', text)}
        assert not re.search(r"https?:|//[a-z]+\.|@import|url\(|\bon[a-z]+=|style=", _plain(text))
    assert linked == {path[1:] for path in CONSOLE_PATHS - {"/"}}


def _plain(text: str) -> str:
    """``text`` without the name by which SVG calls itself."""
    return text.replace('xmlns="http://www.w3.org/2000/svg"', "")


def test_the_policy_lets_only_this_server_in(served: Served) -> None:
    headers = served.http.get("/").headers
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert {policy[f"{kind}-src"] for kind in ("script", "style", "img", "connect")} == {"'self'"}
    assert {policy[name] for name in ("base-uri", "form-action", "frame-ancestors")} == {"'none'"}
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"


def test_files_are_read_again_only_where_they_changed(served: Served) -> None:
    first = served.http.get("/console/main.js")
    assert first.headers["cache-control"] == "no-cache"
    for known in (first.headers["etag"], f'"other", W/{first.headers["etag"]}'):
        again = served.http.get("/console/main.js", headers={"If-None-Match": known})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["etag"] == first.headers["etag"]
    other = served.http.get("/console/api.js", headers={"If-None-Match": first.headers["etag"]})
    assert other.status_code == 200


def test_files_can_be_read_and_nothing_else(served: Served) -> None:
    whole = served.http.get("/")
    head = served.http.head("/")
    assert (head.status_code, head.content) == (200, b"")
    same = ("content-length", "content-type", "etag", "content-security-policy")
    assert {name: head.headers[name] for name in same} == {
        name: whole.headers[name] for name in same
    }
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        answer = served.http.request(method, "/")
        assert answer.status_code == 405
        assert answer.json()["error"]["code"] == "method_not_allowed"


def test_under_a_prefix_with_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONSOLE_KEYS", "secret")
    settings = ServeSettings(auth=AuthSettings(keys_variable="CONSOLE_KEYS"))
    with serve(settings, wrap=lambda app: Starlette(routes=[Mount("/models/a", app)])) as served:
        for path in CONSOLE_PATHS:
            assert served.http.get(f"/models/a{path}").status_code == 200
        assert served.http.get("/models/a/stats").status_code == 401
        key = {"Authorization": "Bearer secret"}
        metrics = served.http.get("/models/a/metrics", headers=key).text
        assert ',path="/",status="200"} 1.0' in metrics
        assert 'path="other"' not in metrics


def test_a_prefix_without_its_slash_leads_to_the_page(served: Served) -> None:
    async def ask() -> httpx2.Response:
        # Ray Serve hands the prefix of an application to it as it came.
        transport = httpx2.ASGITransport(served.app, root_path="/models/a")
        async with httpx2.AsyncClient(transport=transport, base_url="http://x") as client:
            return await client.get("/models/a")

    answer = served.run(ask())
    assert (answer.status_code, answer.headers["location"]) == (307, "/models/a/")


def test_the_wheel_has_all_files(tmp_path: Path) -> None:
    [wheel] = WheelBuilder(str(REPOSITORY)).build(directory=str(tmp_path), versions=["standard"])
    names = set(zipfile.ZipFile(wheel).namelist())
    assert names >= {f"shoal_deployments/console/static/{name}" for name in FILES}
    assert names >= {"shoal/cli/__init__.py", "shoal_actors/__init__.py"}
