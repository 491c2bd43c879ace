// How fast a counter grows.

const WINDOW_MS = 4000;
const NUM_SHOWN = 60;

/** Growth per second of a counter, over the last seconds, and what it was before. */
export class Rate {
  #samples = [];

  /** The latest rates, the oldest first. */
  history = [];

  /** Notes the counter's value and gives its rate; null until there are two values. */
  note(value, now = performance.now()) {
    const last = this.#samples.at(-1);
    if (last !== undefined && value < last.value) {
      this.#samples = []; // the engine is a new one and counts from 0
    }
    this.#samples.push({ value, now });
    while (this.#samples.length > 2 && this.#samples[1].now <= now - WINDOW_MS) {
      this.#samples.shift();
    }
    const first = this.#samples[0];
    if (now === first.now) {
      return null;
    }
    const rate = (1000 * (value - first.value)) / (now - first.now);
    this.history = [...this.history, rate].slice(-NUM_SHOWN);
    return rate;
  }
}

/** Draws rates as a line in an SVG whose view box is 60 wide and 16 high. */
export function drawLine(line, history) {
  const top = Math.max(...history, 1e-9);
  const start = NUM_SHOWN - history.length;
  const points = history.map((rate, place) => `${start + place},${15 - (14 * rate) / top}`);
  line.setAttribute("points", points.join(" "));
}
