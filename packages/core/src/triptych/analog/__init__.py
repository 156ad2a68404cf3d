"""Hardware-aware training for analog in-memory computing: linear layers and convolutions on simulated crossbars.

    config = AnalogConfig(
        forward=IOParameters(inp_res=254, out_res=254, out_bound=14),
        modifier=WeightModifierParameter(std_dev=0.03, noise_type="AddNormalPerChannel"),
        clip=WeightClipParameter(sigma=2.5, type="LayerGaussianPerChannel"),
        pre_post=PrePostProcessingParameter(InputRangeParameter(enable=True)),
    )
    model = convert_to_analog(model, config)

Names and meanings are those of aihwkit-lightning 2.1; `from_lightning` takes over its configurations.
"""

from triptych.analog.calibration import calibrate_input_ranges
from triptych.analog.clipping import clip_weights
from triptych.analog.config import (
    AnalogConfig,
    InputRangeParameter,
    IOParameters,
    MappingParameter,
    PrePostProcessingParameter,
    TorchInferenceRPUConfig,
    WeightClipParameter,
    WeightModifierParameter,
)
from triptych.analog.conv import AnalogConv1d, AnalogConv2d, AnalogConv3d
from triptych.analog.convert import convert_to_analog, convert_to_digital
from triptych.analog.enums import WeightClipType, WeightNoiseInjectionType, WeightQuantizationType
from triptych.analog.layer import AnalogLayer, named_analog_layers
from triptych.analog.lightning import from_lightning
from triptych.analog.linear import AnalogLinear
from triptych.analog.observers import InputRangeCalibrationType
from triptych.analog.quantizing import quantize_weights
from triptych.analog.ranges import synchronise_ranges

__all__ = [
    "AnalogConfig",
    "AnalogConv1d",
    "AnalogConv2d",
    "AnalogConv3d",
    "AnalogLayer",
    "AnalogLinear",
    "IOParameters",
    "InputRangeCalibrationType",
    "InputRangeParameter",
    "MappingParameter",
    "PrePostProcessingParameter",
    "TorchInferenceRPUConfig",
    "WeightClipParameter",
    "WeightClipType",
    "WeightModifierParameter",
    "WeightNoiseInjectionType",
    "WeightQuantizationType",
    "calibrate_input_ranges",
    "clip_weights",
    "convert_to_analog",
    "convert_to_digital",
    "from_lightning",
    "named_analog_layers",
    "quantize_weights",
    "synchronise_ranges",
]
