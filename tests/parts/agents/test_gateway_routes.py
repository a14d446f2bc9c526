"""The gateway's routes, as docs/json.md lists them."""

import re

import pytest
from support.paths import ROOT

pytest.importorskip("starlette", reason="the gateway needs starlette")

from explorer_hooks.parts.agents.app import GatewayApp

TABLE = (ROOT / "docs" / "json.md").read_text().partition("## HTTP: the gateway")[2]
MODEL = re.compile(r"`(GET|POST) ([^`]+)`")


def test_each_route_is_documented_and_no_other():
    app = GatewayApp(None, "", None).application()
    served = {
        (method, re.sub(r"\{(\w+)(?::path)?\}", lambda name: name[1].upper(), route.path))
        for route in app.routes
        for method in route.methods - {"HEAD"}
    }
    rows = [row for row in TABLE.splitlines() if re.match(r"\| `(GET|POST) /", row)]
    assert {found for row in rows for found in MODEL.findall(row.split(" | ")[0])} == served
