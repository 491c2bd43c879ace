"""The model that is on trial."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shoal.inference.forward.model import ServedModel, check_served
from shoal.inference.forward.precision import Precision, activation_dtype, resolved_precision
from shoal.models import Decoder, HFWeights, load_weights


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A Hugging Face folder and how it is served; pickles, so that other processes can load it."""

    folder: Path

    precision: Precision = "auto"

    def load_model(self) -> ServedModel:
        """The model as the engine computes it."""
        return ServedModel.load(self.folder, self.precision)

    def load_decoder(self) -> Decoder:
        """The model as the trainer computes it; raises ``ConfigError`` as ``load_model`` does."""
        weights = HFWeights(self.folder)
        check_served(weights.config)
        decoder = Decoder(weights.config, activation_dtype(resolved_precision(self.precision)))
        load_weights(decoder, weights)
        return decoder.eval()
