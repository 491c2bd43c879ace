"""Dense decoders in Megatron Core's names: its distributed checkpoints, read and written."""

from shoal.models.megatron.folder import is_megatron
from shoal.models.megatron.reading import MegatronWeights
from shoal.models.megatron.writing import write_megatron_folder

__all__ = ["MegatronWeights", "is_megatron", "write_megatron_folder"]
