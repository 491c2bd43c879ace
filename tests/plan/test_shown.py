"""How a plan is shown: text, tables, JSON, picture."""

from __future__ import annotations

import io
import json
from xml.etree import ElementTree

import pytest
from rich.console import Console

from shoal.plan import Kind, Plan, draw_plan, make_plan, print_plan
from shoal.plan.sheet import bytes_text
from shoal.plan.sheets import sheets
from shoal.plan.svg import MOST_DOMAINS
from tests.plan.configs import EXPERTS, config

SVG = "{http://www.w3.org/2000/svg}"


def _plan(workers: int = 4, domain: int = 2) -> Plan:
    return make_plan(
        config(
            model={"config": EXPERTS},
            cluster={"workers": workers, "nvlink_domain": domain},
            sharding={"dense": {"outer": "optimizer", "inner": "parameters"}},
            train={"global_batch": 2 * workers},
            run={"name": "a-run"},
        )
    )


def _printed(plan: Plan, *, terminal: bool = False) -> str:
    file = io.StringIO()
    print_plan(plan, Console(file=file, width=60, force_terminal=terminal))
    return file.getvalue()


def test_plain_text_has_every_sheet_uncut() -> None:
    text = _printed(_plan())
    for title in ("Run a-run", "Mesh", "Ranks", "Memory of rank", "Collectives of a step"):
        assert title in text
    assert "\x1b" not in text and "│" not in text and "…" not in text
    assert "8 sequences of 16 tokens, 2 x 1 on each data-parallel rank" in text


def test_a_terminal_gets_tables() -> None:
    text = _printed(_plan(), terminal=True)
    assert "\x1b" in text and "─" in text
    assert "a-run" in text


def test_a_single_dense_rank_has_no_collectives_and_no_experts() -> None:
    text = _printed(make_plan(config()))
    assert "none: no axis has more than one rank" in text
    assert "expert" not in text


def test_shared_experts_are_shown_with_what_travels() -> None:
    text = _printed(
        make_plan(
            config(
                model={"config": {**EXPERTS, "num_experts": 8}},
                cluster={"workers": 4},
                parallel={"expert": 2},
            )
        )
    )
    # 2 sparse layers; there and back, forward and backward; 16 tokens to 2 experts of 32 fp32 each
    rows = {" ".join(line.split()) for line in text.splitlines()}
    assert (
        "all-gather expert counts expert inside 2 2 256 B 128 B each microbatch" in rows
        and "all-to-all expert tokens expert inside 2 8 32.0 KiB 16.0 KiB each microbatch" in rows
    )
    assert "Tokens as of an even routing" in text
    assert "expert inner              2" in text and "exchange" in text


def test_many_ranks_are_listed_in_json_only() -> None:
    plan = _plan(workers=80, domain=2)
    assert "16 more ranks; --json lists them all" in _printed(plan)
    ranks = plan.as_dict()["ranks"]
    assert [row["rank"] for row in ranks] == list(range(80))


def test_json_holds_the_whole_plan() -> None:
    plan = _plan()
    made = json.loads(json.dumps(plan.as_dict()))
    assert made["mesh"]["world_size"] == 4 and made["mesh"]["domains"] == 2
    assert made["sharding"]["dense"] == {"outer": "optimizer", "inner": "parameters"}
    assert made["batches"]["tokens"] == 8 * 16
    for row, memory in zip(made["ranks"], plan.memory, strict=True):
        assert set(row["bytes"]) == {kind.value for kind in Kind}
        assert row["at_rest_bytes"] == memory.at_rest
        assert row["peak_bytes"] == sum(row["bytes"].values())
        assert row["at_rest_bytes"] == sum(row["bytes"][kind] for kind in made["at_rest_kinds"])
    for row, traffic in zip(made["collectives"], plan.traffic, strict=True):
        assert (row["operation"], row["count"]) == (traffic.stream.operation, traffic.count)
        share = (row["group_size"] - 1) / row["group_size"]
        passes = 2 if row["operation"] == "all_reduce" else 1
        assert row["sent_bytes"] == pytest.approx(passes * share * row["payload_bytes"], abs=1)


def test_the_picture_shows_every_rank_and_kind() -> None:
    root = ElementTree.fromstring(draw_plan(_plan()))
    words = [element.text or "" for element in root.iter(f"{SVG}text")]
    for rank in range(4):
        assert f"rank {rank}" in words
    for domain in range(2):
        assert f"domain {domain}" in words
    for kind in Kind:
        assert any(text.startswith(kind.value.replace("_", " ")) for text in words)
    for box in root.iter(f"{SVG}rect"):
        assert float(box.attrib["x"] if "x" in box.attrib else 0) >= 0
        assert float(box.attrib["width"]) >= 0


def test_the_picture_shows_where_each_rank_stands() -> None:
    plan = make_plan(
        config(
            model={"config": {**EXPERTS, "num_experts": 8}},
            cluster={"workers": 8, "nvlink_domain": 4},
            parallel={"pipeline": 2, "context": 2, "expert": 2},
        )
    )
    root = ElementTree.fromstring(draw_plan(plan))
    words = [element.text or "" for element in root.iter(f"{SVG}text")]
    for rank in range(8):
        at, first = plan.topology.coordinates(rank), words.index(f"rank {rank}")
        assert words[first + 1] == f"stage {at.pipeline}, context {at.context}, expert {at.expert}"
        assert words[first + 2] == f"inner {at.inner}"


def test_the_bar_of_a_rank_is_as_long_as_its_kinds_together() -> None:
    root = ElementTree.fromstring(draw_plan(_plan()))
    bars = [box for box in root.iter(f"{SVG}rect") if box.attrib.get("height") == "24"]
    assert sum(float(bar.attrib["width"]) for bar in bars) == pytest.approx(1224, rel=1e-4)


def test_a_large_picture_says_what_it_leaves_out() -> None:
    drawn = draw_plan(_plan(workers=MOST_DOMAINS + 3, domain=1))
    assert "and 3 more domains like these" in drawn


def test_sheets_are_rectangular() -> None:
    for sheet in sheets(_plan()):
        assert {len(row) for row in sheet.rows} == {len(sheet.header)}


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.98 KiB"),
        (1536, "1.50 KiB"),
        (10 * 1024, "10.0 KiB"),
        (999 * 1024, "999 KiB"),
        (1023 * 1024, "1.00 MiB"),
        (3 * 2**40, "3.00 TiB"),
        (5000 * 2**50, "5000 PiB"),
    ],
)
def test_bytes_in_words(num_bytes: int, text: str) -> None:
    assert bytes_text(num_bytes) == text
