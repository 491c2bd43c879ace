// What the user set beside the question.

const folder = document.getElementById("settings");
const form = document.getElementById("settings-form");
const turns = document.getElementById("turns");

const { system, temperature, seed, most, tints } = form.elements;

const LARGEST_SEED = 2n ** 63n - 1n;

export function startSettings() {
  form.addEventListener("submit", (event) => event.preventDefault());
  seed.addEventListener("input", checkSeed);
  tints.addEventListener("change", () => turns.classList.toggle("tinted", tints.checked));
}

/** Fields and first messages of a request; null where a setting is wrong, which is shown. */
export function readSettings() {
  if (!form.checkValidity()) {
    folder.open = true; // what is folded away cannot be pointed at
    form.reportValidity();
    return null;
  }
  const fields = {
    stream: true,
    stream_options: { include_usage: true },
    logprobs: true,
    return_token_ids: true,
    // One is drawn for each question, so that any answer can be had again. Seeds are BigInts: a
    // number of JavaScript's would round those from 2^53 on.
    seed: BigInt(seed.value.trim() || crypto.getRandomValues(new Uint32Array(1))[0]),
  };
  if (temperature.value !== "") {
    fields.temperature = Number(temperature.value);
  }
  if (most.value !== "") {
    fields.max_tokens = Number(most.value);
  }
  const prompt = system.value.trim();
  return { fields, messages: prompt ? [{ role: "system", content: prompt }] : [] };
}

function checkSeed() {
  const text = seed.value.trim();
  const isSeed = /^\d{0,19}$/.test(text) && BigInt(text) <= LARGEST_SEED;
  seed.setCustomValidity(isSeed ? "" : `A whole number from 0 to ${LARGEST_SEED}, or nothing`);
}
