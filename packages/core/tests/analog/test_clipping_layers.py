"""Weight clipping and the lives of layers: copies, other dtypes, torch.compile, every kind of layer, a GPU."""

from __future__ import annotations

import copy
import gc
import io
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from clipped_layer import (
    LEARNED,
    NONE,
    PLAIN,
    ROWS,
    WHOLE,
    Clipped,
    assert_same,
    backward,
    by_hand,
    clipped,
    pair,
    subtract,
    x_of,
)
from torch import Tensor, nn

from triptych.analog import AnalogConfig, AnalogConv1d, AnalogConv2d, AnalogConv3d, AnalogLinear, clipping

# --- layers come, go and are copied -----------------------------------------------------------------------------------


def pickled(layer: Clipped) -> Clipped:
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    loaded: Clipped = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled], ids=["deepcopy", "pickle"])
def test_a_copy_is_clipped_by_its_own_optimizer(duplicate: Any) -> None:
    layer = Clipped()
    backward(layer)
    twin = duplicate(layer)
    twin = duplicate(twin)
    values = layer.weight.clone()
    twin.zero_grad()
    backward(twin)
    expected = clipped(twin.weight - 0.01 * twin.weight.grad)
    torch.optim.SGD(twin.parameters(), 0.01).step()
    torch.testing.assert_close(twin.weight.double(), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(layer.weight, values)
    assert len(twin._load_state_dict_post_hooks) == 1


def test_tied_weights_are_clipped_once() -> None:
    one, two = Clipped(m=8, seed=1), Clipped(m=8, seed=2)
    two.weight = one.weight
    model = nn.Sequential(one, two)
    optimizer = torch.optim.SGD(one.parameters(), 0.001)
    for step in range(3):
        optimizer.zero_grad()
        backward(model, step)
        expected = clipped(one.weight - 0.001 * one.weight.grad)  # type: ignore[operator]
        optimizer.step()
        torch.testing.assert_close(one.weight.double(), expected, rtol=1e-5, atol=1e-6)
    del optimizer
    gc.collect()
    for step in range(3):
        model.zero_grad()
        backward(model, step)
        subtract(one.weight, 0.001)
        expected = clipped(one.weight)
        model(x_of())
        torch.testing.assert_close(one.weight.double(), expected, rtol=1e-5, atol=1e-6)


def test_a_changed_configuration_counts_from_then_on() -> None:
    layer = Clipped(config=NONE)
    optimizer = torch.optim.SGD(layer.parameters(), 0.01)
    for config in (NONE, ROWS, NONE, WHOLE):
        layer.rpu_config = config
        clipping.watch(layer)
        layer.zero_grad()
        backward(layer)
        plain = layer.weight - 0.01 * layer.weight.grad  # type: ignore[operator]
        optimizer.step()
        expected = plain.double() if config is NONE else clipped(plain, config is ROWS)
        torch.testing.assert_close(layer.weight.double(), expected, rtol=1e-5, atol=1e-6)


def test_layers_are_not_kept_alive_and_the_hooks_are_installed_once() -> None:
    layer = Clipped()
    backward(layer)
    torch.optim.SGD(layer.parameters(), 0.01).step()
    known, dead = len(clipping._layers), weakref.ref(layer)
    weight = weakref.ref(layer.weight)
    del layer
    gc.collect()
    assert dead() is None
    assert weight() is None
    assert len(clipping._layers) == known - 1
    assert len(clipping._installed) == 2


def test_weights_that_are_frozen_and_thawed() -> None:
    layer = Clipped()
    layer.weight.requires_grad_(False)
    frozen = copy.deepcopy(layer)
    frozen(x_of())
    frozen.weight.requires_grad_(True)
    frozen(x_of())
    backward(frozen)
    subtract(frozen.weight, 0.05)
    expected = clipped(frozen.weight)
    frozen(x_of())
    torch.testing.assert_close(frozen.weight.double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_another_dtype_is_not_a_step(dtype: torch.dtype) -> None:
    layer = Clipped()
    backward(layer)
    layer.to(dtype)
    values = layer.weight.clone()
    layer(x_of(dtype=dtype))
    assert torch.equal(layer.weight, values)
    layer.zero_grad()
    backward(layer)
    subtract(layer.weight, 0.05)
    layer(x_of(dtype=dtype))
    assert layer.weight.abs().max() < values.abs().max()


@pytest.fixture
def swapping() -> Iterator[None]:
    """As torch will one day convert and load by default: by torch.utils.swap_tensors."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.usefixtures("swapping")
@pytest.mark.parametrize("config", [WHOLE, ROWS, LEARNED], ids=["whole", "rows", "learned"])
@pytest.mark.parametrize("hooked", [True, False], ids=["optimizer", "by hand"])
def test_parameters_that_are_swapped_are_clipped_as_before(config: AnalogConfig, hooked: bool) -> None:
    ours, manual = pair(config)
    optimizers = [torch.optim.SGD(layer.parameters(), 0.05) for layer in (ours, manual)]
    for step in range(6):
        if step == 2:
            ours, manual = ours.double(), manual.double()
        if step == 4:
            for layer in (ours, manual):
                layer.load_state_dict(copy.deepcopy(layer.state_dict()))
        for layer, optimizer in zip((ours, manual), optimizers, strict=True):
            layer.zero_grad()
            backward(layer, step)
            if hooked:
                optimizer.step()
            else:
                for p in layer.parameters():
                    subtract(p, 0.05)
        if not hooked:
            optimizers = [torch.optim.SGD([torch.zeros(1)], 0.05)] * 2  # the ones that held the parameters are gone
            gc.collect()
            ours(x_of(dtype=ours.weight.dtype))
        by_hand(manual, config)
        assert_same(ours, manual)


@pytest.mark.usefixtures("swapping")
@pytest.mark.parametrize("config", [ROWS, LEARNED], ids=["rows", "learned"])
def test_a_layer_converts_and_loads_by_swapping(config: AnalogConfig) -> None:
    layer = AnalogLinear(9, 4, rpu_config=config)
    weight = layer.weight
    del weight  # whoever holds it keeps torch from swapping it
    layer.load_state_dict(copy.deepcopy(layer.state_dict()))
    watched = layer.__dict__[clipping._NAME]
    layer.to(torch.float64)
    parameter = clipping.clipped_parameter(layer)
    assert parameter is not None
    assert parameter.dtype == torch.float64
    assert layer.__dict__[clipping._NAME] is clipping._watch_of(parameter) is not watched


def test_a_saved_parameter_needs_no_triptych_to_load() -> None:
    layer = Clipped()
    backward(layer)
    file = io.BytesIO()
    torch.save(layer.state_dict(keep_vars=True), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["weight"]
    assert torch.equal(loaded, layer.weight)
    other = Clipped(seed=3)
    other.weight = loaded
    other(x_of())
    backward(other)
    subtract(other.weight, 0.05)
    expected = clipped(other.weight)
    other(x_of())
    torch.testing.assert_close(other.weight.double(), expected, rtol=1e-6, atol=0)


# --- the layers of the package ----------------------------------------------------------------------------------------

LAYERS: list[tuple[Callable[..., nn.Module], tuple[int, ...], tuple[int, ...]]] = [
    (AnalogLinear, (8, 6), (5, 8)),
    (AnalogConv1d, (4, 6, 3), (2, 4, 7)),
    (AnalogConv2d, (4, 6, 3), (2, 4, 5, 5)),
    (AnalogConv3d, (2, 6, 2), (2, 2, 3, 3, 3)),
]


@pytest.mark.parametrize(("make", "sizes", "shape"), LAYERS, ids=[make.__name__ for make, *_ in LAYERS])
@pytest.mark.parametrize("rows", [True, False], ids=["rows", "whole"])
def test_every_analog_layer_is_clipped_after_any_step(
    make: Callable[..., nn.Module], sizes: tuple[int, ...], shape: tuple[int, ...], rows: bool
) -> None:
    layer: Any = make(*sizes, rpu_config=ROWS if rows else WHOLE)
    x = torch.randn(shape)
    optimizer: Any = torch.optim.SGD(layer.parameters(), 1e-3)
    for hooked in (True, False):
        layer.zero_grad()
        layer(x).square().mean().backward()
        expected = clipped(layer.weight - 1e-3 * layer.weight.grad, rows)
        if hooked:
            optimizer.step()
        else:
            del optimizer
            gc.collect()
            layer.zero_grad()
            layer(x).square().mean().backward()
            subtract(layer.weight, 1e-3)
            layer(x)
        torch.testing.assert_close(layer.weight.double(), expected, rtol=1e-4, atol=1e-6)


# --- torch.compile ----------------------------------------------------------------------------------------------------


@pytest.fixture
def graphs() -> Iterator[SimpleNamespace]:
    """Counts the graphs that a compiled function is made of."""
    torch._dynamo.reset()
    counter = SimpleNamespace(count=0)

    def backend(graph: Any, inputs: Any) -> Any:
        counter.count += 1
        return graph.forward

    counter.backend = backend
    yield counter
    torch._dynamo.reset()


def test_compiled_training_under_torch_optim_is_one_graph(graphs: SimpleNamespace) -> None:
    ours, manual = pair()
    compiled = torch.compile(ours, backend=graphs.backend, fullgraph=True)
    first, second = torch.optim.AdamW(ours.parameters(), 0.05), torch.optim.AdamW(manual.parameters(), 0.05)
    for step in range(4):
        for call, optimizer in ((compiled, first), (manual, second)):
            optimizer.zero_grad()
            call(x_of(seed=step)).square().sum().backward()
            optimizer.step()
        by_hand(manual, ROWS)
        assert_same(ours, manual)
    assert graphs.count == 1


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("update", PLAIN)
def test_compiled_training_under_a_hand_written_optimizer(update: Any, backend: str) -> None:
    torch._dynamo.reset()
    ours, manual = pair()
    compiled = torch.compile(ours, backend=backend, fullgraph=True)
    for step in range(4):
        for call, layer in ((compiled, ours), (manual, manual)):
            for micro in range(2):
                call(x_of(seed=10 * step + micro)).square().sum().backward()
            update(layer.weight, 0.02)
            layer.zero_grad()
        compiled(x_of())
        by_hand(manual, ROWS)
        assert_same(ours, manual)
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_a_compiled_optimizer_clips_too() -> None:
    torch._dynamo.reset()
    ours, manual = pair()
    first, second = torch.optim.Adam(ours.parameters(), 0.05), torch.optim.Adam(manual.parameters(), 0.05)
    compiled = torch.compile(first.step, backend="eager")
    for step in range(3):
        ours.zero_grad()
        manual.zero_grad()
        backward(ours, step)
        backward(manual, step)
        compiled()
        second.step()
        by_hand(manual, ROWS)
        torch.testing.assert_close(ours.weight, manual.weight)
    torch._dynamo.reset()


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@contextmanager
def without_waiting() -> Iterator[None]:
    """An error where the host waits for the device."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def on_gpu(config: AnalogConfig) -> tuple[Clipped, Tensor]:
    return Clipped(n=256, m=64, config=config).cuda(), torch.randn(32, 256, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("config", [WHOLE, ROWS, LEARNED], ids=["whole", "rows", "learned"])
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}, {"capturable": True}], ids=str)
def test_clipping_never_waits_for_the_device(config: AnalogConfig, options: Any) -> None:
    (layer, x), (plain, _) = on_gpu(config), on_gpu(config)
    optimizer = torch.optim.AdamW(layer.parameters(), 1e-3, **options)
    weight = layer.weight.clone()
    for step in range(4):
        with without_waiting() if step else nullcontext():  # the first step allocates and compiles
            optimizer.zero_grad()
            layer(x).square().mean().backward()
            optimizer.step()
            plain.zero_grad()
            plain(x).square().mean().backward()
            for p in plain.parameters():
                p.data.sub_(p.grad, alpha=1e-3)  # type: ignore[arg-type]
            plain(x)
            clipping.clip_weights(plain)
    assert not torch.equal(layer.weight, weight)


@pytest.mark.gpu
@pytest.mark.parametrize("captured", ["forward", "all"])
def test_clipping_beside_and_in_a_cuda_graph(captured: str) -> None:
    layer, x = on_gpu(ROWS)
    manual, _ = on_gpu(ROWS)
    manual.rpu_config = NONE
    clipping.watch(manual)
    first = torch.optim.AdamW(layer.parameters(), 1e-2, capturable=True)
    second = torch.optim.AdamW(manual.parameters(), 1e-2, capturable=True)

    def gradients(model: Clipped) -> None:
        model.zero_grad(set_to_none=False)
        model(x).square().mean().backward()

    def step(model: Clipped, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()
        if model is manual:
            by_hand(manual, ROWS)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            for model, optimizer in ((layer, first), (manual, second)):
                gradients(model)
                step(model, optimizer)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gradients(layer)
        if captured == "all":
            first.step()
    for _ in range(3):
        graph.replay()
        if captured == "forward":
            first.step()
        gradients(manual)
        step(manual, second)
        torch.testing.assert_close(layer.weight, manual.weight, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
def test_a_step_that_a_grad_scaler_skips_on_the_device() -> None:
    layer, x = on_gpu(ROWS)
    optimizer = torch.optim.AdamW(layer.parameters(), 1e-2, fused=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
    for overflow in (False, True):
        with without_waiting() if overflow else nullcontext():
            optimizer.zero_grad()
            scaler.scale(layer(x).square().mean()).backward()
            if overflow:
                layer.weight.grad.fill_(float("inf"))  # type: ignore[union-attr]
            before = layer.weight.detach().clone()
            scaler.step(optimizer)
            scaler.update()
    assert torch.equal(layer.weight, before)
