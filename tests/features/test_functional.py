"""torch.func: models as functions, their gradients, batches of models, of samples and of gradients.

Under vmap an op runs once for each element; gradients come from the same kernels as with loss.backward(). What the
kernels have no derivative for is an error, never zeros.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from subjects import DETERMINISTIC, SUBJECTS, assert_close, batch, build, counts, ran_on
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, stack_module_state, vjp, vmap

import triptych
from triptych.scope import process_policy

NORMS = ("rms_norm", "add_rms_norm")
BATCHED = tuple(name for name in DETERMINISTIC if name != "analog_calibrating")
"""vmap refuses a layer that calibrates."""
Values = dict[str, Tensor]


def one(name: str, device: str) -> nn.Module:
    """One block: the triton interpreter is slow."""
    return build(name, device, blocks=1)


def parameters(model: nn.Module) -> Values:
    return {name: value.detach().clone().requires_grad_() for name, value in model.named_parameters()}


def state_of(model: nn.Module) -> tuple[Values, Values]:
    """Copies of what a model holds."""
    values = {path: value.detach().clone() for path, value in model.named_parameters()}
    return values, {path: value.clone() for path, value in model.named_buffers()}


def small(device: str, number: int = 0) -> Tensor:
    return batch(device, rows=2, length=3, number=number)


def loss_of(model: nn.Module) -> Callable[[Values, Tensor], Tensor]:
    return lambda values, x: functional_call(model, values, (x,)).square().mean()


def gradients(model: nn.Module, x: Tensor) -> Values:
    """What autograd says, with nothing of torch.func around it."""
    model.zero_grad()
    torch.autograd.backward(model(x).square().mean())
    return {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


# --- one model, as a function of its parameters -----------------------------------------------------------------------


@pytest.mark.feature("torch.func.functional_call")
@pytest.mark.parametrize("name", SUBJECTS)
def test_a_functional_call_is_the_call(name: str, backend: str, device: str) -> None:
    model, x = one(name, device), small(device)
    other, values = copy.deepcopy(model), parameters(model)
    for value in values.values():
        value.grad = None
    with process_policy(backend), ran_on(backend, name):
        torch.manual_seed(3)
        loss = loss_of(other)(values, x)
        torch.autograd.backward(loss)
    with process_policy(backend):
        torch.manual_seed(3)
        wanted = gradients(model, x)
    assert {path for path, value in values.items() if value.grad is not None} == wanted.keys()
    assert all(torch.equal(values[path].grad, wanted[path]) for path in wanted)  # type: ignore[arg-type]
    assert all(parameter.grad is None for parameter in other.parameters())


@pytest.mark.feature("torch.func.grad")
@pytest.mark.parametrize("name", SUBJECTS)
def test_grad_is_autograd(name: str, backend: str, device: str) -> None:
    """Buffers are arguments: a layer that calibrates changes them, and torch lets nothing change what it captured."""
    model, x = one(name, device), small(device)
    values, buffers = state_of(model)

    def loss(values: Values, buffers: Values) -> Tensor:
        return functional_call(model, (values, buffers), (x,)).square().mean()  # type: ignore[no-any-return]

    with process_policy(backend), ran_on(backend, name):
        torch.manual_seed(3)
        found = grad(loss)(values, buffers)
    with process_policy(backend), ran_on(backend, name):
        torch.manual_seed(3)
        wanted = gradients(model, x)
    assert_gradients(found, wanted)
    for path, value in model.state_dict().items():
        assert torch.equal({**values, **buffers}[path], value), path


@pytest.mark.feature("torch.func.grad")
@pytest.mark.parametrize("name", BATCHED)
def test_vjp_is_autograd(name: str, backend: str, device: str) -> None:
    model, x = one(name, device), small(device)
    with process_policy(backend), ran_on(backend, name):
        loss, pull, *_ = vjp(lambda values: loss_of(model)(values, x), state_of(model)[0])
        found = pull(torch.ones_like(loss))[0]
    with process_policy(backend):
        assert_gradients(found, gradients(model, x))


def assert_gradients(found: Values, wanted: Values) -> None:
    """Bit for bit; torch.func gives zeros where autograd gives none."""
    assert found.keys() >= wanted.keys() and wanted
    for path, value in found.items():
        assert torch.equal(value, wanted.get(path, torch.zeros_like(value))), path


@pytest.mark.feature("torch.func.grad")
@pytest.mark.parametrize("name", [*NORMS, "analog"])
def test_jacobians_and_batches_of_gradients_have_the_rows_of_autograd(name: str, backend: str, device: str) -> None:
    x, model = batch(device, rows=1, length=1), one(name, device)

    def corner(x: Tensor) -> Tensor:
        return model(x)[..., :2].flatten()  # type: ignore[no-any-return]

    entry = x.clone().requires_grad_()
    with process_policy(backend), ran_on(backend, name):
        y = corner(entry)
    vectors = torch.eye(len(y), device=device)
    with ran_on_backward(backend):  # after the block of the policy has ended
        wanted = torch.stack([torch.autograd.grad(y, entry, each, retain_graph=True)[0] for each in vectors])
        batched = torch.autograd.grad(y, entry, vectors, is_grads_batched=True, retain_graph=True)[0]
        mapped = vmap(lambda each: torch.autograd.grad(y, entry, each, retain_graph=True)[0])(vectors)
    with process_policy(backend), ran_on(backend, name):
        reverse = jacrev(corner)(x)
    for found in (batched, mapped, reverse):
        assert_close(found, wanted)


class ran_on_backward:  # noqa: N801 - used like a function
    """Assert that the block runs backwards, on one backend, and nothing else."""

    def __init__(self, backend: str) -> None:
        self.backend = backend

    def __enter__(self) -> None:
        self.before = counts()

    def __exit__(self, *exc: object) -> None:
        found = counts() - self.before
        if exc[0] is None:
            assert {(phase, each) for _, phase, each in found} == {("backward", self.backend)}, found


# --- many at once -----------------------------------------------------------------------------------------------------


@pytest.mark.feature("torch.func.vmap")
@pytest.mark.parametrize("name", BATCHED)
def test_a_batch_of_inputs_is_a_loop_over_them(name: str, backend: str, device: str) -> None:
    xs = torch.stack([small(device, number) for number in range(2)], dim=1)  # the batch is not the first one
    model = one(name, device)
    first, second = (xs.clone().requires_grad_() for _ in range(2))
    with process_policy(backend), ran_on(backend, name):
        mapped = vmap(model, in_dims=1, out_dims=1)(first)
        torch.autograd.backward(mapped.square().mean())
        found = {path: value.grad for path, value in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    with process_policy(backend):
        looped = torch.stack([model(x) for x in second.unbind(1)], dim=1)
        torch.autograd.backward(looped.square().mean())
    assert_close(mapped, looped)
    assert_close(first.grad, second.grad)  # type: ignore[arg-type]
    for path, value in model.named_parameters():
        assert value.grad is not None and found[path] is not None, path
        assert_close(found[path], value.grad, path)  # type: ignore[arg-type]


@pytest.mark.feature("torch.func.vmap")
@pytest.mark.parametrize("name", BATCHED)
def test_an_ensemble_is_its_models(name: str, backend: str, device: str) -> None:
    x, models = small(device), []
    for number in range(2):
        models.append(one(name, device))
        with torch.no_grad():
            for parameter in models[-1].parameters():
                parameter.mul_(1 + number / 8)
    values, buffers = stack_module_state(models)
    base = copy.deepcopy(models[0])
    with process_policy(backend), ran_on(backend, name):
        outputs = vmap(lambda *state: functional_call(base, state, (x,)))(values, buffers)
        torch.autograd.backward(outputs.square().sum())
    with process_policy(backend):
        for number, model in enumerate(models):
            y = model(x)
            torch.autograd.backward(y.square().sum())
            assert_close(outputs[number], y)
            for path, parameter in model.named_parameters():
                assert parameter.grad is not None and values[path].grad is not None, path
                assert_close(values[path].grad[number], parameter.grad, path)


@pytest.mark.feature("torch.func.vmap")
@pytest.mark.parametrize("name", BATCHED)
def test_gradients_of_single_samples(name: str, backend: str, device: str) -> None:
    model, xs = one(name, device), small(device)
    values = {path: value.detach() for path, value in model.named_parameters()}
    with process_policy(backend), ran_on(backend, name):
        found = vmap(grad(loss_of(model)), in_dims=(None, 0))(values, xs)
    with process_policy(backend):
        for number, x in enumerate(xs):
            for path, wanted in gradients(model, x).items():
                assert_close(found[path][number], wanted, path)


@pytest.mark.feature("torch.func.vmap")
def test_noise_under_vmap_is_drawn_as_vmap_is_told(backend: str, device: str) -> None:
    name = "analog_noise"
    model, xs = one(name, device), small(device)[:1].expand(2, -1, -1)
    with process_policy(backend), ran_on(backend, name):
        same = vmap(model, randomness="same")(xs)
        different = vmap(model, randomness="different")(xs)
        torch.autograd.backward(different.square().sum())
    assert torch.equal(same[0], same[1])
    assert not torch.equal(different[0], different[1])
    assert all(bool(torch.isfinite(value.grad).all()) for value in model.parameters() if value.grad is not None)
    with process_policy(backend), pytest.raises(RuntimeError, match="randomness"):
        vmap(model)(xs)


@pytest.mark.feature("torch.func.vmap")
def test_operators_called_by_name_follow_vmap_too(backend: str, device: str) -> None:
    xs, weights = torch.randn(3, 4, 8, device=device), torch.randn(8, 3, device=device, requires_grad=True)
    operator = torch.ops.triptych.rms_norm.default
    before = counts()
    with process_policy(backend):
        y, rstd = vmap(lambda x, w: operator(x, w, 1e-6, 0.0, "after_weight", ""), in_dims=(0, 1))(xs, weights)
        torch.autograd.backward(y.sum())
        found, weights.grad = weights.grad, None
        looped = torch.stack([triptych.rms_norm(x, w, eps=1e-6) for x, w in zip(xs, weights.unbind(1), strict=True)])
        torch.autograd.backward(looped.sum())
    assert counts() - before == {("rms_norm", phase, backend): 6 for phase in ("forward", "backward")}
    assert rstd.shape == (3, 4)
    assert torch.equal(y, looped) and torch.equal(found, weights.grad)  # type: ignore[arg-type]


@pytest.mark.feature("torch.func.vmap")
@pytest.mark.parametrize("name", BATCHED)
def test_vmap_is_compiled(name: str, device: str) -> None:
    """A function around the model: torch.compile cannot follow torch's vmap of a module that has modules in it."""
    model, xs = one(name, device), torch.stack([small(device, number) for number in range(2)])
    first, second = (xs.clone().requires_grad_() for _ in range(2))
    with process_policy("torch"), ran_on("torch", name):
        compiled = torch.compile(vmap(lambda x: model(x)), backend="aot_eager", fullgraph=True)(first)
        torch.autograd.backward(compiled.square().mean())
    with process_policy("torch"):
        eager = vmap(model)(second)
        torch.autograd.backward(eager.square().mean())
    assert_close(compiled, eager)
    assert_close(first.grad, second.grad)  # type: ignore[arg-type]


def test_a_batch_of_nothing_is_refused() -> None:
    with pytest.raises(triptych.ArgumentError, match=r"rms_norm was called inside torch\.func\.vmap over a dimension"):
        vmap(triptych.rms_norm)(torch.randn(0, 4, 8))


# --- what there is no derivative for ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*NORMS, "analog", "analog_clipped"])
@pytest.mark.parametrize("ask", [hessian, jacfwd, lambda f: lambda x: jvp(f, (x,), (x,)), lambda f: grad(grad_sum(f))])
def test_a_derivative_that_does_not_exist_is_refused(name: str, ask: Callable[..., Callable[[Tensor], object]]) -> None:
    model = build(name)
    with (
        process_policy("torch"),
        pytest.raises(triptych.DerivativeError, match=r"forward-mode differentiation|differentiated twice"),
    ):
        ask(lambda x: model(x).square().sum())(batch(rows=1, length=1))


def grad_sum(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: grad(function)(x).sum()


@pytest.mark.parametrize("name", [*NORMS, "analog"])
def test_batches_of_gradients_cannot_be_differentiated_again(name: str) -> None:
    model, x = build(name), batch(rows=1, length=1).requires_grad_()
    with process_policy("torch"):
        y = model(x)
        vectors = torch.randn(2, *y.shape)
        first = torch.autograd.grad(y, x, vectors, is_grads_batched=True, create_graph=True)[0]
        with pytest.raises(triptych.DerivativeError, match="differentiated twice"):
            torch.autograd.backward(first.sum())
