// The page's parts, put to work.

import { startConversation } from "./conversation.js";
import { askForKey } from "./key.js";
import { startReplicas } from "./replicas.js";
import { startSettings } from "./settings.js";

startSettings();
startConversation();
startReplicas();

document.getElementById("change-key").addEventListener("click", () => {
  askForKey("This key is sent with every request, until the tab is closed.");
});
