"""Which tokens of a chat are the assistant's, against ``transformers``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.data import load_tokenizer
from shoal.data.tokenizer.chat_template import ChatTemplate
from shoal.errors import ConfigError
from tests.data.tiny import CHAT, CHATML, MARKED_CHATML, oracle, write_tokenizer

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def test_marked_templates_give_the_mask_that_transformers_gives(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, chat_template=MARKED_CHATML)
    ours = load_tokenizer(str(folder)).encode_chat(CHAT)
    theirs = oracle(folder).apply_chat_template(
        CHAT, return_dict=True, return_assistant_tokens_mask=True
    )
    assert ours.tokens[:-1] == theirs["input_ids"]
    assert ours.is_label[:-1] == [bool(flag) for flag in theirs["assistant_masks"]]
    assert any(ours.is_label) and not ours.is_label[-1]  # the end-of-text added after "\n"


def test_templates_without_marks_give_the_mask_of_the_same_with_marks(tmp_path: Path) -> None:
    marked = load_tokenizer(str(write_tokenizer(tmp_path / "a", chat_template=MARKED_CHATML)))
    plain = load_tokenizer(str(write_tokenizer(tmp_path / "b", chat_template=CHATML)))
    assert plain.encode_chat(CHAT) == marked.encode_chat(CHAT)


@given(
    st.lists(
        st.tuples(st.sampled_from(["user", "assistant", "tool"]), st.text(max_size=5)),
        min_size=1,
        max_size=5,
    )
)
def test_marks_and_prefixes_agree_on_any_chat(turns: list[tuple[str, str]]) -> None:
    chat = [{"role": role, "content": content} for role, content in turns]
    marked = ChatTemplate(MARKED_CHATML, {}).render_with_spans(chat)
    plain = ChatTemplate(CHATML, {}).render_with_spans(chat)
    assert plain.text == marked.text
    # Unmarked, a turn runs to its end; the line break after the end marker is cut by tokens.
    assert [(start, stop - 1) for start, stop in plain.spans] == list(marked.spans)


def test_a_prompt_is_what_transformers_would_send(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path)
    theirs = oracle(folder)
    assert (
        load_tokenizer(str(folder)).apply_chat_template(CHAT[:2])
        == (theirs.apply_chat_template(CHAT[:2], add_generation_prompt=True)["input_ids"])
    )


def test_a_template_in_a_file_of_its_own_goes_first(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, chat_template="old")
    (folder / "chat_template.jinja").write_text(CHATML)
    assert (
        load_tokenizer(str(folder)).apply_chat_template(CHAT[:1])
        == (oracle(folder).apply_chat_template(CHAT[:1], add_generation_prompt=True)["input_ids"])
    )


def test_of_several_templates_the_default_is_taken(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "x"}, {"name": "default", "template": CHATML}]
    several = load_tokenizer(str(write_tokenizer(tmp_path / "a", chat_template=named)))
    one = load_tokenizer(str(write_tokenizer(tmp_path / "b")))
    assert several.encode_chat(CHAT) == one.encode_chat(CHAT)


def test_a_template_without_end_marker_still_teaches_to_stop(tmp_path: Path) -> None:
    folder = write_tokenizer(
        tmp_path,
        chat_template="{% for m in messages %}{{ m['role'][0] + m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}a{% endif %}",
    )
    chat = load_tokenizer(str(folder)).encode_chat(
        [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    )
    assert chat.is_label == [False, False, False, True, True]
    assert chat.tokens[-1] == load_tokenizer(str(folder)).end_of_text


def test_a_template_that_rewrites_earlier_turns_is_refused(tmp_path: Path) -> None:
    drops_reasoning = (
        "{% for m in messages %}{{ m['role'] + ':' }}"
        "{% if loop.last %}{{ '<think></think>' }}{% endif %}{{ m['content'] }}{% endfor %}"
    )
    tokenizer = load_tokenizer(str(write_tokenizer(tmp_path, chat_template=drops_reasoning)))
    with pytest.raises(ConfigError, match="turns up to number 3 differently.*generation"):
        tokenizer.encode_chat(CHAT)


def test_hugging_faces_conventions() -> None:
    template = ChatTemplate(
        """{% if true %}
    {%- set data = {'b': '<é>', 'a': 1} %}
{{ bos_token }}{{ data | tojson }}{{ data | tojson(indent=1, sort_keys=true) }}
{% endif %}
{{ strftime_now('%%') }}{% for m in messages %}{% if m.role == 'x' %}{% continue %}{% endif %}
{{- m.content }}{% endfor %}""",
        TOKENS,
    )
    rendered = template.render(
        [{"role": "x", "content": "no"}, {"role": "y", "content": "yes"}],
        add_generation_prompt=False,
    )
    assert rendered == '<s>{"b": "<é>", "a": 1}{\n "a": 1,\n "b": "<é>"\n}\n%yes'


def test_messages_that_are_nested_too_deeply_are_refused() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    template = ChatTemplate("{% generation %}{% endgeneration %}", TOKENS)
    with pytest.raises(ConfigError, match="refuses them: maximum recursion"):
        template.render([{"role": "user", "content": deep}], add_generation_prompt=True)


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses them: roles must alternate"),
        ("{{ messages[0].content + 1 }}", "refuses them"),
        ("{{ messages[0]['absent'] + 'a' }}", "refuses them: 'dict object' has no attribute"),
        ("{{ ''.__class__.__mro__ }}", "refuses them"),
        ("{{ messages.append(1) }}", "refuses them"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "refuses them: maximum recursion"),
        ("{{ 'a'.center(10**17) }}", "refuses them: MemoryError"),
        ("{{ 'a' * 10**17 }}", "refuses them: it repeats something too often"),
        ("{{ 10**7 * [1] }}", "refuses them: it repeats something too often"),
        ("{{ 9**(9**9) }}", "refuses them: it makes a number that is too large"),
    ],
)
def test_what_a_template_refuses_or_must_not_do(template: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as refusal:
        ChatTemplate(template, TOKENS).render(CHAT, add_generation_prompt=True)
    assert refusal.value.field == "messages"


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(90000) %}{% for b in range(90000) if b %}{% endfor %}{% endfor %}",
        "{% for a in range(200) recursive %}{{ loop(range(200)) if loop.depth < 9 }}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(99) }}",
        "{% macro f(n) %}{% if n %}{{ caller() }}{% endif %}{% endmacro %}"
        "{% for a in range(90000) %}{% call f(1) %}x{% endcall %}{% endfor %}",
    ],
)
def test_a_template_that_has_no_end_is_ended(template: str) -> None:
    endless = ChatTemplate(template, TOKENS)
    for _ in range(2):  # each rendering has its own steps
        with pytest.raises(ConfigError, match=r"refuses them: it takes more than 20,004 steps"):
            endless.render(CHAT[:1], add_generation_prompt=True)


def test_loops_are_those_of_jinja(tmp_path: Path) -> None:
    template = """{% for m in messages if m.role != 'system' -%}
    {{ loop.index }}/{{ loop.length }}{{ loop.first }}{{ loop.last }}{{ loop.revindex }}
    {{- loop.nextitem.role if not loop.last }}{{ loop.cycle('a', 'b') }}|{% endfor %}
    {%- for key, value in messages[0].items() %}{{ key }}{{ value }}{% else %}none{% endfor %}
    {%- for x in absent %}{{ x }}{% else %}nothing{% endfor %}
    {%- for x in [[1, [2]], 3] recursive %}{{ loop.depth }}
    {%- if x is iterable %}{{ loop(x) }}{% else %}{{ x }}{% endif %}{% endfor %}"""
    theirs = oracle(write_tokenizer(tmp_path, chat_template=template))
    for turns in range(1, len(CHAT) + 1):
        expected = theirs.apply_chat_template(CHAT[:turns], tokenize=False)
        rendered = ChatTemplate(template, TOKENS).render(CHAT[:turns], add_generation_prompt=False)
        assert rendered == expected


def test_long_chats_may_look_from_each_turn_at_all_others() -> None:
    template = "{% for m in messages %}{% for o in messages %}{% endfor %}.{% endfor %}"
    chat = [{"role": "user", "content": ""}] * 400
    rendered = ChatTemplate(template, TOKENS).render(chat, add_generation_prompt=False)
    assert rendered == "." * 400


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], "not a list of at least one"),
        ("hello", "not a list"),
        ([{"content": "x"}], "message 1 has no role"),
        ([{"role": "user", "content": "x"}, {"role": 1}], "message 2 has no role"),
        (["x"], "message 1 has no role"),
    ],
)
def test_messages_that_are_none(tmp_path: Path, messages: Any, problem: str) -> None:
    for name in ("bytes", str(write_tokenizer(tmp_path))):
        with pytest.raises(ConfigError, match=problem):
            load_tokenizer(name).encode_chat(messages)


def test_null_values_are_as_absent() -> None:
    template = ChatTemplate("{% for m in messages %}{{ 'tools' in m }}{% endfor %}", TOKENS)
    chat = [{"role": "user", "tools": None}]
    assert template.render(chat, add_generation_prompt=False) == "False"


def test_what_marks_the_assistants_words_inside_is_refused() -> None:
    template = ChatTemplate(MARKED_CHATML, TOKENS)
    with pytest.raises(ConfigError, match="mark the assistant's words"):
        template.render_with_spans([{"role": "user", "content": "\ufdd0generation\ufdd0"}])


def test_chats_need_a_template(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(write_tokenizer(tmp_path, chat_template=None)))
    with pytest.raises(ConfigError, match="no chat template") as refusal:
        tokenizer.encode_chat(CHAT)
    assert refusal.value.field == "data.tokenizer"
    with pytest.raises(ConfigError, match="content of message 1 is not text"):
        load_tokenizer("bytes").encode_chat([{"role": "user", "content": [{"type": "text"}]}])
