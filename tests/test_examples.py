"""Each example of one process does what its first line says."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_the_unet_finds_discs_through_its_skips(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "plain" / "unet_skips.py"), run_name="__main__")
    *_, last = capsys.readouterr().out.strip().splitlines()
    assert last.startswith("discs found: intersection over union")
    assert float(last.split()[-1]) > 0.6
