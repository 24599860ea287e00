"""The examples run, and end where the unmodified one does; the YAML files give it the same plugins."""

from __future__ import annotations

import contextlib
import io
import math
import runpy
import sys
from pathlib import Path

import pytest

from accelerate_plugins.__main__ import main
from tests.ranks import run_ranks

FOLDER = Path(__file__).parents[2] / "examples" / "with_accelerate"


def run(name: str, options: list[str], batch: int | None = None) -> str:
    """A few steps of an example, on a few rows; what it prints."""
    sys.path.append(str(FOLDER.parent))
    import task

    train, validation = task.read_rows()
    task.BATCH = batch or task.BATCH
    task.STEPS, task.read_rows = 24, lambda: (train[:800], validation[:70])
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        if options:
            main([*options, str(FOLDER / name)])
        else:
            runpy.run_path(str(FOLDER / name), run_name="__main__")
    return printed.getvalue()


def validation_loss(printed: str) -> float:
    [line] = [line for line in printed.splitlines() if line.startswith("validation loss")]
    return float(line.split()[-1])


@pytest.fixture(scope="module")
def baseline() -> float:
    return validation_loss(run_ranks(2, run, "baseline.py", [], timeout=120)[0])


def test_zero_ends_where_ddp_does(baseline: float) -> None:
    printed = run_ranks(2, run, "zero.py", [], timeout=120)[0]
    assert validation_loss(printed) == pytest.approx(baseline, abs=2e-3)
    assert "optimizer state held by this rank: 1.9 MB" in printed  # half of 3.8


def test_powersgd_ends_near_where_ddp_does(baseline: float) -> None:
    printed = run_ranks(2, run, "powersgd.py", [], timeout=120)[0]
    assert validation_loss(printed) == pytest.approx(baseline, rel=0.1)
    assert "sent by each rank" in printed


def test_a_pipe_ends_where_one_process_does_with_the_batch_of_both() -> None:
    one = run_ranks(1, run, "baseline.py", [], 16, timeout=120)[0]
    first, _ = run_ranks(2, run, "pipeline.py", [], timeout=120)
    assert validation_loss(first) == pytest.approx(validation_loss(one), abs=2e-3)
    assert "parameters held by this rank: 0.2" in first  # of 0.48 million


def test_a_transformers_model_learns_through_a_pipe() -> None:
    pytest.importorskip("transformers", reason="transformers is no dependency of the tests; install it to run these")
    printed = run_ranks(2, run, "transformers_pipeline.py", [], timeout=150)[0]
    assert validation_loss(printed) < 0.8 * math.log(256)  # what one knows who knows nothing


@pytest.mark.parametrize("name", ["zero.yaml", "powersgd.yaml", "pipeline.yaml"])
def test_the_yaml_files_are_for_the_unmodified_script(name: str, baseline: float) -> None:
    printed = run_ranks(2, run, "baseline.py", ["--plugin_config", str(FOLDER / name)], timeout=120)[0]
    assert validation_loss(printed) == pytest.approx(baseline, rel=0.1)
