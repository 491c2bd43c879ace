"""From tokenized prompts to requests that an engine will take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shoal.config import JournalSettings, LimitSettings
from shoal.errors import ConfigError
from shoal.inference.params import MAX_SEED, SamplingParams
from shoal.inference.request import Request
from shoal_deployments.engine_client import ModelCard
from shoal_deployments.openai.endpoint import PromptTokens
from shoal_deployments.openai.errors import ApiError, bad_field, from_config_error, shown
from shoal_deployments.openai.requests import GenerationBody


def check_model(body: GenerationBody, card: ModelCard) -> None:
    """Refuse another model than the one served: ApiError, status 404."""
    if body.model != card.name:
        raise unknown_model(body.model, card)


def unknown_model(name: str, card: ModelCard) -> ApiError:
    """The refusal of a model that is not served."""
    message = f"There is no model {shown(name)} here. This server has {shown(card.name)}."
    return ApiError(404, message, param="model", code="model_not_found")


def check_durable(body: GenerationBody, journal: JournalSettings) -> None:
    """Refuse a wait for a journal that is not kept, or never synced: ApiError, status 400."""
    if body.durable and journal.dir is None:
        raise bad_field("durable", True, "this server keeps no journal", "Leave it out")
    if body.durable and journal.fsync == "never":
        problem = "this server's journal is never forced onto the disk"
        raise bad_field("durable", True, problem, "Leave it out")


def check_choices(num_prompts: int, n: int, limits: LimitSettings, card: ModelCard) -> None:
    """Refuse too many choices, before anything is made for each: ApiError, status 400.

    More than an empty queue has room for are too many as well: they would be turned away each time.
    """
    most = min(limits.choices, card.limits.max_waiting)
    if n * num_prompts > most:
        problem = f"it asks for more than {most} choices"
        if num_prompts > 1:
            problem = f"with {num_prompts} prompts {problem}"
        fits = most // num_prompts
        remedy = f"Ask for at most {fits}" if fits else f"Send fewer prompts, at most {most}"
        raise bad_field("n", n, problem, remedy)


def make_requests(
    name: str,
    prompts: Sequence[PromptTokens],
    params: SamplingParams,
    card: ModelCard,
    limits: LimitSettings,
    field_names: Mapping[str, str],
    *,
    seed: int,
    durable: bool,
) -> tuple[Request, ...]:
    """One request for each prompt; ApiError, status 400, for what no engine could answer.

    Without a seed in ``params`` the prompts draw with ``seed`` and the numbers after it. A refusal
    calls the engine's fields what ``field_names`` says, if they are there.
    """
    prompt_field = field_names.get("prompt", "prompt")
    requests = []
    for place, prompt in enumerate(prompts):
        _check_length(len(prompt.ids), params.max_tokens, card, limits, prompt_field)
        request = Request(
            id=f"{name}-{place}",
            prompt=prompt.ids,
            params=params,
            seed=(seed + place) % (MAX_SEED + 1),
            durable=durable,
        )
        try:
            card.limits.check(request)
        except ConfigError as error:
            param = field_names.get(error.field, error.field)
            raise from_config_error(error, param) from error
        requests.append(request)
    return tuple(requests)


def _check_length(
    num_tokens: int,
    max_tokens: int | None,
    card: ModelCard,
    limits: LimitSettings,
    prompt_field: str,
) -> None:
    """Refuse a prompt after which not even one token has room, by the code that clients know."""
    most = card.limits.longest_prompt(max_tokens)
    if limits.prompt_tokens is not None:
        most = min(most, limits.prompt_tokens)
    if num_tokens > most:
        message = (
            f"{prompt_field} has {num_tokens} tokens; the longest prompt that leaves room for an "
            f"answer has {most}. Shorten it."
        )
        raise ApiError(400, message, param=prompt_field, code="context_length_exceeded")
