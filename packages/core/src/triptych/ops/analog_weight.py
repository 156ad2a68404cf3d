"""analog_weight: the weights as an analog crossbar holds them: clipped, discretised, with noise on them.

For each tile s of columns (see `triptych.tiling`) and each row c, in the dtype of the arithmetic:

    m_c = a_c with a learned clip a, else max_j |W[c, j]|;   m = max_c m_c
    a learned clip without quantisation:  W' = clamp(W / a_c, -1, 1) a_c
    quantisation:                         W' = round(clamp(W / step, -Q, Q)) step,   step = 2 m / L or 2 m_c / L
    noise:                                W'' = W' + std_dev (m or m_c) normal(seed, 0, c, j)    (`triptych.noise`)
    L = max(res, 1 / res) levels, Q = L / 2; rounding is half to even

backward passes the gradient straight through quantisation and noise. With a learned clip it is that of LSQ (Esser and
others, 2020, "Learned step size quantization", equation 3), with S = C size_s elements a tile:

    without quantisation, q = W / a:    dW = g [|q| <= 1],   da = 1 / sqrt(S) sum_j g ([q > 1] - [q < -1])
    with it, q = W / step:              dW = g [|q| <= Q],
        da = 2 sqrt(Q / S) / L sum_j g (Q [q > Q] - Q [q < -Q] + [inside] (round(q) - q))

Shapes: weight, modified [C, N]; clip [T, C]; wmax [T, C]; seed [1].
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch

from triptych import samples as make
from triptych.call import TensorMeta
from triptych.dispatch import define
from triptych.errors import ArgumentError
from triptych.ops import _weight_pass as weight_pass
from triptych.ops._analog_checks import check_floats, check_like, check_seed
from triptych.ops._norm_bounds import smallest, statistics_dtype, unit
from triptych.ops._quantizer import smallest_step
from triptych.ops.rms_norm import check_plain
from triptych.ops.tile_abs_max import with_values
from triptych.opspec import OpSpec, Phase, Sample, Tensors
from triptych.sharding import analog_weight as parts
from triptych.sharding.rule import Sharding
from triptych.tiling import check_tiles

Tensor = torch.Tensor
Grain = Literal["none", "per_tensor", "per_channel"]
GRAINS: tuple[str, ...] = ("none", "per_tensor", "per_channel")


# --- the public function --------------------------------------------------------------------------------------------


def analog_weight(
    weight: Tensor,
    clip: Tensor | None = None,
    seed: Tensor | None = None,
    *,
    tiles: int = 1,
    quantization: Grain = "none",
    res: float = 0.0,
    noise: Grain = "none",
    std_dev: float = 0.0,
    layer: str = "",
) -> tuple[Tensor, Tensor]:
    """Clip, discretise and add noise to the weights of analog tiles. `weight` itself is left as it is.

    Args:
        weight: [C, N], output channels by inputs; float32, bfloat16, float16 or float64; any strides.
        clip: [T, C], the learned clip, positive; of weight's dtype, or float32 beside a 16-bit weight. It takes the
            place of the absolute maximum everywhere. None clips nothing.
        seed: int64 [1] on weight's device, for noise; see `triptych.noise`.
        tiles: T, how many tiles the N inputs are split into.
        quantization: whether to discretise, to one step a tile or to one a tile and channel.
        res: how many steps cover the range from -m to m (254 for 8 bits), or the step as a share of it if at most 1.
        noise: whether to add noise, relative to the maximum of the tile or of the tile and channel.
        std_dev: the standard deviation of the noise, relative to that maximum.
        layer: the name under which policies and reports know the caller.

    Returns:
        The modified weights, [C, N] in weight's dtype, and the maxima m_c, [T, C] in float32 (float64 for float64),
        which have no gradient.

    Raises:
        ArgumentError: the arguments do not fit together.
        Refused: the policy allows no backend that can run it.
    """
    modified, wmax = _analog_weight(layer, weight, clip, seed, tiles, quantization, res, noise, std_dev)
    return modified, wmax


# --- what every backend may rely on ---------------------------------------------------------------------------------


def check(
    weight: Tensor,
    clip: Tensor | None,
    seed: Tensor | None,
    tiles: int,
    quantization: str,
    res: float,
    noise: str,
    std_dev: float,
) -> None:
    """Raise ArgumentError unless the arguments of `analog_weight` fit together."""
    op = "analog_weight"
    check_weight(op, weight)
    check_tiles(op, tiles, weight.shape[1])
    if clip is not None:
        check_like(op, "clip", clip, "weight", weight, (tiles, weight.shape[0]), "one number for each tile and channel")
    check_floats(op, res=res, std_dev=std_dev)
    for name, value in (("quantization", quantization), ("noise", noise)):
        if not isinstance(value, str) or value not in GRAINS:
            raise ArgumentError(f"{op}: {name} is {value!r}. It must be one of {', '.join(map(repr, GRAINS))}.")
    if quantization != "none" and res <= 0:
        raise ArgumentError(
            f"{op}: quantization is {quantization!r} but res is {res}. Give the number of steps, such as 254 for 8 "
            f"bits, or quantization 'none'."
        )
    if quantization == "per_tensor" and clip is not None:
        raise ArgumentError(
            f"{op}: there is a learned clip, one number a channel, but quantization is 'per_tensor'. Quantise "
            f"'per_channel', or pass no clip."
        )
    if std_dev < 0:
        raise ArgumentError(f"{op}: std_dev is {std_dev}. It must be 0 or greater.")
    check_seed(op, seed, weight, needed=noise != "none", why=f"noise is {noise!r}")


def check_weight(op: str, weight: Tensor) -> None:
    """Raise ArgumentError unless `weight` is a matrix of numbers."""
    if not isinstance(weight, Tensor):
        raise ArgumentError(f"{op}: weight is a {type(weight).__name__}. It must be a torch.Tensor.")
    check_plain(op, "weight", weight)
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise ArgumentError(
            f"{op}: weight has dtype {weight.dtype}. It must be float32, bfloat16, float16 or float64; convert it with "
            f"weight.to(...)."
        )
    if weight.dim() != 2:
        raise ArgumentError(
            f"{op}: weight has shape {list(weight.shape)}. It must be [output channels, inputs]; flatten the rest with "
            f"weight.flatten(1)."
        )


def check_backward(
    dmodified: Tensor,
    weight: Tensor,
    clip: Tensor | None,
    tiles: int,
    quantization: str,
    res: float,
    noise: str,
    std_dev: float,
    need_dweight: bool,
    need_dclip: bool,
) -> None:
    """Raise ArgumentError unless the arguments of `analog_weight_backward` fit together."""
    op = "analog_weight_backward"
    check_weight(op, weight)
    check_tiles(op, tiles, weight.shape[1])
    if clip is not None:
        check_like(op, "clip", clip, "weight", weight, (tiles, weight.shape[0]), "one number for each tile and channel")
    check_like(op, "dmodified", dmodified, "weight", weight, tuple(weight.shape), "the shape of weight")


def fake_forward(
    weight: Tensor,
    clip: Tensor | None,
    seed: Tensor | None,
    tiles: int,
    quantization: str,
    res: float,
    noise: str,
    std_dev: float,
) -> Tensors:
    """Empty modified weights and maxima, contiguous."""
    wmax = torch.empty((tiles, weight.shape[0]), dtype=statistics_dtype(weight.dtype), device=weight.device)
    return torch.empty(weight.shape, dtype=weight.dtype, device=weight.device), wmax


def fake_backward(
    dmodified: Tensor,
    weight: Tensor,
    clip: Tensor | None,
    tiles: int,
    quantization: str,
    res: float,
    noise: str,
    std_dev: float,
    need_dweight: bool,
    need_dclip: bool,
) -> Tensors:
    """Empty dweight and dclip, contiguous; [0] for one that is not wanted, and for dclip without a clip."""
    dweight = torch.empty(weight.shape if need_dweight else (0,), dtype=weight.dtype, device=weight.device)
    wanted = need_dclip and clip is not None
    kind = weight if clip is None else clip
    dclip = torch.empty((tiles, weight.shape[0]) if wanted else (0,), dtype=kind.dtype, device=weight.device)
    return dweight, dclip


# --- the reference: float64 inside ----------------------------------------------------------------------------------


def reference_forward(weight: Tensor, clip: Tensor | None, seed: Tensor | None, tiles: int, *scalars: Any) -> Tensors:
    """In float64 throughout."""
    return weight_pass.forward(weight.double(), clip, seed, tiles, *scalars, least=smallest_step(weight.dtype))


def reference_backward(
    dmodified: Tensor,
    weight: Tensor,
    clip: Tensor | None,
    tiles: int,
    quantization: str,
    res: float,
    noise: str,
    std_dev: float,
    need_dweight: bool,
    need_dclip: bool,
) -> Tensors:
    """In float64 throughout."""
    nothing = torch.empty(0, dtype=torch.float64, device=weight.device)
    if clip is None:
        return dmodified.double() if need_dweight else nothing, nothing
    least = smallest_step(weight.dtype)
    dweight, dclip = weight_pass.backward(dmodified.double(), weight.double(), clip, tiles, quantization, res, least)
    return dweight if need_dweight else nothing, dclip if need_dclip else nothing


# --- how far from the reference a correct implementation may lie ----------------------------------------------------


def bound_forward(weight: Tensor, clip: Tensor | None, seed: Tensor | None, tiles: int, *scalars: Any) -> Tensors:
    """See `_weight_pass.forward_bound`."""
    return weight_pass.forward_bound(weight, clip, seed, tiles, *scalars)


def bound_backward(
    dmodified: Tensor,
    weight: Tensor,
    clip: Tensor | None,
    tiles: int,
    quantization: str,
    res: float,
    noise: str,
    std_dev: float,
    need_dweight: bool,
    need_dclip: bool,
) -> Tensors:
    """Without a clip exact; see `_weight_pass.backward_bound`, with dclip rounded once."""
    scalars = (tiles, quantization, res, noise, std_dev)
    results = reference_backward(dmodified, weight, clip, *scalars, need_dweight, need_dclip)
    if clip is None:
        return tuple(torch.zeros_like(result) for result in results)
    dweight, dclip = weight_pass.backward_bound(dmodified, weight, clip, tiles, quantization, res)
    if need_dclip:
        dclip = dclip + (results[1].abs() + dclip) * unit(clip.dtype) + smallest(clip.dtype)
    return dweight if need_dweight else results[0], dclip if need_dclip else results[1]


# --- plain PyTorch, one operation after the other -------------------------------------------------------------------


def composite_forward(weight: Tensor, clip: Tensor | None, seed: Tensor | None, tiles: int, *scalars: Any) -> Tensors:
    """The modified weights, computed in the dtype of the arithmetic, and the maxima."""
    wide = weight.to(statistics_dtype(weight.dtype))
    modified, wmax = weight_pass.forward(wide, clip, seed, tiles, *scalars, least=smallest_step(weight.dtype))
    return modified.to(weight.dtype), wmax.contiguous()


def composite_backward(
    dmodified: Tensor,
    weight: Tensor,
    clip: Tensor | None,
    tiles: int,
    quantization: str,
    res: float,
    noise: str,
    std_dev: float,
    need_dweight: bool,
    need_dclip: bool,
) -> Tensors:
    """dweight and dclip, computed in the dtype of the arithmetic; [0] for one that is not wanted."""
    scalars = (tiles, quantization, res, noise, std_dev)
    no_weight, no_clip = fake_backward(dmodified, weight, clip, *scalars, False, False)
    if clip is None:
        copy = dmodified.clone(memory_format=torch.contiguous_format) if need_dweight else no_weight
        return copy, no_clip
    wide = statistics_dtype(weight.dtype)
    least = smallest_step(weight.dtype)
    dweight, dclip = weight_pass.backward(dmodified.to(wide), weight.to(wide), clip, tiles, quantization, res, least)
    return (
        dweight.to(weight.dtype) if need_dweight else no_weight,
        dclip.to(clip.dtype) if need_dclip else no_clip,
    )


# --- the cases of the conformance suite -----------------------------------------------------------------------------


def weight_samples() -> Iterator[Sample]:
    """Each way to clip, discretise and add noise, with one, several and uneven tiles, in every layout."""
    cut = make.scaled(make.positive(make.normal(3, 24)), 0.5)  # about half of the elements lie beyond
    tall = make.scaled(make.positive(make.normal(3, 70)), 0.5)
    yield _sample("all", make.normal(24, 40), cut, "per_channel", 30.0, "per_channel", 0.1, 3)
    yield _sample("all_wide", make.normal(24, 200), cut, "per_channel", 30.0, "per_channel", 0.1, 3)
    yield _sample("all_tall", make.normal(70, 40), tall, "per_channel", 30.0, "per_channel", 0.1, 3)
    yield _sample("clip", make.normal(24, 40), cut, "none", 0.0, "none", 0.0, 3, smooth=("weight",))
    yield _sample("clip_noise", make.normal(24, 40), cut, "none", 0.0, "per_tensor", 0.1, 3, smooth=("weight",))
    yield _sample("clip_beyond_1", make.normal(24, 40), make.constant(1.5, 1, 24), "per_channel", 254.0, "none", 0.0)
    yield _sample("clip_float32", make.normal(24, 40), make.in_float32(cut), "per_channel", 30.0, "none", 0.0, 3)
    yield _sample(
        "clip_transposed", make.transposed(24, 40), make.positive(make.transposed(3, 24)), "none", 0.0, "none", 0.0, 3
    )
    for quantization in ("per_tensor", "per_channel"):
        for res in (254.0, 1 / 254, 7.0):
            yield _sample(f"{quantization}_{res:.3g}", make.normal(33, 70), None, quantization, res, "none", 0.0)
    for noise in ("per_tensor", "per_channel"):
        yield _sample(f"noise_{noise}", make.normal(33, 70), None, "none", 0.0, noise, 0.03, smooth=("weight",))
        yield _sample(f"both_{noise}", make.normal(33, 257), None, noise, 254.0, noise, 0.03, 3)
    yield _sample("nothing", make.normal(8, 40), None, "none", 0.0, "none", 0.0, 2, smooth=("weight",))
    yield _sample("zeros", make.constant(0.0, 8, 40), None, "per_channel", 254.0, "per_channel", 0.1, 2)
    small = make.scaled(make.normal(8, 40), 1e-3)  # their steps are no normal numbers of float16
    yield _sample("small", small, None, "per_channel", 254.0, "per_tensor", 0.1, 2)
    for grain in ("per_tensor", "per_channel"):
        lost = with_values(make.normal(8, 40), float("nan"), row=2, columns=slice(30, 31))
        yield _sample(f"nan_{grain}", lost, None, grain, 254.0, grain, 0.1, 2)
    yield _sample("one_by_one", make.normal(1, 1), None, "per_tensor", 254.0, "per_tensor", 0.1)
    yield _sample("one_column_tiles", make.normal(5, 7), None, "per_channel", 254.0, "per_tensor", 0.1, 7)
    yield _sample("large", make.normal(300, 1030), None, "per_tensor", 254.0, "per_channel", 0.03, 3)
    yield _sample("many_columns", make.normal(3, 20001), None, "per_channel", 254.0, "per_channel", 0.03, 2)
    yield _sample("many_rows", make.normal(4099, 24), None, "per_tensor", 254.0, "per_tensor", 0.03)
    yield _sample("no_rows", make.normal(0, 16), None, "per_channel", 254.0, "per_tensor", 0.1, 2)
    yield _sample("no_columns", make.normal(3, 0), None, "per_tensor", 254.0, "per_channel", 0.1)
    for layout in (make.transposed, make.narrowed, make.offset, make.expanded, make.every_other):
        yield _sample(layout.__name__, layout(12, 42), None, "per_channel", 254.0, "per_tensor", 0.1, 2)


def _sample(
    name: str,
    weight: make.Maker,
    clip: make.Maker | None,
    quantization: str,
    res: float,
    noise: str,
    std_dev: float,
    tiles: int = 1,
    smooth: tuple[str, ...] = (),
) -> Sample:
    def tensors(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> tuple[Tensor | None, ...]:
        seed = make.seed()(generator, dtype, device) if noise != "none" else None
        return weight(generator, dtype, device), None if clip is None else clip(generator, dtype, device), seed

    return Sample(name, tensors, (tiles, quantization, res, noise, std_dev), smooth=smooth)


# --- the spec -------------------------------------------------------------------------------------------------------


def typical(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    """The arguments of an ordinary call: 8 bits and noise, both a channel, on one tile."""
    seed = TensorMeta.contiguous((1,), torch.int64, device)
    return (TensorMeta.contiguous(shape, dtype, device), None, seed, 1, "per_channel", 254.0, "per_channel", 0.03)


SCALARS: tuple[tuple[str, type], ...] = (
    ("tiles", int), ("quantization", str), ("res", float), ("noise", str), ("std_dev", float),
)  # fmt: skip

SPEC = OpSpec(
    name="analog_weight",
    summary="the weights of analog tiles: learned clip, quantisation, noise",
    forward=Phase(
        tensors=("weight", "clip?", "seed?"),
        scalars=SCALARS,
        outputs=("modified", "wmax"),
        reference=reference_forward,
        composite=composite_forward,
        fake=fake_forward,
        bound=bound_forward,
    ),
    backward=Phase(
        tensors=("dmodified", "weight", "clip?"),
        scalars=(*SCALARS, ("need_dweight", bool), ("need_dclip", bool)),
        outputs=("dweight", "dclip"),
        reference=reference_backward,
        composite=composite_backward,
        fake=fake_backward,
        bound=bound_backward,
    ),
    check=check,
    check_backward=check_backward,
    typical=typical,
    samples=weight_samples,
    differentiable=("modified",),
    returned=("wmax",),
    saved=("weight", "clip"),
    gradients=(("weight",), ("clip",)),
    varying=("res", "std_dev"),
    sharding=Sharding(
        "c n, t c, 1 -> c n, t c",
        "c n, c n, t c -> c n, t c",
        splits=("c", "n"),
        decides=("weight",),
        tiles="tiles",
        seed="seed",
        weights=("weight",),
        local_forward=parts.forward,
        local_backward=parts.backward,
    ),
)

_analog_weight = define(SPEC).call
