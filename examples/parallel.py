"""What `train_text.py --parallel` does: several ranks train one model.

    torchrun --nproc-per-node 2 examples/train_text.py --parallel ddp     each rank takes a part of every batch
    ... --parallel fsdp                                                   and holds a part of every weight (FSDP2)
    ... --parallel tp          each rank holds a part of every layer; between layers, a part of every sequence
    ... --parallel pp          each rank holds some of the blocks and trains them on microbatches

Batches, weights and losses are those of a run in one process. On CPUs the ranks talk through gloo, on GPUs through
NCCL, one GPU for each rank.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from byte_model import BYTES, Block, ByteModel, hidden_width
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from trainer import LARGEST_NORM, Trainer, bits, cross_entropy

import triptych
from triptych.report import Row

if TYPE_CHECKING:
    from train_text import Settings

LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What a launcher puts into the environment of each process."""


class Ranks:
    """Where a run takes place: on all ranks of the default process group, of which this process is one.

    Attributes:
        device: of the data and the model, on this rank.
        talks: whether this rank prints and writes files: the first does.
    """

    def __init__(self, settings: Settings, device: torch.device) -> None:
        self.settings = settings
        self.device = device
        self.talks = dist.get_rank() == 0

    def trainer(self, network: ByteModel) -> Trainer:
        """What trains a network here; every rank passes the same one."""
        mesh = init_device_mesh(self.device.type, (dist.get_world_size(),))
        return TRAINERS[self.settings.parallel](network, self.settings, mesh)

    def rows(self) -> dict[str, Sequence[Row]]:
        """What ran, by the ranks that it ran on."""
        return rows_by_ranks()


def rows_by_ranks() -> dict[str, Sequence[Row]]:
    """What ran on all ranks; those where the same ran share an entry. Every rank calls it."""
    every: list[Sequence[Row]] = [()] * dist.get_world_size()
    dist.all_gather_object(every, triptych.report().rows)
    ranks: dict[Sequence[Row], list[int]] = {}
    for rank, rows in enumerate(every):
        ranks.setdefault(rows, []).append(rank)
    return {spans(numbers): rows for rows, numbers in ranks.items()}


def spans(numbers: list[int]) -> str:
    """Ascending numbers as text: 0-3, 5."""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][-1] == number - 1:
            found[-1][1:] = [number]
        else:
            found.append([number])
    return ", ".join("-".join(map(str, span)) for span in found)


@contextmanager
def joined(settings: Settings, device_type: str) -> Iterator[Ranks]:
    """The process group of the launched processes, while the block runs.

    After an error it is left to the end of the process: the other ranks may be waiting in a collective, and to leave
    in order would be to wait for them.
    """
    device = torch.device(device_type)
    if device_type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    transport = "nccl" if device_type == "cuda" else "gloo"
    dist.init_process_group(transport, device_id=device if device_type == "cuda" else None)
    yield Ranks(settings, device)
    settle()
    dist.destroy_process_group()


def settle() -> None:
    """Before a rank ends: let gloo's threads have the interpreter's lock until they are done with the last tensors.

    One that wants it later, to free the Python side of a tensor, aborts the process if Python is shutting down, and
    waits for ever if the lock is held by what is freeing the group: DistributedDataParallel and FSDP keep the group
    until then. Without this, one run in ten ends so.
    """
    if dist.get_backend() == "gloo":
        time.sleep(0.2)


# --- the batch is shared out ------------------------------------------------------------------------------------------


class DataParallel(Trainer):
    """Each rank holds the model, or a part of each weight, and takes its part of every batch."""

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        ranks, rank = dist.get_world_size(), dist.get_rank()
        return super().loss(tokens.chunk(ranks)[rank], targets.chunk(ranks)[rank])

    def of_the_whole_batch(self, loss: Tensor) -> Tensor:
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total / dist.get_world_size()


def ddp(network: ByteModel, settings: Settings, mesh: DeviceMesh) -> Trainer:
    """Each rank holds the model; gradients are averaged while backward runs."""
    return DataParallel(DistributedDataParallel(network, device_mesh=mesh), settings.compile)


def fsdp(network: ByteModel, settings: Settings, mesh: DeviceMesh) -> Trainer:
    """Each rank holds a part of each weight; a block's weights are gathered while it runs, its gradients scattered."""
    if settings.dtype != "float32":  # a group has one dtype, and the norms' weights have float32
        for layer in triptych.name_layers(network).values():
            fully_shard(layer, mesh=mesh)
    for block in network.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(network, mesh=mesh)
    return DataParallel(network, settings.compile)


# --- every layer is shared out ----------------------------------------------------------------------------------------


class TensorParallel(Trainer):
    """Each rank holds a part of each layer and sees the whole batch; the logits are gathered on all."""

    def update(self, lr: float) -> None:
        for weight in self.network.parameters():
            # Each rank has the gradients of the norms for its part of the sequence: sums that are still to be taken.
            assert isinstance(weight, DTensor) and isinstance(weight.grad, DTensor)
            weight.grad = weight.grad.redistribute(placements=weight.placements)
        super().update(lr)


def tp(network: ByteModel, settings: Settings, mesh: DeviceMesh) -> Trainer:
    """Attention heads and the feed-forward's hidden width are shared out; norms and residuals have sequence shards."""
    for block in network.blocks:
        assert isinstance(block, Block)
        share_rows_out(block.attention.qkv, 3, mesh.size())
        share_rows_out(block.ffn.gate_up, 2, mesh.size())
        plan = {
            "attention_norm": SequenceParallel(),
            "attention.qkv": ColwiseParallel(input_layouts=Shard(1)),
            "attention.out": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
            "ffn.gate_up": ColwiseParallel(input_layouts=Shard(1)),
            "ffn.down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        }
        parallelize_module(block, mesh, plan)
        distribute_module(block.ffn_norm, mesh)  # SequenceParallel passes one input on; this norm has two
    ends = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False),
        "final_norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(network, mesh, ends)
    if settings.head == "tied":
        network.head.weight = network.embedding.weight  # both have the bytes shared out, and have become two
    return TensorParallel(network, settings.compile)


@torch.no_grad()
def share_rows_out(linear: nn.Linear, parts: int, ranks: int) -> None:
    """Order the rows of a layer that is `parts` layers in one, so that each rank's rows are its share of each part."""
    rows = linear.weight.view(parts, ranks, -1, linear.in_features)
    linear.weight.copy_(rows.transpose(0, 1).flatten(0, 2))  # flatten has copied: the order has changed


# --- the blocks are shared out ----------------------------------------------------------------------------------------


class Pipeline(Trainer):
    """Each rank holds one stage of the model; microbatches go through the stages one after the other."""

    def __init__(self, network: ByteModel, settings: Settings, mesh: DeviceMesh) -> None:
        # PyTorch's pipelining imports the compiler's tracer: only here.
        from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, SplitPoint, pipeline

        self.stages, self.rank = mesh.size(), mesh.get_rank()
        device = network.embedding.weight.device
        example = torch.zeros(settings.batch // settings.microbatches, settings.length, dtype=torch.long, device=device)
        cuts = [settings.layers * stage // self.stages for stage in range(1, self.stages)]
        spec = {f"blocks.{cut}": SplitPoint.BEGINNING for cut in cuts}
        pipe = pipeline(network, (example,), split_spec=spec)
        super().__init__(pipe.get_stage_module(self.rank))
        stage = pipe.build_stage(self.rank, device, mesh.get_group())
        kinds = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
        self.schedule = kinds[settings.schedule](stage, settings.microbatches, loss_fn=cross_entropy)

    def backward(self, tokens: Tensor, targets: Tensor, where: str) -> float:
        self.network.zero_grad()
        return self._run(self.schedule.step, tokens, targets, where)

    def evaluate(self, tokens: Tensor, targets: Tensor, where: str) -> float:
        return self._run(self.schedule.eval, tokens, targets, where)

    def _run(self, work: Callable[..., object], tokens: Tensor, targets: Tensor, where: str) -> float:
        """The first stage takes the tokens, the last finds the losses, and all hear of their mean."""
        losses: list[Tensor] = []
        last = self.rank == self.stages - 1
        work(*((tokens,) if self.rank == 0 else ()), **({"target": targets, "losses": losses} if last else {}))
        loss = torch.stack(losses).mean() if last else torch.zeros((), device=tokens.device)
        loss = loss.detach()
        dist.broadcast(loss, self.stages - 1)
        return bits(loss, where)

    def update(self, lr: float) -> None:
        weights = list(self.network.parameters())
        norm = nn.utils.get_total_norm([weight.grad for weight in weights if weight.grad is not None])
        square = norm.square()
        dist.all_reduce(square)
        nn.utils.clip_grads_with_norm_(weights, LARGEST_NORM, square.sqrt())
        self.optimizer.step(lr)


TRAINERS = {"ddp": ddp, "fsdp": fsdp, "tp": tp, "pp": Pipeline}


# --- wrong use --------------------------------------------------------------------------------------------------------


def mistakes(settings: Settings, device_type: str) -> list[str]:
    """What keeps this process from being one of the ranks that the settings ask for, a sentence each."""
    asked = f"--parallel {settings.parallel}"
    if missing := [name for name in LAUNCHED if name not in os.environ]:
        return [
            f"{asked}: the environment lacks {', '.join(missing)}: this process was not started as a rank. "
            f"Start it by a launcher, for example: "
            f"torchrun --nproc-per-node 2 examples/train_text.py {asked}"
        ]
    ranks, here = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if device_type == "cuda" and torch.cuda.device_count() < here:
        count = torch.cuda.device_count()
        return [
            f"{asked}: this machine has {here} ranks and {count} CUDA devices; each rank needs its own. "
            f"Start at most {count} ranks on it, or use --device cpu."
        ]
    return [f"{asked}: {mistake}" for mistake in NEEDS[settings.parallel](settings, ranks)]


def needs_of_data_parallel(settings: Settings, ranks: int) -> list[str]:
    return unequal(ranks, "--batch", settings.batch)


def needs_of_tp(settings: Settings, ranks: int) -> list[str]:
    found = unequal(ranks, "--heads", settings.heads) + unequal(ranks, "--length", settings.length)
    if not found and (hidden_width(settings.dim) % ranks or BYTES % ranks):
        found.append(
            f"{ranks} ranks cannot share out {BYTES} bytes and a feed-forward {hidden_width(settings.dim)} wide "
            f"equally. Use 2, 4, 8 or 16 ranks."
        )
    if settings.compile:
        found.append("the model cannot be compiled in this mode. Leave --compile out.")
    return found


def needs_of_pp(settings: Settings, ranks: int) -> list[str]:
    microbatches = settings.microbatches
    found = unequal(microbatches, "--batch", settings.batch, "microbatches") if microbatches > 0 else []
    if microbatches < ranks:
        found.append(f"--microbatches is {microbatches}. It must be at least {ranks}, the number of ranks.")
    if settings.layers < ranks:
        found.append(f"--layers is {settings.layers}. It must be at least {ranks}: each rank holds whole blocks.")
    if settings.head == "tied":
        found.append(
            "--head is tied, but the first rank would hold the embedding and the last one the head, and each would "
            "train its own copy. Use --head untied."
        )
    if settings.compile:
        found.append("the model is traced in this mode and cannot be compiled. Leave --compile out.")
    return found


def unequal(parts: int, option: str, size: int, what: str = "ranks") -> list[str]:
    if size % parts == 0:
        return []
    fits = ", ".join(str(parts * factor) for factor in sorted({max(1, size // parts), size // parts + 1}))
    return [f"{option} is {size}. It must be a multiple of {parts}, the number of {what}, such as {fits}."]


NEEDS = {"ddp": needs_of_data_parallel, "fsdp": needs_of_data_parallel, "tp": needs_of_tp, "pp": needs_of_pp}
