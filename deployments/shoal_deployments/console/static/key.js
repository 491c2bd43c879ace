// The API key: kept for as long as the tab is open, asked for where the server wants one.

const PLACE = "shoal.key";

const dialog = document.getElementById("key-dialog");
const form = document.getElementById("key-form");
const reason = document.getElementById("key-reason");
const input = document.getElementById("key");
let asked = null;

/** The key that requests carry; null for none. */
export function currentKey() {
  return sessionStorage.getItem(PLACE);
}

/**
 * Asks the user for a key and gives whether there is one; all who ask share one dialog. The document
 * hears of a new key by the event "keychange".
 */
export function askForKey(why) {
  asked ??= show(why).finally(() => {
    asked = null;
  });
  return asked;
}

function show(why) {
  reason.textContent = why;
  input.value = "";
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "given"), { once: true });
  });
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(PLACE, input.value);
  dialog.close("given");
  document.dispatchEvent(new Event("keychange"));
});

document.getElementById("key-cancel").addEventListener("click", () => dialog.close());
