"""Text to train on: read from files, split, drawn from in random windows.

Shapes: B = batch, S = length.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

MAX_DATA = 8 << 20
"""Bytes of text read at most: more than the default run sees, and read in well under a second."""


def read_text(data: Path | None) -> bytes:
    """The first MAX_DATA bytes of a file, of a folder's text files in sorted order, or of the standard library.

    Raises:
        FileNotFoundError: there is no such path.
        ValueError: there is no text in it.
    """
    if data is None:
        source = f"the standard library in {sysconfig.get_paths()['stdlib']}"
        files = text_files(Path(sysconfig.get_paths()["stdlib"]), ".py")
    else:
        source = str(data)
        if not data.exists():
            raise FileNotFoundError(
                f"--data {data}: there is no such file or folder. Name one that exists, or leave it out."
            )
        files = iter((data,)) if data.is_file() else text_files(data, "")
    text = bytearray()
    for file in files:
        with file.open("rb") as stream:
            part = stream.read(MAX_DATA - len(text))
        if b"\0" not in part[:4096]:
            text += part
        if len(text) >= MAX_DATA:
            break
    if not text:
        raise ValueError(f"--data: {source} holds no text. Name a text file, or a folder with text files in it.")
    return bytes(text)


def text_files(folder: Path, suffix: str) -> Iterator[Path]:
    """Files below `folder` whose names end in `suffix`, in an order that depends on their names only."""
    skipped = {"__pycache__", "site-packages", "dist-packages"}
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in skipped and not name.startswith("."))
        for name in sorted(names):
            path = Path(root, name)
            if name.endswith(suffix) and not name.startswith(".") and path.is_file():
                yield path


def split(text: bytes, length: int) -> tuple[Tensor, Tensor]:
    """Training and held-out bytes, uint8: the last tenth is held out.

    Raises:
        ValueError: one of them is too short for a sequence and its next byte.
    """
    needed = 10 * (length + 2)
    if len(text) < needed:
        raise ValueError(
            f"--data: the text has {len(text)} bytes; --length {length} needs at least {needed}. "
            f"Give more text, or a --length of at most {max(len(text) // 10 - 2, 1)}."
        )
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    held_out = len(text) // 10
    return data[:-held_out], data[-held_out:]


def windows(data: Tensor, batch: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random sequences and their next bytes, both [B, S] of int64 on the data's device."""
    starts = torch.randint(len(data) - length, (batch, 1), generator=generator)
    index = (starts + torch.arange(length + 1)).to(data.device)
    tokens = data[index].long()
    return tokens[:, :-1], tokens[:, 1:]
