"""A transformers config as a model without numbers, and what its own code says of its layers."""

from __future__ import annotations

import itertools
import weakref
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from weft._torch import TorchDispatchMode, local_scalar, memory_of, one_hot, part_in_memory
from weft.errors import UnsupportedError, shown
from weft_integrations.common import tensors_in

from .config_file import few_modules, of_transformers, read_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig

#: Sizes of a copy that is small enough to be verified, by the keys of configs.
_SMALL = {
    "intermediate_size": 32, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    "vocab_size": 64, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8, "sliding_window": 16, "n_group": 1, "topk_group": 1,
}  # fmt: skip
#: Head size of such a copy, its layers at most, and its weights.
_HEAD, _LAYERS, _NUMBERS = 16, 8, 1 << 27
#: Functions of a step at most, of some microseconds each.
MOST_FUNCTIONS = 1 << 19
#: Values of attributes that tell one kind of layer from another.
_PLAIN = (bool, int, str, type(None), tuple)


class HFModel:
    """A causal language model of transformers, by its configuration alone.

    >>> from transformers import LlamaConfig
    >>> model = HFModel(LlamaConfig(num_hidden_layers=3, vocab_size=64, hidden_size=64))
    >>> model.layers, model.numbers
    (3, 6398400)
    """

    def __init__(self, config: PretrainedConfig, name: str = "config") -> None:
        self.given, self.config, self.name = config, config.get_text_config(), name

    @classmethod
    def load(cls, path: str | Path) -> HFModel:
        """A model by the folder of a checkpoint, or its config.json."""
        config = read_config(path)
        with of_transformers(f"{path}: not a configuration of {config.model_type}"):
            model = cls(config, str(path))
            model.check()
            model.units(model.parts)  # what cannot be made is refused here
        return model

    def check(self) -> None:
        """Raise `UnsupportedError` for what is no causal language model."""
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

        kind = type(self.config)
        if getattr(self.config, "is_encoder_decoder", False):
            raise UnsupportedError(
                f"{self.name}: {self.config.model_type} has an encoder and a decoder, whose"
                " steps are not counted (weft.parallelize splits them); plan a decoder alone"
            )
        if kind not in MODEL_FOR_CAUSAL_LM_MAPPING or not hasattr(
            self.config, "num_attention_heads"
        ):
            raise UnsupportedError(
                f"{self.name}: {self.config.model_type} is no causal language model of transformers"
                " with attention"
            )

    @cached_property
    def notes(self) -> list[str]:
        """What of the file is not planned."""
        found = []
        method = getattr(self.given, "quantization_config", None)
        if method:
            kind = method.get("quant_method") if isinstance(method, dict) else method
            found.append(f"quantization {shown(kind)}: weights are planned in bf16, 2 bytes each")
        rest = [n for n in self.given.sub_configs if getattr(self.given, n) is not self.config]
        if self.given is not self.config and rest:
            found.append(f"planned without {', '.join(rest)}: the language model alone")
        named = str(getattr(self.given, "architectures", None) or self.class_name)
        if self.class_name not in named:
            found.append(f"planned as {self.class_name}; the file names {shown(named)}")
        return found

    @cached_property
    def parts(self) -> nn.Module:
        """The whole model in bf16 on device "meta", to look at; it is not run."""
        return self.build(torch.bfloat16)

    @property
    def layers(self) -> int:
        """Layers of the model."""
        return len(self.units(self.parts))

    @property
    def numbers(self) -> int:
        """Weights of the whole model."""
        return sum(p.numel() for p in self.parts.parameters())

    @property
    def class_name(self) -> str:
        """Class of the model in transformers."""
        return type(self.parts).__name__

    @cached_property
    def kinds(self) -> list[int]:
        """A number per layer, equal for layers of equal modules, shapes and plain attributes."""
        layers = [_facts(layer) for layer in self.units(self.parts)]
        for name, value in self.config.to_dict().items():
            if isinstance(value, list) and len(value) == len(layers):
                for facts, each in zip(layers, value):
                    facts["config", name] = each if isinstance(each, int) else str(each)
        values: dict[Hashable, dict[int, Any]] = defaultdict(dict)
        for number, facts in enumerate(layers):
            for key, value in facts.items():
                values[key][number] = value
        counting = {key for key, of_layers in values.items() if _counts(of_layers)}
        numbers: dict[Hashable, int] = {}
        keys = (frozenset((k, v) for k, v in f.items() if k not in counting) for f in layers)
        return [numbers.setdefault(key, len(numbers)) for key in keys]

    @cached_property
    def repeats(self) -> tuple[int, int] | None:
        """Layers (n, p) such that all behind the first n are periods of p layers like the last p.

        None where n + p of them would be all of the model, or more.
        """
        kinds, total = self.kinds, self.layers
        found = [
            (lead + (total - lead) % period + period, period)
            for lead, period in itertools.product(range(total), range(1, total // 2 + 1))
            if lead + 2 * period < total
            and all(kinds[i] == kinds[i + period] for i in range(lead, total - period))
        ]
        few = min(found, key=lambda one: (sum(one), one), default=None)
        return few if few is not None and sum(few) < total else None

    @property
    def every_kind(self) -> int:
        """The fewest first layers with all kinds among them."""
        return max(self.kinds.index(kind) for kind in self.kinds) + 1

    @cached_property
    def recurrent(self) -> bool:
        """True if some layers carry a state, which no striped order takes."""
        from weft_integrations.transformers.hooks import recurrent

        return recurrent(self.parts)

    @property
    def routed(self) -> bool:
        """True if a router gives tokens to experts."""
        return any("Expert" in type(module).__name__ for module in self.parts.modules())

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.config.num_attention_heads

    def small(self) -> HFModel:
        """A copy of every kind of layer, of few weights and the same heads."""
        c = self.config
        data: dict[str, Any] = {k: v for k, v in _SMALL.items() if getattr(c, k, None)}
        size = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        data["hidden_size"] = c.num_attention_heads * _HEAD
        if getattr(c, "head_dim", None):
            data["head_dim"] = data.get("qk_rope_head_dim", _HEAD)
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            data[name] = None
        few = min(_LAYERS, max(2, self.every_kind))
        of_unit = c.num_hidden_layers // self.layers  # two in LongCat's, which counts attentions
        whole = c.to_dict()
        data["num_hidden_layers"] = few * of_unit
        if "num_layers" in whole:
            data["num_layers"] = few
        # Lists per layer, and rope's factors per pair of a head's numbers.
        cut = {c.num_hidden_layers: few * of_unit, self.layers: few, size // 2: _HEAD // 2}
        return HFModel(type(c).from_dict(_cut(whole, cut) | data), self.name)

    def build_small(self) -> nn.Module:
        """The small copy with random numbers on the CPU, in eval mode, unless it is large."""
        small = self.small()
        if small.numbers > _NUMBERS:
            raise ValueError(f"{small.numbers:,} weights")
        return small.build(torch.float32, "cpu").eval()

    def build(self, dtype: torch.dtype, device: str = "meta") -> nn.Module:
        """The model in train mode, on device "meta" without numbers."""
        from transformers import AutoModelForCausalLM

        with torch.device(device), few_modules(self.name):
            model = AutoModelForCausalLM.from_config(self.config, dtype=dtype)
        model.config.use_cache = False
        return model.train()

    def units(self, model: nn.Module) -> nn.ModuleList:
        """The layers of a built model, which FSDP2 gathers one after another.

        Of the lists of modules that number its layers, in units of one or more, that which holds
        most weights: layers may have lists of their own, and towers stand beside them.
        """
        total = self.config.num_hidden_layers
        lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m)]
        lists = [m for m in lists if total % len(m) == 0] or lists
        if not lists:
            raise UnsupportedError(f"{self.name}: its {total} layers are no list of modules")
        return max(lists, key=lambda m: sum(p.numel() for p in m.parameters()))


def _cut(value: Any, sizes: Mapping[int, int]) -> Any:
    """The same with every list of one of some lengths cut to another."""
    if isinstance(value, dict):
        return {key: _cut(each, sizes) for key, each in value.items()}
    return value[: sizes[len(value)]] if isinstance(value, list) and len(value) in sizes else value


def _facts(layer: nn.Module) -> dict[tuple[str, str], Hashable]:
    """What a layer's code may depend on: its modules, shapes of tensors, plain attributes."""
    facts: dict[tuple[str, str], Hashable] = {}
    for path, module in layer.named_modules():
        facts[path, ""] = type(module).__qualname__
        for name, value in vars(module).items():
            if isinstance(value, float):
                facts[path, name] = bool(value)
            elif isinstance(value, _PLAIN) and isinstance(value, Hashable):
                facts[path, name] = value
        for name, t in (*module._parameters.items(), *module._buffers.items()):
            facts[path, name] = None if t is None else (t.shape, t.dtype)
    return facts


def _counts(of_layers: Mapping[int, Any]) -> bool:
    """True of numbers that grow with the number of the layer by 1, or by 2 of units of two."""
    if not all(type(value) is int for value in of_layers.values()):
        return False
    return any(len({v - by * i for i, v in of_layers.items()}) == 1 for by in (1, 2))


class _NoNumbers(TorchDispatchMode):
    """What is read of tensors without numbers: zeros, and masks that are true everywhere.

    A class of a one-hot mask is true for its mean share, and what is nonzero of a whole vector are
    0, 1, 2, ...: so loops over experts run.
    """

    def __init__(self) -> None:
        super().__init__()
        self.functions = 0
        self.classes: dict[int, int] = {}  # of the memory of one-hot masks
        self.places: dict[int, int] = {}  # of the memory of places in a vector, how many there are

    def one_hot(self, tensor: Tensor, num_classes: int = -1) -> Tensor:
        """torch's, whose result is remembered."""
        out = one_hot(tensor, num_classes)
        return self._remembered(out, self.classes, num_classes) if out.is_meta else out

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        self.functions += 1
        if self.functions > MOST_FUNCTIONS:
            raise UnsupportedError(
                f"more than {MOST_FUNCTIONS:,} functions: it loops over tokens or experts, as"
                " recurrences without a kernel do, and is not counted so"
            )
        given = args[0] if args else None
        if not (isinstance(given, Tensor) and given.is_meta):
            return func(*args, **(kwargs or {}))
        part = part_in_memory(given)
        memory = memory_of(part)[0]
        if func is local_scalar:
            place = part.storage_offset() if memory in self.places else 0
            return torch.tensor(place, dtype=given.dtype).item()
        if func is torch.ops.aten.nonzero.default:
            found = -(-given.numel() // self.classes.get(memory, 1))
            out = given.new_empty(found, given.dim(), dtype=torch.long)
            return self._remembered(out, self.places, found) if given.dim() == 1 else out
        out = func(*args, **(kwargs or {}))
        if func.namespace == "weft" and memory in self.classes:  # that comes to other ranks
            for t in tensors_in(out):
                self._remembered(t, self.classes, self.classes[memory])
        return out

    @staticmethod
    def _remembered(t: Tensor, known: dict[int, int], number: int) -> Tensor:
        memory, _ = memory_of(part_in_memory(t))
        known[memory] = number
        weakref.finalize(
            part_in_memory(t).untyped_storage(), known.pop, memory, None
        ).atexit = False
        return t


@contextmanager
def on_meta() -> Iterator[None]:
    """Inside the block models run on meta tensors, whose position ids and labels have no numbers.

    transformers looks for packed documents in position ids; without numbers there are none.
    """
    from transformers import masking_utils

    stock, none = masking_utils.find_packed_sequence_indices, _NoNumbers()

    def packed(position_ids: Tensor) -> Tensor | None:
        return None if position_ids.is_meta else stock(position_ids)

    masking_utils.find_packed_sequence_indices = packed
    functional.one_hot = none.one_hot
    try:
        with none:
            yield
    finally:
        masking_utils.find_packed_sequence_indices = stock
        functional.one_hot = one_hot
