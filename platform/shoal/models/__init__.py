"""Decoders in the image of their Hugging Face configs: building, filling, sharding, writing."""

from shoal.models.config import DecoderConfig, ExpertsConfig
from shoal.models.decoder import Carried, Decoder, DecoderOutput
from shoal.models.experts import Router
from shoal.models.export import write_hf_folder
from shoal.models.hf_folder import HFWeights, read_hf_config
from shoal.models.importing import import_model
from shoal.models.initialization import InitialWeights, initialize
from shoal.models.matrices import matrix_rows
from shoal.models.megatron import MegatronWeights, write_megatron_folder
from shoal.models.mxfp8 import Bf16Choice, check_quantized_gather, choose_mxfp8
from shoal.models.names import ExpertLayout, parameter_shapes, tensor_shapes
from shoal.models.part import Part, split_decoder
from shoal.models.sharding import ShardedUnit, decoder_units, shard_decoder
from shoal.models.stage import EMBEDDING, DecoderStage
from shoal.models.weight_source import WeightSource, whole_tensors
from shoal.models.weights import load_weights
from shoal.models.weights_mark import weights_mark

__all__ = [
    "Bf16Choice",
    "Carried",
    "Decoder",
    "DecoderConfig",
    "DecoderOutput",
    "DecoderStage",
    "EMBEDDING",
    "ExpertLayout",
    "ExpertsConfig",
    "HFWeights",
    "InitialWeights",
    "MegatronWeights",
    "Part",
    "Router",
    "ShardedUnit",
    "WeightSource",
    "check_quantized_gather",
    "choose_mxfp8",
    "decoder_units",
    "import_model",
    "initialize",
    "load_weights",
    "matrix_rows",
    "parameter_shapes",
    "read_hf_config",
    "shard_decoder",
    "split_decoder",
    "tensor_shapes",
    "weights_mark",
    "whole_tensors",
    "write_hf_folder",
    "write_megatron_folder",
]
