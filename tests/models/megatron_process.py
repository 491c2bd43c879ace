"""Megatron Core's own GPT on a CPU: loads what we wrote, and saves what we read.

Run as ``python -m tests.models.megatron_process FOLDER``, with a case for each of ``MODELS``: from
``FOLDER/case/ours`` a checkpoint is loaded, and its logits kept; then the model is filled anew and
saved as ``FOLDER/case/theirs`` with its logits. A process of its own, because Megatron saves
through more processes, and because what it asks of a GPU is answered for the CPU here.
"""

from __future__ import annotations

import contextlib
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

LENGTH, VOCABULARY, PADDED, LAYERS, HIDDEN, WIDTH, CONTEXT = 17, 257, 384, 3, 66, 50, 64

MODELS: dict[str, dict[str, Any]] = {
    # heads, query groups, width of a head; biases; norms of heads; tied; Llama 3's scaling
    "llama": {"heads": 3, "groups": 3, "head": 22},
    "llama biased": {"heads": 6, "groups": 2, "head": 22, "bias": True, "scaling": 4.0},
    "qwen2": {"heads": 4, "groups": 2, "head": 16, "qkv_bias": True, "tied": True},
    "qwen3": {"heads": 6, "groups": 3, "head": 10, "norms": True},
}


class _NoTracker:
    """In the place of the states of CUDA's generators."""

    def is_initialized(self) -> bool:
        return True

    @contextlib.contextmanager
    def fork(self, name: str = "") -> Iterator[None]:
        yield


def tokens() -> torch.Tensor:
    """Two sequences."""
    draw = torch.Generator().manual_seed(3)
    return torch.randint(0, VOCABULARY, (2, LENGTH), generator=draw)


def _prepare(store: Path) -> None:
    """Answer for the CPU what Megatron asks of a GPU, and start its groups of one rank."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.tensor_parallel import random

    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda *_: None
    filesystem_async._process_memory = lambda: 0  # psutil's, for a log
    random._CUDA_RNG_STATE_TRACKER = _NoTracker()
    random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()


def _model(case: dict[str, Any]) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    norms = case.get("norms", False)
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        ffn_hidden_size=WIDTH,
        num_attention_heads=case["heads"],
        num_query_groups=case["groups"],
        kv_channels=case["head"],
        add_bias_linear=case.get("bias", False),
        add_qkv_bias=case.get("qkv_bias", False),
        qk_layernorm=norms,
        normalization="RMSNorm",
        layernorm_epsilon=1e-6,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )
    scaling = case.get("scaling")
    return GPTModel(
        config,
        get_gpt_layer_local_spec(qk_layernorm=norms, normalization="RMSNorm"),
        vocab_size=PADDED,
        max_sequence_length=CONTEXT,
        position_embedding_type="rope",
        rotary_base=10_000,
        rope_scaling=scaling is not None,
        rope_scaling_factor=scaling or 8.0,
        share_embeddings_and_output_weights=case.get("tied", False),
    )


def _logits(model: Any) -> torch.Tensor:
    batch = tokens()
    positions = torch.arange(LENGTH).expand_as(batch)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    with torch.no_grad():
        logits: torch.Tensor = model(batch, positions, mask)
    return logits[..., :VOCABULARY]


def _load(model: Any, folder: Path) -> None:
    from megatron.core import dist_checkpointing

    loaded = dist_checkpointing.load(model.sharded_state_dict(), str(folder))
    wanted = model.state_dict()
    absent = {name for name in wanted if name not in loaded}
    assert absent == {"output_layer._extra_state"}, f"{absent}: Megatron saves all but that one"
    model.load_state_dict({**loaded, **dict.fromkeys(absent)}, strict=False)


def _fill(model: Any) -> None:
    draw = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.2 + 0.1)


def _arguments(case: dict[str, Any]) -> Namespace:
    """What Megatron-LM's command line would have been, with an object of its own among it."""
    from megatron.core.transformer.enums import AttnBackend

    return Namespace(
        attention_backend=AttnBackend.unfused,
        params_dtype=torch.float32,
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        ffn_hidden_size=WIDTH,
        num_attention_heads=case["heads"],
        group_query_attention=case["groups"] != case["heads"],
        num_query_groups=case["groups"] if case["groups"] != case["heads"] else 1,
        kv_channels=case["head"],
        max_position_embeddings=CONTEXT,
        position_embedding_type="rope",
        rotary_base=10_000,
        rotary_percent=1.0,
        use_rope_scaling="scaling" in case,
        rope_scaling_factor=case.get("scaling", 8.0),
        swiglu=True,
        normalization="RMSNorm",
        norm_epsilon=1e-6,
        qk_layernorm=case.get("norms", False),
        add_bias_linear=case.get("bias", False),
        add_qkv_bias=case.get("qkv_bias", False),
        untie_embeddings_and_output_weights=not case.get("tied", False),
        vocab_size=VOCABULARY,
        padded_vocab_size=PADDED,
        attention_dropout=0.0,
        init_method_std=0.02,
    )


def main(folder: Path) -> None:
    """Every case."""
    from megatron.core import dist_checkpointing

    _prepare(folder / "store")
    for name, case in MODELS.items():
        model = _model(case)
        _load(model, folder / name / "ours" / "release")
        torch.save(_logits(model), folder / name / "ours.pt")
        _fill(model)
        theirs = folder / name / "theirs"
        (theirs / "iter_0000012").mkdir(parents=True)
        state = {**model.sharded_state_dict(), "args": _arguments(case), "iteration": 12}
        dist_checkpointing.save(state, str(theirs / "iter_0000012"))
        (theirs / "latest_checkpointed_iteration.txt").write_text("12")
        torch.save(_logits(model), folder / name / "theirs.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
