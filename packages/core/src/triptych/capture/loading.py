"""Reading a captured call back. A folder is anybody's text: what it says is checked before a tensor is made of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from triptych import files
from triptych.capture.store import SCHEMA, SIDECAR, STORAGES, Capture
from triptych.checking import check_scalars
from triptych.errors import ArgumentError, UsageError
from triptych.explain import spec_of
from triptych.layout import view
from triptych.opspec import OpSpec

_MOST = 2**63
"""Sizes, strides and offsets lie below it."""


class _Defect(Exception):
    """Why a folder does not hold a whole capture."""


def load(folder: Path | str, device: torch.device | str | None = None) -> Capture:
    """The captured call in `folder`, its tensors rebuilt exactly.

    Args:
        folder: what a run with TRIPTYCH_CAPTURE wrote.
        device: where to put the tensors; None means where each of them was.

    Raises:
        UsageError: the folder holds no capture, one that is incomplete, was edited into something that no call has, or
            has another schema; its op is not installed; or the device is not there.
        PluginError: the op's plug-in is broken.
    """
    folder = Path(folder)
    try:
        return _loaded(folder, device)
    except OSError as cause:
        name = cause.filename or folder
        raise UsageError(f"{name} cannot be read: {cause.strerror}. Name a folder that a capture wrote.") from cause
    except _Defect as cause:
        raise UsageError(f"{folder} does not hold a whole capture: {cause} Capture the call again.") from cause
    except (ValueError, RuntimeError, MemoryError, OverflowError, SafetensorError) as cause:
        if isinstance(cause, UsageError):
            raise
        raise UsageError(
            f"{folder} does not hold a whole capture ({type(cause).__name__}: {cause}). Capture the call again."
        ) from cause


def _loaded(folder: Path, device: torch.device | str | None) -> Capture:
    document = json.loads(files.read_regular(folder / SIDECAR))
    if not isinstance(document, dict) or "schema" not in document:
        raise _Defect(f"{SIDECAR} has no schema.")
    if document["schema"] != SCHEMA:
        raise UsageError(f"{folder} holds a capture of another schema. Load it with the version that wrote it.")
    _check_fields(SIDECAR, document, _DOCUMENT)
    spec = spec_of(document["op"])
    if document["phase"] not in spec.phases:
        raise _Defect(f"its phase is {document['phase']!r}; {spec.name} has {' and '.join(spec.phases)}.")
    described = document["arguments"]
    _check_arguments(described, spec, document["phase"])

    files.check_regular(folder / STORAGES)
    storages = load_file(folder / STORAGES)
    devices = {each["storage"]: each["device"] for each in described if "storage" in each}
    for name in devices:
        if name not in storages:
            raise _Defect(f"{STORAGES} has no {name!r}.")
    placed = {
        name: _bytes_on(_present(device or where, folder), storages[name], name) for name, where in devices.items()
    }
    arguments = tuple((each["name"], _rebuilt(each, placed)) for each in described)
    _check_values(tuple(value for _, value in arguments), spec, document["phase"])
    return Capture(**{name: document[name] for name in _CALL}, arguments=arguments)


# --- what the text says ---------------------------------------------------------------------------------------------


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value == value.encode("utf-8", "replace").decode()  # no half of a surrogate pair


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MOST


def _is_counts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_count, value))


def _is_versions(value: Any) -> bool:
    return isinstance(value, dict) and all(each is None or isinstance(each, str) for each in value.values())


_Fields = dict[str, tuple[Callable[[Any], bool], str]]

_TEXT = (_is_text, "text")
_COUNT = (_is_count, "a whole number, 0 or greater")
_COUNTS = (_is_counts, "a list of whole numbers, 0 or greater")

_CALL: _Fields = {
    "op": _TEXT,
    "phase": _TEXT,
    "layer": _TEXT,
    "call": _COUNT,
    "backend": _TEXT,
    "policy": _TEXT,
    "versions": (_is_versions, "an object of texts"),
}
_DOCUMENT: _Fields = {
    "schema": _COUNT,
    **_CALL,
    "arguments": (lambda value: isinstance(value, list) and all(isinstance(each, dict) for each in value), "objects"),
}
_ABSENT: _Fields = {"name": _TEXT, "absent": (lambda value: value is True, "true")}
_SCALAR: _Fields = {"name": _TEXT, "value": (lambda value: isinstance(value, bool | int | float | str), "a scalar")}
_TENSOR: _Fields = {
    "name": _TEXT,
    "storage": _TEXT,
    "dtype": (
        lambda value: _is_text(value) and isinstance(getattr(torch, value, None), torch.dtype),
        "the name of a dtype",
    ),
    "shape": _COUNTS,
    "stride": _COUNTS,
    "offset": _COUNT,
    "device": _TEXT,
}


def _check_fields(where: str, found: dict[str, Any], fields: _Fields) -> None:
    for name in found:
        if name not in fields:
            raise _Defect(f"{where} has an unknown {_shown(name)}.")
    for name, (fits, wanted) in fields.items():
        if name not in found:
            raise _Defect(f"{where} has no {name!r}.")
        if not fits(found[name]):
            raise _Defect(f"{where}: {name} is {_shown(found[name])}. It must be {wanted}.")


def _check_arguments(described: list[dict[str, Any]], spec: OpSpec, phase: str) -> None:
    """The parameters of the phase, all of them, in their order; of each, what it must say."""
    wanted = (*spec.phase(phase).tensors, *spec.phase(phase).scalar_names)
    names = [name.removesuffix("?") for name in wanted]
    if [each.get("name") for each in described] != names:
        found = _shown([each.get("name") for each in described])
        raise _Defect(f"its arguments are {found}; {spec.name}.{phase} takes {', '.join(names)}.")
    count = len(spec.phase(phase).tensors)
    for place, (name, each) in enumerate(zip(wanted, described, strict=True)):
        if place >= count:
            fields = _SCALAR
        elif "absent" in each and name.endswith("?"):
            fields = _ABSENT
        else:
            fields = _TENSOR
        _check_fields(f"argument {names[place]}", each, fields)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


# --- the tensors ------------------------------------------------------------------------------------------------------


def _bytes_on(device: torch.device, stored: torch.Tensor, name: str) -> torch.Tensor:
    if stored.dtype is not torch.uint8 or stored.dim() != 1:
        raise _Defect(f"{name!r} in {STORAGES} is {stored.dtype}{list(stored.shape)}; it must be a row of bytes.")
    # A copy always: what safetensors gives need not begin where an allocator would, and alignment is part of the call.
    return torch.empty_like(stored, device=device).copy_(stored)


def _rebuilt(described: dict[str, Any], placed: dict[str, torch.Tensor]) -> Any:
    if "absent" in described:
        return None
    if "value" in described:
        return described["value"]
    storage, dtype = placed[described["storage"]], getattr(torch, described["dtype"])
    shape, stride, offset = tuple(described["shape"]), tuple(described["stride"]), described["offset"]
    what = f"argument {described['name']}: shape {list(shape)} with strides {list(stride)} at offset {offset}"
    if len(shape) != len(stride):
        raise _Defect(f"{what} has {len(shape)} sizes and {len(stride)} strides.")
    # The number of its last element plus one. A storage that is too short would be made longer, with whatever memory
    # happened to hold.
    end = offset
    if 0 not in shape:
        end += sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1
    if end * dtype.itemsize > storage.numel():
        needed = end * dtype.itemsize
        raise _Defect(f"{what} needs {needed} bytes; its storage has {storage.numel()}.")
    return view(storage, dtype, shape, stride, offset)


def _check_values(values: tuple[Any, ...], spec: OpSpec, phase: str) -> None:
    """What the op itself would say to these arguments."""
    try:
        check_scalars(spec, values[len(spec.phase(phase).tensors) :], phase)
        spec.check_of(phase)(*values)
    except ArgumentError as cause:
        raise _Defect(str(cause)) from cause


def _present(device: torch.device | str, folder: Path) -> torch.device:
    """`device`, which must exist on this machine and hold values."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as cause:
        raise UsageError(f"{str(device)!r} is not a device. Write cpu, cuda or cuda:1.") from cause
    count = torch.cuda.device_count()
    other = f"Name another device: --device {'cuda:0' if count else 'cpu'}."
    if found.type == "cuda" and not 0 <= (found.index or 0) < count:
        raise UsageError(f"The capture in {folder} is for {found}, and this machine has {count} CUDA devices. {other}")
    try:
        works = (torch.zeros(1, dtype=torch.uint8, device=found) + 7).item() == 7
    except Exception as cause:  # each kind of device that is not there says so in its own way
        reason = (str(cause).splitlines() or [type(cause).__name__])[0]
        raise UsageError(
            f"The capture in {folder} is for {found}, which holds no tensors here: {reason.rstrip('.')}. {other}"
        ) from cause
    if not works:
        raise UsageError(f"The capture in {folder} is for {found}, which does not keep what is written to it. {other}")
    return found
