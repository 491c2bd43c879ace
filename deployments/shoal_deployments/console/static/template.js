// Copies of the page's templates, and the places in them by the name in `data-is`.

/** A copy of the first element of the template with this id, and what is named in it. */
export function copyOf(id) {
  const root = document.getElementById(id).content.firstElementChild.cloneNode(true);
  const parts = {};
  for (const part of root.querySelectorAll("[data-is]")) {
    parts[part.dataset.is] = part;
  }
  return { root, parts };
}

/** Sets the text of an element, unless it has it: screen readers announce what is set. */
export function say(element, text) {
  if (element.textContent !== text) {
    element.textContent = text;
  }
}
