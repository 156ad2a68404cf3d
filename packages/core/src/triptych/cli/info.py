"""`triptych info`: backends, ops, versions, devices, the policy in force, and what is broken and why."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from triptych import environment, registry, scope
from triptych.backend import ask, origin_of
from triptych.cli.output import write_json
from triptych.cli.reading import policy_in_force
from triptych.errors import TriptychError
from triptych.trace import versions

MISSING = {"cuda": "none (a CPU build of torch)", "triton": "not installed", "triptych": "not installed"}
"""What the text says in place of a version that there is not."""


def info(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result to FILE as JSON.")] = None,
) -> None:
    """List backends, ops, versions, devices and the policy in force; say what is broken and why."""
    with policy_in_force():
        found = collect()
    if json_file is not None:
        write_json(json_file, found)
    show(found, Console())


def collect() -> dict[str, Any]:
    """Everything `triptych info` shows, as plain data."""
    return {
        "schema": 1,
        "versions": versions(),
        "devices": _devices(),
        "backends": [_backend(name) for name in registry.backends.names()],
        "ops": [_op(name) for name in registry.ops.names()],
        "policy": [{"rule": rule.text, "source": rule.source} for rule in scope.current().policy.rules],
        "environment": {name: os.environ[name] for name in environment.VARIABLES if name in os.environ},
    }


def _devices() -> list[str]:
    devices = [f"cpu: {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"]
    for index in range(torch.cuda.device_count()):
        try:
            properties = torch.cuda.get_device_properties(index)
        except RuntimeError as cause:  # a broken driver, or a device that another process holds for itself
            devices.append(f"cuda:{index}: it cannot be asked what it is: {cause}")
            continue
        devices.append(
            f"cuda:{index}: {properties.name}, compute capability {properties.major}.{properties.minor}, "
            f"{properties.multi_processor_count} SMs, {properties.total_memory / 2**30:.0f} GiB"
        )
    return devices


def _backend(name: str) -> dict[str, Any]:
    row: dict[str, Any] = {
        "name": name,
        "origin": registry.backends.origin(name),
        "ops": [],
        "auto": {},
        "broken": None,
    }
    row["unavailable"] = []
    try:
        backend = registry.backends.get(name)
        origin_of(backend)
        row["unavailable"] = list(ask(backend, "reasons_unavailable"))
        row["ops"] = list(ask(backend, "ops"))
        places = {kind: ask(backend, "priority", kind) for kind in ("cpu", "cuda")}
    except TriptychError as cause:
        row["broken"] = str(cause)
        return row
    row["auto"] = {kind: rank for kind, rank in places.items() if rank is not None}
    return row


def _op(name: str) -> dict[str, Any]:
    row: dict[str, Any] = {"name": name, "origin": registry.ops.origin(name), "broken": None}
    try:
        spec = registry.ops.get(name)
    except TriptychError as cause:
        return {**row, "summary": "", "phases": {}, "broken": str(cause)}
    phases = {phase: [each for each in registry.backends.names() if _runs(each, name, phase)] for phase in spec.phases}
    return {**row, "summary": str(spec.summary), "phases": phases}


def _runs(backend: str, op: str, phase: str) -> bool:
    try:
        plugin = registry.backends.get(backend)
        return not ask(plugin, "reasons_unavailable") and ask(plugin, "implementation", op, phase) is not None
    except TriptychError:
        return False


def show(found: dict[str, Any], console: Console) -> None:
    """Print what `collect` returned."""
    known = [f"{name} {version or MISSING[name]}" for name, version in found["versions"].items()]
    console.print(", ".join(known), highlight=False, markup=False, soft_wrap=True)
    for device in found["devices"]:
        console.print(device, highlight=False, markup=False, soft_wrap=True)
    backends = Table("backend", "from", "place in auto", "state", title="Backends", title_justify="left")
    for row in found["backends"]:
        places = ", ".join(f"{kind} {rank}" for kind, rank in row["auto"].items()) or "none: by name only"
        state = "broken" if row["broken"] else "unavailable" if row["unavailable"] else "ready"
        backends.add_row(*map(escape, (row["name"], row["origin"], places, state)))
    console.print(backends)
    for row in found["backends"]:
        for reason in [row["broken"]] if row["broken"] else row["unavailable"]:
            console.print(f"{row['name']}: {reason}", highlight=False, markup=False, soft_wrap=True)
    ops = Table("op", "phase", "runs on", "from", title="Ops", title_justify="left")
    for row in found["ops"]:
        for phase, names in row["phases"].items():
            ops.add_row(*map(escape, (row["name"], phase, ", ".join(names) or "nothing", row["origin"])))
    console.print(ops)
    for row in found["ops"]:
        if row["broken"]:
            console.print(f"{row['name']}: {row['broken']}", highlight=False, markup=False, soft_wrap=True)
    console.print("Policy, the last rule that matches decides:", highlight=False)
    for rule in found["policy"]:
        console.print(f"  {rule['rule']}  ({rule['source']})", highlight=False, markup=False, soft_wrap=True)
