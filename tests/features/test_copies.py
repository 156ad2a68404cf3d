"""Copies of a model and models made without memory: they hold what the original holds, and train as it does."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from subjects import SUBJECTS, batch, build, counts, ran_on, step
from torch import Tensor, nn

import triptych
from triptych.layers.naming import Layer
from triptych.scope import process_policy

EACH_OP = ("rms_norm", "add_rms_norm", "analog_calibrating", "analog_clipped")
"""Subjects that together run every op: enough where the backend matters little."""

Duplicate = Callable[[nn.Sequential], nn.Sequential]


def small(device: str, number: int) -> Tensor:
    return batch(device, rows=2, length=3, number=number)


def original(name: str, device: str) -> nn.Sequential:
    """A block that has trained one step."""
    model = build(name, device, blocks=1)
    train(model, device)
    return model


def train(model: nn.Module, device: str) -> dict[str, Tensor]:
    """Everything that the model holds after a step with a fixed seed, and what it gave before and after.

    The step is one that makes two weights of each matrix large, so that clipping has something to cut.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(0)
    optimizer.zero_grad()
    loss = step(model, small(device, 0))
    for parameter in model.parameters():
        if parameter.dim() == 2 and parameter.grad is not None:
            parameter.grad[0, :2] = -30.0
    optimizer.step()
    with torch.no_grad():
        torch.manual_seed(1)
        last = model(small(device, 1))
    return {"loss": loss, "last": last, **{key: each.clone() for key, each in model.state_dict().items()}}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for key, value in expected.items():
        assert found[key].dtype == value.dtype and torch.equal(found[key], value), key


# --- copies -----------------------------------------------------------------------------------------------------------


def pickled(model: nn.Sequential) -> nn.Sequential:
    return pickle.loads(pickle.dumps(model))  # type: ignore[no-any-return]


def saved(model: nn.Sequential) -> nn.Sequential:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)  # type: ignore[no-any-return]


@pytest.mark.feature("deepcopy and pickle")
@pytest.mark.parametrize("name", EACH_OP)
def test_a_deep_copy_trains_as_the_original(name: str, backend: str, device: str) -> None:
    check_copy(name, copy.deepcopy, backend, device)


@pytest.mark.feature("deepcopy and pickle")
@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled, saved], ids=["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("name", SUBJECTS)
def test_every_kind_of_copy_trains_as_the_original(name: str, duplicate: Duplicate, device: str) -> None:
    check_copy(name, duplicate, "torch", device)


def check_copy(name: str, duplicate: Duplicate, backend: str, device: str) -> None:
    with process_policy(backend):
        model = original(name, device)
        twin = duplicate(model)
    state = copy.deepcopy(model.state_dict())
    with process_policy(backend), ran_on(backend, name):
        found = train(twin, device)
    assert_equal(dict(model.state_dict()), dict(state))  # nothing is shared
    with process_policy(backend):
        assert_equal(found, train(model, device))
    assert names(twin) == names(model) and all(names(twin))


def names(model: nn.Module) -> list[str]:
    return [each.layer_name for each in model.modules() if isinstance(each, Layer)]


# --- without memory ---------------------------------------------------------------------------------------------------


def on_meta(name: str) -> nn.Sequential:
    with torch.device("meta"):
        model = nn.Sequential(SUBJECTS[name].make())
    triptych.name_layers(model)
    tensors = [*model.parameters(), *model.buffers()]
    assert tensors and all(each.is_meta for each in tensors)
    return model


@pytest.mark.parametrize("name", SUBJECTS)
def test_a_model_on_meta_has_shapes_and_runs_nothing(name: str) -> None:
    before = counts()
    model = on_meta(name)
    y = model(batch().to("meta"))
    torch.autograd.backward(y.sum())
    assert y.is_meta and y.shape == batch().shape
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    assert gradients and all(each.is_meta for each in gradients)
    assert counts() == before


@pytest.mark.feature("meta-device initialisation")
@pytest.mark.parametrize("name", EACH_OP)
def test_a_model_made_on_meta_takes_the_tensors_of_a_state(name: str, backend: str, device: str) -> None:
    model, late = trained_and_late(name, backend, device)
    late.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    assert_trains_alike(name, backend, device, late, model)


@pytest.mark.feature("meta-device initialisation")
@pytest.mark.parametrize("name", SUBJECTS)
def test_a_model_made_on_meta_takes_the_values_of_a_state(name: str, device: str) -> None:
    model, late = trained_and_late(name, "torch", device)
    late.to_empty(device=device)
    for each in late.state_dict().values():
        each.fill_(7)
    late.load_state_dict(model.state_dict())
    assert_trains_alike(name, "torch", device, late, model)


def trained_and_late(name: str, backend: str, device: str) -> tuple[nn.Sequential, nn.Sequential]:
    with process_policy(backend):
        return original(name, device), on_meta(name)


def assert_trains_alike(name: str, backend: str, device: str, late: nn.Module, model: nn.Module) -> None:
    with process_policy(backend), ran_on(backend, name):
        found = train(late, device)
    with process_policy(backend):
        assert_equal(found, train(model, device))


@pytest.mark.parametrize("name", EACH_OP)
@pytest.mark.feature("meta-device initialisation")
def test_a_model_made_on_meta_is_initialised_as_one_made_in_place(name: str, backend: str, device: str) -> None:
    torch.manual_seed(5)
    with torch.device(device):
        model = nn.Sequential(SUBJECTS[name].make())
    triptych.name_layers(model)
    late = on_meta(name).to_empty(device=device)
    for each in late.state_dict().values():
        each.fill_(7)
    torch.manual_seed(5)
    for module in late.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()  # type: ignore[operator]
    assert_equal(dict(late.state_dict()), dict(model.state_dict()))
    assert_trains_alike(name, backend, device, late, model)
