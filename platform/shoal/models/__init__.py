"""Decoders in the image of their Hugging Face configs: building, filling, reading and writing."""

from shoal.models.config import DecoderConfig, ExpertsConfig
from shoal.models.decoder import Decoder, DecoderOutput
from shoal.models.export import write_hf_folder
from shoal.models.hf_folder import HFWeights, read_hf_config
from shoal.models.importing import import_model
from shoal.models.names import ExpertLayout, parameter_shapes
from shoal.models.weight_source import WeightSource, whole_tensors

__all__ = [
    "Decoder",
    "DecoderConfig",
    "DecoderOutput",
    "ExpertLayout",
    "ExpertsConfig",
    "HFWeights",
    "WeightSource",
    "import_model",
    "parameter_shapes",
    "read_hf_config",
    "whole_tensors",
    "write_hf_folder",
]
