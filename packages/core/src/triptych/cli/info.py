"""`triptych info`: backends, ops, versions, devices, the policy in force, and what is broken and why."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from triptych import environment, registry, scope
from triptych.cli.output import write_json
from triptych.errors import PluginError


def info(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result to FILE as JSON.")] = None,
) -> None:
    """List backends, ops, versions, devices and the policy in force; say what is broken and why."""
    found = collect()
    if json_file is not None:
        write_json(json_file, found)
    show(found, Console())


def collect() -> dict[str, Any]:
    """Everything `triptych info` shows, as plain data."""
    return {
        "schema": 1,
        "versions": _versions(),
        "devices": _devices(),
        "backends": [_backend(name) for name in registry.backends.names()],
        "ops": [_op(name) for name in registry.ops.names()],
        "policy": [{"rule": rule.text, "source": rule.source} for rule in scope.current().policy.rules],
        "environment": {name: os.environ[name] for name in environment.VARIABLES if name in os.environ},
    }


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    versions["cuda"] = torch.version.cuda or "none (a CPU build of torch)"
    for distribution in ("triptych", "triton"):
        try:
            versions[distribution] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            versions[distribution] = "not installed"
    return versions


def _devices() -> list[str]:
    devices = [f"cpu: {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
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
        row["unavailable"] = backend.reasons_unavailable()
        row["ops"] = list(backend.ops())
    except PluginError as cause:
        row["broken"] = str(cause)
        return row
    row["auto"] = {kind: rank for kind in ("cpu", "cuda") if (rank := backend.priority(kind)) is not None}
    return row


def _op(name: str) -> dict[str, Any]:
    row: dict[str, Any] = {"name": name, "origin": registry.ops.origin(name), "broken": None}
    try:
        spec = registry.ops.get(name)
    except PluginError as cause:
        return {**row, "summary": "", "phases": {}, "broken": str(cause)}
    phases = {phase: [each for each in registry.backends.names() if _runs(each, name, phase)] for phase in spec.phases}
    return {**row, "summary": spec.summary, "phases": phases}


def _runs(backend: str, op: str, phase: str) -> bool:
    try:
        plugin = registry.backends.get(backend)
        return not plugin.reasons_unavailable() and plugin.implementation(op, phase) is not None
    except PluginError:
        return False


def show(found: dict[str, Any], console: Console) -> None:
    """Print what `collect` returned."""
    console.print(", ".join(f"{name} {version}" for name, version in found["versions"].items()), highlight=False)
    for device in found["devices"]:
        console.print(device, highlight=False)
    backends = Table("backend", "from", "place in auto", "state", title="Backends", title_justify="left")
    for row in found["backends"]:
        places = ", ".join(f"{kind} {rank}" for kind, rank in row["auto"].items()) or "none: by name only"
        state = "broken" if row["broken"] else "unavailable" if row["unavailable"] else "ready"
        backends.add_row(row["name"], row["origin"], places, state)
    console.print(backends)
    for row in found["backends"]:
        for reason in [row["broken"]] if row["broken"] else row["unavailable"]:
            console.print(f"{row['name']}: {reason}", highlight=False, markup=False, soft_wrap=True)
    ops = Table("op", "phase", "runs on", "from", title="Ops", title_justify="left")
    for row in found["ops"]:
        for phase, names in row["phases"].items():
            ops.add_row(row["name"], phase, ", ".join(names) or "nothing", row["origin"])
    console.print(ops)
    for row in found["ops"]:
        if row["broken"]:
            console.print(f"{row['name']}: {row['broken']}", highlight=False, markup=False, soft_wrap=True)
    console.print("Policy, the last rule that matches decides:", highlight=False)
    for rule in found["policy"]:
        console.print(f"  {rule['rule']}  ({rule['source']})", highlight=False, markup=False, soft_wrap=True)
