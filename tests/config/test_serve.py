"""Settings of serving that contradict each other are refused by key."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.config import ServeSettings, config_from_tree
from shoal.errors import ConfigError

TREE: dict[str, Any] = {
    "model": {"path": "m"},
    "data": {"sources": [{"path": "d"}]},
    "train": {"steps": 1},
}


@pytest.mark.parametrize(
    ("serve", "message"),
    [
        ({"kv": {"tokens": 63}}, "serve.kv.tokens = 63: one block alone holds 64 tokens"),
        (
            {"kv": {"tokens": 640}, "limits": {"prompt_tokens": 640}},
            "serve.limits.prompt_tokens = 640: the cache holds 640 tokens",
        ),
        (
            {"kv": {"block_tokens": 40}},
            "serve.kv.block_tokens = 40: a block is a multiple of 16 tokens. Use 32 or 48.",
        ),
        ({"kv": {"block_tokens": 8}}, "serve.kv.block_tokens = 8: must be at least 16"),
        ({"replicas": 10**6}, "serve.replicas = 1000000: must be at most 1024"),
        (
            {"limits": {"queue": 10**26}},
            "serve.limits.queue = 100000000000000000000000000: must be",
        ),
        ({"port": 65536}, "serve.port = 65536: must be at most 65535"),
        ({"limits": {"request": 5}}, "Did you mean serve.limits.requests"),
        ({"auth": {"keys": ["secret"]}}, "serve.auth.keys"),
        ({"stall_s": 1e10}, "serve.stall_s = 10000000000.0: must be at most 1000000000"),
        ({"limits": {"retry_after_s": 10**10}}, "must be at most 1000000000"),
        ({"model_name": "a b"}, "'/', ':' or '-', 200 at most"),
        ({"model_name": "a" * 201}, "200 at most"),
        ({"auth": {"keys_variable": "A-B"}}, "must be letters, digits or '_', and not begin with"),
        (
            {"journal": {"when_full": "refuse"}},
            "serve.journal.when_full = 'refuse': without a folder no journal is kept. Leave it "
            "out, or set serve.journal.dir.",
        ),
        ({"journal": {"keep_bytes": 9}}, "serve.journal.keep_bytes = 9: without a folder"),
        (
            {"journal": {"dir": "j", "fsync": "always", "interval_s": 1.0}},
            "serve.journal.interval_s = 1.0: with fsync = always no batch waits",
        ),
        (
            {"journal": {"dir": "j", "fsync": "never", "ack_timeout_s": 1.0}},
            "serve.journal.ack_timeout_s = 1.0: with fsync = never no request can be durable",
        ),
        ({"precision": "fp8"}, "Use one of auto, fp32, bf16, mxfp8"),
    ],
)
def test_what_cannot_work_is_named(serve: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_tree(TREE | {"serve": serve})
    assert message in str(caught.value)


def test_there_is_a_frontend_for_each_replica() -> None:
    assert ServeSettings(replicas=3).num_frontends == 3
    assert ServeSettings(replicas=3, frontends=1).num_frontends == 1
    assert config_from_tree(TREE).serve == ServeSettings()
