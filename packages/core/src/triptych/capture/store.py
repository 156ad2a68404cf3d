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
from safetensors.torch import save_file

from triptych.call import Call, TensorMeta, dtype_name
from triptych.layout import distinct_storages, whole
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
        versions: see `triptych.trace.versions`.
    """

    op: str
    phase: str
    layer: str
    call: int
    backend: str
    policy: str
    arguments: tuple[tuple[str, Any], ...]
    versions: dict[str, str | None]

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


def _safe(title: str) -> str:
    """A title that cannot end the script's docstring and can be encoded, whatever the layer is called."""
    return title.replace("\\", "/").replace('"', "'").encode("utf-8", "replace").decode()
