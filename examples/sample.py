"""How Hugging Face model folders continue the same prompts, greedily: ``sample.py MODEL...``."""

from __future__ import annotations

import signal
import sys

PROMPTS = ("class Queue:", "    def close(self):")
NEW_TOKENS = 40


def main(folders: list[str]) -> None:
    """Continue each prompt with the model of each folder."""
    print("Loading transformers ...", flush=True)
    # It takes seconds, in which Ctrl-C is to end this without a traceback too.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    for folder in folders:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for prompt in PROMPTS:
            tokens = tokenizer(prompt, return_tensors="pt")
            continued = model.generate(**tokens, max_new_tokens=NEW_TOKENS, do_sample=False)
            text = tokenizer.decode(continued[0], skip_special_tokens=True)
            print(f"--- {folder}\n{text}\n", flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    main(sys.argv[1:])
