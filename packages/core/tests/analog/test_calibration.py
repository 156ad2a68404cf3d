"""calibrate_input_ranges."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import triptych
from triptych.analog import (
    AnalogConfig,
    AnalogConv2d,
    AnalogLinear,
    InputRangeCalibrationType,
    calibrate_input_ranges,
    convert_to_analog,
    named_analog_layers,
)
from triptych.analog.layer import must_be_called
from triptych.analog.observers import quantile_of

RANGE = AnalogConfig().replaced({"pre_post.input_range.enable": True, "mapping.max_input_size": 5})
QUANTISED = RANGE.replaced({"forward.inp_res": 4, "forward.out_bound": 0.5, "forward.out_res": 4})
BATCHES = [torch.randn(6, 13, generator=torch.Generator().manual_seed(seed)) * (1 + seed) for seed in range(3)]
SIZES = (5, 4, 4)


@pytest.fixture(autouse=True)
def on_composite() -> Any:
    torch.manual_seed(0)
    with triptych.use("composite"):
        yield


def layer(config: AnalogConfig = RANGE) -> AnalogLinear:
    return AnalogLinear(13, 7, rpu_config=config)


def tiles(x: torch.Tensor) -> list[np.ndarray[Any, Any]]:
    return [part.numpy() for part in x.split(SIZES, -1)]


EXPECTED = {
    "MovingStd": np.mean([[3 * part.std(ddof=1) for part in tiles(x)] for x in BATCHES], 0),
    "MovingQuantile": np.mean([[np.quantile(np.abs(part), 0.9) for part in tiles(x)] for x in BATCHES], 0),
    "CacheQuantile": [np.quantile(np.abs(part), 0.9) for part in tiles(torch.cat(BATCHES))],
    "Max": [np.abs(part).max() for part in tiles(torch.cat(BATCHES))],
}


@pytest.mark.parametrize("kind", EXPECTED)
@pytest.mark.parametrize("config", [RANGE, QUANTISED, RANGE.replaced("pre_post.input_range.enable", False)])
def test_the_ranges_are_those_of_the_data(kind: str, config: AnalogConfig) -> None:
    model = layer(config)
    before = dict(model.named_parameters())
    calibrate_input_ranges(model, kind, BATCHES, quantile=0.9)
    assert model.input_range is not None
    np.testing.assert_allclose(model.input_range.detach().numpy(), EXPECTED[kind], rtol=1e-5)
    assert all(model.get_parameter(name) is value for name, value in before.items())
    assert model.rpu_config == config.replaced("pre_post.input_range.enable", True)
    assert model.training
    assert [*model._forward_pre_hooks.values()] == [must_be_called]
    assert model.input_range_update_idx is not None
    assert model.input_range_update_idx.tolist() == [100] * 3
    ranges = model.input_range.tolist()
    model(torch.randn(6, 13))
    assert model.input_range.tolist() == ranges


def test_the_number_of_deviations() -> None:
    model = layer()
    calibrate_input_ranges(model, InputRangeCalibrationType.MOVING_STD, BATCHES, std_alpha=1.5)
    assert model.input_range is not None
    np.testing.assert_allclose(model.input_range.detach().numpy(), EXPECTED["MovingStd"] / 2, rtol=1e-5)
    assert model.rpu_config == RANGE


def test_a_range_beyond_float16_is_its_largest_number() -> None:
    model = layer().half()
    calibrate_input_ranges(model, "MovingStd", [torch.tensor([[40000.0], [-40000.0]]).half().expand(2, 13)])
    assert model.input_range is not None
    assert model.input_range.tolist() == [65504.0] * 3


@pytest.mark.parametrize(("dtype", "value"), [(torch.float32, 3e19), (torch.bfloat16, 3e19), (torch.float64, 1e200)])
def test_deviations_whose_squares_overflow(dtype: torch.dtype, value: float) -> None:
    model = layer().to(dtype)
    calibrate_input_ranges(model, "MovingStd", [torch.tensor([[value], [-value]], dtype=dtype).expand(2, 13)])
    assert model.input_range is not None
    expected = [3 * value * (2 * size / (2 * size - 1)) ** 0.5 for size in SIZES]
    assert model.input_range.tolist() == pytest.approx(expected, rel=1e-2 if dtype is torch.bfloat16 else 1e-5)


def test_fast_mode_and_its_extremes() -> None:
    model = layer(RANGE.replaced("pre_post.input_range.fast_mode", True))
    calibrate_input_ranges(model, "Max", BATCHES)
    assert model.input_range is not None
    assert model.x_max is not None
    assert model.x_min is not None
    assert model.x_max.tolist() == model.input_range.tolist() == (-model.x_min).tolist()


def test_layers_are_calibrated_on_what_ideal_ones_before_them_give() -> None:
    digital = nn.Sequential(nn.Linear(13, 13), nn.Linear(13, 7))
    noisy = QUANTISED.replaced({"modifier.noise_type": "AddNormal", "modifier.std_dev": 1, "forward.out_noise": 1})
    model = convert_to_analog(digital, noisy)
    calibrate_input_ranges(model, "Max", BATCHES)
    largest = [np.abs(part).max() for part in tiles(digital[0](torch.cat(BATCHES)).detach())]
    np.testing.assert_allclose(model[1].input_range.detach().numpy(), largest, rtol=1e-5)


def test_a_convolution_with_groups() -> None:
    model = AnalogConv2d(4, 6, 3, groups=2, padding=1, rpu_config=RANGE)
    x = torch.randn(2, 4, 6, 6)
    calibrate_input_ranges(model, "Max", [x])
    columns = nn.functional.unfold(x, 3, padding=1).abs().amax((0, 2)).view(2, 18)
    expected = torch.stack([part.amax(1) for part in columns.split(model.in_sizes, 1)], 1).flatten()
    assert model.input_range is not None
    assert torch.equal(model.input_range.detach(), expected)


def test_what_dataloaders_yield() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = layer()

        def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            return torch.as_tensor(self.inner(input=x * scale))

    x = torch.cat(BATCHES)
    loaders: list[Any] = [
        BATCHES,
        iter(BATCHES),
        [(batch, 1.0) for batch in BATCHES],
        [[batch] for batch in BATCHES],
        [{"x": batch / 2, "scale": 2.0} for batch in BATCHES],
        [((batch / 2,), {"scale": 2.0}) for batch in BATCHES],
        DataLoader(TensorDataset(x), batch_size=4),
    ]
    for loader in loaders:
        model = Model()
        calibrate_input_ranges(model, "Max", loader)
        assert model.inner.input_range is not None
        np.testing.assert_allclose(model.inner.input_range.detach().numpy(), EXPECTED["Max"], rtol=1e-5)
    with pytest.raises(triptych.ArgumentError, match=r"the dataloader yields a float. It must yield a tensor"):
        calibrate_input_ranges(Model(), "Max", [1.0])


def test_everything_is_as_before_when_the_model_raises() -> None:
    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyError("mine")

    model = nn.Sequential(layer(QUANTISED.replaced({"forward.inp_res": 6})), nn.Dropout().eval(), Fails())
    modes = [each.training for each in model.modules()]
    circuit, ranges = model[0]._circuit, model[0].input_range.tolist()
    with pytest.raises(KeyError):
        calibrate_input_ranges(model, "Max", BATCHES)
    assert [each.training for each in model.modules()] == modes
    assert model[0]._circuit is circuit
    assert [*model[0]._forward_pre_hooks.values()] == [must_be_called]
    assert model[0].input_range.tolist() == ranges
    assert model[0].input_range_update_idx.tolist() == [0] * 3


def test_padding_counts_for_nothing_and_dead_tiles_keep_their_range() -> None:
    padded = [torch.cat((x, torch.zeros(50, 13))) for x in BATCHES]
    model = layer()
    calibrate_input_ranges(model, "MovingStd", padded)
    assert model.input_range is not None
    np.testing.assert_allclose(model.input_range.detach().numpy(), EXPECTED["MovingStd"], rtol=1e-5)
    dead = torch.ones(2, 13)
    dead[:, :5] = 0
    model = layer()
    calibrate_input_ranges(model, "Max", [dead])
    assert model.input_range is not None
    assert model.input_range.tolist() == [3, 1, 1]


def test_what_cannot_be_calibrated_is_refused() -> None:
    nan = BATCHES[0].clone()
    nan[3, 7] = float("nan")
    for model, arguments, text in (
        (layer(), ("Max", [nan]), "the input of '' holds NaN or infinities"),
        (layer(), ("Max", []), "after 0 batches no analog layer has seen an input"),
        (layer(), ("Max", [torch.zeros(3, 13)]), "after 1 batches no analog layer"),
        (
            layer(),
            ("Maximum", BATCHES),
            "calibration_type is 'Maximum'. It must be a member of InputRangeCalibrationType",
        ),
        (layer(), ("Max", BATCHES, 1.5), "quantile is 1.5. It must be a number from 0 to 1"),
        (layer(), ("Max", BATCHES, float("nan")), "quantile is nan"),
        (layer(), ("Max", BATCHES, 0.9, 0), "max_samples is 0. It must be an integer, 1 or greater"),
        (layer(), ("Max", BATCHES, 0.9, 10, -1), "std_alpha is -1. It must be a number greater than 0"),
        (nn.Linear(13, 7), ("Max", BATCHES), "the model has no analog layers"),
        (
            layer(RANGE.replaced("pre_post.input_range.dynamic", True)),
            ("Max", BATCHES),
            "every analog layer has a dynamic input range",
        ),
    ):
        with pytest.raises(triptych.ArgumentError, match=f"^calibrate_input_ranges: {text}"):
            calibrate_input_ranges(model, *arguments)  # type: ignore[arg-type]


def test_none_does_nothing() -> None:
    model = layer()
    calibrate_input_ranges(model, InputRangeCalibrationType.NONE, iter(()))
    assert model.input_range is not None
    assert model.input_range.tolist() == [3] * 3


def test_a_layer_that_no_batch_reaches_is_named() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = layer(), layer()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.as_tensor(self.used(x))

    model = Model()
    with pytest.warns(
        UserWarning, match="1 of 2 analog layers have seen no input and keep what they had: unused"
    ) as warned:
        calibrate_input_ranges(model, "Max", BATCHES)
    assert warned[0].filename == __file__
    assert model.unused.input_range_update_idx is not None
    assert model.unused.input_range_update_idx.tolist() == [0] * 3


def test_the_sample_is_uniform_bounded_and_the_same_every_time() -> None:
    rows = torch.arange(1, 2001, dtype=torch.float32).unsqueeze(1).expand(2000, 13)
    found = []
    for batch in (7, 2000):
        model = layer()
        state = torch.get_rng_state()
        calibrate_input_ranges(model, "CacheQuantile", rows.split(batch), quantile=0.5, max_samples=200)
        assert torch.equal(torch.get_rng_state(), state)
        assert model.input_range is not None
        found.append(model.input_range.tolist())
    assert found[0] == found[1]
    assert 850 < found[0][0] < 1150  # 1000 +- 4 standard deviations of the median of 200


@pytest.mark.parametrize("quantile", [0.0, 0.3, 0.5, 0.99995, 1.0])
@pytest.mark.parametrize("count", [1, 2, 1000])
def test_the_quantile_of_magnitudes(quantile: float, count: int) -> None:
    x = torch.randn(count)
    np.testing.assert_allclose(quantile_of(x, quantile), np.quantile(np.abs(x.double().numpy()), quantile), rtol=1e-6)


def test_the_quantile_of_more_elements_than_torch_takes() -> None:
    x = torch.arange(2**24 + 2, dtype=torch.int32).float()
    with pytest.raises(RuntimeError, match="too large"):
        x.quantile(0.5)
    assert quantile_of(x, 0.5) == 2**23 + 0.5


def test_a_compiled_model_is_calibrated() -> None:
    model = nn.Sequential(layer(), nn.ReLU())
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    compiled(BATCHES[0])
    calibrate_input_ranges(compiled, "Max", BATCHES)
    np.testing.assert_allclose(model[0].input_range.detach().numpy(), EXPECTED["Max"], rtol=1e-5)  # type: ignore[union-attr]
    assert [path for path, _ in named_analog_layers(compiled)] == ["_orig_mod.0"]
