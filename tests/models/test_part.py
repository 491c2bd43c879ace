"""Parts of a decoder: together they hold and compute what the whole does."""

from __future__ import annotations

import pytest
import torch

from shoal.models import (
    EMBEDDING,
    Decoder,
    DecoderConfig,
    DecoderStage,
    initialize,
    parameter_shapes,
    split_decoder,
)
from tests.models.tiny import TINY


@pytest.mark.parametrize("num_parts", [1, 2, 3])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["smollm2", "qwen2_moe"])
def test_parts_compute_the_whole(name: str, tied: bool, num_parts: int) -> None:
    hf = {**TINY[name], "num_hidden_layers": 5, "tie_word_embeddings": tied}
    config = DecoderConfig.from_hf(hf)
    whole = Decoder(config, torch.float32)
    parts = [Decoder(config, torch.float32, part=p) for p in split_decoder(config, num_parts)]
    for decoder in (whole, *parts):
        initialize(decoder, 3)
    tokens = torch.randint(0, 257, (2, 13), generator=torch.Generator().manual_seed(1))
    expected, output = whole(tokens, labels=tokens), None
    for part in parts:
        output = part(tokens, labels=tokens, carried=None if output is None else output.carried)
        if not part.part.is_last:
            shapes = [(tuple(t.shape), t.dtype) for t in output.carried if t is not None]
            assert shapes == [(b.shape, b.dtype) for b in part.boundary(tokens)]
    assert output is not None and output.carried is None
    torch.testing.assert_close(output.loss_sum, expected.loss_sum, rtol=0, atol=0)
    if config.experts is not None:
        torch.testing.assert_close(output.auxiliary, expected.auxiliary, rtol=1e-6, atol=0)


@pytest.mark.parametrize("tied", [True, False])
def test_parts_hold_each_parameter_once_but_for_a_tied_table(tied: bool) -> None:
    hf = {**TINY["smollm2"], "num_hidden_layers": 5, "tie_word_embeddings": tied}
    config = DecoderConfig.from_hf(hf)
    decoders = [Decoder(config, torch.float32, part=p) for p in split_decoder(config, 4)]
    names = [name for decoder in decoders for name, _ in decoder.named_parameters()]
    copies = [EMBEDDING] if tied else []
    assert sorted(names) == sorted([*parameter_shapes(config), *copies])
    assert [len(decoder.copies) for decoder in decoders] == [0, 0, 0, len(copies)]
    assert [len(part.layers) for part in split_decoder(config, 4)] == [2, 1, 1, 1]


def test_a_stage_names_what_it_holds_as_the_whole_does() -> None:
    config = DecoderConfig.from_hf({**TINY["smollm2"], "num_hidden_layers": 4})
    whole = Decoder(config, torch.float32)
    parts = split_decoder(config, 4)
    stage = DecoderStage([Decoder(config, torch.float32, part=parts[n]) for n in (1, 3)])
    wanted = [n for n, _ in whole.named_parameters() if ".1." in n or ".3." in n]
    names = [name for name, _ in stage.named_parameters()]
    assert set(names) == {*wanted, EMBEDDING, "model.norm.weight"} and len(set(names)) == len(names)
    assert stage.shared_names == {EMBEDDING}
    initialize(stage, 3)
    initialize(whole, 3)
    held = dict(stage.named_parameters())
    for name in names:
        assert torch.equal(held[name], whole.get_parameter(name))


def test_more_parts_than_layers_are_refused() -> None:
    config = DecoderConfig.from_hf({**TINY["smollm2"], "num_hidden_layers": 2})
    with pytest.raises(ValueError, match="2 layers cannot be 3 parts"):
        split_decoder(config, 3)
