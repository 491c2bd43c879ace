"""The decoder for serving: weights packed once, rows of any sequences, keys and values in pages."""

from __future__ import annotations

from pathlib import Path

import torch

from shoal.errors import ConfigError
from shoal.inference.forward.layer import Place, ServedLayer, Weights
from shoal.inference.forward.packing import packing_of
from shoal.inference.forward.precision import Precision, activation_dtype, resolved_precision
from shoal.inference.forward.probes import UNPROVEN, model_probes
from shoal.inference.forward.rows import Rows
from shoal.models import DecoderConfig, HFWeights, WeightSource
from shoal.models.rotary import rotary_angles
from shoal.ops import fixed
from shoal.ops.fixed.certify import Certificate, certify_kernels
from shoal.ops.fixed_order import HEAD_KINDS, fixed_order


def check_served(config: DecoderConfig) -> None:
    """Raise ``ConfigError`` for a family that has no kernels of fixed order."""
    if config.experts is not None and config.experts.selection_bias:
        raise ConfigError(
            "model.config.model_type",
            config.model_type,
            "the engine has no kernels for experts that a bias chooses; this family is for "
            "training and export",
            "Serve it with another engine, or serve another family",
        )


class ServedModel:
    """A model whose answers to a row do not depend on the rows beside it.

    Its weights are read and packed when it is made; the source is not needed afterwards.
    """

    def __init__(
        self,
        config: DecoderConfig,
        source: WeightSource,
        precision: Precision = "auto",
        *,
        batch_invariant: bool = True,
    ) -> None:
        """``batch_invariant=False`` gives the promise up for torch's own products."""
        check_served(config)
        self.config = config
        self.kind = resolved_precision(precision)
        self.is_batch_invariant = batch_invariant
        packing = packing_of(self.kind, batch_invariant=batch_invariant)
        self.dtype = activation_dtype(self.kind)
        shapes = source.shapes()

        def whole(name: str) -> torch.Tensor:
            return source.rows(name, 0, shapes[name][0]).to(self.dtype)

        self._embedding = whole("model.embed_tokens.weight")
        self._norm = whole("model.norm.weight")
        self._layers = [
            ServedLayer(config, layer, _within(whole, f"model.layers.{layer}."), packing)
            for layer in range(config.num_layers)
        ]
        head = self._embedding if config.tie_word_embeddings else whole("lm_head.weight")
        self._head = packing.linear(head, kind=HEAD_KINDS[self.kind])
        positions = torch.arange(config.max_position_embeddings, device=self._embedding.device)
        with fixed_order(self.kind):
            self._cosine, self._sine = rotary_angles(
                config.rotary, config.head_dim, positions, torch.float32
            )

    @staticmethod
    def load(
        folder: Path, precision: Precision = "auto", *, batch_invariant: bool = True
    ) -> ServedModel:
        """The model in a Hugging Face folder.

        Raises ``ConfigError`` for a folder that holds none or one of a family that is not
        supported, ``WorkError`` for damaged files.
        """
        weights = HFWeights(folder)
        return ServedModel(weights.config, weights, precision, batch_invariant=batch_invariant)

    def new_cache(self, num_blocks: int, block_size: int) -> fixed.KVCache:
        """An empty cache of ``num_blocks`` blocks of ``block_size`` tokens."""
        config = self.config
        return fixed.KVCache(
            num_blocks,
            block_size,
            config.num_layers,
            config.num_key_value_heads,
            config.head_dim,
            self.dtype,
        )

    def forward(
        self, rows: Rows, cache: fixed.KVCache, wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Fill ``cache`` with the keys and values of ``rows`` and give the head's input.

        That is ``[W, H]`` for the rows ``wanted`` ``[W]`` int64, for all where unset, in the dtype
        of the activations.
        """
        place = Place(
            rows=rows,
            cache=cache,
            cosine=fixed.take_rows(self._cosine, rows.positions),
            sine=fixed.take_rows(self._sine, rows.positions),
            wanted=wanted,
        )
        # The residual stream is fp32: rounding it to bf16 would more than double the error.
        hidden, added = fixed.take_rows(self._embedding, rows.tokens), None
        for layer in self._layers:
            hidden, added = layer(hidden, added, place)
        assert added is not None
        return fixed.add_rms_norm(hidden, added, self._norm, self.config.rms_norm_eps)[1]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden`` ``[W, H]`` to fp32 ``[W, V]``: 4 V bytes a row, so mind how many."""
        return self._head(hidden, dtype=torch.float32)

    def certify(self, block_size: int = 64) -> Certificate:
        """Prove the kernels, in the shapes that this model uses; takes about a second.

        Of a model that is not batch-invariant it is said that nothing was proven.
        """
        if not self.is_batch_invariant:
            return UNPROVEN
        return certify_kernels(
            list(model_probes(self.config, self._layers, self._head, block_size))
        )


def _within(whole: Weights, prefix: str) -> Weights:
    return lambda name: whole(prefix + name)
