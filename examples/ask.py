"""Ask a served model a question, and what is proven of its answers: ``ask.py URL QUESTION``."""

from __future__ import annotations

import signal
import sys

MAX_TOKENS = 48


def main(url: str, question: str) -> int:
    """Print the answer as it comes, then the certificate; 1 unless the two belong together."""
    # It takes a second to load, in which Ctrl-C is to end this without a traceback too.
    import openai

    # A proxy that the environment names is for the world outside.
    http = openai.DefaultHttpxClient(trust_env=False)
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", http_client=http)
    (model,) = client.models.list()
    print(f"{question}\n> ", end="", flush=True)
    fingerprint = None
    for chunk in client.chat.completions.create(
        model=model.id,
        messages=[{"role": "user", "content": question}],
        max_tokens=MAX_TOKENS,
        temperature=0,
        stream=True,
    ):
        fingerprint = chunk.system_fingerprint
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
    (certificate,) = (each["certificate"] for each in http.get(f"{url}/stats").json()["replicas"])
    passed, kernels = certificate["passed"], certificate["kernels"]
    print(f"\n\nCertificate of these bits: fingerprint {certificate['fingerprint']}, ", end="")
    print(f"{len(kernels)} kernels tried, {'all passed' if passed else 'NOT passed'}.", flush=True)
    return int(not passed or fingerprint != certificate["fingerprint"])


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(main(*sys.argv[1:]))
