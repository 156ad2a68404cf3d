"""What a training step does in one process; parallel.py does the same with several.

Shapes: B = batch, S = length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from byte_model import BYTES
from torch import Tensor, nn
from torch.nn import functional

LARGEST_NORM = 1.0
"""Of the gradients of all weights together; larger ones are scaled down to it."""


class Trainer:
    """Trains a network in this process.

    Where several ranks train one model, each method is called on all of them, in the same order and with the same
    whole batch: a rank takes its part of it. Losses are of the whole batch, the same on every rank.

    Args:
        network: what is trained, in place.
        compile: whether it runs through torch.compile.

    Attributes:
        network: holds the weights that this process trains.
    """

    def __init__(self, network: nn.Module, compile: bool = False) -> None:
        self.network = network
        self.model: Callable[[Tensor], Tensor] = torch.compile(network) if compile else network
        self.optimizer = AdamW(network.parameters())

    def backward(self, tokens: Tensor, targets: Tensor, where: str) -> float:
        """Make the gradients of a batch, [B, S] twice; its loss in bits a byte.

        Raises:
            FloatingPointError: the loss is not finite; on every rank alike.
        """
        self.network.zero_grad()  # before forward: between the two, FSDP has other Parameters in the network
        loss = self.loss(tokens, targets)
        value = bits(self.of_the_whole_batch(loss), where)
        torch.autograd.backward(loss)
        return value

    def update(self, lr: float) -> None:
        """Clip the gradients and take a step along them."""
        nn.utils.clip_grad_norm_(self.network.parameters(), LARGEST_NORM)
        self.optimizer.step(lr)

    @torch.no_grad()
    def evaluate(self, tokens: Tensor, targets: Tensor, where: str) -> float:
        """The loss of a batch in bits a byte; raises as `backward` does."""
        return bits(self.of_the_whole_batch(self.loss(tokens, targets)), where)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """What this process finds in its part of a batch, differentiable."""
        return cross_entropy(self.model(tokens), targets)

    def of_the_whole_batch(self, loss: Tensor) -> Tensor:
        """The loss of the batch from those of its parts."""
        return loss


class AdamW:
    """AdamW (Loshchilov and Hutter, 2019) with its state, and a copy of 16-bit weights, in float32.

    Written out because torch.optim imports the compiler, which takes as long as importing torch, and a bisect starts
    the program that uses this a dozen times. Weights may be DTensors: each rank updates its shards.
    """

    def __init__(self, weights: Iterable[nn.Parameter]) -> None:
        self.weights = list(weights)
        self.masters = [weight.detach().float() for weight in self.weights]
        self.means = [torch.zeros_like(master) for master in self.masters]
        self.squares = [torch.zeros_like(master) for master in self.masters]
        self.steps = 0

    @torch.no_grad()
    def step(self, lr: float, beta1: float = 0.9, beta2: float = 0.95, decay: float = 0.01, eps: float = 1e-8) -> None:
        self.steps += 1
        correction = math.sqrt(1 - beta2**self.steps)
        for weight, master, mean, square in zip(self.weights, self.masters, self.means, self.squares, strict=True):
            assert weight.grad is not None
            grad = weight.grad.float()
            mean.lerp_(grad, 1 - beta1)
            square.lerp_(grad * grad, 1 - beta2)
            master.mul_(1 - lr * decay)
            master.addcdiv_(mean, square.sqrt().div_(correction).add_(eps), value=-lr / (1 - beta1**self.steps))
            weight.copy_(master)


def schedule(step: int, steps: int) -> float:
    """The learning rate's factor: up over the first tenth, at most 20 steps, then along a cosine to a tenth."""
    warm_up = min(20, max(1, steps // 10))
    if step <= warm_up:
        return step / warm_up
    return 0.55 + 0.45 * math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up))


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean over all positions, in nats and float32."""
    return functional.cross_entropy(logits.float().view(-1, BYTES), targets.reshape(-1))


def bits(loss: Tensor, where: str) -> float:
    """The loss in bits a byte; FloatingPointError when it is not finite."""
    value = loss.item() / math.log(2)
    if not math.isfinite(value):
        raise FloatingPointError(
            f"the loss is {value} at {where}. A kernel or the settings are at fault: swap the backend "
            f"(TRIPTYCH_BACKEND=torch) to tell which; if it stays, lower --lr."
        )
    return value
