"""What a decoder is, read from a Hugging Face config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal.errors import ConfigError
from shoal.models.config_reader import ConfigReader, refuse_typos
from shoal.models.families import FAMILIES, Biases, Family, QueryKeyNorm, Windows
from shoal.models.rotary import RotaryConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsConfig:
    """The mixture-of-experts layers."""

    num_experts: int
    """Routed experts of each such layer."""
    experts_per_token: int
    """Routed experts that each token visits."""
    intermediate_size: int
    """Width of a routed expert."""
    normalize_weights: bool
    """Whether the weights of a token's experts are scaled to sum to one."""
    shared_intermediate_size: int | None
    """Width of the expert that every token visits; None for none."""
    shared_gate: bool
    """Whether that one's output passes a sigmoid gate."""
    balance_coefficient: float
    """Weight of the load-balancing loss in training."""
    selection_bias: bool
    """Whether scores are sigmoids, and a bias of each expert takes part in the choice alone."""
    weight_scale: float
    """What the weights of a token's experts are multiplied by."""

    @property
    def shared_name(self) -> str:
        """What the expert that every token visits is called in the layer's MLP."""
        return "shared_expert" if self.shared_gate else "shared_experts"


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig:
    """A decoder's shape; one that exists is valid."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Width of the dense MLP."""
    num_layers: int
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    """Longest sequence the model was made for, in tokens."""
    rms_norm_eps: float
    initializer_range: float
    """Standard deviation of initial matrices."""
    tie_word_embeddings: bool
    """Whether the output head is the embedding table."""
    attention_dropout: float
    """Probability with which an attention weight is dropped in training."""
    query_key_value_bias: bool
    output_bias: bool
    """Whether attention's output projection has a bias."""
    mlp_bias: bool
    query_key_norm: QueryKeyNorm
    clip_qkv: float | None
    """Bound of the absolute values of queries, keys and values before the rotation."""
    rotary: RotaryConfig
    windows: tuple[int | None, ...]
    """For each layer, how many positions a token sees, itself included; None for all."""
    sparse_layers: tuple[bool, ...]
    """For each layer, whether its MLP is a mixture of experts."""
    experts: ExpertsConfig | None
    """None where no layer is sparse."""
    hf: Mapping[str, Any] = field(repr=False, compare=False)
    """The Hugging Face config as it was given."""

    @staticmethod
    def from_hf(hf: Mapping[str, Any]) -> DecoderConfig:
        """Read a Hugging Face config.

        Raises ``ConfigError`` for a family, a feature or a value that is not supported and for a
        key that is misspelt.
        """
        family = _family(hf)
        refuse_typos(hf, family)
        reader = ConfigReader({**family.defaults, **hf})
        _refuse_features(reader, family)
        hidden_size = reader.count("hidden_size", most=2**20)
        num_heads = reader.count("num_attention_heads", most=2**14)
        num_key_value_heads = reader.count("num_key_value_heads", default=num_heads)
        if num_heads % num_key_value_heads:
            raise reader.error(
                "num_key_value_heads",
                f"it does not divide num_attention_heads, {num_heads}",
                "Take a divisor",
            )
        num_layers = reader.count("num_hidden_layers", most=4096)
        context = reader.count("max_position_embeddings", most=2**31 - 1)
        sparse_layers = _sparse_layers(reader, family, num_layers)
        biases = _biases(reader, family)
        return DecoderConfig(
            model_type=hf["model_type"],
            vocab_size=reader.count("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=reader.count("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_key_value_heads=num_key_value_heads,
            head_dim=_head_dim(reader, family, hidden_size, num_heads),
            max_position_embeddings=context,
            rms_norm_eps=reader.number("rms_norm_eps"),
            initializer_range=reader.number("initializer_range"),
            tie_word_embeddings=reader.flag("tie_word_embeddings"),
            attention_dropout=_probability(reader, "attention_dropout"),
            query_key_value_bias=biases[0],
            output_bias=biases[1],
            mlp_bias=reader.flag("mlp_bias"),
            query_key_norm=family.query_key_norm,
            clip_qkv=None if reader.get("clip_qkv") is None else reader.number("clip_qkv"),
            rotary=RotaryConfig.from_hf(hf, family.defaults["rope_theta"], context),
            windows=_windows(reader, family, num_layers),
            sparse_layers=sparse_layers,
            experts=_experts(reader, family) if any(sparse_layers) else None,
            hf=dict(hf),
        )

    @property
    def architecture(self) -> str:
        """Class name that ``config.json`` carries for this family."""
        return FAMILIES[self.model_type].architecture


def _family(hf: Mapping[str, Any]) -> Family:
    name = hf.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise ConfigError(
            "model.config.model_type",
            name,
            "this family is not supported",
            f"Take one of {', '.join(FAMILIES)}",
        )
    return FAMILIES[name]


def _refuse_features(reader: ConfigReader, family: Family) -> None:
    if reader.get("hidden_act") != "silu":
        raise reader.error("hidden_act", "these families gate with silu", "Set it to silu")
    if reader.get("quantization_config"):
        raise reader.error(
            "quantization_config", "quantized weights cannot be trained", "Dequantize them first"
        )
    if reader.get("router_jitter_noise"):
        raise reader.error("router_jitter_noise", "router noise is not supported", "Set it to 0")
    features = ["attention_bias", "mlp_bias", "clip_qkv"]
    if family.selection_bias:
        features.append("router_aux_loss_coef")
        for key in ("n_group", "topk_group"):
            if reader.count(key, default=1) != 1:
                raise reader.error(
                    key, "choosing groups of experts is not supported", "Set it to 1"
                )
    for key in features:
        if key not in family.defaults and reader.get(key):
            raise reader.error(key, "this family has no such feature", "Remove the key")


def _biases(reader: ConfigReader, family: Family) -> tuple[bool, bool]:
    match family.biases:
        case Biases.NONE:
            return False, False
        case Biases.QKV:
            return True, False
        case Biases.CONFIGURED_QKV:
            return reader.flag("qkv_bias"), False
        case Biases.CONFIGURED:
            return reader.flag("attention_bias"), reader.flag("attention_bias")


def _head_dim(reader: ConfigReader, family: Family, hidden_size: int, num_heads: int) -> int:
    if reader.get("head_dim") is None and hidden_size % num_heads:
        raise reader.error(
            "hidden_size", f"{num_heads} heads do not divide it", "Set head_dim or change the heads"
        )
    head_dim = reader.count("head_dim", default=hidden_size // num_heads, most=2**20)
    if head_dim % 2:
        raise reader.error(
            "head_dim", f"heads of {head_dim} elements cannot rotate", "Make it even"
        )
    if family.query_key_norm is QueryKeyNorm.FULL and head_dim * num_heads != hidden_size:
        raise reader.error(
            "head_dim",
            "this family's heads fill the hidden size",
            f"Take {hidden_size // num_heads}",
        )
    return head_dim


def _probability(reader: ConfigReader, key: str) -> float:
    value = reader.number(key)
    if value >= 1:
        raise reader.error(key, "a probability below 1 is needed", "Take, say, 0.1")
    return value


def _windows(reader: ConfigReader, family: Family, num_layers: int) -> tuple[int | None, ...]:
    kind = family.windows
    if kind is Windows.NONE:
        used = False
    elif kind in (Windows.ALL, Windows.UPPER_IF_SET):
        used = reader.get("sliding_window") is not None
    else:
        used = reader.flag("use_sliding_window")
    window = reader.count("sliding_window", most=2**31 - 1) if used else None
    by_layer = (Windows.UPPER, Windows.UPPER_IF_SET, Windows.LOWER_EVEN)
    if kind in by_layer and used:
        border = reader.get("max_window_layers")
        if not isinstance(border, int) or border < 0:
            raise reader.error("max_window_layers", "it must be a whole number", "Set it")
        upper = kind is not Windows.LOWER_EVEN
        default = tuple(
            window if (i >= border if upper else i < border and i % 2 == 0) else None
            for i in range(num_layers)
        )
    else:
        default = (window,) * num_layers
    types = reader.get("layer_types")
    if types is None:
        return default
    given = _typed_windows(reader, types, window, num_layers)
    if kind not in by_layer and given != default:
        raise reader.error("layer_types", "this family's layers are all alike", "Remove the key")
    return given


def _typed_windows(
    reader: ConfigReader, types: Any, window: int | None, num_layers: int
) -> tuple[int | None, ...]:
    windows = {"full_attention": None, "sliding_attention": window}
    if not isinstance(types, list | tuple) or len(types) != num_layers:
        raise reader.error("layer_types", f"{num_layers} entries are needed", "Remove the key")
    if any(kind not in windows for kind in types):
        raise reader.error(
            "layer_types", "a kind of attention is not supported", f"Take {', '.join(windows)}"
        )
    if "sliding_attention" in types and window is None:
        raise reader.error("layer_types", "no sliding_window is in use", "Set use_sliding_window")
    return tuple(windows[kind] for kind in types)


def _sparse_layers(reader: ConfigReader, family: Family, num_layers: int) -> tuple[bool, ...]:
    if family.expert_width is None:
        return (False,) * num_layers
    if family.selection_bias:
        first = reader.count("first_k_dense_replace", default=0, least=0)
        return tuple(i >= first for i in range(num_layers))
    if "decoder_sparse_step" not in family.defaults:
        return (True,) * num_layers
    step = reader.count("decoder_sparse_step")
    dense = reader.get("mlp_only_layers") or []
    if not isinstance(dense, list | tuple):
        raise reader.error("mlp_only_layers", "it is no list of layers", "Write a list, or null")
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers))


def _experts(reader: ConfigReader, family: Family) -> ExpertsConfig:
    assert family.expert_width is not None
    key = "n_routed_experts" if family.selection_bias else "num_experts"
    key = key if reader.get("num_local_experts") is None else "num_local_experts"
    num_experts = reader.count(key, most=2**14)
    per_token = reader.count("num_experts_per_tok")
    if per_token > num_experts:
        raise reader.error(
            "num_experts_per_tok", f"there are only {num_experts} experts", "Take fewer"
        )
    width, shared = reader.count(family.expert_width), None
    if family.selection_bias:
        shared = width * reader.count("n_shared_experts", most=2**14)
    elif "shared_expert_intermediate_size" in family.defaults:
        shared = reader.count("shared_expert_intermediate_size")
    return ExpertsConfig(
        num_experts=num_experts,
        experts_per_token=per_token,
        intermediate_size=width,
        normalize_weights=family.always_normalize or reader.flag("norm_topk_prob"),
        shared_intermediate_size=shared,
        shared_gate=not family.selection_bias,
        balance_coefficient=0.0 if family.selection_bias else reader.number("router_aux_loss_coef"),
        selection_bias=family.selection_bias,
        weight_scale=reader.number("routed_scaling_factor") if family.selection_bias else 1.0,
    )
