// Server-sent events out of the body of a response, which EventSource cannot read: it only GETs.

/** The data of each event, as it comes; an event that was cut off is none. */
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) {
        return;
      }
      const blocks = (rest + value).split(/\r?\n\r?\n/);
      rest = blocks.pop();
      yield* blocks.map(dataOf).filter((data) => data !== null);
    }
  } finally {
    // Whoever stops reading leaves: this closes the connection, and the server frees what it held.
    await reader.cancel().catch(() => {});
  }
}

function dataOf(block) {
  const lines = block.split(/\r?\n/).filter((line) => line.startsWith("data:"));
  if (lines.length === 0) {
    return null; // a comment, which shows that the stream is alive
  }
  return lines.map((line) => line.slice(5).replace(/^ /, "")).join("\n");
}
