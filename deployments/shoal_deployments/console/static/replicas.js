// The replicas as they are now: asked every second, less often while they cannot be asked.

import { request } from "./api.js";
import { showCertificate } from "./certificate.js";
import { currentKey } from "./key.js";
import { Rate, drawLine } from "./rate.js";
import { copyOf, say } from "./template.js";

const INTERVAL_MS = 1000;
const LONGEST_MS = 15000;
const DEADLINE_MS = 10000;

const list = document.getElementById("replica-list");
const model = document.getElementById("model");
const summary = document.getElementById("summary");
const problem = document.getElementById("stats-problem");
const kinds = document.getElementById("kinds");

const cards = new Map();
let timer = null;
let delayMs = INTERVAL_MS;
let isAsking = false;
/** The key with which the server last refused us; null is no key. */
let refusedKey;

export function startReplicas() {
  document.addEventListener("visibilitychange", () => {
    clearTimeout(timer);
    if (!document.hidden) {
      poll();
    }
  });
  document.addEventListener("keychange", () => {
    clearTimeout(timer);
    poll();
  });
  poll();
}

async function poll() {
  if (isAsking) {
    return;
  }
  isAsking = true;
  const key = currentKey();
  try {
    // Who has put the question for a key aside is not asked again every second.
    const asks = refusedKey !== key;
    show(await (await request("stats", {}, { asks, deadlineMs: DEADLINE_MS })).json());
    delayMs = INTERVAL_MS;
    say(problem, "");
  } catch (error) {
    if (error.status === 401) {
      refusedKey = key;
    }
    delayMs = Math.min(2 * delayMs, LONGEST_MS);
    say(problem, error.message);
    lose();
  } finally {
    isAsking = false;
  }
  if (!document.hidden) {
    timer = setTimeout(poll, delayMs);
  }
}

function show({ model: name, replicas, health }) {
  const byName = new Map(replicas.map((replica) => [replica.replica, replica]));
  let [speed, running] = [0, 0];
  for (const state of health) {
    const stats = byName.get(state.replica);
    const card = cardOf(state.replica);
    const isUp = state.progresses && stats !== undefined;
    showState(card, isUp, state.detail || (isUp ? "" : "It does not answer."));
    if (stats !== undefined) {
      speed += showStats(card, stats);
      running += stats.running;
    }
  }
  say(model, name);
  document.title = `${name} · Shoal`;
  const numWell = health.filter((state) => state.progresses).length;
  say(
    summary,
    `${numWell} of ${health.length} replicas up · ${running} running · ${perSecond(speed)}`,
  );
  const fingerprints = new Set(replicas.map((replica) => replica.certificate.fingerprint));
  kinds.hidden = fingerprints.size < 2;
}

function lose() {
  say(summary, "no numbers");
  for (const card of cards.values()) {
    showState(card, false, "No numbers.");
  }
}

function cardOf(name) {
  if (!cards.has(name)) {
    const card = { ...copyOf("replica-template"), rate: new Rate() };
    card.parts.name.textContent = `Replica ${name}`;
    cards.set(name, card);
    list.append(card.root);
  }
  return cards.get(name);
}

function showState({ root, parts }, isUp, detail) {
  root.dataset.up = String(isUp);
  say(parts.state, isUp ? "up" : "down");
  say(parts.detail, detail);
}

/** Shows one replica's numbers and gives its tokens per second. */
function showStats({ parts, rate }, stats) {
  const used = stats.kv_blocks_total - stats.kv_blocks_free;
  fill(parts.batch, parts.batchText, stats.running, stats.max_running);
  fill(parts.kv, parts.kvText, used, stats.kv_blocks_total);
  const speed = rate.note(stats.generated_tokens);
  say(parts.speed, speed === null ? "–" : perSecond(speed));
  drawLine(parts.line, rate.history);
  say(parts.waiting, number(stats.waiting));
  say(parts.cached, number(stats.kv_blocks_cached));
  say(parts.hits, number(stats.prefix_hit_tokens));
  say(parts.preempted, number(stats.preempted));
  say(parts.finished, number(stats.finished));
  say(parts.cancelled, number(stats.cancelled));
  say(parts.failed, number(stats.failed));
  say(parts.migrated, number(stats.migrated));
  showJournal(parts, stats);
  showCertificate(parts, stats.certificate);
  return speed ?? 0;
}

function showJournal(parts, stats) {
  parts.journal.hidden = stats.journal_written === undefined;
  if (parts.journal.hidden) {
    return;
  }
  const isFailing = stats.journal_failing > 0;
  say(parts.journalProblem, isFailing ? "Its disk fails, and is tried again every second." : "");
  say(parts.journalWritten, number(stats.journal_written));
  say(parts.journalPending, number(stats.journal_pending));
  say(parts.journalOldest, `${stats.journal_oldest_s.toFixed(1)} s`);
  say(parts.journalDropped, number(stats.journal_dropped));
  say(parts.journalRefused, number(stats.journal_refused));
  say(parts.journalErrors, number(stats.journal_errors));
}

function fill(bar, text, value, most) {
  bar.max = most;
  bar.value = value;
  say(text, `${number(value)} of ${number(most)}`);
}

function number(value) {
  return value.toLocaleString("en");
}

function perSecond(speed) {
  return `${speed.toFixed(speed < 10 ? 1 : 0)} tokens/s`;
}
