"""Sequences against a packer written out token by token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data import IGNORED, Batch, DatasetSpec, Sample, SequenceDataset
from shoal.data.indexed_writer import IndexedWriter
from shoal.data.spec import TokenizedSource
from shoal.data.summary import Summary
from shoal.errors import WorkError

END = 256
Documents = list[list[int]]
Masks = list[list[bool]]


def _source(
    prefix: Path, documents: Documents, masks: Masks | None = None, weight: float | None = None
) -> TokenizedSource:
    with IndexedWriter(prefix, 257) as writer:
        for number, document in enumerate(documents):
            writer.add(document, masks[number] if masks else None)
    summary = Summary.of(prefix)
    return TokenizedSource(
        prefix=str(prefix),
        num_tokens=summary.tokens,
        num_labels=summary.labels,
        digest=summary.digest,
        weight=weight,
    )


def _spec(*sources: TokenizedSource, seq_len: int) -> DatasetSpec:
    return DatasetSpec(sources=sources, seq_len=seq_len, end_of_text=END)


def _naive(documents: Documents, masks: Masks, seq_len: int) -> list[dict[str, list[int]]]:
    """Pack one token at a time."""
    stream = [
        (token, number, place > 0 and mask)
        for number, (document, flags) in enumerate(zip(documents, masks, strict=True))
        for place, (token, mask) in enumerate(zip(document, flags, strict=True))
    ]
    sequences = []
    for start in range(0, len(stream) - 1, seq_len):
        inputs = stream[start : start + seq_len]
        targets = stream[start + 1 : start + seq_len + 1]
        rows: dict[str, list[int]] = {"tokens": [], "labels": [], "positions": [], "documents": []}
        seen: list[int] = []
        for place in range(seq_len):
            token, number, _ = inputs[place] if place < len(inputs) else (END, -1, False)
            label, _, counts = targets[place] if place < len(targets) else (END, -1, False)
            is_new = not seen or seen[-1] != number
            seen.append(number)
            rows["tokens"].append(token)
            rows["labels"].append(label if counts else IGNORED)
            rows["positions"].append(0 if is_new else rows["positions"][-1] + 1)
            rows["documents"].append(len(dict.fromkeys(seen)) - 1)
        sequences.append(rows)
    return sequences


def _rows(sample: Sample) -> dict[str, list[int]]:
    return {
        name: getattr(sample, name).tolist()
        for name in ("tokens", "labels", "positions", "documents")
    }


@settings(max_examples=50)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(lambda all_: sum(all_) > 1),
    seq_len=st.integers(1, 12),
    is_masked=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_packing_equals_the_naive_packer(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    seq_len: int,
    is_masked: bool,
    seed: int,
) -> None:
    random = np.random.default_rng(seed)
    documents = [random.integers(0, 256, length).tolist() for length in lengths]
    masks = [random.integers(0, 2, length).astype(bool).tolist() for length in lengths]
    if not is_masked:
        masks = [[True] * length for length in lengths]
    prefix = tmp_path_factory.mktemp("pack") / "a"
    source = _source(prefix, documents, masks if is_masked else None)
    dataset = SequenceDataset(_spec(source, seq_len=seq_len))
    expected = _naive(documents, masks, seq_len)
    assert [_rows(dataset[number]) for number in range(len(dataset))] == expected
    labels = [label for row in expected for label in row["labels"] if label != IGNORED]
    assert len(labels) == source.num_labels  # none lost at a border, none twice


def test_every_array_is_int64(tmp_path: Path) -> None:
    sample = SequenceDataset(_spec(_source(tmp_path / "a", [[1, 2, 3]]), seq_len=2))[0]
    for name in ("tokens", "labels", "positions", "documents"):
        assert getattr(sample, name).dtype == np.int64


def test_a_label_at_a_later_cut_is_the_next_token(tmp_path: Path) -> None:
    """Two context-parallel ranks halve the sequence: the border's labels stay as they were."""
    rare = 200
    dataset = SequenceDataset(
        _spec(_source(tmp_path / "a", [[1, 2, 3, rare, 5, 6], [7, 8, 9]]), seq_len=6)
    )
    first = dataset[0]
    halves = [part.tolist() for part in np.split(first.labels, 2)]
    assert halves == [[2, 3, rare], [5, 6, IGNORED]]  # the next token is another document's
    assert dataset[1].labels.tolist() == [8, 9, IGNORED, IGNORED, IGNORED, IGNORED]


def test_without_weights_every_sequence_comes_once(tmp_path: Path) -> None:
    sources = (
        _source(tmp_path / "a", [[1] * 9]),
        _source(tmp_path / "b", [[2] * 4]),
    )
    dataset = SequenceDataset(_spec(*sources, seq_len=2))
    firsts = [int(dataset[number].tokens[0]) for number in range(len(dataset))]
    assert firsts == [1, 1, 1, 1, 2, 2]
    with pytest.raises(IndexError):
        dataset[6]
    with pytest.raises(IndexError):
        dataset[-1]


@pytest.mark.parametrize(
    ("weights", "shares"),
    [((1.0, 1.0), (4, 4)), ((3.0, 1.0), (6, 2)), ((1.0, 3.0), (4, 12)), ((0.2, 0.1), (4, 2))],
)
def test_weights_are_shares_and_lose_nothing(
    tmp_path: Path, weights: tuple[float, float], shares: tuple[int, int]
) -> None:
    sources = (
        _source(tmp_path / "a", [[1, 3, 5, 7, 9, 11, 13, 15, 17]], weight=weights[0]),  # 4
        _source(tmp_path / "b", [[2, 4, 6, 8]], weight=weights[1]),  # 2
    )
    dataset = SequenceDataset(_spec(*sources, seq_len=2))
    firsts = [int(dataset[number].tokens[0]) for number in range(len(dataset))]
    odd, even = firsts[: shares[0]], firsts[shares[0] :]
    assert len(even) == shares[1]
    assert set(odd) == {1, 5, 9, 13} and set(even) == {2, 6}
    for part, size in ((odd, 4), (even, 2)):
        counts = [part.count(first) for first in set(part)]
        assert max(counts) - min(counts) <= 1 and sum(counts) == len(part) >= size


@given(
    sizes=st.lists(st.integers(1, 10_000), min_size=1, max_size=4),
    weights=st.lists(st.floats(1e-3, 1e3), min_size=4, max_size=4),
)
def test_shares_follow_the_weights(sizes: list[int], weights: list[float]) -> None:
    weights = weights[: len(sizes)]
    sources = tuple(
        TokenizedSource(prefix="", num_tokens=size + 1, num_labels=1, digest="", weight=weight)
        for size, weight in zip(sizes, weights, strict=True)
    )
    spec = DatasetSpec(sources=sources, seq_len=1, end_of_text=END)
    assert all(share >= size for share, size in zip(spec.shares, spec.sizes, strict=True))
    for share, weight in zip(spec.shares, weights, strict=True):
        exact = spec.num_sequences * weight / sum(weights)
        assert abs(share - exact) <= len(sizes) / 2 + 1
    # No shorter epoch would hold every source.
    assert any(
        (spec.num_sequences - len(sizes) - 1) * weight / sum(weights) < size
        for size, weight in zip(sizes, weights, strict=True)
    )


def test_the_fingerprint_follows_content_and_not_place(tmp_path: Path) -> None:
    documents = [[1, 2, 3], [4, 5]]
    one = _spec(_source(tmp_path / "a", documents), seq_len=2)
    moved = _spec(_source(tmp_path / "b", documents), seq_len=2)
    assert one.fingerprint == moved.fingerprint
    masks = [[True, False, True], [True, True]]
    others = [
        _spec(_source(tmp_path / "c", [[1, 2, 3, 4, 5]]), seq_len=2),
        _spec(_source(tmp_path / "d", documents, masks), seq_len=2),
        _spec(_source(tmp_path / "e", documents), seq_len=3),
        _spec(_source(tmp_path / "f", documents, weight=2.0), seq_len=2),
    ]
    assert len({spec.fingerprint for spec in (one, *others)}) == 5


def test_files_replaced_since_are_noticed(tmp_path: Path) -> None:
    spec = _spec(_source(tmp_path / "a", [[1, 2, 3]]), seq_len=2)
    _source(tmp_path / "a", [[1, 2, 3, 4]])
    with pytest.raises(WorkError, match="4 tokens where 3 were expected"):
        SequenceDataset(spec)


def _num_labels(batch: Batch) -> int:
    return int((batch.labels != IGNORED).sum())


def test_a_batch_holds_its_sequences_in_order(tmp_path: Path) -> None:
    masks = [[False, False, False], [False, True]]
    source = _source(tmp_path / "a", [[1, 2, 3], [4, 5]], masks)
    dataset = SequenceDataset(_spec(source, seq_len=2))
    batch = Batch.load(dataset, np.array([1, 0]))
    assert batch.tokens.tolist() == [[3, 4], [1, 2]]
    assert batch.labels.tolist() == [[IGNORED, 5], [IGNORED, IGNORED]]
    assert batch.positions.tolist() == [[0, 0], [0, 1]]
    assert batch.documents.tolist() == [[0, 1], [0, 0]]
    assert batch.tokens.dtype == torch.int64 and batch.tokens.is_contiguous()
    assert _num_labels(batch) == 1
    assert _num_labels(Batch.load(dataset, [0])) == 0  # a rank may have none
    assert batch.to(torch.device("meta")).labels.is_meta


def test_ranks_may_have_very_different_numbers_of_labels(tmp_path: Path) -> None:
    """Fault 36: a loss can weigh by tokens only if each batch counts its own labels."""
    full = list(range(64))
    masks = [[True] * 64, [False] * 63 + [True]]
    dataset = SequenceDataset(_spec(_source(tmp_path / "a", [full, full], masks), seq_len=64))
    assert [_num_labels(Batch.load(dataset, [number])) for number in (0, 1)] == [63, 1]
    assert _num_labels(Batch.load(dataset, [0, 1])) == dataset.spec.num_labels == 64
