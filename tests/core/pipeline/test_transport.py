"""Frames of any content cross in both directions at once, ahead of who reads them, and their memory comes back."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from lightning_distkit.core.ledger import Ledger
from lightning_distkit.core.pipeline import transport as module
from lightning_distkit.core.pipeline.frames import Parcel, pack
from lightning_distkit.core.pipeline.plan import Direction, Message
from lightning_distkit.core.pipeline.transport import Transport
from lightning_distkit.core.pipeline.watch import Broken, Ends
from tests.core.pipeline.test_frames import same
from tests.ranks import run_ranks


def transport(timeout: float = 20.0) -> Transport:
    ranks = list(range(dist.get_world_size()))
    group = dist.new_group(ranks, backend="gloo")
    return Transport(Ends(group, {}, torch.device("cpu"), ranks, len(ranks), timeout), Ledger())


def messages(source: int, n: int, direction: Direction = Direction.FORWARD) -> list[Message]:
    return [Message(source, 1 - source, direction, 0, i) for i in range(n)]


def values(received: Any) -> Any:
    assert isinstance(received, Parcel)
    return received.with_tensors(received.tensors)


def anything() -> tuple[int, int]:
    """Each rank sends the other frames that all differ, then the same again: what is known is not described again."""
    ends = transport()
    me, it = dist.get_rank(), 1 - dist.get_rank()
    dtypes = [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64, torch.float16, torch.uint8]
    nests: list[Any] = [torch.ones(n + 1, 2).to(dtype) for n, dtype in enumerate(dtypes)]
    nests += [(torch.zeros(()), None, "text"), {"a": [torch.arange(3), 1]}, torch.zeros(0, 5), [1, 2]]
    sent = []
    for number in (1, 2, 3):
        ends.begin(number, 7, [messages(it, len(nests))])
        before = ends.ledger.total
        for message, nest in zip(messages(me, len(nests)), nests, strict=True):
            ends.send(message, pack(nest))
        for message, nest in zip(messages(it, len(nests)), nests, strict=True):
            assert same(values(ends.receive(message)), nest)
        ends.finish()
        sent.append((ends.ledger.total.nbytes - before.nbytes, ends.ledger.total.n_messages - before.n_messages))
    payload = sum(tensor.nbytes for nest in nests for tensor in pack(nest).tensors)
    assert sent[1] == sent[2]
    assert sent[1][0] == payload + 64 * len(nests)
    assert sent[0][0] > sent[1][0]
    return sent[1]


def test_frames_hold_anything_and_the_second_time_a_header_and_the_payload_alone() -> None:
    first, second = run_ranks(2, anything)
    assert first == second


def more_descriptions_than_are_remembered() -> None:
    module._MAX_DESCRIPTIONS = 7
    ends, n = transport(), 20
    me, it = dist.get_rank(), 1 - dist.get_rank()
    for number in range(3):
        ends.begin(number, 0, [messages(it, n)])
        for message in messages(me, n):
            ends.send(message, pack([message.micro_batch % 11, torch.ones(1)]))
        for message in messages(it, n):
            assert values(ends.receive(message))[0] == message.micro_batch % 11
        ends.finish()


def test_more_different_frames_than_a_channel_remembers() -> None:
    run_ranks(2, more_descriptions_than_are_remembered)


def runs_of_changing_shapes() -> int:
    """Memory is offered for a frame like the last; where another comes, the offer stands for a later one."""
    ends = transport()
    me, it = dist.get_rank(), 1 - dist.get_rank()
    random = torch.Generator().manual_seed(0)
    for number in range(6):
        rows = [int(n) for n in torch.randint(0, 7, (8,), generator=random) for _ in range(2)]
        frames = [torch.full((n, 3), float(i + number)) for i, n in enumerate(rows)]
        ends.begin(number, 0, [messages(it, len(frames))])
        for message, frame in zip(messages(me, len(frames)), frames, strict=True):
            ends.send(message, pack([frame, frame + 0.5]))
        for message, frame in zip(messages(it, len(frames)), frames, strict=True):
            assert same(values(ends.receive(message)), [frame, frame + 0.5])
        ends.finish()
    (channel,) = ends._incoming.values()
    return len(channel._offers)


def test_shapes_may_change_in_a_call_and_a_few_offers_of_memory_stand() -> None:
    for n_offers in run_ranks(2, runs_of_changing_shapes):
        assert 0 < n_offers <= module._MAX_OFFERS


def ahead() -> list[float]:
    """While the reader is busy the next frame arrives, and no more than that; who sends is never held up."""
    ends = transport()
    n, numel = 4, 1_000_000
    dist.barrier()
    if dist.get_rank() == 0:
        begin = time.perf_counter()
        for message in messages(0, n):
            ends.send(message, pack(torch.full((numel,), float(message.micro_batch))))
        took = time.perf_counter() - begin
        ends.finish()
        return [took, time.perf_counter() - begin]
    ends.begin(0, 0, [messages(0, n)])
    waits = []
    for message in messages(0, n):
        time.sleep(0.3)
        assert ends._inbox.messages == {message}  # the next one, and no more
        before = ends.waited
        assert values(ends.receive(message))[0] == message.micro_batch
        waits.append(ends.waited - before)
    ends.finish()
    return waits


def test_frames_are_received_before_they_are_asked_for_and_sending_does_not_block() -> None:
    (sending, finished), waits = run_ranks(2, ahead)
    assert sending < 0.25
    assert finished > 0.5  # it waits at the end, as memory is held until it was taken
    assert max(waits) < 0.15


def read_in_another_order() -> None:
    """A frame that lies behind others is reached, though the channel is only one ahead."""
    ends = transport()
    order = [5, 0, 4, 1, 3, 2]
    if dist.get_rank() == 0:
        for message in messages(0, 6):
            ends.send(message, pack(torch.tensor(message.micro_batch)))
    else:
        ends.begin(0, 0, [messages(0, 6)])
        for i in order:
            assert values(ends.receive(messages(0, 6)[i])) == i
    ends.finish()


def test_frames_may_be_read_in_another_order_than_they_come() -> None:
    run_ranks(2, read_in_another_order)


def memory() -> tuple[int, bool]:
    """The memory of a frame is used again when nobody has it any more, and not before."""
    ends = transport()
    numel, pointers, kept = 100_000, [], []
    for number in range(8):
        if dist.get_rank() == 0:
            ends.send(messages(0, 1)[0], pack(torch.full((numel,), float(number))))
        else:
            ends.begin(number, 0, [messages(0, 1)])
            tensor = values(ends.receive(messages(0, 1)[0]))
            pointers.append(tensor.data_ptr())
            if number % 4 == 0:
                kept.append(tensor[:10])  # a view is enough
            del tensor
        ends._call = (number + 1, 0)
        ends.finish()
        dist.barrier()
    if dist.get_rank() == 0:
        return 0, True
    assert [float(each[0]) for each in kept] == [0.0, 4.0]
    return len(set(pointers)), True


def test_memory_of_frames_is_used_again_but_not_while_somebody_has_it() -> None:
    n_blocks, _ = run_ranks(2, memory)[1]
    assert n_blocks <= 3  # two are kept


def sent_memory_is_free() -> int:
    """What was sent is held until it was taken, and no longer; one frame is not kept for the next."""
    import weakref

    ends = transport()
    alive = []
    if dist.get_rank() == 0:
        for message in messages(0, 3):
            tensor = torch.ones(1000)
            alive.append(weakref.ref(tensor.untyped_storage()))
            storage_was = tensor.untyped_storage().nbytes()
            ends.send(message, pack(tensor))
            del tensor
            assert storage_was == 4000
    else:
        ends.begin(0, 0, [messages(0, 3)])
        for message in messages(0, 3):
            ends.receive(message)
    ends.finish()
    return sum(each() is not None for each in alive)


def test_what_was_sent_is_not_held_any_longer() -> None:
    assert run_ranks(2, sent_memory_is_free) == [0, 0]


def of_another_call() -> str:
    ends = transport()
    me, it = dist.get_rank(), 1 - dist.get_rank()
    ends.begin(1 + me, 0, [messages(it, 1)])
    ends.send(messages(me, 1)[0], pack(torch.ones(3)))
    try:
        ends.receive(messages(it, 1)[0])
    except Broken as broken:
        return str(ends.broken_by(broken.failure).text)
    raise AssertionError


def test_a_frame_of_another_call_is_an_error_that_names_both() -> None:
    first, second = run_ranks(2, of_another_call)
    assert first == second  # who noted it first
    assert "in call" in first
    assert "of call" in first
