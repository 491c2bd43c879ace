"""The Ray Data shell around tokenization."""

from shoal_actors.data.tokenize import RayDataRunner

__all__ = ["RayDataRunner"]
