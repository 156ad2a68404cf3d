"""Dispatch: which backend runs, when it is decided, and that both paths decide alike."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from spies import ran, spying
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import triptych
from triptych import registry
from triptych.backend import Backend

F32 = torch.float32


def leaf(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype).requires_grad_()


def test_forward_and_backward_run_where_the_policy_says() -> None:
    for forward, backward in (("torch", "composite"), ("composite", "torch")):
        x, w = leaf(3, 8), leaf(8)
        with triptych.use(f"{forward};rms_norm.backward={backward}"), ran() as seen:
            triptych.rms_norm(x, w).sum().backward()
        assert seen == {("rms_norm", "forward", forward): 1, ("rms_norm", "backward", backward): 1}
        assert x.grad is not None
        assert w.grad is not None


def test_a_refused_backward_is_refused_before_forward_is_launched() -> None:
    with spying(refuse=("backward",)) as spy:
        triptych.rms_norm(torch.ones(2, 4))  # no gradient: backward is not asked
        assert [phase for _, phase, _ in spy.ran] == ["forward"]
        with pytest.raises(triptych.Refused, match=r"rms_norm\.backward on 'spy'"):
            triptych.rms_norm(leaf(2, 4))
        assert len(spy.ran) == 1


def test_backward_is_asked_with_unknown_gradient_strides_and_the_saved_layout() -> None:
    with spying() as spy:
        triptych.rms_norm(leaf(2, 3, 4).transpose(0, 1), leaf(4).detach())
    forward, backward = spy.asked
    assert forward.tensor("x").stride == (4, 12, 1)  # type: ignore[union-attr]
    assert backward.tensor("dy").stride is None  # type: ignore[union-attr]
    assert backward.tensor("dy").shape == (3, 2, 4)  # type: ignore[union-attr]
    assert backward.tensor("x").stride == (4, 12, 1)  # type: ignore[union-attr]
    assert backward.tensor("rstd").shape == (3, 2)  # type: ignore[union-attr]
    assert backward.scalar("need_dx") is True
    assert backward.scalar("need_dw") is False


def test_a_signature_is_selected_once_and_every_difference_is_selected_anew() -> None:
    with spying() as spy:
        for _ in range(3):
            triptych.rms_norm(torch.ones(2, 4))
        assert len(spy.asked) == 1
        variants = [
            lambda: triptych.rms_norm(torch.ones(3, 4)),
            lambda: triptych.rms_norm(torch.ones(4, 2).t()),
            lambda: triptych.rms_norm(torch.ones(2, 4, dtype=torch.bfloat16)),
            lambda: triptych.rms_norm(torch.ones(9)[1:].view(2, 4)),
            lambda: triptych.rms_norm(torch.ones(2, 4), torch.ones(4)),
            lambda: triptych.rms_norm(torch.ones(2, 4), eps=1e-3),
            lambda: triptych.rms_norm(torch.ones(2, 4), rounding="before_weight"),
            lambda: triptych.rms_norm(torch.ones(2, 4), layer="a"),
        ]
        for number, variant in enumerate(variants, start=2):
            variant()
            variant()
            assert len(spy.asked) == number
        assert spy.asked[4].tensor("x").aligned is False  # type: ignore[union-attr]


def test_rules_by_call_number_take_effect_between_equal_calls() -> None:
    first = next_number()
    with triptych.use(f"composite;rms_norm#{first + 2}:{first + 4}=torch"):
        order = []
        for _ in range(5):
            with ran() as seen:
                triptych.rms_norm(torch.ones(2, 4))
            order += [backend for _, _, backend in seen]
    assert order == ["composite", "composite", "torch", "torch", "composite"]


def next_number() -> int:
    """The number that the next call of rms_norm.forward gets."""
    from triptych import dispatch, intercept

    numbers = []

    def note(invocation: intercept.Invocation, proceed: intercept.Proceed) -> tuple[torch.Tensor, ...]:
        numbers.append(invocation.index)
        return proceed()

    undo = intercept.install(note)
    triptych.rms_norm(torch.ones(1, 1))
    undo()
    assert "rms_norm" in dispatch.live()
    return int(numbers[0]) + 1


def test_rules_by_layer_and_by_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    with triptych.use("composite;rms_norm@blocks.*.norm=torch"), ran() as seen:
        triptych.rms_norm(torch.ones(2, 4), layer="blocks.3.norm")
        triptych.rms_norm(torch.ones(2, 4), layer="final")
    assert seen == {("rms_norm", "forward", "torch"): 1, ("rms_norm", "forward", "composite"): 1}
    with triptych.use("composite;rms_norm%1=torch"):
        for rank, backend in (("0", "composite"), ("1", "torch")):
            monkeypatch.setenv("RANK", rank)
            with ran() as seen:
                triptych.rms_norm(torch.ones(2, 4))
            assert seen == {("rms_norm", "forward", backend): 1}


def test_the_operator_selects_like_the_short_path() -> None:
    x = torch.randn(2, 4)
    for backend in ("torch", "composite"):
        with triptych.use(backend), ran() as seen:
            torch.ops.triptych.rms_norm(x, None, 1e-6, 0.0, "after_weight", "")
        assert seen == {("rms_norm", "forward", backend): 1}


def test_a_policy_switch_takes_effect_without_recompiling() -> None:
    graphs = 0

    def counting(graph: torch.fx.GraphModule, example: list[torch.Tensor]) -> object:
        nonlocal graphs
        graphs += 1
        return graph.forward

    compiled = torch.compile(lambda x: triptych.rms_norm(x), backend=counting, fullgraph=True)
    x = torch.randn(2, 4)
    for backend in ("torch", "composite", "torch"):
        with triptych.use(backend), ran() as seen:
            compiled(x)
        assert seen == {("rms_norm", "forward", backend): 1}
    assert graphs == 1


def test_tensor_subclasses_and_modes_go_through_the_operator() -> None:
    class Wrapped(torch.Tensor):
        pass

    x = torch.randn(2, 4).as_subclass(Wrapped)
    with triptych.use("torch"), ran() as seen:
        assert torch.equal(torch.Tensor(triptych.rms_norm(x)), triptych.rms_norm(torch.Tensor(x)))
        with Watching() as mode:
            triptych.rms_norm(torch.ones(2, 4))
        assert mode.saw("rms_norm")
    assert seen == {("rms_norm", "forward", "torch"): 3}


class Watching(TorchFunctionMode):
    """Keeps the names of the functions that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))

    def saw(self, name: str) -> bool:
        return any(f"triptych.{name}" in each for each in self.names)


def test_a_default_device_costs_no_detour() -> None:
    x = leaf(2, 4)
    with torch.device("cpu"), triptych.use("composite"), ran() as seen:
        y = triptych.rms_norm(x)
    assert type(y.grad_fn).__name__ == "triptych.rms_normBackward"  # the short path's, not the operator's
    assert seen == {("rms_norm", "forward", "composite"): 1}


def test_meta_and_fake_tensors_run_nothing() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with ran() as seen:
        y = triptych.rms_norm(torch.empty(2, 4, device="meta"))
        assert y.is_meta
        assert y.shape == (2, 4)
        with FakeTensorMode():
            assert triptych.rms_norm(torch.empty(3, 4)).shape == (3, 4)
    assert seen == {}


def test_only_wanted_gradients_are_asked_for() -> None:
    with spying() as spy:
        for x, w in (
            (leaf(2, 4), torch.ones(4)),
            (torch.ones(2, 4), leaf(4)),
            (leaf(2, 4), leaf(4)),
            (leaf(2, 4), None),
        ):
            triptych.rms_norm(x, w).sum().backward()
            assert (x.grad is not None) is x.requires_grad
            assert w is None or (w.grad is not None) is w.requires_grad
    flags = [args[-2:] for _, phase, args in spy.ran if phase == "backward"]
    assert flags == [(True, False), (False, True), (True, True), (True, False)]


def test_a_missing_gradient_is_none_where_the_op_takes_none_and_zeros_elsewhere() -> None:
    with spying() as spy:
        x, r = leaf(2, 4), leaf(2, 4)
        triptych.add_rms_norm(x, r)[0].sum().backward()
        triptych.add_rms_norm(x, r)[1].sum().backward()
    backwards = [args for _, phase, args in spy.ran if phase == "backward"]
    assert backwards[0][1] is None
    assert torch.equal(backwards[1][0], torch.zeros(2, 4))


def test_x_and_residual_get_gradients_of_their_own() -> None:
    x, r = leaf(2, 4), leaf(2, 4)
    y, h = triptych.add_rms_norm(x, r, leaf(4))
    (y.sum() + h.square().sum()).backward()
    assert x.grad is not None
    assert r.grad is not None
    assert torch.equal(x.grad, r.grad)
    x.grad.zero_()
    assert r.grad.abs().sum() > 0


def test_a_second_derivative_is_an_error_on_both_paths() -> None:
    for call in (triptych.rms_norm, lambda x: torch.ops.triptych.rms_norm(x, None, 1e-6, 0.0, "after_weight", "")[0]):
        x = leaf(2, 4)
        (dx,) = torch.autograd.grad(call(x).square().sum(), x, create_graph=True)
        with pytest.raises(triptych.TriptychError, match="rms_norm was differentiated twice") as raised:
            dx.sum().backward()
        assert isinstance(raised.value, NotImplementedError)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_recomputes_and_gives_the_same_gradients(reentrant: bool) -> None:
    x, w = leaf(3, 8), leaf(8)
    with triptych.use("composite"):
        expected = torch.autograd.grad(triptych.rms_norm(x, w).square().sum(), (x, w))
    with triptych.use("composite"), ran() as seen:
        y = checkpoint(lambda a, b: triptych.rms_norm(a, b), x, w, use_reentrant=reentrant)
        y.square().sum().backward()
    assert seen == {("rms_norm", "forward", "composite"): 2, ("rms_norm", "backward", "composite"): 1}
    assert x.grad is not None
    assert w.grad is not None
    assert torch.equal(x.grad, expected[0])
    assert torch.equal(w.grad, expected[1])


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_whoever_observes_the_dispatcher_sees_the_operator() -> None:
    """A trace that missed the kernel would replay its empty outputs."""
    layer = triptych.layers.RMSNorm(8).requires_grad_(False)
    with triptych.use("composite"):
        traced = torch.jit.trace(layer, torch.randn(4, 8))
        x = torch.randn(3, 8)
        with ran() as seen:
            assert torch.equal(traced(x), layer(x))
    assert seen == {("rms_norm", "forward", "composite"): 2}
    assert "triptych::rms_norm" in str(traced.graph)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_derivatives_that_do_not_exist_are_errors_not_zeros() -> None:
    from torch.autograd import forward_ad

    x, t = torch.randn(2, 4), torch.ones(2, 4)
    with triptych.use("composite"), ran() as seen:
        with pytest.raises(triptych.DerivativeError, match="rms_norm was called under forward-mode differentiation"):
            torch.func.jvp(triptych.rms_norm, (x,), (t,))
        with forward_ad.dual_level(), pytest.raises(triptych.DerivativeError, match="under forward-mode"):
            triptych.rms_norm(forward_ad.make_dual(x, t))
        with forward_ad.dual_level():
            triptych.rms_norm(x)  # no tangent: nothing would be lost
        with pytest.raises(triptych.DerivativeError, match="rms_norm was differentiated twice"):
            torch.func.grad(lambda x: torch.func.grad(lambda x: triptych.rms_norm(x).sum())(x).sum())(x)
    assert seen == {("rms_norm", "forward", "composite"): 2, ("rms_norm", "backward", "composite"): 1}


def test_eager_backward_through_the_operator_runs_as_forwards_block_said() -> None:
    x = leaf(2, 4)
    with triptych.use("composite"), Watching(), ran() as seen:
        y = triptych.rms_norm(x)
    assert seen == {("rms_norm", "forward", "composite"): 1}
    with triptych.use("torch"), ran() as seen:
        y.sum().backward()
    assert seen == {("rms_norm", "backward", "composite"): 1}


@pytest.mark.parametrize(
    ("outputs", "text"),
    [
        (lambda y, rstd: None, "returned a NoneType. It must return a tuple of tensors: y, rstd."),
        (lambda y, rstd: y, "returned a Tensor. It must return a tuple of tensors: y, rstd."),
        (lambda y, rstd: (y, 1.0), "returned a tuple of Tensor, float. It must return a tuple of tensors: y, rstd."),
        (lambda y, rstd: (y,), "returned 1 tensors. It must return 2: y, rstd."),
        (lambda y, rstd: (y, rstd, y), "returned 3 tensors. It must return 2: y, rstd."),
        (
            lambda y, rstd: (y[:1], rstd),
            "returned y as [1, 4] in torch.float32 on cpu. It must be [2, 4] in torch.float32 on cpu.",
        ),
        (
            lambda y, rstd: (y, rstd.double()),
            "returned rstd as [2] in torch.float64 on cpu. It must be [2] in torch.float32 on cpu.",
        ),
    ],
)
def test_what_a_backend_returns_is_checked(outputs: Any, text: str) -> None:
    class Bad(Backend):
        def ops(self) -> tuple[str, ...]:
            return ("rms_norm",)

        def implementation(self, op: str, phase: str) -> Any:
            return lambda *args: outputs(*registry.ops.get(op).phase(phase).composite(*args))

    calls = [lambda: triptych.rms_norm(torch.ones(2, 4))]
    if "as [" not in text:
        calls.append(lambda: torch.ops.triptych.rms_norm(torch.ones(2, 4), None, 1e-6, 0.0, "after_weight", ""))
    for call in calls:
        with registry.backends.added("bad", Bad("bad")), triptych.use("bad"):
            with pytest.raises(triptych.PluginError) as raised:
                call()
        assert str(raised.value) == (
            f"rms_norm.forward on backend 'bad' {text} Report it to the authors of that backend, or choose another."
        )


def test_selections_do_not_pile_up_without_bound() -> None:
    from triptych import scope

    with triptych.use("composite"):
        for size in range(1, scope._LIMIT + 50):
            triptych.rms_norm(torch.ones(1, size % 7 + 1), eps=size * 1e-9)
        assert len(scope.current().plans) <= scope._LIMIT


def test_an_added_backend_leaves_no_stale_selection() -> None:
    class Takes(Backend):
        def ops(self) -> tuple[str, ...]:
            return ("rms_norm",)

        def priority(self, device_type: str) -> int | None:
            return 10**6

        def implementation(self, op: str, phase: str) -> object:  # type: ignore[override]
            return registry.ops.get(op).phase(phase).composite

    x = torch.ones(2, 4)
    for backend in (Takes("one"), Takes("two")):
        with registry.backends.added(backend.name, backend), ran() as seen:
            triptych.rms_norm(x)
        assert seen == {("rms_norm", "forward", backend.name): 1}
    with ran() as seen:
        triptych.rms_norm(x)
    assert not {"one", "two"} & {backend for _, _, backend in seen}


def test_a_preference_that_is_not_met_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    from triptych import refusals

    refusals._logged.clear()
    with spying("spy,composite", refuse=("forward",)), caplog.at_level("INFO", "triptych.select"), ran() as seen:
        for size in (4, 5, 6):
            triptych.rms_norm(torch.ones(2, size))
    assert seen == {("rms_norm", "forward", "composite"): 3}
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        (
            "WARNING",
            "rms_norm.forward runs on 'composite', not on 'spy' (triptych.use rule 1, \"spy,composite\"): "
            "this spy refuses it. Use 'composite'.",
        )
    ]


def test_a_layer_is_copied_and_pickled_with_its_name() -> None:
    layer = triptych.layers.RMSNorm(8)
    layer.layer_name = "blocks.0.norm"
    assert copy.deepcopy(layer).layer_name == "blocks.0.norm"
