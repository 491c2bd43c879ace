"""A GGUF file of the Llama family: its config and its weights, dequantized.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Writers of such files store
the rows of queries and keys for an interleaved rotation, pairs (2i, 2i + 1) within a head; Hugging
Face weights pair i with i + D/2, so the rows are put back in that order here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shoal.errors import ConfigError, WorkError
from shoal.models.config import DecoderConfig
from shoal.models.rotary import RotaryConfig, rotary_frequencies

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_ROPE_FACTORS = "rope_freqs.weight"
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


class GGUFFile:
    """One opened file. Raises ``ConfigError`` for another family, ``WorkError`` for damage."""

    def __init__(self, path: Path) -> None:
        # Imported here: the package is needed for this alone.
        from gguf import GGUFReader

        self.path = Path(path)
        try:
            self._reader = GGUFReader(self.path)
        except FileNotFoundError:
            raise ConfigError(
                "SOURCE", str(path), "there is no such file", "Give a GGUF file"
            ) from None
        except (ValueError, IndexError, OSError) as error:
            raise WorkError(f"{path} is not a whole GGUF file: {error}") from error
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        architecture = self.value("general.architecture")
        if architecture != "llama":
            raise self._error(
                f"its architecture is {architecture!r}", "Give one of the Llama family"
            )
        if self.value("llama.expert_count"):
            raise self._error(
                "it is a mixture of experts", "Give the Hugging Face folder of this model instead"
            )

    def value(self, key: str, default: Any = None) -> Any:
        """A value of the file's metadata; WorkError for a text that is none."""
        field = self._reader.get_field(key)
        try:
            return default if field is None else field.contents()
        except UnicodeDecodeError as error:
            raise WorkError(f"{self.path} is damaged: {key} is not UTF-8 ({error})") from error

    def config(self) -> dict[str, Any]:
        """The Hugging Face config that the metadata describe."""
        heads = self._needed("attention.head_count")
        hidden = self._needed("embedding_length")
        window = self.value("llama.attention.sliding_window")
        config: dict[str, Any] = {
            "model_type": "mistral" if window else "llama",
            "vocab_size": int(self._tensor("token_embd.weight").shape[1]),
            "hidden_size": hidden,
            "intermediate_size": self._needed("feed_forward_length"),
            "num_hidden_layers": self._needed("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self.value("llama.attention.head_count_kv", heads),
            "head_dim": self.value("llama.attention.key_length", hidden // heads),
            "max_position_embeddings": self._needed("context_length"),
            "rms_norm_eps": _decimal(self._needed("attention.layer_norm_rms_epsilon")),
            "rope_theta": _decimal(self.value("llama.rope.freq_base", 10_000.0)),
            "rope_scaling": self._rope_scaling(),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "bos_token_id": self.value("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self.value("tokenizer.ggml.eos_token_id"),
            "pad_token_id": self.value("tokenizer.ggml.padding_token_id"),
        }
        if window:
            config["sliding_window"] = int(window)
        else:
            config["attention_bias"] = "blk.0.attn_q.bias" in self._tensors
            config["mlp_bias"] = "blk.0.ffn_up.bias" in self._tensors
        rotated = self.value("llama.rope.dimension_count", config["head_dim"])
        if rotated != config["head_dim"]:
            raise self._error(
                f"it rotates {rotated} of {config['head_dim']} elements", "Give another file"
            )
        return config

    def tensors(self, config: DecoderConfig) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter by its decoder name, fp32, one at a time."""
        from gguf.quants import dequantize

        for name, tensor in self._tensors.items():
            if name == _ROPE_FACTORS:
                continue
            try:
                values = dequantize(tensor.data, tensor.tensor_type)
            except NotImplementedError as error:
                raise self._error(
                    f"{name} has the format {tensor.tensor_type.name}",
                    "Give a file in a format that the gguf package can dequantize",
                ) from error
            whole = torch.from_numpy(np.array(values, dtype=np.float32))
            whole = whole.view(*(int(size) for size in reversed(tensor.shape)))
            yield self._hf_name(name), _unpermuted(name, whole, config)

    def _hf_name(self, name: str) -> str:
        layer = _LAYER.fullmatch(name)
        if layer and layer[2] in _LAYER_NAMES:
            return f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}.{layer[3]}"
        if name in _OTHER_NAMES:
            return _OTHER_NAMES[name]
        raise self._error(f"the tensor {name} has no place in this family", "Give another file")

    def _rope_scaling(self) -> dict[str, Any] | None:
        if _ROPE_FACTORS in self._tensors:
            return self._llama3_scaling()
        kind = self.value("llama.rope.scaling.type", "none")
        if kind == "none":
            return None
        scaling = {"rope_type": kind, "factor": _decimal(self._needed("rope.scaling.factor"))}
        original = self.value("llama.rope.scaling.original_context_length")
        if original is not None and kind == "yarn":
            scaling["original_max_position_embeddings"] = original
        return scaling

    def _llama3_scaling(self) -> dict[str, Any]:
        """The settings behind the file's divisors of each frequency, which it holds ready-made."""
        divisors = torch.from_numpy(np.array(self._tensor(_ROPE_FACTORS).data, dtype=np.float32))
        theta = _decimal(self.value("llama.rope.freq_base", 10_000.0))
        factor = float(divisors.max())
        settings = RotaryConfig(
            kind="llama3", theta=theta, factor=factor, original_context=8192
        )  # Meta's own values besides; every published model has them
        head_dim, cpu = 2 * divisors.numel(), torch.device("cpu")
        plain = rotary_frequencies(RotaryConfig(theta=theta), head_dim, cpu)
        expected = plain / rotary_frequencies(settings, head_dim, cpu)
        if not torch.allclose(divisors, expected, rtol=1e-4):
            raise self._error(
                "its rotary divisors are not those of Llama 3.1 and later",
                "Give the Hugging Face folder of this model instead",
            )
        return {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": settings.low_frequency,
            "high_freq_factor": settings.high_frequency,
            "original_max_position_embeddings": settings.original_context,
        }

    def _needed(self, key: str) -> Any:
        value = self.value(f"llama.{key}")
        if value is None:
            raise WorkError(f"{self.path} lacks the key llama.{key}")
        return value

    def _tensor(self, name: str) -> Any:
        if name not in self._tensors:
            raise WorkError(f"{self.path} lacks the tensor {name}")
        return self._tensors[name]

    def _error(self, problem: str, remedy: str) -> ConfigError:
        return ConfigError("SOURCE", str(self.path), problem, remedy)


def _decimal(value: float) -> float:
    """The shortest decimal number that is this fp32 number: 1e-05 and not 9.99999974e-06."""
    return float(str(np.float32(value)))


def _unpermuted(name: str, tensor: torch.Tensor, config: DecoderConfig) -> torch.Tensor:
    """Rows of queries and keys in the order of two halves; anything else as it is."""
    if ".attn_q." not in name and ".attn_k." not in name:
        return tensor
    pairs = tensor.reshape(-1, config.head_dim // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)
