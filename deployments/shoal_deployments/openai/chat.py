"""``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shoal.inference.params import SamplingParams
from shoal.inference.text import TokenNames
from shoal_deployments.openai.answers import Choice
from shoal_deployments.openai.endpoint import Endpoint, PromptTokens
from shoal_deployments.openai.errors import ApiError
from shoal_deployments.openai.logprobs import chat_logprobs
from shoal_deployments.openai.requests import ChatCompletionBody, Message
from shoal_deployments.openai.sampling import chat_params
from shoal_deployments.openai.writer import Chunk, Header, Writer, ending_of
from shoal_deployments.tokenizing import Tokenizing


class ChatCompletions(Endpoint[ChatCompletionBody]):
    """Answers a chat, which the tokenizer's template turns into a prompt."""

    body_type = ChatCompletionBody
    id_prefix = "chatcmpl"

    def params(self, body: ChatCompletionBody) -> SamplingParams:
        return chat_params(body)

    def field_names(self, body: ChatCompletionBody) -> Mapping[str, str]:
        names = {"prompt": "messages", "logprobs": "top_logprobs"}
        if body.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        return names

    async def prompts(self, body: ChatCompletionBody, tokenizing: Tokenizing) -> list[PromptTokens]:
        if not tokenizing.has_chat_template:
            raise ApiError(
                400,
                "messages: this model has no chat template. Use /v1/completions, or add "
                "chat_template.jinja to the model's folder and start the server again.",
                param="messages",
                code="no_chat_template",
            )
        messages = [_for_template(message) for message in body.messages]
        return [PromptTokens(ids=await tokenizing.encode_chat(messages))]

    async def writer(
        self,
        header: Header,
        body: ChatCompletionBody,
        prompts: Sequence[PromptTokens],
        tokenizing: Tokenizing,
    ) -> Writer:
        return ChatWriter(header, body, prompts[0], tokenizing.names)


class ChatWriter(Writer):
    """``chat.completion`` and ``chat.completion.chunk``."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(
        self, header: Header, body: ChatCompletionBody, prompt: PromptTokens, names: TokenNames
    ) -> None:
        super().__init__(header, includes_usage=body.includes_usage)
        self._has_logprobs = bool(body.logprobs)
        self._has_token_ids = bool(body.return_token_ids)
        self._prompt = prompt
        self._names = names

    def opening(self, choices: Sequence[Choice]) -> list[Chunk]:
        delta = {"role": "assistant", "content": ""}
        contents = [self._chunk(self._written(choice, "delta", delta)) for choice in choices]
        if self._has_token_ids:
            contents[0]["prompt_token_ids"] = self._prompt.ids
        pairs = zip(choices, contents, strict=True)
        return [Chunk(choice=choice, content=content) for choice, content in pairs]

    def chunks(self, added: Sequence[Choice]) -> list[Chunk]:
        return [Chunk(choice=choice, content=self._content(choice)) for choice in added]

    def _content(self, choice: Choice) -> dict[str, Any] | None:
        # Half a character has no text yet, but a log-probability and an id of its own.
        if choice.text or choice.finish_reason or self._has_logprobs or self._has_token_ids:
            delta = {"content": choice.text} if choice.text else {}
            return self._chunk(self._written(choice, "delta", delta))
        return None

    def whole(self, choices: Sequence[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        written = []
        for choice in choices:
            message = {"role": "assistant", "content": choice.text, "refusal": None}
            written.append(self._written(choice, "message", message))
        answer = self._object(self.kind, written) | {"usage": usage}
        if self._has_token_ids:
            answer["prompt_token_ids"] = self._prompt.ids
        return answer

    def _written(self, choice: Choice, name: str, content: dict[str, Any]) -> dict[str, Any]:
        written: dict[str, Any] = {
            "index": choice.index,
            name: content,
            "logprobs": None,
            "finish_reason": choice.finish_reason,
        }
        if self._has_logprobs and choice.logprobs:
            written["logprobs"] = chat_logprobs(choice.logprobs, self._names)
        written |= ending_of(choice)
        if self._has_token_ids:
            written["token_ids"] = choice.token_ids
        return written


def _for_template(message: Message) -> dict[str, str]:
    """A message as chat templates know it."""
    role = "system" if message.role == "developer" else message.role
    plain = {"role": role, "content": message.content}
    return plain if message.name is None else {**plain, "name": message.name}
