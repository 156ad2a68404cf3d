"""What is no capture, or no whole one, or not for this machine, is refused before it is judged."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from captures import captured, step
from safetensors.torch import save_file

from triptych import capture
from triptych.cli.app import main
from triptych.errors import UsageError


def test_loading_what_is_no_capture_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"capture\.json cannot be read: No such file or directory\."):
        capture.load(tmp_path)
    captured(torch.ones(2, 8), None, tmp_path / "c")
    sidecar = tmp_path / "c" / "capture.json"
    document = json.loads(sidecar.read_text())
    sidecar.write_text(json.dumps({**document, "schema": 9}))
    with pytest.raises(UsageError, match="holds a capture of another schema"):
        capture.load(tmp_path / "c")
    sidecar.write_text(json.dumps(document)[:-30])
    with pytest.raises(UsageError, match=r"does not hold a whole capture \(JSONDecodeError"):
        capture.load(tmp_path / "c")
    sidecar.write_text(json.dumps(document))
    capture.load(tmp_path / "c")
    (tmp_path / "c" / "storages.safetensors").write_bytes(b"short")
    with pytest.raises(UsageError, match=r"does not hold a whole capture \(SafetensorError"):
        capture.load(tmp_path / "c")


def edit(document: dict[str, Any], change: Any) -> Any:
    """The document with a change: a function of it, or a dictionary, of x's description where it is about that."""
    if callable(change):
        return change(document)
    target = document["arguments"][0] if set(change) <= set(document["arguments"][0]) - {"name"} else document
    target.update(change)
    return document


def weight(**changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda document: document["arguments"][1].update(changes) or document


def scalar(place: int, value: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda document: document["arguments"][place].update(value=value) or document


def arguments(change: Callable[[list[Any]], Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda document: change(document["arguments"]) or document


COUNTS = "It must be a list of whole numbers, 0 or greater."
SPOILT: list[tuple[Any, str]] = [
    # What `set_` would enlarge a storage for, and judge whatever memory it then gets.
    ({"stride": [10**6, 1]}, "argument x: shape [4, 8] with strides [1000000, 1] at offset 0 needs 12000032 bytes; "
                             "its storage has 128."),
    ({"offset": 10**9}, "argument x: shape [4, 8] with strides [8, 1] at offset 1000000000 needs 4000000128 bytes; "
                        "its storage has 128."),
    ({"offset": 1}, "argument x: shape [4, 8] with strides [8, 1] at offset 1 needs 132 bytes; its storage has 128."),
    ({"shape": [0, 8], "offset": 33}, "argument x: shape [0, 8] with strides [8, 1] at offset 33 needs 132 bytes; "
                                      "its storage has 128."),
    ({"dtype": "float64"}, "argument x: shape [4, 8] with strides [8, 1] at offset 0 needs 256 bytes; its storage has "
                           "128."),
    (weight(offset=7), "argument weight: shape [8] with strides [1] at offset 7 needs 60 bytes; its storage has 32."),
    ({"stride": [2**62, 1]}, "argument x: shape [4, 8] with strides [4611686018427387904, 1] at offset 0 needs "),
    ({"stride": [2**63, 1]}, f"argument x: stride is [9223372036854775808, 1]. {COUNTS}"),
    ({"stride": [-8, 1], "offset": 24}, f"argument x: stride is [-8, 1]. {COUNTS}"),
    ({"shape": [-4, 8]}, f"argument x: shape is [-4, 8]. {COUNTS}"),
    ({"shape": [4.0, 8]}, f"argument x: shape is [4.0, 8]. {COUNTS}"),
    ({"shape": [True, 8]}, f"argument x: shape is [True, 8]. {COUNTS}"),
    ({"shape": "48"}, f"argument x: shape is '48'. {COUNTS}"),
    ({"offset": -8}, "argument x: offset is -8. It must be a whole number, 0 or greater."),
    ({"shape": [32]}, "argument x: shape [32] with strides [8, 1] at offset 0 has 1 sizes and 2 strides."),
    ({"dtype": "nn"}, "argument x: dtype is 'nn'. It must be the name of a dtype."),
    ({"dtype": "int32"}, "rms_norm: x has dtype torch.int32. It must be float32, bfloat16, float16 or float64; "),
    ({"storage": "../../etc/passwd"}, "storages.safetensors has no '../../etc/passwd'."),
    ({"device": 5}, "argument x: device is 5. It must be text."),
    # What the op does not take.
    (scalar(4, "zz"), "rms_norm: rounding is 'zz'. It must be 'after_weight' or 'before_weight'."),
    (scalar(4, 5), "rms_norm: rounding is 5. It must be 'after_weight' or 'before_weight'."),
    (scalar(2, "x"), "rms_norm: eps is a str ('x'). It must be a float."),
    (scalar(2, [1]), "argument eps: value is [1]. It must be a scalar."),
    (scalar(2, float("nan")), "rms_norm: eps is nan. It must be a finite number, 0 or greater."),
    (weight(shape=[4]), "rms_norm: weight has shape [4] and x has shape [4, 8]."),
    (arguments(list.reverse), "its arguments are ['rounding', 'offset', 'eps', 'weight', 'x']; rms_norm.forward takes "
                              "x, weight, eps, offset, rounding."),
    (arguments(lambda found: found.__delitem__(-1)), "its arguments are ['x', 'weight', 'eps', 'offset']; rms_norm.forward takes x, "),
    (arguments(lambda found: found[0].update(name="q")), "its arguments are ['q', 'weight', "),
    (arguments(lambda found: found.__setitem__(0, {"name": "x", "absent": True})), "argument x has an unknown 'absent'."),
    (arguments(lambda found: found.__setitem__(0, 5)), "capture.json: arguments is [5, "),
    # What is no call.
    ({"op": []}, "capture.json: op is []. It must be text."),
    ({"phase": "sideways"}, "its phase is 'sideways'; rms_norm has forward and backward."),
    ({"phase": "backward"}, "its arguments are ['x', 'weight', 'eps', 'offset', 'rounding']; rms_norm.backward takes "),
    ({"layer": 5}, "capture.json: layer is 5. It must be text."),
    ({"layer": "\ud800"}, "capture.json: layer is '\\ud800'. It must be text."),
    ({"call": "x"}, "capture.json: call is 'x'. It must be a whole number, 0 or greater."),
    ({"call": True}, "capture.json: call is True. It must be a whole number, 0 or greater."),
    ({"backend": 7}, "capture.json: backend is 7. It must be text."),
    ({"versions": [1]}, "capture.json: versions is [1]. It must be an object of texts."),
    ({"zz": 1}, "capture.json has an unknown 'zz'."),
    (lambda document: {"schema": 1}, "capture.json has no 'op'."),
    (lambda document: [document], "capture.json has no schema."),
]  # fmt: skip


@pytest.mark.parametrize(("change", "cause"), SPOILT)
def test_a_capture_that_says_what_no_call_has_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Any, cause: str
) -> None:
    folder = tmp_path / "c"
    captured(torch.ones(4, 8), torch.ones(8), folder)
    sidecar = folder / "capture.json"
    sidecar.write_text(json.dumps(edit(json.loads(sidecar.read_text()), change)))
    with pytest.raises(UsageError) as raised:
        capture.load(folder)
    assert str(raised.value).startswith(f"{folder} does not hold a whole capture: {cause}")
    assert str(raised.value).endswith("Capture the call again.")
    with pytest.raises(SystemExit) as ended:
        main(["replay", str(folder)])
    assert (ended.value.code, capsys.readouterr()) == (2, ("", f"triptych: {raised.value}\n"))


def test_a_backward_that_no_forward_made_is_refused(capturing: Callable[..., Path]) -> None:
    folder = capturing("rms_norm.backward")
    step()
    (path,) = folder.iterdir()
    sidecar = path / "capture.json"
    document = json.loads(sidecar.read_text())
    for place, change in ((3, {"shape": [2], "stride": [1]}), (0, {"shape": [2, 8]}), (6, {"value": "zz"})):
        spoilt = json.loads(json.dumps(document))
        spoilt["arguments"][place].update(change)
        sidecar.write_text(json.dumps(spoilt))
        with pytest.raises(UsageError, match=r"does not hold a whole capture: .*rms_norm.*Capture the call again\."):
            capture.load(path)
    for place in (7, 8):
        spoilt = json.loads(json.dumps(document))
        spoilt["arguments"][place]["value"] = 1
        sidecar.write_text(json.dumps(spoilt))
        with pytest.raises(UsageError, match=r"need_d[xw] is a int \(1\)\. It must be a bool\."):
            capture.load(path)
    sidecar.write_text(json.dumps(document))
    assert capture.replay(capture.load(path)).agrees


def test_an_op_that_is_not_installed_is_named(tmp_path: Path) -> None:
    captured(torch.ones(4, 8), None, tmp_path / "c", op="rms_nrm")
    with pytest.raises(UsageError, match=r"There is no op 'rms_nrm'\. Did you mean 'rms_norm'"):
        capture.load(tmp_path / "c")


@pytest.mark.parametrize("text", ["[" * 100000, "9" * 5000, '"text"', "", "\ufeff{}"])
def test_what_is_not_even_json_of_a_capture_is_refused(tmp_path: Path, text: str) -> None:
    captured(torch.ones(4, 8), None, tmp_path / "c")
    (tmp_path / "c" / "capture.json").write_text(text)
    with pytest.raises(UsageError, match="does not hold a whole capture"):
        capture.load(tmp_path / "c")


@pytest.mark.parametrize("name", ["capture.json", "storages.safetensors"])
@pytest.mark.parametrize(("make", "found"), [(Path.mkdir, "Is a directory"), (os.mkfifo, "Is a pipe")])
def test_what_is_no_file_is_not_waited_for(
    tmp_path: Path, name: str, make: Callable[[Path], object], found: str
) -> None:
    captured(torch.ones(4, 8), None, tmp_path / "c")
    (tmp_path / "c" / name).unlink()
    make(tmp_path / "c" / name)
    with pytest.raises(UsageError, match=f"{name} cannot be read: {found}"):
        capture.load(tmp_path / "c")


def test_a_storage_that_is_no_row_of_bytes_is_refused(tmp_path: Path) -> None:
    captured(torch.ones(4, 8), None, tmp_path / "c")
    save_file({"storage_0": torch.ones(4, 8)}, tmp_path / "c" / "storages.safetensors")
    with pytest.raises(UsageError, match=r"'storage_0' in storages.safetensors is torch.float32\[4, 8\]; it must be"):
        capture.load(tmp_path / "c")


def test_a_call_too_large_to_judge_is_an_error(tmp_path: Path) -> None:
    captured(torch.ones(4, 8), None, tmp_path / "c")
    sidecar = tmp_path / "c" / "capture.json"
    sidecar.write_text(json.dumps(edit(json.loads(sidecar.read_text()), {"shape": [2**50, 8], "stride": [0, 1]})))
    with pytest.raises(UsageError, match=r"cannot be judged here \(RuntimeError: .*\)\. Replay it where there is more"):
        capture.replay(capture.load(tmp_path / "c"))


@pytest.mark.parametrize("device", ["meta", "mps", "xla", "hpu", "privateuseone:0"])
def test_a_device_that_holds_no_tensors_here_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], device: str
) -> None:
    captured(torch.ones(2, 8), None, tmp_path / "c")
    with pytest.raises(SystemExit) as ended:
        main(["replay", str(tmp_path / "c"), "--device", device])
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert err.startswith(f"triptych: The capture in {tmp_path / 'c'} is for {device}, which holds no tensors here: ")
    assert ". Name another device: --device " in err


def test_a_device_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    captured(torch.ones(2, 8), None, tmp_path / "c")
    with pytest.raises(
        UsageError, match=r"is for cuda:99, and this machine has \d+ CUDA devices\. Name another device: "
    ):
        capture.load(tmp_path / "c", "cuda:99")
    with pytest.raises(UsageError, match="'cupboard' is not a device"):
        capture.load(tmp_path / "c", "cupboard")
