"""vLLM as a contender; run by the Python of its own virtual environment, which has no Shoal.

The protocol is that of ``engine_ours``.
"""

import json
import os
import sys
import time


def main(folder: str, threads: str) -> None:
    """Serve the model in ``folder`` in bf16 on so many cores, as vLLM is by default."""
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{int(threads) - 1}"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"
    import vllm

    llm = vllm.LLM(
        model=folder,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=2048,
        max_num_seqs=64,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    say("ready")
    for line in sys.stdin:
        load = json.loads(line)
        params = vllm.SamplingParams(
            max_tokens=load["new_tokens"], temperature=0.0, ignore_eos=True, detokenize=False
        )
        prompts = [{"prompt_token_ids": prompt} for prompt in load["prompts"]]
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        assert all(len(o.outputs[0].token_ids) == load["new_tokens"] for o in outputs)
        say(seconds)


def say(answer: object) -> None:
    """Tell the driver."""
    sys.stdout.write(f"@{json.dumps(answer)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
