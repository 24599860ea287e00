"""A skip tensor goes from the one layer that stashes it to the one that pops it."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Generator
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_distkit.core.pipeline.skip import (
    Namespace,
    Skippable,
    carried,
    isolate,
    pop,
    skip_layout,
    skippable,
    stash,
    verify_skippables,
)

Steps = Generator[Any, Any, Any]


@skippable(stash=["1to3"])
class Layer1(nn.Module):
    """Stashes its input."""

    def forward(self, x: Tensor) -> Steps:
        yield stash("1to3", x)
        return x * 2


class Layer2(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1


@skippable(pop=["1to3"])
class Layer3(nn.Module):
    def forward(self, x: Tensor) -> Steps:
        skip = yield pop("1to3")
        return x * skip


@skippable(stash=["alice", "bob"])
class StashTwo(nn.Module):
    def forward(self, x: Tensor) -> Steps:
        yield stash("alice", x + 1)
        yield stash("bob", x + 2)
        return x


@skippable(pop=["alice", "bob"], stash=["carol"])
class PopTwoStashOne(nn.Module):
    def forward(self, x: Tensor) -> Steps:
        bob = yield pop("bob")
        yield stash("carol", x + 10)
        alice = yield pop("alice")
        return alice * bob


@skippable(pop=["carol"])
class PopCarol(nn.Module):
    def forward(self, x: Tensor) -> Steps:
        return x + (yield pop("carol"))


def test_it_works_in_a_plain_sequential_with_gradients() -> None:
    x = torch.tensor([2.0, 3.0], requires_grad=True)
    y = nn.Sequential(Layer1(), Layer2(), Layer3())(x)
    assert torch.equal(y, (2 * x + 1) * x)
    y.sum().backward()
    assert torch.equal(x.grad, 4 * x.detach() + 1)  # type: ignore[arg-type]


def test_a_layer_may_stash_and_pop_several_in_any_order() -> None:
    x = torch.tensor([2.0])
    assert nn.Sequential(StashTwo(), PopTwoStashOne(), Layer2(), PopCarol())(x) == (3 * 4 + 1) + 12


def test_none_can_be_stashed_and_nothing_else_than_tensors() -> None:
    @skippable(stash=["x"])
    class Stash(nn.Module):
        def __init__(self, value: Any) -> None:
            super().__init__()
            self.value = value

        def forward(self, x: Tensor) -> Steps:
            yield stash("x", self.value)
            return x

    @skippable(pop=["x"])
    class Pop(nn.Module):
        def forward(self, x: Tensor) -> Steps:
            assert (yield pop("x")) is None
            return x

    x = torch.ones(1)
    assert nn.Sequential(Stash(None), Pop())(x) is x
    with pytest.raises(TypeError, match="a tensor or None can be stashed, got int as 'x'"):
        Stash(3)(x)


def test_a_decorated_class_keeps_its_name_its_arguments_and_its_layer() -> None:
    @skippable(stash=["s"])
    class Scaled(nn.Module):
        def __init__(self, n: int, *, bias: bool) -> None:
            super().__init__()
            self.linear = nn.Linear(n, n, bias=bias)

        def forward(self, x: Tensor, *, scale: float) -> Steps:
            yield stash("s", x)
            return self.linear(x) * scale

    layer = Scaled(3, bias=False)
    assert isinstance(layer, Skippable)
    assert (Layer1.__name__, Layer1.__module__, Layer1.__doc__) == ("Layer1", __name__, "Stashes its input.")
    assert list(layer.state_dict()) == ["module.linear.weight"]
    assert repr(Layer1()) == "@skippable(Layer1())"
    x = torch.ones(2, 3)
    with carried() as tracker:
        assert torch.equal(layer(x, scale=2.0), layer.module.linear(x) * 2)  # type: ignore[operator, union-attr]
    assert tracker.stashed == {(None, "s"): x}


def test_several_values_go_through_as_they_are() -> None:
    @skippable(stash=["s"])
    class Two(nn.Module):
        def forward(self, a: Tensor, b: int) -> Steps:
            yield stash("s", a)
            return a, b + 1

    x = torch.ones(1)
    with carried():
        assert Two()(x, 3) == (x, 4)


def test_a_forward_without_a_yield_may_not_forget_what_it_declared() -> None:
    @skippable(stash=["s"])
    class Forgets(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    @skippable()
    class Nothing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    x = torch.ones(1)
    with pytest.raises(RuntimeError, match="'s' must be stashed but have not"):
        Forgets()(x)
    assert Nothing()(x) is x


def commanded(*commands: Any, **names: Any) -> nn.Module:
    @skippable(**names)
    class Commanded(nn.Module):
        def forward(self, x: Tensor) -> Steps:
            for command in commands:  # noqa: UP028  # which would not send them their answers
                yield command
            return x

    return Commanded()


X = torch.ones(1)


@pytest.mark.parametrize(
    ("layer", "error", "message"),
    [
        (commanded(stash("b", X), stash=["a"]), RuntimeError, "'b' has not been declared as stashable"),
        (commanded(pop("b"), pop=["a"]), RuntimeError, "'b' has not been declared as poppable"),
        (commanded(pop=["a"]), RuntimeError, "'a' must be popped but have not"),
        (commanded(stash=["b", "a"]), RuntimeError, "'a', 'b' must be stashed but have not"),
        (commanded(pop("a"), pop("a"), pop=["a"]), RuntimeError, "'a' has been popped already"),
        (commanded(pop("c"), pop=["c"]), RuntimeError, "'c' has not been stashed"),
        (commanded("hello"), TypeError, "'hello' is not a command from @skippable"),
    ],
)
def test_a_layer_that_does_not_what_it_declared_is_refused(layer: nn.Module, error: Any, message: str) -> None:
    with carried({(None, "a"): X}), pytest.raises(error, match=message):
        layer(X)


def test_a_string_is_no_list_of_names() -> None:
    with pytest.raises(TypeError, match=r"got the string '1to3'; write \['1to3'\]"):
        skippable(stash="1to3")


@pytest.mark.parametrize(
    ("layers", "faults"),
    [
        ([Layer1(), Layer2()], ["no module declared '1to3' as poppable but stashed"]),
        ([Layer2(), Layer3()], ["'1' declared '1to3' as poppable but it was not stashed"]),
        (
            [Layer1(), Layer2(), Layer3(), Layer3()],
            ["'3' redeclared '1to3' as poppable but not isolated by namespace"],
        ),
        (
            [Layer1(), Layer1(), Layer2(), Layer3()],
            ["'1' redeclared '1to3' as stashable but not isolated by namespace"],
        ),
        (
            [Layer3(), Layer1()],
            [
                "'0' declared '1to3' as poppable but it was not stashed",
                "no module declared '1to3' as poppable but stashed",
            ],
        ),
        ([commanded(stash=["a"], pop=["a"])], ["'0' declared 'a' both as stashable and as poppable"]),
        (
            [StashTwo(), Layer3(), PopCarol()],
            [
                "'1' declared '1to3' as poppable but it was not stashed",
                "'2' declared 'carol' as poppable but it was not stashed",
                "no module declared 'alice' as poppable but stashed",
                "no module declared 'bob' as poppable but stashed",
            ],
        ),
    ],
)
def test_all_mismatches_are_in_one_type_error(layers: list[nn.Module], faults: list[str]) -> None:
    with pytest.raises(TypeError) as raised:
        verify_skippables(nn.Sequential(*layers))
    first, *others = str(raised.value).split("\n* ")
    assert first.strip() == "one or more pairs of stash and pop do not match:"
    assert others == faults


def test_matching_pairs_are_accepted() -> None:
    verify_skippables(nn.Sequential(Layer1(), Layer2(), Layer3()))
    verify_skippables(nn.Sequential(StashTwo(), PopTwoStashOne(), PopCarol()))
    verify_skippables(nn.Sequential(nn.Sequential(Layer1(), Layer2()), Layer3()))
    verify_skippables(nn.Sequential())


def test_pairs_inside_other_modules_are_seen() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.first = Layer3(), Layer1()  # in which order they run cannot be told from this

    verify_skippables(nn.Sequential(Block()))
    with pytest.raises(TypeError, match=r"'0\.first' redeclared"):
        verify_skippables(nn.Sequential(OrderedLayers(Layer1()), Layer3()))


class OrderedLayers(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.stash, self.first = layers[0], deepcopy(layers[0])


def test_namespaces_set_one_name_apart() -> None:
    outer, inner = Namespace(), Namespace()
    module = nn.Sequential(
        Layer1().isolate(outer),
        Layer1().isolate(inner),
        Layer2(),
        isolate(Layer3(), inner),
        Layer3().isolate(outer),
    )
    verify_skippables(module)
    x = torch.tensor([2.0])
    assert module(x) == (4 * x + 1) * (2 * x) * x
    with pytest.raises(TypeError, match="redeclared"):
        verify_skippables(nn.Sequential(Layer1().isolate(outer), Layer1().isolate(outer), Layer3().isolate(outer)))


def test_only_some_names_may_be_isolated() -> None:
    alice, bob = Namespace(), Namespace()
    two = StashTwo().isolate(alice, only=["alice"]).isolate(bob, only=["bob"])
    assert list(two.stashable()) == [(alice, "alice"), (bob, "bob")]
    assert list(PopTwoStashOne().isolate(bob, only="bob").poppable()) == [(None, "alice"), (bob, "bob")]
    with pytest.raises(ValueError, match="must name skip tensors of this layer, 'alice', 'bob'; got 'carol'"):
        StashTwo().isolate(alice, only=["carol"])


def test_a_namespace_is_its_copies_and_nothing_else() -> None:
    one, other = Namespace(), Namespace()
    for copied in (deepcopy(one), pickle.loads(pickle.dumps(one))):
        assert copied == one
        assert hash(copied) == hash(one)
    assert one != other
    assert (one < other) != (other < one)
    assert one != "one"


def test_skippable_layers_can_be_copied_and_pickled() -> None:
    module = nn.Sequential(Layer1().isolate(Namespace()), Layer2(), Layer3())
    module[2].isolate(module[0].namespaces["1to3"])
    x = torch.tensor([2.0])
    for copied in (deepcopy(module), pickle.loads(pickle.dumps(module))):
        verify_skippables(copied)
        assert torch.equal(copied(x), module(x))


def test_partitions_are_functions_of_values_and_skips() -> None:
    front, back = nn.Sequential(Layer1(), StashTwo(), Layer2()), nn.Sequential(PopTwoStashOne(), PopCarol(), Layer3())
    x = torch.tensor([2.0])
    with carried() as sent:
        h = front(x)
    assert {name for _, name in sent.stashed} == {"1to3", "alice", "bob"}
    with carried(sent.stashed) as left:
        y = back(h)
    assert left.stashed == {}  # carol did not leave
    assert len(sent.stashed) == 3
    assert torch.equal(y, nn.Sequential(*front, *back)(x))
    with carried(), pytest.raises(RuntimeError, match="has not been stashed"):
        back(h)


def test_the_layout_says_from_which_partition_to_which() -> None:
    partitions = [nn.Sequential(Layer1(), StashTwo()), nn.Sequential(PopTwoStashOne(), PopCarol()), Layer3()]
    assert list(skip_layout(partitions).items()) == [
        ((None, "1to3"), (0, 2)),
        ((None, "alice"), (0, 1)),
        ((None, "bob"), (0, 1)),
        ((None, "carol"), (1, 1)),
    ]


def test_threads_do_not_see_each_others_skips() -> None:
    with carried({(None, "1to3"): X}):
        raised = []

        def other() -> None:
            try:
                Layer3()(X)
            except RuntimeError as error:
                raised.append(str(error))

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert raised == ["'1to3' has not been stashed"]
        assert torch.equal(Layer3()(X), X)
