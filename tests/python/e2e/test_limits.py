"""The server's README lists every limit with its default."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path


def test_the_readme_has_every_limit(binary: Path) -> None:
    text = subprocess.run([binary, "--help"], capture_output=True, text=True, check=True, timeout=30).stdout
    settings = re.findall(r"^ +(--max-[a-z-]+) [A-Z]+ \[(.+?)\] ", text, re.MULTILINE)
    assert ("--max-programs", "10000") in settings
    assert text.count("\n  --max-") == len(settings), "one has no default"
    readme = (Path(__file__).resolve().parents[3] / "server" / "README.md").read_text()
    assert re.findall(r"^\| `(--max-[a-z-]+)` \| (.+?) \|", readme, re.MULTILINE) == settings
