"""What stage 2 leaves of a gradient is NaN to whoever looks, and says the way out to whoever changes it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.core.zero.test_gradients import zero
from tests.ranks import run_ranks


def looked_at() -> tuple[bool, int]:
    module = nn.Linear(64, 64)
    optimizer = zero(module.parameters(), 2)
    module(torch.ones(2, 64)).sum().backward()
    grad = module.weight.grad
    assert grad is not None
    seen = bool(grad.isnan().all()), grad.untyped_storage().nbytes()
    optimizer.zero_grad()
    assert module.weight.grad is None
    return seen


def test_in_stage_2_a_gradient_that_has_gone_is_nan_and_of_no_size() -> None:
    assert run_ranks(2, looked_at) == [(True, 4)] * 2


def edited(how: str) -> tuple[float, str]:
    param = nn.Parameter(torch.ones(4))
    optimizer = zero([param], 2, lr=1.0)
    (3 * param).sum().backward()
    if how == "zeroed":
        param.grad.zero_()
    elif how == "replaced":
        param.grad = torch.ones(4)
    elif how == "dropped":
        torch.autograd.grad((5 * param).sum(), [param])
        param.grad = None
    try:
        param.sum().backward()
        optimizer.step()
    except RuntimeError as error:
        return 0.0, str(error)
    return float(param.detach()[0]), ""


def test_in_stage_2_a_gradient_may_be_dropped_or_zeroed_and_no_more() -> None:
    assert run_ranks(2, edited, "zeroed")[0] == (0.0, "")
    assert run_ranks(2, edited, "dropped")[0] == (0.0, "")
    for _, said in run_ranks(2, edited, "replaced"):
        assert "was changed or replaced, but stage 2 had reduced it" in said


CHANGES: dict[str, Callable[[list[nn.Parameter]], object]] = {
    "clip_grad_norm_": lambda params: nn.utils.clip_grad_norm_(params, 1.0),
    "clip_grad_norm_, foreach": lambda params: nn.utils.clip_grad_norm_(params, 1.0, foreach=True),
    "clip_grad_value_": lambda params: nn.utils.clip_grad_value_(params, 1.0),
    "mul_": lambda params: grad_of(params).mul_(0.5),
    "/=": lambda params: grad_of(params).__itruediv__(2),
    "copy_": lambda params: grad_of(params).copy_(torch.ones(4)),
}


def grad_of(params: list[nn.Parameter]) -> Tensor:
    assert params[0].grad is not None
    return params[0].grad


def changed_by_torch() -> dict[str, str]:
    said = {}
    for name, change in CHANGES.items():
        params = [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))]
        optimizer = zero(params, 2)
        (params[0] * params[1]).sum().backward()
        try:
            change(params)
        except RuntimeError as error:
            said[name] = str(error)
        assert bool(nn.utils.get_total_norm([grad_of(params)]).isnan())  # looking is no error
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        assert bool(params[0].isfinite().all())
    return said


def test_clipping_by_torch_in_stage_2_says_what_to_use_instead() -> None:
    for said in run_ranks(2, changed_by_torch):
        assert said.keys() == CHANGES.keys()
        for its in said.values():
            assert "clip and measure by the optimizer's clip_grad_norm_, clip_grad_value_ and grad_norm" in its


def dropped_in_all_ways() -> list[float]:
    left = []
    for way in ("module", "module, kept", "optimizer, kept", "foreach"):
        module = nn.Linear(2, 2)
        nn.init.zeros_(module.bias)  # so that the difference is exact
        optimizer = zero(module.parameters(), 2, lr=1.0)
        before = module.bias.detach().clone()
        for _ in range(2):
            if way == "module":
                module.zero_grad()
            elif way == "module, kept":
                module.zero_grad(set_to_none=False)
            elif way == "optimizer, kept":
                optimizer.zero_grad(set_to_none=False)
            else:
                torch.optim.SGD(module.parameters(), foreach=True).zero_grad(set_to_none=False)
            module(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        left.append(float((before - module.bias)[0].detach()))
    return left


def test_whichever_way_gradients_are_dropped_the_next_ones_are_alone() -> None:
    assert run_ranks(2, dropped_in_all_ways) == [[1.0] * 4] * 2
