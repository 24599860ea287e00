"""The arguments of PowerSGD, what they refuse, and what is logged."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from lightning_distkit.core.compression import PowerSGDState
from tests.core.compression.bodies import MANY_BUCKETS, mlp, powersgd, train
from tests.ranks import run_ranks


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"matrix_approximation_rank": 0}, "matrix_approximation_rank must be a whole number of at least 1, got 0"),
        ({"matrix_approximation_rank": {}}, "must not be empty"),
        ({"matrix_approximation_rank": {5: 1}}, "must say what holds from iteration 0 on, got {5: 1}"),
        ({"matrix_approximation_rank": {0: 1, -5: 2}}, "must have iterations as keys, from 0 on, got -5"),
        ({"matrix_approximation_rank": {0: 1, "*": 2}}, "must have names or iterations as keys, not both"),
        ({"matrix_approximation_rank": {"*": -1}}, "must be a whole number of at least 0, got -1"),
        ({"matrix_approximation_rank": {"*": {0: 1.5}}}, "must be a whole number of at least 0, got 1.5"),
        ({"wire_dtype": "int8"}, 'wire_dtype must be "bf16", "fp16" or None, got \'int8\''),
        ({"matrix_approximation_rank": 1.5}, "matrix_approximation_rank must be a whole number of at least 1, got 1.5"),
        ({"start_powerSGD_iter": 1}, "start_powerSGD_iter must be at least 2 with use_error_feedback or warm_start"),
        ({"start_powerSGD_iter": -1, "use_error_feedback": False, "warm_start": False}, "at least 0, got -1"),
        ({"compression_stats_logging_frequency": -1}, "compression_stats_logging_frequency must be a whole number"),
        ({"min_compression_rate": 0}, "min_compression_rate must be a number above 0, got 0"),
        ({"orthogonalization_epsilon": -1e-8}, "orthogonalization_epsilon must be a number of at least 0, got -1e-08"),
        ({"min_compression_rate": "2"}, "min_compression_rate must be a number above 0, got '2'"),
        ({"orthogonalization_epsilon": None}, "orthogonalization_epsilon must be a number of at least 0, got None"),
        ({"use_error_feedback": "no"}, "use_error_feedback must be True or False, got 'no'"),
        ({"warm_start": 1}, "warm_start must be True or False, got 1"),
        ({"batch_tensors_with_same_shape": "x"}, "batch_tensors_with_same_shape must be True or False, got 'x'"),
        ({"random_seed": -1}, "random_seed must be a whole number of at least 0, got -1"),
    ],
)
def test_a_wrong_argument_is_refused_at_once(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match="got") as raised:
        PowerSGDState(None, **arguments)
    assert says in str(raised.value)


def test_a_group_that_is_none_is_refused_at_once() -> None:
    with pytest.raises(TypeError, match="process_group must be a process group, or None for all, got 'gloo'"):
        PowerSGDState("gloo")  # type: ignore[arg-type]


@pytest.mark.parametrize("scale", [0, -1, float("inf"), None])
def test_a_wrong_gradient_scale_is_refused(scale: Any) -> None:
    with pytest.raises(ValueError, match="gradient_scale must be a finite number above 0"):
        PowerSGDState(None).gradient_scale = scale


def test_arguments_and_defaults_are_torchs() -> None:
    import inspect

    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torchs

    ours, theirs = (inspect.signature(cls.__init__).parameters for cls in (PowerSGDState, torchs.PowerSGDState))
    assert list(ours) == [*theirs, "wire_dtype"]
    assert [p.default for p in ours.values()] == [*(p.default for p in theirs.values()), None]


def test_compression_from_the_first_step_without_memory() -> None:
    state = PowerSGDState(None, start_powerSGD_iter=0, use_error_feedback=False, warm_start=False)
    assert state.is_compressing


def log_lines() -> list[str]:
    lines: list[str] = []
    logger = logging.getLogger("lightning_distkit")
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    model, _ = powersgd(mlp(20, 30, 10), ddp=MANY_BUCKETS, compression_stats_logging_frequency=3)
    train(model, 9, 20)
    return lines


def test_the_log_lines_are_torchs() -> None:
    lines = run_ranks(2, log_lines)[0]
    assert lines[0].startswith("PowerSGD config: matrix_approximation_rank = 1; start_powerSGD_iter = 2; ")
    assert lines.count("Start to apply PowerSGD after 2 iterations.") == 1
    assert "A zero tensor of length 600 that represents local error is created." in lines
    stats = [line for line in lines if line.startswith("Compression stats")]
    assert [line.split(",")[0] for line in stats] == [f"Compression stats: iter {i}" for i in (2, 5, 8)]
    assert "total before compression 940, total after compression 130, rate 7.2" in stats[0]
