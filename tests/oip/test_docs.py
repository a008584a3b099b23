"""The example of docs/oip.md runs as it stands there, but for the address."""

from __future__ import annotations

import re

import pytest
from conftest import Layers, sparse
from local_server import LocalServer
from wire import REPOSITORY


def test_the_example_runs(server: LocalServer, layers: Layers, capsys: pytest.CaptureFixture[str]) -> None:
    text = (REPOSITORY / "docs" / "oip.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(examples) == 1
    assert "127.0.0.1:8500" in examples[0]
    layers.register("ffn.down", sparse(8, 32, 128))
    exec(examples[0].replace("127.0.0.1:8500", server.address), {})
    assert capsys.readouterr().out == "(4, 32) float16\n"
    layers.unregister("ffn.down")
