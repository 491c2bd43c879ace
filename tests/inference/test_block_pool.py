"""Names, sharing and eviction of blocks."""

from __future__ import annotations

from shoal.inference import ROOT_HASH, BlockPool, block_hashes, child_hash


def _named(pool: BlockPool, name: bytes, parent: int | None) -> int:
    (block,) = pool.allocate(1)
    pool.register(block, name, parent)
    return block


def test_only_full_blocks_have_names_and_a_name_stands_for_all_before_it() -> None:
    assert block_hashes([], 4) == block_hashes([1, 2, 3], 4) == []
    names = block_hashes([1, 2, 3, 4, 5, 6, 7, 8, 9], 4)
    assert names == [child_hash(ROOT_HASH, [1, 2, 3, 4]), child_hash(names[0], [5, 6, 7, 8])]
    assert names == block_hashes([1, 2, 3, 4, 5, 6, 7, 8], 4)
    others = block_hashes([1, 2, 3, 0, 5, 6, 7, 8], 4)
    assert not set(names) & set(others)
    assert {len(name) for name in names} == {32}


def test_tokens_do_not_run_into_each_other() -> None:
    assert child_hash(ROOT_HASH, [1, 256]) != child_hash(ROOT_HASH, [257, 0])
    assert child_hash(ROOT_HASH, [2**40]) != child_hash(ROOT_HASH, [0])


def test_eviction_peels_leaves_from_the_oldest() -> None:
    #     A(1) ── B(2) ── C(5)        in brackets: when it was released
    #       │       └──── F(3)
    #       └──── D(3) ── E(5)
    pool = BlockPool(6)
    a = _named(pool, b"A", None)
    b = _named(pool, b"B", a)
    c = _named(pool, b"C", b)
    d = _named(pool, b"D", a)
    e = _named(pool, b"E", d)
    f = _named(pool, b"F", b)
    for released in ([a], [b], [d, f], [], [c, e]):
        pool.release(released)
    assert (pool.num_cached, pool.num_available) == (6, 6)
    evicted = []
    for _ in range(6):
        pool.allocate(1)
        gone = [name for name in (b"A", b"B", b"C", b"D", b"E", b"F") if pool.find(name) is None]
        evicted += [name for name in gone if name not in evicted]
    assert evicted == [b"F", b"C", b"B", b"E", b"D", b"A"]
    assert pool.num_available == 0


def test_use_makes_a_block_young_again() -> None:
    pool = BlockPool(2)
    old, new = _named(pool, b"old", None), _named(pool, b"new", None)
    pool.release([old])
    pool.release([new])
    pool.share([old])
    pool.release([old])
    pool.allocate(1)
    assert pool.match([b"old"]) == [old] and pool.match([b"new"]) == []


def test_a_shared_block_stays_until_the_last_lets_go() -> None:
    pool = BlockPool(2)
    block = _named(pool, b"x", None)
    pool.share([block])
    assert pool.num_reclaimable([block]) == 0
    pool.release([block])
    assert (pool.num_available, pool.num_cached) == (1, 0)
    pool.release([block])
    assert (pool.num_available, pool.num_cached, pool.num_reclaimable([block])) == (2, 1, 1)


def test_a_match_ends_at_the_first_unknown_name() -> None:
    pool = BlockPool(3)
    first = _named(pool, b"1", None)
    third = _named(pool, b"3", first)
    assert pool.match([b"1", b"2", b"3"]) == [first]
    assert pool.match([b"3"]) == [third]


def test_what_is_forgotten_is_free_at_once() -> None:
    pool = BlockPool(3)
    parent = _named(pool, b"parent", None)
    child = _named(pool, b"child", parent)
    pool.release([parent, child])
    pool.forget(child)
    assert (pool.num_available, pool.num_cached) == (3, 1)
    pool.forget_cached()
    assert (pool.num_available, pool.num_cached) == (3, 0)
    assert pool.match([b"parent"]) == []


def test_bookkeeping_does_not_grow_with_use() -> None:
    pool = BlockPool(4)
    block = _named(pool, b"x", None)
    for _ in range(1000):
        pool.release([block])
        pool.share([block])
    assert len(pool._leaves) <= 4 * 4 + 1
    pool.release([block])
    pool.allocate(4)
    assert pool.match([b"x"]) == []
