"""A transformers config as a model without numbers, from a folder or a file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from weft._torch import all_nonzero_on_meta
from weft.errors import DeclarationError, UnsupportedError, shown

if TYPE_CHECKING:
    from transformers import PretrainedConfig

#: Kinds of layers whose attention sees all earlier tokens, or those of a window.
FULL, WINDOW = "full_attention", "sliding_attention"
#: Sizes of a copy that is small enough to be verified, by the keys of configs.
_SMALL = {
    "intermediate_size": 32, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    "vocab_size": 64, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8, "sliding_window": 16, "n_group": 1, "topk_group": 1,
}  # fmt: skip
#: Head size and most layers of such a copy.
_HEAD, _LAYERS = 16, 8


class HFModel:
    """A causal language model of transformers, by its configuration alone.

    Args:
        config: of transformers.
        name: for messages, such as its path.

    >>> from transformers import LlamaConfig
    >>> model = HFModel(LlamaConfig(num_hidden_layers=3, vocab_size=64, hidden_size=64))
    >>> model.layers, model.period, model.numbers
    (3, 1, 6398400)
    """

    def __init__(self, config: PretrainedConfig, name: str = "config") -> None:
        self.config, self.name = config.get_text_config(), name

    @classmethod
    def load(cls, path: str | Path) -> HFModel:
        """A model by the folder of a checkpoint, or its config.json.

        Raises:
            DeclarationError: no such file, or one that is no configuration of a model.
            UnsupportedError: a model whose code comes with the checkpoint, of an unknown type, or
                that is no causal language model.
        """
        file = Path(path)
        file = file / "config.json" if file.is_dir() else file
        if not file.is_file():
            raise DeclarationError(
                f"no file {str(file)!r}: pass the folder of a transformers model, or its"
                " config.json (nothing is downloaded)"
            )
        try:
            data = json.loads(file.read_text())
        except ValueError as error:
            raise DeclarationError(f"{file}: not valid JSON: {error}") from None
        if not isinstance(data, dict) or "model_type" not in data:
            raise DeclarationError(f"{file}: no config of transformers, which has a 'model_type'")
        if data.get("auto_map"):
            raise UnsupportedError(
                f"{file}: 'auto_map' names code of the checkpoint, {shown(data['auto_map'])}, which"
                " is not run here; give a model type that transformers itself has"
            )
        from transformers import AutoConfig

        try:
            config = AutoConfig.from_pretrained(str(file), local_files_only=True)
        except (ValueError, KeyError, OSError) as error:
            raise UnsupportedError(f"{file}: {str(error).splitlines()[0]}") from None
        model = cls(config, str(path))
        model.check()
        return model

    def check(self) -> None:
        """Raise `UnsupportedError` for what is no causal language model."""
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

        kind = type(self.config)
        if getattr(self.config, "is_encoder_decoder", False):
            raise UnsupportedError(
                f"{self.name}: {self.config.model_type} has an encoder and a decoder, between which"
                " attention is not sharded; plan a decoder alone"
            )
        if kind not in MODEL_FOR_CAUSAL_LM_MAPPING or not hasattr(
            self.config, "num_attention_heads"
        ):
            raise UnsupportedError(
                f"{self.name}: {self.config.model_type} is no causal language model of transformers"
                " with attention"
            )

    @property
    def layers(self) -> int:
        """Layers of the model."""
        return self.config.num_hidden_layers

    @property
    def kinds(self) -> list[str]:
        """Kind of each layer, in transformers' words."""
        kinds = getattr(self.config, "layer_types", None)
        if kinds:
            return list(kinds)
        windowed = getattr(self.config, "sliding_window", None) is not None
        windowed &= getattr(self.config, "use_sliding_window", True)
        return [WINDOW if windowed else FULL] * self.layers

    @property
    def period(self) -> int:
        """Layers after which kinds repeat."""
        kinds = [*zip(self.kinds, getattr(self.config, "mlp_layer_types", None) or self.kinds)]
        return next(
            p
            for p in range(1, len(kinds) + 1)
            if all(kind == kinds[i % p] for i, kind in enumerate(kinds))
        )

    @property
    def recurrent(self) -> bool:
        """True if some layers carry a state, which no striped order takes."""
        known = (FULL, WINDOW, "chunked_attention")
        return any(kind not in known for kind in self.kinds) or not self._attends_only

    @property
    def _attends_only(self) -> bool:
        names = ("mamba_d_state", "ssm_state_size", "layers_block_type", "hybrid_override_pattern")
        return not any(hasattr(self.config, name) for name in names)

    @property
    def experts(self) -> int:
        """Experts of a layer, 0 for a dense model."""
        names = ("num_experts", "num_local_experts", "n_routed_experts")
        return next((n for name in names if (n := getattr(self.config, name, 0))), 0)

    @property
    def heads(self) -> tuple[int, int, int]:
        """Query heads, key/value heads, size of a head."""
        c = self.config
        size = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        kv = getattr(c, "num_key_value_heads", None) or c.num_attention_heads
        return c.num_attention_heads, kv, size

    @property
    def window(self) -> int | None:
        """Tokens of the window of its windowed layers."""
        return getattr(self.config, "sliding_window", None)

    @cached_property
    def numbers(self) -> int:
        """Weights of the whole model."""
        return sum(p.numel() for p in self.build(torch.bfloat16).parameters())

    @cached_property
    def class_name(self) -> str:
        """Class of the model in transformers."""
        return type(self.shortened(1).build(torch.bfloat16)).__name__

    def shortened(self, layers: int) -> HFModel:
        """The same model with its first layers alone."""
        return self._with({"num_hidden_layers": layers})

    def small(self) -> HFModel:
        """A copy of a period of layers whose weights are a few thousand, of the same heads."""
        data: dict[str, Any] = {k: v for k, v in _SMALL.items() if getattr(self.config, k, None)}
        heads, _, _ = self.heads
        data["hidden_size"] = heads * _HEAD
        if getattr(self.config, "head_dim", None):
            data["head_dim"] = data.get("qk_rope_head_dim", _HEAD)
        data["num_hidden_layers"] = min(_LAYERS, max(2, self.period))
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            data[name] = None
        return self._with(data)

    def _with(self, changes: Mapping[str, Any]) -> HFModel:
        data = {**self.config.to_dict(), **changes}
        for key in ("layer_types", "mlp_layer_types"):
            if data.get(key):
                data[key] = data[key][: data["num_hidden_layers"]]
        return HFModel(type(self.config).from_dict(data), self.name)

    def build(self, dtype: torch.dtype, device: str = "meta") -> nn.Module:
        """The model in train mode, on device "meta" without numbers."""
        from transformers import AutoModelForCausalLM

        with torch.device(device):
            model = AutoModelForCausalLM.from_config(self.config, dtype=dtype)
        model.config.use_cache = False
        return model.train()

    def units(self, model: nn.Module) -> Sequence[nn.Module]:
        """The layers of a built model, which FSDP2 gathers one after another."""
        lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
        found = next((m for m in lists if len(m) == self.layers), None)
        if found is None:
            raise UnsupportedError(f"{self.name}: its {self.layers} layers are no list of modules")
        return list(found)


@contextmanager
def on_meta() -> Iterator[None]:
    """Inside the block models run on meta tensors, whose position ids and labels have no numbers.

    transformers looks for packed documents in position ids; without numbers there are none.
    """
    from transformers import masking_utils

    stock = masking_utils.find_packed_sequence_indices

    def packed(position_ids: torch.Tensor) -> torch.Tensor | None:
        return None if position_ids.is_meta else stock(position_ids)

    masking_utils.find_packed_sequence_indices = packed
    try:
        with all_nonzero_on_meta():
            yield
    finally:
        masking_utils.find_packed_sequence_indices = stock


__all__ = ["FULL", "WINDOW", "HFModel", "on_meta"]
