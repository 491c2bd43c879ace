// The chat: questions, answers that grow, a way to stop them, and the same question asked again.

import { emptyAnswer, numCommon, readAnswer } from "./answer.js";
import { modelName } from "./api.js";
import { readSettings } from "./settings.js";
import { copyOf, say } from "./template.js";

const NEAR_END_PX = 48;

const list = document.getElementById("turns");
const composer = document.getElementById("composer");
const input = document.getElementById("question");
const send = document.getElementById("send");
const stop = document.getElementById("stop");
const clear = document.getElementById("clear");

/** Turns that the model is told of: those with an answer, be it a part of one. */
let turns = [];
/** Stops the stream under way; null while there is none. */
let stopper = null;

export function startConversation() {
  composer.addEventListener("submit", (event) => {
    event.preventDefault();
    ask();
  });
  input.addEventListener("keydown", (event) => {
    // While a character is being composed of several keys, Enter ends that.
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      ask();
    }
  });
  stop.addEventListener("click", () => stopper?.abort());
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      stopper?.abort();
    }
  });
  clear.addEventListener("click", () => {
    turns = [];
    list.replaceChildren();
    input.focus();
  });
}

async function ask() {
  const question = input.value.trim();
  const settings = question && stopper === null ? readSettings() : null;
  if (settings === null) {
    return;
  }
  input.value = "";
  const messages = [
    ...settings.messages,
    ...turns.flatMap((turn) => [
      { role: "user", content: turn.question },
      { role: "assistant", content: turn.answer.text },
    ]),
    { role: "user", content: question },
  ];
  const turn = { question, answer: emptyAnswer(), body: { ...settings.fields, messages } };
  showQuestion(question);
  const view = showAnswer();
  const problem = await stream(turn.body, turn.answer, (pieces) => showPieces(view, pieces));
  showOutcome(view, turn, problem);
  if (turn.answer.text) {
    turns.push(turn);
  } else if (problem !== null && !input.value) {
    input.value = question; // nothing has come of it: it may be corrected and sent again
  }
  input.focus();
}

/** Asks the same again, and says whether the answer has the same bits. */
async function askAgain(view, turn) {
  const { answer } = turn;
  const body = { ...turn.body };
  if (answer.reason === null) {
    body.max_tokens = answer.tokens.length; // the first one was not let finish
  }
  const second = emptyAnswer();
  view.parts.again.hidden = false;
  view.parts.other.hidden = true;
  view.parts.again.dataset.verdict = "open";
  const problem = await stream(body, second, () => {
    say(view.parts.verdict, `Asking again: ${numCommon(answer, second)} tokens the same so far.`);
  });
  const { verdict, text } = compare(answer, second, problem);
  view.parts.again.dataset.verdict = verdict;
  say(view.parts.verdict, text);
  if (verdict === "different") {
    view.parts.other.hidden = false;
    view.parts.otherText.textContent = second.text;
  }
  view.parts.repeat.focus();
}

function compare(first, second, problem) {
  const [length, common] = [second.tokens.length, numCommon(first, second)];
  const isComplete = problem === null;
  if (common < (isComplete ? Math.max : Math.min)(first.tokens.length, length)) {
    const reason =
      first.fingerprint !== null && first.fingerprint === second.fingerprint
        ? "although the kernels have the same fingerprint"
        : `which is not promised between the fingerprints ${shown(first)} and ${shown(second)}`;
    const text = `Asked again: it differs from token ${common + 1} on, ${reason}.`;
    return { verdict: "different", text };
  }
  if (!isComplete) {
    return { verdict: "open", text: `Asked again: ${common} tokens the same, then: ${problem}` };
  }
  const cached = second.usage?.prompt_tokens_details?.cached_tokens ?? 0;
  const cache = cached > 0 ? ` ${cached} tokens of the prompt came from the cache.` : "";
  const text =
    `Asked again: the same ${count(length, "token")} with the same log-probabilities, ` +
    `bit for bit.${cache}`;
  return { verdict: "same", text };
}

function shown(answer) {
  return answer.fingerprint ?? "none";
}

/** Reads an answer, as the only one at a time; gives what went wrong, null for nothing. */
async function stream(body, answer, onMore) {
  stopper = new AbortController();
  setBusy(true);
  try {
    const model = await modelName();
    stopper.signal.throwIfAborted();
    await readAnswer({ model, ...body }, answer, stopper.signal, onMore);
    return null;
  } catch (error) {
    return error.name === "AbortError" ? "Stopped." : error.message;
  } finally {
    stopper = null;
    setBusy(false);
  }
}

function setBusy(isBusy) {
  const hasFocus = document.activeElement === send;
  send.hidden = isBusy;
  stop.hidden = !isBusy;
  if (hasFocus) {
    stop.focus();
  }
  clear.disabled = isBusy;
  // Screen readers read an answer once it is complete, not token by token.
  list.setAttribute("aria-busy", String(isBusy));
  for (const button of list.querySelectorAll("button")) {
    button.disabled = isBusy;
  }
}

function showQuestion(question) {
  const { root, parts } = copyOf("question-template");
  parts.text.textContent = question;
  list.append(root);
  list.scrollTop = list.scrollHeight;
}

function showAnswer() {
  const view = copyOf("answer-template");
  list.append(view.root);
  list.scrollTop = list.scrollHeight;
  return view;
}

function showPieces(view, pieces) {
  const isAtEnd = list.scrollHeight - list.scrollTop - list.clientHeight < NEAR_END_PX;
  for (const { text, logprob, id } of pieces) {
    if (text === "") {
      continue; // it ends inside a character: the token that completes it has all of it
    }
    const span = document.createElement("span");
    const probability = Math.exp(logprob);
    span.textContent = text;
    span.title = `${percent(probability)}, log-probability ${logprob.toFixed(4)}, token ${id}`;
    span.dataset.level = String(Math.min(4, Math.floor(5 * probability)));
    view.parts.text.append(span);
  }
  if (isAtEnd) {
    list.scrollTop = list.scrollHeight;
  }
}

function showOutcome(view, turn, problem) {
  const { answer } = turn;
  if (problem !== null) {
    view.parts.problem.hidden = false;
    view.parts.problem.textContent = problem;
    view.root.dataset.outcome = problem === "Stopped." ? "stopped" : "failed";
  }
  view.parts.facts.textContent = facts(turn).join(" · ");
  if (answer.tokens.length > 0) {
    view.parts.repeat.hidden = false;
    view.parts.repeat.addEventListener("click", () => askAgain(view, turn));
  }
  list.scrollTop = list.scrollHeight;
}

function facts({ answer, body }) {
  const number = answer.tokens.length;
  if (number === 0) {
    return [];
  }
  const found = [count(number, "token")];
  if (number > 1) {
    const seconds = (answer.endedAt - answer.firstAt) / 1000;
    found.push(`${((number - 1) / seconds).toFixed(1)} tokens/s`);
  }
  found.push(`first after ${((answer.firstAt - answer.beganAt) / 1000).toFixed(2)} s`);
  const cached = answer.usage?.prompt_tokens_details?.cached_tokens ?? 0;
  if (cached > 0) {
    found.push(`${cached} of ${answer.usage.prompt_tokens} prompt tokens from the cache`);
  }
  if (answer.reason === "length") {
    found.push("cut off at max tokens");
  }
  if (body.temperature !== 0) {
    found.push(`seed ${body.seed}`);
  }
  found.push(`fingerprint ${shown(answer)}`);
  return found;
}

function count(number, noun) {
  return number === 1 ? `1 ${noun}` : `${number} ${noun}s`;
}

function percent(probability) {
  return `${(100 * probability).toFixed(1)} %`;
}
