"""Decoders in the image of their Hugging Face configs: building, filling, reading and writing."""

from shoal.models.config import DecoderConfig, ExpertsConfig
from shoal.models.decoder import Decoder, DecoderOutput

__all__ = ["Decoder", "DecoderConfig", "DecoderOutput", "ExpertsConfig"]
