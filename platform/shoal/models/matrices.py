"""Which parameters are matrices inside the layers, and which of these are several in one."""

from __future__ import annotations

from shoal.models.config import DecoderConfig
from shoal.models.names import ExpertLayout, parameter_shapes, pieces_of

_GATES = (".mlp.gate.weight", ".mlp.shared_expert_gate.weight")
"""What chooses experts: a vector for each, not a map from vectors to vectors."""


def matrix_rows(config: DecoderConfig) -> dict[str, int]:
    """Rows of each matrix, by the name of the parameter that stacks them.

    Matrices are the layers' projections, of each expert the gate, the up and the down projection.
    Embedding, head, norms, biases, router and the shared expert's gate are none.
    """
    rows = {}
    for name, shape in parameter_shapes(config).items():
        if name.startswith("model.layers.") and len(shape) == 2 and not name.endswith(_GATES):
            pieces = pieces_of(name, config, ExpertLayout.SEPARATE)
            rows[name] = shape[0] if pieces is None else pieces[0].num_rows
    return rows
