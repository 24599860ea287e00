"""Each example does what its first line says."""

from __future__ import annotations

import math
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.ranks import run_ranks

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_the_unet_finds_discs_through_its_skips(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "plain" / "unet_skips.py"), run_name="__main__")
    *_, last = capsys.readouterr().out.strip().splitlines()
    assert last.startswith("discs found: intersection over union")
    assert float(last.split()[-1]) > 0.6


def on_this_rank(name: str, n_steps: int) -> None:
    """Run an example for fewer steps, in the world that is there already."""
    sys.path.append(str(EXAMPLES))
    import task

    task.STEPS = n_steps
    dist.init_process_group = dist.destroy_process_group = lambda *args: None  # type: ignore[assignment]
    runpy.run_path(str(EXAMPLES / "plain" / f"{name}.py"), run_name="__main__")


@pytest.mark.parametrize(
    ("name", "n_ranks"), [("pipeline", 2), ("transformer_pipeline", 2), ("transformer_data_parallel_pipeline", 4)]
)
def test_a_pipeline_of_the_examples_learns(name: str, n_ranks: int, capsys: pytest.CaptureFixture[str]) -> None:
    run_ranks(n_ranks, on_this_rank, name, 20, timeout=120)
    (loss,) = re.findall(r"validation loss (\S+?),? ", capsys.readouterr().out.replace("\n", " "))
    assert float(loss) < 0.8 * math.log(256)  # what one knows who knows nothing
