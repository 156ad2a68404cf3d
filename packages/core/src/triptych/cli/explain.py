"""`triptych explain`: which backend would run a call, by which rule, and why the others would not."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from triptych import scope, tools
from triptych.call import FORWARD, dtype_name
from triptych.cli.output import write_json
from triptych.cli.reading import policy_in_force
from triptych.compile_mode import INLINE
from triptych.errors import Refused, UsageError, nearest
from triptych.explain import Explanation, spec_of
from triptych.explain import explain as decide

LIMIT = 2**60
"""Elements that no tensor has: 8 bytes each, they would not fit into an address space that torch can count."""

DTYPES = {dtype_name(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)}


def explain(
    op: Annotated[str, typer.Argument(metavar="OP", help="An op, for example rms_norm.")],
    shape: Annotated[str, typer.Option(help="Shape of the op's first tensor, for example 4096x4096.")] = "4096x4096",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")] = "float32",
    device: Annotated[str, typer.Option(help="A device, for example cpu or cuda:1. It need not be present.")] = "cpu",
    phase: Annotated[str, typer.Option(help="forward or backward.")] = FORWARD,
    layer: Annotated[str, typer.Option(help="Name of the calling layer, for rules with @.")] = "",
    backend: Annotated[str, typer.Option(metavar="POLICY", help="Rules to put over the policy in force.")] = "",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result to FILE as JSON.")] = None,
) -> None:
    """Say which backend would run a call, by which rule, and why the others would not. Runs nothing."""
    args = spec_of(op).typical(parse_shape(shape), parse_dtype(dtype), parse_device(device))
    console = Console()
    try:
        with policy_in_force(), scope.use(backend):
            decision = decide(op, *args, phase=phase, layer=layer)
            if not decision.opaque and tools.see_calls(tools.read_settings(os.environ)):
                decision = dataclasses.replace(
                    decision, opaque="the environment switches on a tool that must see every call"
                )
    except Refused as refusal:
        if json_file is not None:
            write_json(json_file, {"schema": 1, **refusal.record})
        console.print(f"Refused: {refusal}", highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    if json_file is not None:
        write_json(json_file, {"schema": 1, **decision.to_json()})
    for line in lines(decision):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def lines(decision: Explanation) -> list[str]:
    """The record of a decision as text."""
    call = decision.call
    origin = f" ({decision.distribution} {decision.version})" if decision.distribution else ""
    text = [f"{call.op}.{call.phase} runs on {decision.chosen}{origin}"]
    text.append(f"  decided by: {decision.rule.text} ({decision.rule.source})")
    for name, reasons in decision.rejected:
        text += [f"  not {name}: {reason}" for reason in reasons]
    return [*text, f"  compile mode: {decision.mode}{_compiled(decision)}", f"  asked: {call}"]


def _compiled(decision: Explanation) -> str:
    """What the mode comes to for this call, where it is not what it always comes to."""
    if not decision.opaque:
        return ": torch.compile traces through the implementation of 'torch'; tools and counters do not see such calls"
    return f": opaque all the same, since {decision.opaque}" if decision.mode.name == INLINE else ""


def parse_shape(text: str) -> tuple[int, ...]:
    """`4096x4096` as (4096, 4096)."""
    if not re.fullmatch(r"[0-9]+(x[0-9]+)*", text):
        raise UsageError(f"--shape is {text!r}. Write sizes joined by x, for example 4096x4096 or 8x128x4096.")
    sizes = [size.lstrip("0") or "0" for size in text.split("x")]
    shape = tuple(int(size[:20]) for size in sizes)  # 20 digits are beyond the limit, and int() has one of its own
    if math.prod(max(size, 1) for size in shape) >= LIMIT:
        shown = text if len(text) <= 60 else f"{text[:57]}..."
        raise UsageError(
            f"--shape is {shown!r}. A tensor has fewer than 2**60 elements (a size of 0 counts as 1). Use smaller."
        )
    return shape


def parse_dtype(text: str) -> torch.dtype:
    """`bfloat16` as torch.bfloat16."""
    if text.removeprefix("torch.") not in DTYPES:
        raise UsageError(f"--dtype is {text!r}. {nearest(text, DTYPES)}")
    return DTYPES[text.removeprefix("torch.")]


def parse_device(text: str) -> torch.device:
    """`cuda:1` as torch.device("cuda", 1)."""
    cause: Exception | None = None
    try:
        device = torch.device(text)
        if str(device) == text:  # torch takes cuda:999 for cuda:-25
            return device
    except RuntimeError as error:
        cause = error
    raise UsageError(f"--device is {text!r}. Write a torch device, for example cpu, cuda or cuda:1.") from cause
