// What was proven of a replica's kernels when it loaded.

import { say } from "./template.js";

/** Shows a certificate in the parts of a replica's card; nothing happens where it is shown. */
export function showCertificate(parts, certificate) {
  const content = JSON.stringify(certificate);
  if (parts.certificate.dataset.content === content) {
    return;
  }
  parts.certificate.dataset.content = content;
  const { passed, fingerprint, kernels = [], threads = [] } = certificate;
  parts.certificate.dataset.passed = String(passed === true);
  say(parts.passed, passed === true ? "Certified" : "Not certified");
  say(parts.fingerprint, fingerprint ?? "none");
  say(parts.tried, tried(kernels, threads));
  parts.kernels.replaceChildren(...kernels.map(line));
}

function tried(kernels, threads) {
  const counts = [...new Set(kernels.flatMap((kernel) => kernel.row_counts))].sort((a, b) => a - b);
  if (counts.length === 0) {
    return "Nothing was tried.";
  }
  return (
    `${kernels.length} kernels gave each row the same bits alone and in batches of ` +
    `${words(counts)}, in order and shuffled, on ${words(threads)} threads, unless noted:`
  );
}

function line({ name, failure }) {
  const item = document.createElement("li");
  item.textContent = failure === null ? name : `${name}: ${failure}`;
  item.dataset.passed = String(failure === null);
  return item;
}

function words(numbers) {
  const all = numbers.map(String);
  return all.length < 2 ? all.join() : `${all.slice(0, -1).join(", ")} and ${all.at(-1)}`;
}
