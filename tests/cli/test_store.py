"""``shoal checkpoint`` and ``shoal export`` on steps in a store."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shoal.checkpoint import hf_attachments, save
from shoal.models import Decoder, DecoderConfig, initialize
from tests.checkpoint.bucket import serving
from tests.cli.shell import shoal_here, write_config
from tests.cli.test_weights import MODEL, same_weights


def test_commands_take_uris(tmp_path: Path) -> None:
    decoder = Decoder(DecoderConfig.from_hf(MODEL), torch.float32)
    initialize(decoder, seed=1)
    with serving() as bucket:
        first, second = (
            save(
                bucket.at("runs/run"),
                step,
                model=decoder,
                optimizer=None,
                counters={},
                attachments=hf_attachments(MODEL),
            ).path
            for step in (3, 6)
        )
        run = bucket.uri("runs/run")
        done = shoal_here("checkpoint", "pin", str(first), cwd=tmp_path)
        assert (done.returncode, done.stdout) == (0, f"{first}  pinned\n"), done.stderr
        done = shoal_here("checkpoint", "ls", run, cwd=tmp_path)
        lines = done.stdout.splitlines()
        assert lines[0].startswith(f"{first}  complete  ") and lines[0].endswith("  pinned")
        assert lines[1].startswith(f"{second}  complete  ") and lines[1].endswith("by 1 rank")
        missing = bucket.uri("runs/run/step-00000004")
        done = shoal_here("checkpoint", "pin", missing, cwd=tmp_path)
        assert done.returncode == 2
        assert f"no such step. Give one of {first}, {second}." in " ".join(done.stderr.split())
        shoal_here("checkpoint", "unpin", str(first), cwd=tmp_path)
        assert "pinned" not in shoal_here("checkpoint", "ls", run, cwd=tmp_path).stdout

        # The run's folder says where its checkpoints are.
        (tmp_path / "run").mkdir()
        config = f"checkpoint: {{storage: '{bucket.uri('runs')}'}}"
        (tmp_path / "run" / "config.yaml").write_text(config)
        done = shoal_here("export", "run", "out", "--dtype", "fp32", cwd=tmp_path)
        assert (done.returncode, done.stdout) == (0, f"Wrote out from {second}\n"), done.stderr
        assert same_weights(tmp_path / "out", decoder)

        write_config(tmp_path, cluster="{workers: 2, device: cpu}")
        other = bucket.uri("runs/other")
        done = shoal_here("checkpoint", "reshard", run, other, "--config", "run.yaml", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f"Wrote s3://{bucket.name}/runs/other/step-00000006-")
        done = shoal_here("checkpoint", "verify", other, cwd=tmp_path)
        assert (done.returncode, done.stdout[-7:]) == (0, " whole\n")

        key = f"runs/run/{second.name}/__0_0.distcp"
        data = bucket.read(key)
        bucket.write(key, data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
        done = shoal_here("checkpoint", "verify", run, cwd=tmp_path)
        assert done.returncode == 1 and f"{first}  whole\n" in done.stdout
        assert f"{second}  damaged: " in done.stdout and "__0_0.distcp" in done.stdout


@pytest.mark.parametrize("command", ["ls", "verify"])
def test_a_store_that_does_not_answer(tmp_path: Path, command: str) -> None:
    with serving() as bucket:
        bucket.rule = lambda method, path: "403"
        done = shoal_here("checkpoint", command, bucket.uri("run"), cwd=tmp_path)
        assert done.returncode == 1
        assert "ACCESS_DENIED" in done.stderr and "Traceback" not in done.stderr
        bucket.rule = lambda method, path: None
        done = shoal_here("checkpoint", command, bucket.uri("run"), cwd=tmp_path)
        assert done.returncode == 2 and "it holds no checkpoints" in done.stderr
    done = shoal_here("checkpoint", command, "s3://bucket?what=ever", cwd=tmp_path)
    assert done.returncode == 2 and "what is none of its options" in done.stderr
