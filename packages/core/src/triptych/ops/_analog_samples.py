"""The cases of analog_linear for the conformance suite: every mode and converter, alone and together, on odd shapes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from triptych import samples as make
from triptych.ops._analog_product import Settings
from triptych.ops._norm_bounds import statistics_dtype
from triptych.ops.tile_abs_max import with_values
from triptych.opspec import Sample

Tensor = torch.Tensor

PLAIN = Settings(1, "none", -1.0, 0.0, False, 0.0, -1.0, False, 0.0, 0.95)


def linear_samples() -> Iterator[Sample]:
    """The grid. Ranges lie at about one standard deviation of x, so that a third of it is clipped."""
    full: dict[str, Any] = {
        "tiles": 3, "input_range_mode": "learned", "inp_res": 30.0, "out_noise": 0.1, "out_bound": 1.5, "out_res": 30.0,
        "decay": 0.01, "input_min_percentage": 0.3,
    }  # fmt: skip
    yield _sample("all", (4, 3, 42), 20, **full)
    yield _sample("all_long", (4, 30, 42), 20, **full)
    yield _sample("all_many", (40, 3, 42), 20, **full)
    yield _sample("all_channels", (4, 3, 42), 20, out_noise_per_channel=True, out_bound_per_channel=True, **full)
    yield _sample("all_float32", (4, 3, 42), 20, wide=True, **full)
    yield _sample("plain", (6, 40), 24, smooth=("x", "weight", "bias"))
    yield _sample("plain_without_bias", (6, 40), 24, bias=False, smooth=("x", "weight"))
    yield _sample("plain_leading", (2, 3, 40), 24, smooth=("x", "weight", "bias"))
    yield _sample("plain_vector", (40,), 24, smooth=("x", "weight", "bias"))
    yield _sample("one_dimension", (40,), 24, input_range_mode="learned", inp_res=254.0)
    yield _sample("fast", (6, 40), 24, tiles=2, input_range_mode="fast", smooth=("x", "weight", "bias", "input_range"))
    yield _sample("fast_dac", (6, 40), 24, tiles=2, input_range_mode="fast", inp_res=254.0)
    yield _sample("learned", (6, 40), 24, tiles=2, input_range_mode="learned", smooth=("x", "weight", "bias"))
    yield _sample("learned_decay", (60, 40), 24, tiles=2, input_range_mode="learned", decay=0.5,
                  input_min_percentage=0.3, inp_res=254.0)  # fmt: skip
    yield _sample("learned_no_decay", (60, 40), 24, tiles=2, input_range_mode="learned", decay=0.5,
                  input_min_percentage=0.99)  # fmt: skip
    yield _sample("dynamic", (6, 40), 24, tiles=2, input_range_mode="dynamic", smooth=("x", "weight", "bias"))
    yield _sample("dynamic_dac", (6, 40), 24, tiles=3, input_range_mode="dynamic", inp_res=254.0)
    yield _sample("dynamic_adc", (6, 40), 24, tiles=3, input_range_mode="dynamic", inp_res=254.0, out_bound=1.5,
                  out_res=254.0, out_noise=0.05)  # fmt: skip
    yield _sample("dynamic_adc_channels", (6, 40), 24, tiles=3, input_range_mode="dynamic", out_bound=1.5,
                  out_bound_per_channel=True, out_noise=0.05, out_noise_per_channel=True)  # fmt: skip
    yield _sample("dac_as_share", (6, 40), 24, input_range_mode="learned", inp_res=1 / 254)
    yield _sample("noise", (6, 40), 24, tiles=2, input_range_mode="learned", out_noise=0.1,
                  smooth=("x", "weight", "bias"))  # fmt: skip
    yield _sample("bound", (6, 40), 24, tiles=2, input_range_mode="fast", out_bound=1.0,
                  smooth=("x", "weight", "bias"))  # fmt: skip
    yield _sample("adc_as_share", (6, 40), 24, input_range_mode="learned", out_bound=1.5, out_res=1 / 30)
    yield _sample("adc_odd", (6, 40), 24, input_range_mode="learned", out_bound=1.5, out_res=31.0)
    yield _sample("real_use", (70, 96), 130, input_range_mode="learned", inp_res=254.0, out_bound=14.0, out_res=254.0,
                  out_bound_per_channel=True, decay=0.01)  # fmt: skip
    yield _sample("uneven_tiles", (33, 257), 65, **{**full, "tiles": 7})
    yield _sample("tiles_without_adc", (33, 257), 65, tiles=3, input_range_mode="learned", inp_res=254.0)
    yield _sample("one_column_tiles", (5, 7), 9, **{**full, "tiles": 7})
    yield _sample("one_by_one", (1, 1), 1, **{**full, "tiles": 1})
    yield _sample("long_rows", (5, 4097), 17, **full)
    yield _sample("many_rows", (1030, 24), 12, **full)
    yield _sample("many_channels", (5, 24), 1030, **full)
    yield _sample("large", (130, 300), 190, **full)
    yield _sample("large_plain", (130, 300), 190, input_range_mode="learned", inp_res=254.0)
    yield _sample("no_rows", (0, 16), 8, **{**full, "tiles": 2})
    yield _sample("no_columns", (3, 0), 8, **{**full, "tiles": 1})
    yield _sample("no_channels", (3, 16), 0, **{**full, "tiles": 2})
    yield _sample("zeros", (3, 16), 8, maker=make.constant, **{**full, "tiles": 2, "input_range_mode": "dynamic"})
    for mode in ("learned", "fast"):
        edges = PLAIN._replace(input_range_mode=mode, decay=0.5, input_min_percentage=0.5)
        yield Sample(f"{mode}_edges", _on_the_edges, tuple(edges), smooth=())
    for name, value in (("nan", float("nan")), ("infinite", float("inf"))):
        maker = _with_one(value)
        yield _sample(f"{name}_learned", (6, 40), 24, maker=maker, **full)
        yield _sample(f"{name}_dynamic", (6, 40), 24, maker=maker, **{**full, "input_range_mode": "dynamic"})
    for layout in (make.transposed, make.permuted, make.narrowed, make.offset, make.expanded, make.every_other):
        yield _sample(layout.__name__, (3, 4, 40), 24, maker=layout, **{**full, "tiles": 2})
        yield _sample(f"{layout.__name__}_plain", (3, 4, 40), 24, maker=layout, tiles=2, input_range_mode="learned",
                      inp_res=254.0)  # fmt: skip


def _on_the_edges(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> tuple[Tensor | None, ...]:
    """Inputs on the range, beyond and inside it; exactly half of them strictly inside, which is not more than half."""
    x = torch.tensor([[1.0, -1.0, 0.5, -0.25], [2.0, -3.0, 0.0, 0.75]], dtype=dtype, device=device)
    weight = make.normal(5, 4)(generator, dtype, device)
    return x, weight, None, torch.ones(1, dtype=dtype, device=device), None, None


def _with_one(value: float) -> Any:
    """A maker like `normal`, of matrices with `value` in one place."""
    return lambda *shape: with_values(make.normal(*shape), value, row=2, columns=slice(30, 31))


def _sample(
    name: str,
    shape: tuple[int, ...],
    channels: int,
    bias: bool = True,
    wide: bool = False,
    maker: Any = make.normal,
    smooth: tuple[str, ...] = (),
    **settings: Any,
) -> Sample:
    """One case. `wide` keeps bias and ranges in float32 beside 16-bit data; `maker` lays out x, and the weights where
    they can have that layout."""
    chosen = PLAIN._replace(**settings)
    ranged = chosen.input_range_mode in ("learned", "fast")
    needs_wmax = chosen.out_noise > 0 or chosen.out_bound > 0

    def tensors(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> tuple[Tensor | None, ...]:
        small = statistics_dtype(dtype) if wide else dtype
        x = (
            maker(0.0, *shape)(generator, dtype, device)
            if maker is make.constant
            else maker(*shape)(generator, dtype, device)
        )
        matrix_maker = maker if maker in (make.transposed, make.narrowed, make.offset) else make.normal
        weight = matrix_maker(channels, shape[-1])(generator, dtype, device)
        values = [
            make.normal(channels)(generator, small, device) if bias else None,
            make.scaled(make.positive(make.normal(chosen.tiles)), 0.2)(generator, small, device) + 0.9
            if ranged
            else None,
            make.positive(make.normal(chosen.tiles, channels))(generator, statistics_dtype(dtype), device) + 1
            if needs_wmax
            else None,
            make.seed()(generator, dtype, device) if chosen.out_noise > 0 else None,
        ]
        return (x, weight, *values)

    return Sample(name, tensors, tuple(chosen), smooth=smooth)
