"""A small Llama-style language model of bytes, with Triptych's norms.

The first residual addition of a block is fused with the norm after it (AddRMSNorm); the other norms are RMSNorm.

Shapes: B = batch, S = length, N = dim, H = heads, D = N / H.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from triptych.layers import AddRMSNorm, RMSNorm

BYTES = 256


class Attention(nn.Module):
    """Causal self-attention with rotary position embedding. [B, S, N] to the same."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.width = dim // heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (3, -1, self.width))  # as many as this layer has weights for: see parallel.py
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each [B, H, S, D]
        mixed = functional.scaled_dot_product_attention(rotate(q, rotation), rotate(k, rotation), v, is_causal=True)
        y: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return y


class SwiGLU(nn.Module):
    """The gated feed-forward network: down(silu(gate(x)) * up(x)). [B, S, N] to the same."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        hidden = hidden_width(dim)
        self.gate_up = nn.Linear(dim, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        y: Tensor = self.down(functional.silu(gate) * up)
        return y


def hidden_width(dim: int) -> int:
    """Of the feed-forward network: as many weights as a plain network of 4 dim, in multiples of 16."""
    return -(-8 * dim // 3 // 16) * 16


class Block(nn.Module):
    """Attention and feed-forward, each after a norm. The first residual addition is fused with the second norm."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(dim, eps=1e-5)
        self.attention = Attention(dim, heads)
        self.ffn_norm = AddRMSNorm(dim, eps=1e-5)
        self.ffn = SwiGLU(dim)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        y, h = self.ffn_norm(self.attention(self.attention_norm(x), rotation), x)
        out: Tensor = h + self.ffn(y)
        return out


class ByteModel(nn.Module):
    """A byte-level language model. Tokens [B, S] of int64 in 0..255 to logits [B, S, 256].

    Args:
        dim, layers, heads: the usual; dim must be an even multiple of heads.
        length: the longest S it takes.
        head: "tied" shares the embedding's weight, "untied" has its own.
    """

    rotation: Tensor

    def __init__(self, dim: int, layers: int, heads: int, length: int, head: str = "tied") -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.final_norm = RMSNorm(dim, eps=1e-5)
        self.head = nn.Linear(dim, BYTES, bias=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                into_residual = name.endswith(("attention.out.weight", "ffn.down.weight"))
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * layers) if into_residual else 0.02)
        if head == "tied":
            self.head.weight = self.embedding.weight
        self.register_buffer("rotation", rotations(length, dim // heads), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        rotation = self.rotation[:, : tokens.shape[1]]
        for block in self.blocks:
            x = block(x, rotation)
        logits: Tensor = self.head(self.final_norm(x))
        return logits


def rotations(length: int, width: int) -> Tensor:
    """Cosines and sines of every position's angles: [2, S, D / 2], float32."""
    frequencies = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float32) / width)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate the pairs (x[d], x[d + D/2]) of x [B, H, S, D] by their position's angles."""
    cos, sin = rotation.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
