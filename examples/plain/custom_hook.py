"""A communication hook of one's own: gradients are encoded before the all-reduce and decoded after it.

In Lightning: Trainer(strategy=CommHookDDPStrategy(hook=encode_and_decode, state=Quarter())).

Run: torchrun --nproc-per-node 2 examples/plain/custom_hook.py
"""

import sys
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from lightning_distkit.core.compression import attach

sys.path.append(str(Path(__file__).resolve().parents[1]))
import task


class Quarter:
    """Picks a random quarter of a gradient, a new one each time, and the same on every rank."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)  # DDP calls in the same order everywhere: it stays the same

    def encode(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        index = torch.randperm(len(gradient), generator=self.generator)[: len(gradient) // 4]
        return gradient[index], index


def encode_and_decode(state: Quarter, bucket: dist.GradBucket) -> Future[Tensor]:
    gradient = bucket.buffer()  # 1-D, of this rank alone, not divided by the number of ranks
    encoded, index = state.encode(gradient)
    future = dist.all_reduce(encoded, async_op=True).get_future()

    def decode(done: Future[list[Tensor]]) -> Tensor:
        return gradient.zero_().index_copy_(0, index, done.value()[0] / dist.get_world_size())

    return future.then(decode)


def main() -> None:
    task.use_loopback()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    train, validation = task.read_rows()
    loader = DataLoader(train, task.BATCH, sampler=DistributedSampler(train), drop_last=True)
    model = DistributedDataParallel(task.GPT())
    attach(model, Quarter(), encode_and_decode)  # register_comm_hook, with its contract checked
    optimizer, schedule = task.make_optimizer(model)

    for step, batch in enumerate(islice(loader, task.STEPS), 1):
        loss = task.loss_of(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 50 == 0:
            print(f"step {step:4} of {task.STEPS}: training loss {loss.item():.3f}", flush=True)

    if dist.get_rank() == 0:
        with torch.no_grad():
            losses = [task.loss_of(model.module, rows) for rows in validation.split(4 * task.BATCH)]
        print(f"validation loss {torch.stack(losses).mean():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
