"""analog_linear: y = x W^T + bias as a row of analog crossbars computes it, with converters at both ends.

The N inputs are split into T tiles (`triptych.tiling`). For tile s with input range IR, in the dtype of the arithmetic:

    x'  = x clamped to +-IR (modes learned, fast); x itself (none; dynamic, where IR = max |x_s| for each row)
    x_q = round(x' / step) step,            step = 2 IR / inp_res or 2 IR inp_res, if inp_res > 0         the DAC
    y_s = x_q W_s^T                         W has been through `analog_weight` already
    y_s += m out_noise / sqrt(T) IR normal(seed, 1 + s, row, channel)                        output noise
    y_s = clamp(round(y_s / step) step, +-bound),   bound = IR out_bound m, step from out_res             the ADC
    y   = sum_s y_s + bias
    m = wmax[s, c], or max_c of it; divisions are divisions, and rounding is half to even

backward, with g_s = dy where the ADC of tile s did not clip, else 0, and gx = g_s W_s:

    dW_s = g_s^T x_q;   dbias = sum of dy over rows;   dx = gx, but 0 where |x| > IR (none, dynamic: everywhere gx)
    learned: dIR = IR (sum over x >= IR of min(gx, 0) - sum over x <= -IR of max(gx, 0)
                       + decay [share of |x| < IR  >  input_min_percentage])
    fast:    dIR = sum over x > IR of gx - sum over x < -IR of gx

Shapes: R rows are the leading dimensions of x as one. x, dx [..., N]; weight, dweight [C, N]; bias, dbias [C]; y, dy
[..., C]; input_range, drange [T]; wmax [T, C]; clipped [T, R, ceil(C / 8)]: bit c & 7 of byte c >> 3, lowest first,
says whether the ADC clipped channel c.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from triptych.call import TensorMeta
from triptych.dispatch import define
from triptych.errors import ArgumentError
from triptych.ops import _analog_bounds as bounds
from triptych.ops import _analog_product as product
from triptych.ops._analog_checks import check_device, check_floats, check_like, check_seed
from triptych.ops._analog_product import Operands, Settings, matrix
from triptych.ops._analog_samples import linear_samples
from triptych.ops._norm_bounds import statistics_dtype
from triptych.ops._quantizer import smallest_step
from triptych.ops.analog_weight import check_weight
from triptych.ops.rms_norm import FLOATS, check_plain
from triptych.opspec import OpSpec, Phase, Tensors
from triptych.sharding import analog_linear as parts
from triptych.sharding.rule import Sharding
from triptych.tiling import check_tiles

Tensor = torch.Tensor
InputRangeMode = Literal["none", "learned", "fast", "dynamic"]
MODES: tuple[str, ...] = ("none", "learned", "fast", "dynamic")


# --- the public function --------------------------------------------------------------------------------------------


def analog_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    input_range: Tensor | None = None,
    wmax: Tensor | None = None,
    seed: Tensor | None = None,
    tiles: int = 1,
    input_range_mode: InputRangeMode = "none",
    inp_res: float = -1.0,
    out_noise: float = 0.0,
    out_noise_per_channel: bool = False,
    out_bound: float = 0.0,
    out_res: float = -1.0,
    out_bound_per_channel: bool = False,
    decay: float = 0.001,
    input_min_percentage: float = 0.95,
    layer: str = "",
) -> Tensor:
    """x W^T + bias through analog tiles: input range, DAC, product, output noise, ADC.

    Args:
        x: [..., N]; float32, bfloat16, float16 or float64; any strides.
        weight: [C, N] in x's dtype, as `analog_weight` returns it, or plain weights.
        bias: [C], of x's dtype or float32 beside a 16-bit x; added in full precision.
        input_range: [T], of x's dtype or float32, for the modes "learned" (also a static range) and "fast".
        wmax: [T, C] in float32 (float64 for float64): the maxima that `analog_weight` or `tile_abs_max` returns; needed
            by output noise and ADC.
        seed: int64 [1] on x's device, for output noise; see `triptych.noise`.
        tiles: T, how many tiles the N inputs are split into.
        input_range_mode: "none"; "learned": clamp, with the gradient of a learned range; "fast": clamp, with the
            clamp's own derivative; "dynamic": the maximum of each row and tile, no clamp.
        inp_res: steps of the DAC from -IR to IR (254 for 8 bits), or its step as a share; 0 or less: no DAC.
        out_noise: standard deviation of the output noise, relative to IR and the maximum of the weights.
        out_noise_per_channel: whether that is each channel's maximum.
        out_bound: largest output of a tile, relative to IR and the maximum of the weights; 0: no ADC.
        out_res: steps of the ADC, as inp_res; 0 or less: it only clips.
        out_bound_per_channel: whether out_bound is relative to each channel's maximum.
        decay, input_min_percentage: in backward, a learned range shrinks by decay while more than that share of the
            inputs lies inside it.
        layer: the name under which policies and reports know the caller.

    Returns:
        [..., C] in x's dtype, contiguous; rounded once. 1-D for a 1-D x.

    Raises:
        ArgumentError: the arguments do not fit together, or a range in the memory of the CPU is not finite.
        Refused: the policy allows no backend that can run it.
    """
    if input_range is not None:
        _check_values(input_range)
    y: Tensor = _analog_linear(
        layer,
        x,
        weight,
        bias,
        input_range,
        wmax,
        seed,
        tiles,
        input_range_mode,
        inp_res,
        out_noise,
        out_noise_per_channel,
        out_bound,
        out_res,
        out_bound_per_channel,
        decay,
        input_min_percentage,
    )
    return y


def _check_values(input_range: Tensor) -> None:
    """Raise ArgumentError for a range that is not finite, where looking at it costs no synchronisation."""
    if torch.compiler.is_compiling() or type(input_range) not in (Tensor, torch.nn.Parameter):
        return
    observed = torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack() is not None
    if input_range.device.type == "cpu" and not observed and not torch.isfinite(input_range).all():
        raise ArgumentError(
            f"analog_linear: input_range holds {input_range.tolist()}. Every range must be a finite number; calibrate "
            f"it again, or load one from before the training diverged."
        )


# --- what every backend may rely on ---------------------------------------------------------------------------------


def check(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    input_range: Tensor | None,
    wmax: Tensor | None,
    seed: Tensor | None,
    *scalars: Any,
) -> None:
    """Raise ArgumentError unless the arguments of `analog_linear` fit together."""
    op, settings = "analog_linear", Settings(*scalars)
    _check_data(op, x, weight, bias, input_range, settings)
    _check_settings(op, settings)
    needs_wmax = [name for name in ("out_noise", "out_bound") if getattr(settings, name) > 0]
    if wmax is not None:
        wide = statistics_dtype(x.dtype)
        shape = (settings.tiles, weight.shape[0])
        check_like(op, "wmax", wmax, "weight", weight, shape, "one number for each tile and channel")
        if wmax.dtype is not wide:
            raise ArgumentError(
                f"{op}: wmax has dtype {wmax.dtype} and x has dtype {x.dtype}. wmax must be {wide}, as analog_weight "
                f"and tile_abs_max return it."
            )
    elif needs_wmax:
        raise ArgumentError(
            f"{op}: {' and '.join(needs_wmax)} need the maxima of the weights. Pass wmax from analog_weight or "
            f"tile_abs_max(weight, tiles)."
        )
    check_seed(op, seed, x, needed=settings.out_noise > 0, why=f"out_noise is {settings.out_noise}")


def _check_data(
    op: str, x: Tensor, weight: Tensor, bias: Tensor | None, input_range: Tensor | None, settings: Settings
) -> None:
    if not isinstance(x, Tensor):
        raise ArgumentError(f"{op}: x is a {type(x).__name__}. It must be a torch.Tensor.")
    check_plain(op, "x", x)
    if x.dtype not in FLOATS:
        raise ArgumentError(
            f"{op}: x has dtype {x.dtype}. It must be float32, bfloat16, float16 or float64; convert it with x.to(...)."
        )
    if x.dim() == 0:
        raise ArgumentError(f"{op}: x is a scalar tensor. It needs at least one dimension, that of the inputs.")
    check_weight(op, weight)
    if weight.shape[1] != x.shape[-1]:
        raise ArgumentError(
            f"{op}: weight has shape {list(weight.shape)} and x has shape {list(x.shape)}. weight must have shape "
            f"[channels, {x.shape[-1]}], with the last dimension of x."
        )
    check_device(op, "weight", weight, "x", x)
    if weight.dtype != x.dtype:
        raise ArgumentError(
            f"{op}: weight has dtype {weight.dtype} and x has dtype {x.dtype}. They must be the same; convert x with "
            f"x.to({weight.dtype})."
        )
    check_tiles(op, settings.tiles, x.shape[-1])
    if bias is not None:
        check_like(op, "bias", bias, "weight", weight, (weight.shape[0],), "one number for each channel")
    mode = settings.input_range_mode
    if not isinstance(mode, str) or mode not in MODES:
        raise ArgumentError(f"{op}: input_range_mode is {mode!r}. It must be one of {', '.join(map(repr, MODES))}.")
    if mode in ("learned", "fast"):
        if input_range is None:
            raise ArgumentError(f"{op}: input_range_mode is {mode!r} but there is no input_range. Pass one, [tiles].")
        check_like(op, "input_range", input_range, "x", x, (settings.tiles,), "one number for each tile")
    elif input_range is not None:
        raise ArgumentError(
            f"{op}: there is an input_range but input_range_mode is {mode!r}. Choose 'learned' or 'fast', or pass none."
        )


def _check_settings(op: str, settings: Settings) -> None:
    numbers = ("inp_res", "out_noise", "out_bound", "out_res", "decay", "input_min_percentage")
    check_floats(op, **{name: getattr(settings, name) for name in numbers})
    for name in ("out_noise", "out_bound", "decay"):
        if getattr(settings, name) < 0:
            raise ArgumentError(f"{op}: {name} is {getattr(settings, name)}. It must be 0 or greater.")
    if settings.input_range_mode == "none":
        for name in ("inp_res", "out_noise", "out_bound"):
            if getattr(settings, name) > 0:
                raise ArgumentError(
                    f"{op}: {name} is {getattr(settings, name)} but input_range_mode is 'none'; it is relative to the "
                    f"input range. Choose another mode, or {name} {'-1' if name == 'inp_res' else '0'}."
                )
    if settings.out_res > 0 and settings.out_bound <= 0:
        raise ArgumentError(
            f"{op}: out_res is {settings.out_res} but out_bound is {settings.out_bound}: an ADC needs a range. Set "
            f"out_bound, or out_res -1."
        )


def check_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    input_range: Tensor | None,
    clipped: Tensor,
    *scalars: Any,
) -> None:
    """Raise ArgumentError unless the arguments of `analog_linear_backward` fit together."""
    op, settings = "analog_linear_backward", Settings(*scalars[: len(Settings._fields)])
    _check_data(op, x, weight, bias, input_range, settings)
    _check_settings(op, settings)
    if not isinstance(dy, Tensor) or not isinstance(clipped, Tensor):
        raise ArgumentError(f"{op}: dy and clipped must be torch.Tensors.")
    check_plain(op, "dy", dy)
    shape = (*x.shape[:-1], weight.shape[0])
    if tuple(dy.shape) != tuple(shape) or dy.dtype != x.dtype or dy.device != x.device:
        raise ArgumentError(
            f"{op}: dy is {dy.dtype}{list(dy.shape)} on {dy.device}. It must be {x.dtype}{list(shape)} on {x.device}, "
            f"the gradient of y."
        )
    bits = _clipped_shape(x, weight, settings)
    if tuple(clipped.shape) != tuple(bits) or clipped.dtype is not torch.uint8 or clipped.device != x.device:
        raise ArgumentError(
            f"{op}: clipped is {clipped.dtype}{list(clipped.shape)} on {clipped.device}. It must be uint8{list(bits)} "
            f"on {x.device}, as forward returned it."
        )


def _clipped_shape(x: Tensor, weight: Tensor, settings: Settings) -> tuple[Any, ...]:
    if settings.out_bound <= 0:
        return (0,)
    rows = 1
    for size in x.shape[:-1]:
        rows *= size
    return (settings.tiles, rows, (weight.shape[0] + 7) // 8)


def fake_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    input_range: Tensor | None,
    wmax: Tensor | None,
    seed: Tensor | None,
    *scalars: Any,
) -> Tensors:
    """Empty y and clipped, contiguous."""
    y = torch.empty((*x.shape[:-1], weight.shape[0]), dtype=x.dtype, device=x.device)
    shape = _clipped_shape(x, weight, Settings(*scalars))
    return y, torch.empty(shape, dtype=torch.uint8, device=x.device)


def fake_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    input_range: Tensor | None,
    clipped: Tensor,
    *rest: Any,
) -> Tensors:
    """Empty gradients, contiguous; [0] for one that is not wanted or whose input is absent."""
    return tuple(
        torch.empty(
            each.shape if each is not None and needed else (0,),
            dtype=x.dtype if each is None else each.dtype,
            device=x.device,
        )
        for each, needed in zip((x, weight, bias, input_range), rest[len(Settings._fields) :], strict=True)
    )


# --- the reference, its bounds, and plain PyTorch -------------------------------------------------------------------


def _operands(args: tuple[Any, ...], dtype: torch.dtype) -> Operands:
    x, weight, *rest, seed = args
    bias, input_range, wmax = (None if each is None else each.to(dtype) for each in rest)
    return Operands(matrix(x).to(dtype), weight.to(dtype), bias, input_range, wmax, seed)


def _forward(args: tuple[Any, ...], dtype: torch.dtype) -> Tensors:
    """y in `dtype`, and clipped."""
    x, operands = args[0], _operands(args[:6], dtype)
    y, clipped = product.forward(operands, Settings(*args[6:]), smallest_step(x.dtype))
    return y.reshape(*x.shape[:-1], y.shape[1]), product.pack(clipped, x)


def reference_forward(*args: Any) -> Tensors:
    """In float64 throughout."""
    return _forward(args, torch.float64)


def composite_forward(*args: Any) -> Tensors:
    """y and clipped, computed in the dtype of the arithmetic; y rounded once."""
    y, clipped = _forward(args, statistics_dtype(args[0].dtype))
    return y.to(args[0].dtype), clipped


def bound_forward(*args: Any) -> Tensors:
    """See `_analog_bounds.forward`."""
    x = args[0]
    operands = _operands(args[:6], torch.float64)
    y, clipped = bounds.forward(operands, Settings(*args[6:]), x.dtype, smallest_step(x.dtype))
    return y.reshape(*x.shape[:-1], y.shape[1]), clipped


def _backward(args: tuple[Any, ...], dtype: torch.dtype) -> Tensors:
    """The gradients in `dtype`; [0] for one that is not wanted or whose input is absent."""
    dy, x, weight, bias, input_range, clipped = args[:6]
    given = None if input_range is None else input_range.to(dtype)
    grads = product.backward(
        matrix(dy).to(dtype),
        matrix(x).to(dtype),
        weight.to(dtype),
        given,
        clipped,
        Settings(*args[6:-4]),
        smallest_step(x.dtype),
    )
    return _wanted(grads, x, (x, weight, bias, input_range), args[-4:])


def _wanted(grads: product.Gradients, x: Tensor, inputs: tuple[Tensor | None, ...], needs: tuple[bool, ...]) -> Tensors:
    shaped = grads._replace(dx=grads.dx.reshape(x.shape))
    return tuple(
        grad if needed and given is not None else grad.new_empty(0)
        for grad, given, needed in zip(shaped, inputs, needs, strict=True)
    )


def reference_backward(*args: Any) -> Tensors:
    """In float64 throughout."""
    return _backward(args, torch.float64)


def composite_backward(*args: Any) -> Tensors:
    """The gradients, computed in the dtype of the arithmetic and rounded once."""
    x, inputs = args[1], args[1:5]
    kinds = [x.dtype if each is None else each.dtype for each in inputs]
    grads = _backward(args, statistics_dtype(x.dtype))
    return tuple(grad.to(kind).contiguous() for grad, kind in zip(grads, kinds, strict=True))


def bound_backward(*args: Any) -> Tensors:
    """See `_analog_bounds.backward`."""
    dy, x, weight, bias, input_range, clipped = args[:6]
    kinds = tuple(x.dtype if each is None else each.dtype for each in (x, bias, input_range))
    grads = bounds.backward(
        matrix(dy).double(),
        matrix(x).double(),
        weight.double(),
        None if input_range is None else input_range.double(),
        clipped,
        Settings(*args[6:-4]),
        kinds,
        smallest_step(x.dtype),
    )
    return _wanted(grads, x, (x, weight, bias, input_range), args[-4:])


# --- the spec -------------------------------------------------------------------------------------------------------


def typical(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    """The arguments of an ordinary call: as many channels as inputs, a learned range, an 8-bit DAC."""
    n = shape[-1] if shape else 1
    weight = TensorMeta.contiguous((n, n), dtype, device)
    ranges = TensorMeta.contiguous((1,), torch.float64 if dtype is torch.float64 else torch.float32, device)
    scalars = Settings(1, "learned", 254.0, 0.0, False, 0.0, -1.0, False, 0.001, 0.95)
    return (TensorMeta.contiguous(shape, dtype, device), weight, None, ranges, None, None, *scalars)


SCALARS: tuple[tuple[str, type], ...] = (
    ("tiles", int), ("input_range_mode", str), ("inp_res", float), ("out_noise", float),
    ("out_noise_per_channel", bool), ("out_bound", float), ("out_res", float), ("out_bound_per_channel", bool),
    ("decay", float), ("input_min_percentage", float),
)  # fmt: skip

SPEC = OpSpec(
    name="analog_linear",
    summary="x W^T + bias through analog tiles: input range, DAC, output noise, ADC",
    forward=Phase(
        tensors=("x", "weight", "bias?", "input_range?", "wmax?", "seed?"),
        scalars=SCALARS,
        outputs=("y", "clipped"),
        reference=reference_forward,
        composite=composite_forward,
        fake=fake_forward,
        bound=bound_forward,
    ),
    backward=Phase(
        tensors=("dy", "x", "weight", "bias?", "input_range?", "clipped"),
        scalars=(*SCALARS, ("need_dx", bool), ("need_dweight", bool), ("need_dbias", bool), ("need_drange", bool)),
        outputs=("dx", "dweight", "dbias", "drange"),
        reference=reference_backward,
        composite=composite_backward,
        fake=fake_backward,
        bound=bound_backward,
    ),
    check=check,
    check_backward=check_backward,
    typical=typical,
    samples=linear_samples,
    differentiable=("y",),
    saved=("x", "weight", "bias", "input_range", "clipped"),
    remade=("x", "weight"),
    varying=("inp_res", "out_noise", "out_bound", "out_res", "decay", "input_min_percentage"),
    gradients=(("x",), ("weight",), ("bias",), ("input_range",)),
    sharding=Sharding(
        "... n, c n, c, t, t c, 1 -> ... c +n, t (...) c",
        "... c, ... n, c n, c, t, t (...) c -> ... n +c, c n +..., c +..., t +... +c",
        splits=("...", "c", "n"),
        decides=("x", "weight"),
        tiles="tiles",
        may_cut=parts.is_plain,
        seed="seed",
        stays=("clipped",),  # packed bits, eight channels of a part to a byte
        weights=("weight",),
        local_forward=parts.forward,
        local_backward=parts.backward,
    ),
)

_analog_linear = define(SPEC).call
