"""A captured call on disk: the storages, what the arguments are over them, and a script that runs it.

    <folder>/storages.safetensors   every distinct storage once, as bytes
    <folder>/capture.json           schema 1: the call, its arguments as views of the storages, versions
    <folder>/replay.py              loads the folder it lies in and runs the call alone

Storing whole storages rather than values keeps everything a kernel can see: strides, offsets and so alignment, tensors
that share memory, and what lies around a view, NaN bit patterns included.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from triptych.call import Call, TensorMeta, dtype_name
from triptych.errors import UsageError
from triptych.layout import distinct_storages, view, whole
from triptych.opspec import OpSpec

SCHEMA = 1
SIDECAR = "capture.json"
STORAGES = "storages.safetensors"
SCRIPT = "replay.py"

_SCRIPT_TEXT = '''"""Run one captured call alone: {title}.

Exit status: 0 when the result agrees, 1 when it differs or the backend raised, 2 for wrong use.
"""

import argparse
import sys
from pathlib import Path

from triptych import TriptychError, capture

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--backend", default={backend!r}, help="what runs it (default: what ran it, %(default)s)")
parser.add_argument("--against", default="reference", help="reference, or a backend to compare with")
parser.add_argument("--device", help="where to run it (default: where it ran)")
options = parser.parse_args()

try:
    call = capture.load(Path(__file__).parent, options.device)
    result = capture.replay(call, options.backend, options.against)
except TriptychError as error:
    print(error, file=sys.stderr)
    sys.exit(2)
print(result)
sys.exit(0 if result.agrees else 1)
'''


@dataclass(frozen=True)
class Capture:
    """One phase of one call, with its data.

    Attributes:
        op, phase, layer, call: which call it was; `call` is its number in its process.
        backend: what was about to run it.
        policy: the rules in force in its process.
        arguments: names and values of all parameters in order: tensors (None where absent), then scalars.
        versions: of Python, torch and what else decides how kernels behave.
    """

    op: str
    phase: str
    layer: str
    call: int
    backend: str
    policy: str
    arguments: tuple[tuple[str, Any], ...]
    versions: dict[str, str]

    @property
    def args(self) -> tuple[Any, ...]:
        return tuple(value for _, value in self.arguments)

    @property
    def title(self) -> str:
        return f"{self.op}.{self.phase} call {self.call}" + (f" in layer {self.layer!r}" if self.layer else "")

    def asked(self, spec: OpSpec) -> Call:
        """What selection sees of it."""
        count = len(spec.phase(self.phase).tensors)
        metas = tuple((name, None if value is None else TensorMeta.of(value)) for name, value in self.arguments[:count])
        return Call(self.op, self.phase, metas, self.arguments[count:])

    @property
    def nbytes(self) -> int:
        """How many bytes its storages have."""
        return sum(tensor.untyped_storage().nbytes() for tensor in distinct_storages(self.args).values())


def save(capture: Capture, folder: Path) -> None:
    """Write `capture` into `folder`, which exists and is empty.

    Raises:
        OSError, SafetensorError: the disk is full or not writable.
    """
    storages = distinct_storages(capture.args)
    names = {key: f"storage_{number}" for number, key in enumerate(storages)}
    with torch.no_grad():
        save_file({names[key]: whole(tensor).cpu() for key, tensor in storages.items()}, folder / STORAGES)
    document = {
        "schema": SCHEMA,
        "op": capture.op,
        "phase": capture.phase,
        "layer": capture.layer,
        "call": capture.call,
        "backend": capture.backend,
        "policy": capture.policy,
        "arguments": [_describe(name, value, names) for name, value in capture.arguments],
        "versions": capture.versions,
    }
    (folder / SIDECAR).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    script = _SCRIPT_TEXT.format(title=_safe(capture.title), backend=capture.backend)
    (folder / SCRIPT).write_text(script, encoding="utf-8")


def load(folder: Path | str, device: torch.device | str | None = None) -> Capture:
    """The captured call in `folder`, its tensors rebuilt exactly.

    Args:
        folder: what a run with TRIPTYCH_CAPTURE wrote.
        device: where to put the tensors; None means where each of them was.

    Raises:
        UsageError: the folder holds no capture, an incomplete one or one of another schema, or the device is not there.
    """
    folder = Path(folder)
    try:
        document = json.loads((folder / SIDECAR).read_text(encoding="utf-8"))
        if document.pop("schema") != SCHEMA:
            raise UsageError(f"{folder} holds a capture of another schema. Load it with the version that wrote it.")
        storages = load_file(folder / STORAGES)
        devices = {each["storage"]: each["device"] for each in document["arguments"] if "storage" in each}
        placed = {
            name: torch.empty_like(stored, device=_present(device or devices[name], folder)).copy_(stored)
            for name, stored in storages.items()
        }
        arguments = tuple((each["name"], _rebuild(each, placed)) for each in document.pop("arguments"))
        return Capture(**document, arguments=arguments)
    except OSError as cause:
        name = cause.filename or folder
        raise UsageError(f"{name} cannot be read: {cause.strerror}. Name a folder that a capture wrote.") from cause
    except (ValueError, KeyError, TypeError, AttributeError, SafetensorError) as cause:
        if isinstance(cause, UsageError):
            raise
        raise UsageError(
            f"{folder} does not hold a whole capture ({type(cause).__name__}: {cause}). Capture the call again."
        ) from cause


def _describe(name: str, value: Any, storages: dict[int, str]) -> dict[str, Any]:
    if value is None:
        return {"name": name, "absent": True}
    if not isinstance(value, torch.Tensor):
        return {"name": name, "value": value}
    return {
        "name": name,
        "storage": storages[value.untyped_storage()._cdata],
        "dtype": dtype_name(value.dtype),
        "shape": list(value.shape),
        "stride": list(value.stride()),
        "offset": value.storage_offset(),
        "device": str(value.device),
    }


def _rebuild(described: dict[str, Any], storages: dict[str, torch.Tensor]) -> Any:
    if "absent" in described:
        return None
    if "value" in described:
        return described["value"]
    dtype = getattr(torch, described["dtype"])
    shape, stride = tuple(described["shape"]), tuple(described["stride"])
    return view(storages[described["storage"]], dtype, shape, stride, described["offset"])


def _present(device: torch.device | str, folder: Path) -> torch.device:
    """`device`, which must exist on this machine."""
    try:
        found = torch.device(device)
    except RuntimeError as cause:
        raise UsageError(f"{str(device)!r} is not a device. Write cpu, cuda or cuda:1.") from cause
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise UsageError(
            f"The capture in {folder} is for {found}, and this machine has {count} CUDA devices. "
            f"Name another device: --device {'cuda:0' if count else 'cpu'}."
        )
    return found


def _safe(title: str) -> str:
    """A title that cannot end the script's docstring, whatever the layer is called."""
    return title.replace("\\", "/").replace('"', "'")
