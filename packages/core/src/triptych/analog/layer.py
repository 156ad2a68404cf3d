"""What AnalogLinear and the convolutions share: parameters, state, configuration, the way from and to torch's layers.

A layer is made of crossbars: a linear layer of one, a convolution of one for each group. Which tensors it has beside
weight and bias, and under which names, stands in state.py.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from triptych.analog import clipping, placing, ranges, sharded, state
from triptych.analog.config import AnalogConfig
from triptych.analog.crossbar import Circuit, Crossbar, circuit_of, effective_weight, forward
from triptych.analog.enums import WeightClipType
from triptych.analog.state import CLIP, COUNT, EXTREMES, RANGE
from triptych.errors import ArgumentError
from triptych.layers.naming import Layer
from triptych.ops._norm_bounds import statistics_dtype
from triptych.tiling import tile_sizes, tile_slices, tiles_for


class AnalogLayer(Layer):
    """A layer of torch.nn on analog crossbars: the base of AnalogLinear and the analog convolutions.

    The state_dict holds tensors, under the names of aihwkit-lightning, and not the configuration: that belongs to the
    program, which makes the layer with it.

    Attributes:
        tiles: how many tiles each crossbar has.
        crossbars: how many crossbars there are.
    """

    DIGITAL: ClassVar[type[nn.Module]]
    """The class of torch.nn that this one stands for."""

    weight: Tensor
    bias: Any  # torch types it differently in each class
    input_range: Tensor | None
    input_range_update_idx: Tensor | None
    x_min: Tensor | None
    x_max: Tensor | None
    learnable_weight_clip: Tensor | None
    crossbars: int = 1
    tiles: int
    _config: AnalogConfig
    _circuit: Circuit
    _clips: bool

    # --- construction and configuration ------------------------------------------------------------------------------

    def _begin(self, config: AnalogConfig) -> None:
        """Become analog: add what a layer has beside weight and bias. The end of every constructor."""
        self.tiles = tiles_for(self._inputs, config.mapping.max_input_size)
        for name in (RANGE, CLIP):
            self.register_parameter(name, None)
        for name in (COUNT, *EXTREMES):
            self.register_buffer(name, None)
        self._forward_pre_hooks[_HOOK] = must_be_called
        ranges.enrol(self)
        self._adopt(config)

    @property
    def _inputs(self) -> int:
        """N, how many inputs each crossbar has."""
        return self.weight.shape[1:].numel()

    @property
    def in_sizes(self) -> tuple[int, ...]:
        """How many inputs each tile of a crossbar has."""
        return tile_sizes(self._inputs, self.tiles)

    @property
    def rpu_config(self) -> AnalogConfig:
        """The configuration. Another one takes effect at the next call; it must need the same tensors as this one."""
        return self._config

    @rpu_config.setter
    def rpu_config(self, config: AnalogConfig) -> None:
        check_config(type(self).__name__, config)
        tiles = tiles_for(self._inputs, config.mapping.max_input_size)
        if tiles != self.tiles:
            raise ArgumentError(
                f"{self.title}: rpu_config has mapping.max_input_size {config.mapping.max_input_size}, which splits "
                f"the {self._inputs} inputs into {tiles} tiles; the layer has {self.tiles}. "
                f"Convert the digital layer anew."
            )
        has, needs = state.needed(self._config), state.needed(config)
        if has != needs:
            differences = [f"needs {name}, which the layer does not have" for name in needs if name not in has]
            differences += [f"has no use for {name}, which the layer has" for name in has if name not in needs]
            raise ArgumentError(
                f"{self.title}: rpu_config {' and '.join(differences)}. Parameters and buffers stay as they are, "
                f"because optimizers and checkpoints know them: convert the digital layer anew (convert_to_digital, "
                f"then convert_to_analog), or, for an input range, use calibrate_input_ranges."
            )
        self._adopt(config)

    def _adopt(self, config: AnalogConfig) -> None:
        """Take a configuration, with the Parameters and buffers that it needs: those that are there stay."""
        dtype, device = self.weight.dtype, self.weight.device
        count, range_ = self.crossbars * self.tiles, config.pre_post.input_range
        needs = state.needed(config)
        before = self.__dict__.get("_config")
        learned = None if before is None else before.pre_post.input_range.learn_input_range
        if RANGE in needs:
            if self.input_range is None:
                ranges = torch.full((count,), range_.init_value, dtype=dtype, device=device)
                self.register_parameter(RANGE, nn.Parameter(ranges))
                self.register_buffer(COUNT, torch.zeros(count, dtype=torch.int64, device=device))
                learned = None
            assert self.input_range is not None
            if learned != range_.learn_input_range:  # else it stays as the program has it, frozen perhaps
                self.input_range.requires_grad_(range_.learn_input_range)
        for name in EXTREMES:
            if name in needs and getattr(self, name) is None:
                self.register_buffer(name, torch.zeros(count, dtype=statistics_dtype(dtype), device=device))
        if CLIP in needs and self.learnable_weight_clip is None:
            self.register_parameter(CLIP, nn.Parameter(self._maxima()))
        self._config, self._circuit = config, circuit_of(config, self.tiles)
        self._clips = config.clip.type is not WeightClipType.NONE
        clipping.watch(self)

    def reset_parameters(self) -> None:
        """Initialise weight and bias as torch does, ranges to init_value, learned clips to the largest weights."""
        super().reset_parameters()  # type: ignore[misc]
        if RANGE in self._parameters:  # torch's constructor comes here before there are any
            self._reset_analog()
            clipping.restart(self)

    @torch.no_grad()
    def _reset_analog(self) -> None:
        if self.input_range is not None:
            self.input_range.fill_(self._config.pre_post.input_range.init_value)
        for name in (COUNT, *EXTREMES):
            if (buffer := self._buffers[name]) is not None:
                buffer.zero_()
        self._reset_clip()

    @torch.no_grad()
    def _reset_clip(self) -> None:
        if self.learnable_weight_clip is not None:
            self.learnable_weight_clip.copy_(self._maxima())

    def _maxima(self) -> Tensor:
        """The largest magnitude of the weights of each tile and output, [G T, C], in the dtype of the weights."""
        n, outputs = self._inputs, self.weight.shape[0] // self.crossbars
        magnitudes = self.weight.detach().reshape(self.crossbars, outputs, n).abs()
        parts = [magnitudes[..., columns] for columns in tile_slices(n, self.tiles)]
        maxima = [part.amax(-1) if part.shape[-1] else part.new_zeros(part.shape[:-1]) for part in parts]
        return torch.stack(maxima, dim=1).flatten(0, 1)

    def extra_repr(self) -> str:
        settings = "".join(f", {path}={value!r}" for path, value in self._config.changed().items())
        tiles = f", tiles={self.tiles}" if self.tiles > 1 else ""
        return super().extra_repr() + tiles + settings

    @property
    def title(self) -> str:
        """What error messages call the layer."""
        return type(self).__name__ + (f" {self.layer_name!r}" if self.layer_name else "")

    # --- the forward pass --------------------------------------------------------------------------------------------

    def crossbar_inputs(self, x: Tensor) -> tuple[Tensor, ...]:
        """What each crossbar is given for an input of the layer: [..., N] each.

        Raises:
            ArgumentError: the layer cannot take this input.
        """
        raise NotImplementedError

    def _run(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """What the crossbars make of their inputs."""
        if self._clips and self.training:
            clipping.settle(self)
        if self.training and self._circuit.init_from_data > 0:
            placing.place_buffers(self)
            ranges.follow(self, inputs)
        dtype = autocast_dtype(inputs[0])
        pairs = zip(self._crossbars(), inputs, strict=True)
        outputs = (forward(self._circuit, each, x, self.training, self.layer_name) for each, x in pairs)
        return tuple(y if dtype is None else y.to(dtype) for y in outputs)

    def _crossbars(self) -> tuple[Crossbar, ...]:
        weight = self.weight if self.weight.dim() == 2 else self.weight.flatten(1)
        whole = Crossbar(
            weight,
            self.bias,
            self.input_range,
            self.input_range_update_idx,
            self.x_min,
            self.x_max,
            self.learnable_weight_clip,
        )
        count = self.crossbars
        return (whole,) if count == 1 else tuple(whole.part(group, count) for group in range(count))

    def _checked(self, x: object) -> Tensor:
        """The input, in the dtype of the weights: what arrives in another one under torch.autocast is converted."""
        if not isinstance(x, Tensor):
            raise ArgumentError(f"{self.title}: the input is a {type(x).__name__}. It must be a torch.Tensor.")
        if x.is_nested:
            raise ArgumentError(
                f"{self.title}: the input is a nested tensor. It must be a plain one; pad it with "
                f"to_padded_tensor, or, where torch.nn.TransformerEncoder makes it of a padding mask, give that "
                f"enable_nested_tensor=False."
            )
        if x.dtype != self.weight.dtype and autocast_dtype(x) is None:
            raise ArgumentError(
                f"{self.title}: the input has dtype {x.dtype} and the weight has dtype {self.weight.dtype}. They must "
                f"be the same; convert the input with x.to({self.weight.dtype}), or the layer."
            )
        return x.to(self.weight.dtype)

    # --- the weights -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def set_weights(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Copy values into the Parameters, which stay the same objects. Learned clips start at the largest weights."""
        for name, new, old in (("weight", weight, self.weight), ("bias", bias, self.bias)):
            if new is None:
                continue
            if old is None:
                raise ArgumentError(f"{self.title}: there is a bias to set but the layer has none. Leave it out.")
            if not isinstance(new, Tensor) or new.shape != old.shape:
                found = f"shape {list(new.shape)}" if isinstance(new, Tensor) else f"type {type(new).__name__}"
                raise ArgumentError(
                    f"{self.title}: the {name} to set has {found}. It must be a tensor of shape {list(old.shape)}."
                )
        self.weight.copy_(weight)
        if bias is not None and self.bias is not None:
            self.bias.copy_(bias)
        self._reset_clip()
        clipping.restart(self)

    def get_weights(self) -> tuple[Tensor, Tensor | None]:
        """Copies of weight and bias."""
        return self.weight.detach().clone(), None if self.bias is None else self.bias.detach().clone()

    def clip_weights(self) -> None:
        """Clip the weights in place as `rpu_config.clip` says; see `triptych.analog.clip_weights`."""
        clipping.clip_weights(self)

    @torch.no_grad()
    def quantize_weights(self) -> None:
        """Round the weights in place as the forward pass does; see `triptych.analog.quantize_weights`."""
        parts = [effective_weight(self._circuit, each, "none", None, self.layer_name)[0] for each in self._crossbars()]
        self.weight.copy_(torch.cat(parts).view_as(self.weight))
        clipping.restart(self)

    # --- from torch's layers and back --------------------------------------------------------------------------------

    @classmethod
    def from_digital(cls, module: nn.Module, rpu_config: AnalogConfig) -> Self:
        """An analog copy of a layer of torch.nn: nothing is shared with it. Hooks and attributes are copied too."""
        check_config(cls.__name__, rpu_config)
        problem = cls.why_not(module)
        if problem:
            raise ArgumentError(f"{cls.__name__}.from_digital: {problem}")
        return cls.take_over(copy.deepcopy(module), rpu_config)

    @classmethod
    def take_over(cls, module: nn.Module, rpu_config: AnalogConfig) -> Self:
        """Turn a layer of torch.nn itself into an analog one: the same object, with the same Parameters and hooks.

        Whoever refers to it, by whatever path, finds it analog. `why_not` must have no objection.
        """
        check_config(cls.__name__, rpu_config)
        module.__class__ = cls
        assert isinstance(module, cls)
        module._begin(rpu_config)
        return module

    @classmethod
    def why_not(cls, module: nn.Module) -> str:
        """What keeps a module from being turned into a layer of this class, and what to do; "" if nothing."""
        if not isinstance(module, cls.DIGITAL) or isinstance(module, AnalogLayer):
            return f"the module is a {type(module).__name__}. It must be a torch.nn.{cls.DIGITAL.__name__}."
        weight = module._parameters.get("weight")
        if nn.utils.parametrize.is_parametrized(module) or not isinstance(weight, nn.Parameter):
            return (
                "its weight is computed from other tensors (a parametrization, weight_norm, spectral_norm, pruning), "
                "and crossbars would be clipped and quantised against it. Make it plain first "
                "(torch.nn.utils.parametrize.remove_parametrizations, prune.remove), or exclude the module."
            )
        if isinstance(weight, nn.UninitializedParameter):
            return "it is lazy and has no weight yet. Run a batch through the model first, then convert it."
        if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            return (
                f"its weight has dtype {weight.dtype}. It must be float32, bfloat16, float16 or float64: convert it "
                f"with module.to(...), or exclude the module."
            )
        bias = module._parameters.get("bias")
        if bias is not None and bias.dtype != weight.dtype:
            return (
                f"its bias has dtype {bias.dtype} and its weight has dtype {weight.dtype}. They must be the same: "
                f"convert it with module.to({weight.dtype}), or exclude the module."
            )
        if "forward" in vars(module):
            return (
                "its forward was replaced on the object, as accelerate's hooks do, and would go on calling the digital "
                "one. Convert the model before that, or exclude the module."
            )
        return ""

    @classmethod
    def to_digital(cls, module: AnalogLayer) -> nn.Module:
        """A copy of an analog layer as one of torch.nn, with the weights of its Parameter as they are."""
        if not isinstance(module, cls):
            raise ArgumentError(
                f"{cls.__name__}.to_digital: the module is a {type(module).__name__}. It must be one of these."
            )
        problem = module.why_not_back()
        if problem:
            raise ArgumentError(f"{cls.__name__}.to_digital: {problem}")
        return copy.deepcopy(module).give_back()

    def why_not_back(self) -> str:
        """What keeps this layer from being turned back into one of torch.nn, and what to do; "" if nothing."""
        plain = {"weight", RANGE, CLIP} <= self._parameters.keys()
        if plain and not nn.utils.parametrize.is_parametrized(self):
            return ""
        return (
            "its tensors are computed from others (a parametrization, weight_norm, spectral_norm, pruning), which are "
            "bound to the analog layer. Make them plain first (torch.nn.utils.parametrize.remove_parametrizations, "
            "remove_weight_norm, prune.remove)."
        )

    def give_back(self) -> nn.Module:
        """Turn this layer itself back into one of torch.nn: the same object, with the same Parameters and hooks.

        `why_not_back` must have no objection.
        """
        self._forward_pre_hooks.pop(_HOOK, None)
        for name in (RANGE, CLIP):
            del self._parameters[name]
        for name in (COUNT, *EXTREMES):
            del self._buffers[name]
        for name in ("tiles", "_config", "_circuit", "_clips"):
            del self.__dict__[name]
        ranges.leave(self)
        digital: nn.Module = self
        digital.__class__ = self.DIGITAL
        clipping.forget(digital)
        return digital

    # --- state -------------------------------------------------------------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, nn.Parameter) and not sharded.assigned(self, name, value) and name == RANGE:
            state.check_range(self, value, "the input_range assigned to it")
        if isinstance(value, nn.Parameter) and name in self.__dict__.get("_parameters", ()):
            super().register_parameter(name, value)  # not our own: what is assigned stays where it is
        else:
            super().__setattr__(name, value)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As torch's. A parallel style comes here with what it made of a Parameter; see `triptych.analog.placing`."""
        super().register_parameter(name, placing.registered(self, name, param))

    def __setstate__(self, values: Mapping[str, Any]) -> None:
        super().__setstate__(values)  # type: ignore[no-untyped-call]
        ranges.enrol(self)
        clipping.watch(self)  # a copy, or read from a file

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """As torch's, but the extremes of fast mode stay wide whatever dtype the layer is brought to."""
        before = {name: self._buffers.get(name) for name in EXTREMES}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        wide = statistics_dtype(self.weight.dtype)
        for name, old in before.items():
            new = self._buffers.get(name)
            if old is not None and new is not None and new.dtype != wide:
                self._buffers[name] = new.to(wide) if old.is_meta else old.to(new.device, wide)
        clipping.watch(self)  # the weight may have been swapped for another one
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool, *lists: list[str]
    ) -> None:
        """As torch's; also reads what aihwkit-lightning wrote, see `triptych.analog.state`."""
        lists[-1].extend(state.prepare(self, state_dict, prefix))
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *lists)


def must_be_called(module: nn.Module, args: Any) -> None:
    """A forward pre-hook that does nothing but be there.

    torch.nn.TransformerEncoderLayer hands the weights of its linear layers to one fused kernel in evaluation, and would
    pass analog layers by; it calls them instead when any of its modules has a hook.
    """


_HOOK = -1
"""Its key. torch counts from 0, in each process anew, so that a key of torch's in a layer read from a file may be given
to another hook."""


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype in which torch.nn's layer would answer under torch.autocast; None where that has no say."""
    kind = x.device.type
    if kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind):
        return None
    if not x.is_floating_point() or x.dtype == torch.float64:
        return None
    dtype: torch.dtype = torch.get_autocast_dtype(kind)
    return dtype


def check_config(asker: str, config: object) -> None:
    """Raise ArgumentError unless `config` is a configuration."""
    if not isinstance(config, AnalogConfig):
        raise ArgumentError(
            f"{asker}: rpu_config is a {type(config).__name__}. It must be a triptych.analog.AnalogConfig; "
            f"from_lightning makes one of a configuration of aihwkit-lightning."
        )


def named_analog_layers(model: nn.Module) -> Iterator[tuple[str, AnalogLayer]]:
    """The analog layers of a model with their paths, each layer once."""
    for path, module in model.named_modules():
        if isinstance(module, AnalogLayer):
            yield path, module
