"""The engine from outside: requests in, outputs out, on a small random model that speaks bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from shoal.data import load_tokenizer
from shoal.errors import ConfigError, Overloaded
from shoal.inference import Output, Request, SamplingParams
from shoal.inference.engine import Engine
from shoal.inference.forward.model import ServedModel
from shoal.inference.forward.rows import Rows
from shoal.inference.offline import Answer, joined, stream
from shoal.ops import fixed
from tests.inference.small_models import limits_for, random_model
from tests.models.tiny import TINY

PROMPT = tuple(b"Once upon a time")


@pytest.fixture(scope="module")
def model() -> ServedModel:
    return random_model(TINY["qwen3_moe"], "bf16")


@pytest.fixture
def engine(model: ServedModel) -> Engine:
    return engine_of(model)


def engine_of(model: ServedModel, **limits: int) -> Engine:
    return Engine(
        model, limits_for(model, **limits), tokenizer=load_tokenizer("bytes"), end_ids=(256,)
    )


def request(name: str = "a", prompt: Sequence[int] = PROMPT, **params: object) -> Request:
    values = {"max_tokens": 12, "temperature": 0.0} | params
    return Request(id=name, prompt=tuple(prompt), params=SamplingParams(**values))  # type: ignore[arg-type]


def drained(engine: Engine) -> list[Output]:
    outputs: list[Output] = []
    while engine.has_work:
        outputs += engine.step()
    return outputs


def answers(engine: Engine, *requests: Request) -> dict[str, list[Answer]]:
    for each in requests:
        engine.add(each)
    by_id: dict[str, list[Output]] = {}
    for output in drained(engine):
        by_id.setdefault(output.request_id, []).append(output)
    return {name: joined(outputs) for name, outputs in by_id.items()}


def is_idle(engine: Engine) -> bool:
    stats = engine.stats()
    return (
        (stats.running, stats.waiting) == (0, 0)
        and stats.kv_blocks_free == stats.kv_blocks_total
        and not engine.step()
    )


def test_each_choice_ends_once_and_its_deltas_are_its_text(engine: Engine) -> None:
    engine.add(request(n=3, temperature=1.0, seed=4, logprobs=2))
    outputs = drained(engine)
    ends = [output.choice for output in outputs if output.finish_reason is not None]
    assert sorted(ends) == [0, 1, 2]
    found = joined(outputs)
    for answer in found:
        expected = bytes(token for token in answer.token_ids if token < 256)
        assert answer.text == expected.decode(errors="replace")
        assert answer.logprobs is not None and len(answer.logprobs) == len(answer.token_ids)
        assert "".join(each.text for each in answer.logprobs) == answer.text
    assert len({answer.token_ids for answer in found}) == 3
    assert is_idle(engine)


def test_company_seeds_and_order_change_nothing(engine: Engine, model: ServedModel) -> None:
    ours = [
        request("greedy", logprobs=1),
        request("seeded", temperature=0.8, seed=7, top_p=0.9, logprobs=1),
        request("twin", temperature=0.8, seed=7, top_p=0.9, logprobs=1),
    ]
    alone = {each.id: answers(engine_of(model), each)[each.id] for each in ours}
    others = [request(f"other-{i}", range(i, i + 20), temperature=1.0) for i in range(5)]
    together = answers(engine, others[0], ours[2], *others[1:], ours[1], ours[0])
    assert {name: together[name] for name in alone} == alone
    assert together["seeded"] == together["twin"]
    assert together["seeded"] != together["greedy"]


def test_unseeded_requests_differ_from_run_to_run(engine: Engine) -> None:
    found = answers(engine, *(request(str(i), temperature=1.0) for i in range(3)))
    assert len({answer[0].token_ids for answer in found.values()}) == 3


def test_prompt_logprobs_are_those_of_the_same_tokens_generated(engine: Engine) -> None:
    (first,) = answers(engine, request("a", logprobs=0))["a"]
    prompt = (*PROMPT, *first.token_ids)
    (second,) = answers(engine, request("b", prompt, max_tokens=0, prompt_logprobs=3))["b"]
    assert second.token_ids == () and second.finish_reason == "length"
    assert second.prompt_logprobs is not None and first.logprobs is not None
    assert second.prompt_logprobs[0] is None and len(second.prompt_logprobs) == len(prompt)
    scored = [each for each in second.prompt_logprobs[len(PROMPT) :] if each is not None]
    assert [each.logprob for each in scored] == [each.logprob for each in first.logprobs]
    assert all(len(each.top) == 3 for each in scored)
    text = "".join(each.text for each in second.prompt_logprobs if each is not None)
    whole = bytes(token for token in prompt if token < 256).decode(errors="replace")
    assert chr(prompt[0]) + text == whole
    # Warm: what the cache holds is scored again, to the same bits.
    (third,) = answers(engine, request("c", prompt, max_tokens=0, prompt_logprobs=3))["c"]
    assert third == second


def test_stop_strings_and_stop_tokens_end_an_answer(engine: Engine) -> None:
    (whole,) = answers(engine, request())["a"]
    token = whole.token_ids[4]
    place = whole.token_ids.index(token)
    engine.add(request("b", stop_token_ids=(token,)))
    last = drained(engine)[-1]
    assert (last.finish_reason, last.stop_reason) == ("stop", token)
    (by_id,) = answers(engine, request("c", stop_token_ids=(token,)))["c"]
    assert by_id.token_ids == whole.token_ids[: place + 1]
    (later,) = answers(engine, request("d", stop_token_ids=(token,), min_tokens=place + 2))["d"]
    assert len(later.token_ids) >= place + 2
    stop = whole.text[3:5]
    engine.add(request("e", stop=(stop,)))
    outputs = drained(engine)
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", stop)
    assert "".join(output.text for output in outputs) == whole.text[: whole.text.index(stop)]
    assert is_idle(engine)


def test_end_of_text_ends_an_answer_unless_it_is_ignored(engine: Engine) -> None:
    biased: dict[str, Any] = {"logit_bias": ((256, 100.0),)}
    (answer,) = answers(engine, request(**biased))["a"]
    assert (answer.token_ids, answer.text, answer.finish_reason) == ((256,), "", "stop")
    (answer,) = answers(engine, request("b", ignore_eos=True, **biased))["b"]
    assert (answer.token_ids, answer.finish_reason) == ((256,) * 12, "length")
    (answer,) = answers(engine, request("c", min_tokens=3, **biased))["c"]
    assert len(answer.token_ids) == 4 and 256 not in answer.token_ids[:3]


def test_an_abort_frees_everything_in_every_state(model: ServedModel) -> None:
    engine = engine_of(model, max_running=2, max_step_tokens=10)
    for steps in range(6):
        for name in ("running", "prefilling", "waiting"):
            engine.add(request(name, n=2))
        for _ in range(steps):
            engine.step()
        assert engine.abort("running") + engine.abort("waiting") + engine.abort("prefilling") > 0
        assert engine.abort("running") == 0
        assert is_idle(engine)
    engine.abort("early")
    engine.add(request("early"))
    assert is_idle(engine)
    assert engine.stats().finished == 0


def test_a_tight_pool_gives_the_same_answers(engine: Engine, model: ServedModel) -> None:
    requests = [
        request(str(i), range(i, i + 9), max_tokens=40, temperature=0.9, seed=i, logprobs=1)
        for i in range(5)
    ]
    roomy = answers(engine, *requests)
    tight = engine_of(model, num_blocks=6, max_running=5)
    assert answers(tight, *requests) == roomy
    assert tight.stats().preempted > 0 and engine.stats().preempted == 0


def test_a_warm_cache_gives_the_same_answers(engine: Engine) -> None:
    for length in (15, 16, 17, 31, 32, 33):
        prompt = [(7 * i + length) % 256 for i in range(length)]
        cold = answers(engine, request("cold", prompt, logprobs=2))["cold"]
        engine.add(request("warm", prompt, logprobs=2))
        outputs = drained(engine)
        assert joined(outputs) == cold
        assert outputs[0].num_cached_tokens == (length - 1) // 16 * 16


def test_any_shared_beginning_gives_the_same_answer(engine: Engine, model: ServedModel) -> None:
    whole = [(5 * i) % 251 for i in range(50)]
    others = [*whole[:33], 7, 8, 9]
    for prompt in (whole, whole, whole[:33], whole[:32], others, whole[:17], whole[:40], others):
        alone = answers(engine_of(model), request("a", prompt, logprobs=2))
        assert answers(engine, request("a", prompt, logprobs=2)) == alone
    assert engine.stats().prefix_hit_tokens > 6 * 16


def test_streams_of_many_choices_that_are_closed_leave_nothing(engine: Engine) -> None:
    for number in range(200):
        outputs = stream(engine, request(str(number), n=4, ignore_eos=True))
        next(outputs)
        outputs.close()  # type: ignore[attr-defined]
    assert is_idle(engine)
    assert engine.stats().cancelled == 800 and not engine._choices


def test_wrong_requests_are_refused_and_leave_no_trace(engine: Engine, model: ServedModel) -> None:
    with pytest.raises(ConfigError, match="prompt"):
        engine.add(request(prompt=()))
    with pytest.raises(ConfigError, match="257"):
        engine.add(request(prompt=(257,)))
    with pytest.raises(ConfigError, match="prompt"):
        engine.add(request(prompt=[1] * 64))
    silent = Engine(model, limits_for(model))
    with pytest.raises(ConfigError, match="no tokenizer"):
        silent.add(request(stop=("x",)))
    full = engine_of(model, max_waiting=1)
    full.add(request("first"))
    with pytest.raises(Overloaded):
        full.add(request("second"))
    assert len(answers(full)["first"]) == 1
    assert is_idle(engine) and is_idle(silent) and is_idle(full)


class FailingModel(ServedModel):
    """Raises, or gives what is no number, when told to."""

    fails = False
    breaks_row: int | None = None

    def forward(
        self, rows: Rows, cache: fixed.KVCache, wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        if self.fails:
            raise RuntimeError("scripted")
        hidden = super().forward(rows, cache, wanted)
        if self.breaks_row is not None:
            hidden[self.breaks_row] = float("nan")
        return hidden


@pytest.fixture
def failing() -> Iterator[FailingModel]:
    model = random_model(TINY["smollm2"], "fp32")
    model.__class__ = FailingModel
    assert isinstance(model, FailingModel)
    yield model


def test_a_failed_step_ends_its_requests_and_the_engine_goes_on(failing: FailingModel) -> None:
    engine = engine_of(failing, max_running=2)
    expected = answers(engine, request("before"))["before"]
    for name in ("a", "b", "waits"):
        engine.add(request(name))
    engine.step()
    failing.fails = True
    outputs = engine.step()
    assert [(o.request_id, o.finish_reason) for o in outputs] == [("a", "error"), ("b", "error")]
    assert all("scripted" in str(output.error) for output in outputs)
    failing.fails = False
    (waits,) = joined(drained(engine))
    assert waits == expected[0]
    assert engine.stats().failed == 2 and is_idle(engine)


def test_logits_that_are_no_numbers_end_one_request_only(failing: FailingModel) -> None:
    engine = engine_of(failing)
    expected = answers(engine, request("before"))["before"]
    engine.add(request("a"))
    engine.add(request("b"))
    engine.step()
    failing.breaks_row = 0
    (broken, fine) = engine.step()
    failing.breaks_row = None
    assert (broken.finish_reason, fine.finish_reason) == ("error", None)
    outputs = drained(engine)
    assert {output.request_id for output in outputs} == {"b"}
    assert len(outputs) == len(expected[0].token_ids) - 2
    assert is_idle(engine)


class BrokenTokenizer:
    """Bytes, of which one cannot be decoded."""

    def __init__(self, token: int) -> None:
        self._bytes, self._token = load_tokenizer("bytes"), token

    def __getattr__(self, name: str) -> object:
        return getattr(self._bytes, name)

    def decode(self, tokens: Sequence[int]) -> str:
        if self._token in tokens:
            raise ValueError("scripted")
        return self._bytes.decode(tokens)


def test_a_text_that_fails_ends_its_own_choice_only(model: ServedModel) -> None:
    expected = answers(engine_of(model), request("a"), request("b", prompt=PROMPT[2:]))
    bad = expected["a"][0].token_ids[3]
    assert bad not in expected["b"][0].token_ids
    tokenizer: object = BrokenTokenizer(bad)
    engine = Engine(model, limits_for(model), tokenizer=tokenizer, end_ids=(256,))  # type: ignore[arg-type]
    engine.add(request("a"))
    engine.add(request("b", prompt=PROMPT[2:]))
    outputs = drained(engine)
    (end,) = [o for o in outputs if o.request_id == "a" and o.finish_reason is not None]
    assert end.finish_reason == "error" and "scripted" in str(end.error)
    assert joined([o for o in outputs if o.request_id == "b"]) == expected["b"]
    assert is_idle(engine)


def test_a_closed_stream_aborts_its_request(engine: Engine) -> None:
    outputs = stream(engine, request(n=2))
    next(outputs)
    outputs.close()  # type: ignore[attr-defined]
    assert is_idle(engine)


def test_outputs_are_plain_values(engine: Engine) -> None:
    engine.add(request(logprobs=1, prompt_logprobs=1))
    for output in drained(engine):
        values = dataclasses.asdict(output)
        assert (
            type(output)(
                **values
                | {"logprobs": output.logprobs}
                | {"prompt_logprobs": output.prompt_logprobs}
            )
            == output
        )
        assert all(type(token) is int for token in output.token_ids)
        assert output.finish_reason is None or type(output.finish_reason) is str


@pytest.mark.parametrize("max_tokens", [0, 12])
def test_scores_that_are_no_numbers_end_one_request_only(
    failing: FailingModel, max_tokens: int
) -> None:
    engine = engine_of(failing)
    expected = answers(engine, request("before"))["before"]
    engine.add(request("fine"))
    engine.add(request("scored", max_tokens=max_tokens, prompt_logprobs=1))
    failing.breaks_row = -1  # of a token in the middle of the prompt
    outputs = engine.step()
    failing.breaks_row = None
    (broken,) = (output for output in outputs if output.request_id == "scored")
    assert broken.finish_reason == "error" and "no numbers" in str(broken.error)
    rest = [output for output in outputs if output.request_id == "fine"]
    assert joined([*rest, *drained(engine)]) == expected
    assert engine.stats().failed == 1 and is_idle(engine)
