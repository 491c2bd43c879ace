"""Bodies of the two endpoints, as pydantic checks them.

Names, defaults and ranges are OpenAI's; the extensions (``top_k``, ``min_p``,
``repetition_penalty``, ``min_tokens``, ``stop_token_ids``, ``ignore_eos``, ``priority``,
``return_token_ids``) are named as in vLLM; ``durable`` is this server's own. Null means the
default everywhere.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, FailFast, Field, model_validator
from pydantic_core import PydanticCustomError

from shoal.inference.params import MAX_PRIORITY, MAX_SEED
from shoal_deployments.openai.fields import (
    Content,
    LogitBias,
    NumLogprobs,
    Prompts,
    Role,
    Stop,
    TokenIds,
    at_most,
    refusal,
)

UNKNOWN = "unknown_field"
"""Type of the pydantic error that names a field nobody knows, in its context as ``param``."""


class Body(BaseModel):
    """One JSON object: frozen, no conversion of types, unknown fields refused by name."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )

    @model_validator(mode="before")
    @classmethod
    def _knows_all_fields(cls, content: Any) -> Any:
        """Name the first unknown field here: pydantic would report on each of a million."""
        if isinstance(content, dict):
            name = next((name for name in content if name not in cls.model_fields), None)
            if name is not None:
                close = get_close_matches(name[:64], cls.model_fields, n=1)
                hint = f"Did you mean {close[0]}" if close else "Leave it out"
                context = {"param": name, "hint": hint}
                raise PydanticCustomError(UNKNOWN, "no such field. {hint}", context)
        return content


class StreamOptions(Body):
    """``stream_options``."""

    include_usage: bool | None = None
    """Whether one more chunk, without choices, tells how many tokens were used."""

    include_obfuscation: bool | None = None
    """Has no effect: streams are not padded."""


class GenerationBody(Body):
    """What both endpoints take."""

    model: str
    """Name of the model, as `/v1/models` lists it."""

    stream: bool | None = None
    """Whether the answer comes as server-sent events while it grows."""

    stream_options: StreamOptions | None = None
    """Only with `stream`."""

    n: Annotated[int, Field(ge=1)] | None = None
    """Choices for each prompt; 1 unless set."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """1 unless set; 0 takes the likeliest token."""

    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Keep the fewest likeliest tokens whose probability reaches this; 0 keeps the likeliest."""

    top_k: Annotated[int, Field(ge=0)] | None = None
    """Keep the k likeliest tokens; 0 keeps all."""

    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Keep tokens at least this many times as likely as the likeliest."""

    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    """Subtracted from the logits of tokens seen in the answer."""

    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    """Subtracted once for each time that a token was seen in the answer."""

    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    """Divides positive and multiplies negative logits of tokens seen in prompt or answer."""

    logit_bias: LogitBias = None
    """Token ids, as text, and what is added to their logits, from -100 to 100."""

    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    """Makes the answer the same each time; unset draws afresh."""

    stop: Stop = None
    """Texts that end the answer before them."""

    stop_token_ids: TokenIds | None = None
    """Tokens that end the answer; their text is left out."""

    max_tokens: Annotated[int, Field(ge=0)] | None = None
    """Most tokens to generate."""

    min_tokens: Annotated[int, Field(ge=0)] | None = None
    """Tokens before which nothing ends the answer."""

    ignore_eos: bool | None = None
    """Whether the model's own end-of-text does not end the answer."""

    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    """Lower goes first."""

    return_token_ids: bool | None = None
    """Whether the answer has the token ids of prompt and choices as well."""

    durable: bool | None = None
    """Whether the end of the answer waits until its tokens are on the disk of the server's
    journal, and each choice says whether they are."""

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            name = "stream_options"
            raise refusal("it is given without stream", "Set stream to true", param=name)
        return self

    @property
    def num_choices(self) -> int:
        """Choices for each prompt."""
        return 1 if self.n is None else self.n

    @property
    def includes_usage(self) -> bool:
        """Whether the stream ends with a chunk about usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionBody(GenerationBody):
    """Body of `POST /v1/completions`."""

    prompt: Prompts
    """Text, token ids, or a list of either; none of them empty."""

    best_of: Annotated[int, Field(ge=1)] | None = None
    """Only the value of `n`."""

    echo: bool | None = None
    """Whether each choice begins with its prompt; with `max_tokens` 0 the prompt is only scored."""

    logprobs: NumLogprobs = None
    """Log-probabilities of the chosen tokens and of this many likeliest ones."""


class Message(Body):
    """One turn of a chat."""

    role: Role
    """Who speaks; `developer` is another word for `system`."""

    content: Content
    """Text, whole or in parts; parts stand on lines of their own."""

    name: str | None = None
    """Name of the speaker, for chat templates that print it."""

    @model_validator(mode="before")
    @classmethod
    def _answers_can_be_sent_back(cls, content: Any) -> Any:
        """Drop what an answer's message has beside its text, as long as it is empty."""
        if not isinstance(content, dict):
            return content
        if content.get("role") in ("tool", "function"):
            raise refusal("tools are not offered", "Leave its messages out")
        return {
            name: value
            for name, value in content.items()
            if name not in _EMPTY_IN_ANSWERS or value not in (None, [])
        }


_EMPTY_IN_ANSWERS = ("refusal", "annotations", "audio", "function_call", "tool_calls")


class ChatCompletionBody(GenerationBody):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1), FailFast(), at_most("messages")]
    """The chat so far."""

    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    """Newer name of `max_tokens`."""

    logprobs: bool | None = None
    """Whether the answer has the log-probabilities of its tokens."""

    top_logprobs: NumLogprobs = None
    """Log-probabilities of this many likeliest tokens as well; only with `logprobs`."""

    @model_validator(mode="after")
    def _fields_agree(self) -> ChatCompletionBody:
        if self.top_logprobs is not None and not self.logprobs:
            name = "top_logprobs"
            raise refusal("it is given without logprobs", "Set logprobs to true", param=name)
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            name = "max_completion_tokens"
            raise refusal("it differs from max_tokens", "Send one of them", param=name)
        return self
