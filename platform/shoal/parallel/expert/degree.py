"""How many ranks can share the experts of a model."""

from __future__ import annotations

from shoal.errors import ConfigError


def check_expert_degree(num_experts: int, degree: int) -> None:
    """Raise ``ConfigError`` unless ``degree`` ranks can hold equally many of the experts."""
    if num_experts % degree:
        divisors = [d for d in range(2, num_experts + 1) if num_experts % d == 0]
        raise ConfigError(
            "parallel.expert",
            degree,
            f"the model's {num_experts} experts do not divide into {degree} equal parts",
            f"Use 1 or one of {', '.join(map(str, divisors))}",
        )
