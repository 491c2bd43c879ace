// One answer: read from its stream, and compared with another bit for bit.

import { ApiError, request } from "./api.js";
import { events } from "./events.js";

/** An answer of which nothing has come yet. */
export function emptyAnswer() {
  return {
    text: "",
    tokens: [],
    logprobs: [],
    reason: null,
    usage: null,
    fingerprint: null,
    beganAt: performance.now(),
    firstAt: null,
    endedAt: null,
  };
}

/**
 * Asks, and adds what comes to `answer`, each time calling `onMore` with the new pieces of text.
 *
 * A piece has the text, the log-probability and the id of a token. Throws ApiError where the answer
 * fails, at once or half way, and an AbortError once `signal` is aborted.
 */
export async function readAnswer(body, answer, signal, onMore) {
  try {
    const response = await request("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: toJson(body),
      signal,
    });
    for await (const data of eventsOf(response, signal)) {
      if (data === "[DONE]") {
        return;
      }
      const chunk = JSON.parse(data);
      if (chunk.error) {
        throw new ApiError(chunk.error.message);
      }
      const pieces = add(answer, chunk);
      if (pieces.length > 0) {
        onMore(pieces);
      }
    }
    throw new ApiError("The connection broke before the answer's end.");
  } finally {
    answer.endedAt = performance.now();
  }
}

function toJson({ seed, ...others }) {
  return `{"seed":${seed},${JSON.stringify(others).slice(1)}`; // JSON.stringify takes no BigInt
}

async function* eventsOf(response, signal) {
  try {
    yield* events(response.body);
  } catch (error) {
    throw signal.aborted ? error : new ApiError("The connection broke before the answer's end.");
  }
}

function add(answer, chunk) {
  answer.fingerprint = chunk.system_fingerprint;
  answer.usage = chunk.usage ?? answer.usage;
  const [choice] = chunk.choices;
  if (choice === undefined) {
    return [];
  }
  answer.reason = choice.finish_reason ?? answer.reason;
  answer.text += choice.delta.content ?? "";
  const ids = choice.token_ids ?? [];
  const entries = choice.logprobs?.content ?? [];
  if (ids.length > 0) {
    answer.firstAt ??= performance.now();
  }
  answer.tokens.push(...ids);
  answer.logprobs.push(...entries.map((entry) => entry.logprob));
  return entries.map((entry, place) => ({
    text: entry.token,
    logprob: entry.logprob,
    id: ids[place],
  }));
}

/**
 * How many tokens two answers have in common from their beginning on, ids and log-probabilities
 * alike. JSON carries a log-probability exactly, so that equal numbers are equal bits.
 */
export function numCommon(one, other) {
  const length = Math.min(one.tokens.length, other.tokens.length);
  for (let place = 0; place < length; place += 1) {
    const isSame =
      one.tokens[place] === other.tokens[place] && one.logprobs[place] === other.logprobs[place];
    if (!isSame) {
      return place;
    }
  }
  return length;
}
