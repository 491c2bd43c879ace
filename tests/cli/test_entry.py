"""The entry: commands, exit codes, messages."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.shell import shoal, shoal_here, write_config

COMMANDS = {
    "": (
        "plan",
        "train",
        "export",
        "import",
        "generate",
        "score",
        "serve",
        "certify",
        "checkpoint",
        "bench",
    ),
    "checkpoint": ("ls", "verify", "pin", "unpin", "reshard"),
    "bench": ("train", "engine", "serve", "checkpoint"),
}
"""Those of each group, in the order of its help."""


@pytest.mark.parametrize("group", COMMANDS)
def test_help_names_every_command(tmp_path: Path, group: str) -> None:
    done = shoal(*group.split(), "--help", cwd=tmp_path)
    assert done.returncode == 0
    _, _, listed = done.stdout.partition("─ Commands ─")
    assert tuple(re.findall(r"^│ (\S+)", listed, re.MULTILINE)) == COMMANDS[group]


@pytest.mark.parametrize(
    "words",
    [(*group.split(), command) for group, commands in COMMANDS.items() for command in commands],
    ids=" ".join,
)
def test_each_command_explains_itself(tmp_path: Path, words: tuple[str, ...]) -> None:
    done = shoal_here(*words, "--help", cwd=tmp_path)
    assert done.returncode == 0
    assert "Usage" in done.stdout


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from shoal.cli import main\n"
        "sys.argv = ['shoal', '--help']\n"
        "try: main()\n"
        "except SystemExit as end: assert end.code == 0\n"
        "heavy = {'torch', 'ray', 'numpy', 'transformers'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_installed_command_is_this_one() -> None:
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="shoal")
    assert script.value == "shoal.cli:main"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("plan",), "Missing argument 'CONFIG'"),
        (("plan", "run.yaml", "--set"), "requires an argument"),
        (("frobnicate",), "No such command 'frobnicate'"),
        (("plan", "run.yaml", "--jsno"), "No such option"),
        (("bench", "train", "--against", "jax"), "'jax' is not one of"),
        (("checkpoint", "verify"), "Missing argument 'PATH'"),
    ],
)
def test_wrong_usage(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    write_config(tmp_path)
    done = shoal_here(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["plan", "train"])
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.stepz=1", "train.stepz = 1: is no known key. Did you mean train.steps?"),
        ("train.steps=no", "train.steps = 'no': must be an integer. Write a whole number."),
        ("oops", "--set = 'oops': is not key=value. Write --set section.key=value."),
    ],
)
def test_wrong_input_is_refused_in_one_message(
    tmp_path: Path, command: str, override: str, message: str
) -> None:
    config = write_config(tmp_path)
    done = shoal(command, str(config), "--set", override, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"{message}\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "run.yaml"]


def test_the_python_of_what_is_not_measured(tmp_path: Path) -> None:
    done = shoal_here("bench", "engine", "--vllm-python", "python", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (
        2,
        "",
        "--vllm-python = 'python': vLLM is not run. Add --against vllm.\n",
    )


def test_a_folder_to_measure_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code = (
        "import sys\n"
        "from shoal.cli import main\n"
        "try: main()\n"
        "finally: assert 'torch' not in sys.modules\n"
    )
    for folder, why in (("none", "No such file or directory"), ("file", "Not a directory")):
        words = ["bench", "checkpoint", "--folder", folder]
        done = subprocess.run(
            [sys.executable, "-c", code, *words],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stdout, done.stderr) == (
            2,
            "",
            f"--folder = '{folder}': nothing can be written there: {why}. "
            "Give a folder that there is and that you may write to.\n",
        )


def test_a_missing_file(tmp_path: Path) -> None:
    done = shoal("train", "nowhere.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == (
        "CONFIG = 'nowhere.yaml': there is no such file. Give the path of a YAML file.\n"
    )


@pytest.mark.parametrize(
    ("body", "code", "shown", "hidden"),
    [
        ("raise ConfigError('a.b', 1, 'is odd', 'Use 2')", 2, "a.b = 1: is odd. Use 2.", "Trace"),
        ("raise WorkError('The disk is full.')", 1, "The disk is full.", "Traceback"),
        ("raise EndedEarly('Out of data at step 3.')", 3, "Out of data at step 3.", "Traceback"),
        (
            "try: open('/nowhere/x')\n"
            "except OSError as error: raise WorkError('Saving failed.') from error",
            1,
            "Saving failed.\nFirst cause: FileNotFoundError: [Errno 2]",
            "Traceback",
        ),
        ("raise OSError(28, 'No space left on device', 'f')", 1, "[Errno 28] No space", "Trace"),
        ("raise KeyError('surprise')", 1, "KeyError: 'surprise'", "no such thing"),
        ("raise KeyboardInterrupt", 130, "", "Traceback"),
        (
            "import os, signal, sys\n"
            "try: os.kill(os.getpid(), signal.SIGTERM)\n"
            "finally: sys.stderr.write('put away')",
            143,
            "put away",
            "Traceback",
        ),
        ("return 3", 3, "", "Traceback"),
        ("return 0", 0, "", "Traceback"),
    ],
)
def test_every_end_has_its_exit_code(
    tmp_path: Path, body: str, code: int, shown: str, hidden: str
) -> None:
    # The driver above the platform is found by name, so a stand-in can take its place.
    lines = "".join(f"    {line}\n" for line in body.split("\n"))
    package = tmp_path / "shoal_actors" / "train"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").write_text(
        f"from shoal.errors import ConfigError, EndedEarly, WorkError\ndef run(config):\n{lines}"
    )
    done = shoal("train", str(write_config(tmp_path)), cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert shown in done.stderr
    assert hidden not in done.stderr


@pytest.mark.parametrize("resume", ["never", "runs/run/checkpoints/step-00000010", "123", 'a"b'])
def test_resume_is_laid_over_the_file(tmp_path: Path, resume: str) -> None:
    package = tmp_path / "shoal_actors" / "train"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").write_text(
        "def run(config):\n    print(config.checkpoint.resume)\n    return 0\n"
    )
    config = write_config(tmp_path, checkpoint="{resume: auto}")
    done = shoal("train", str(config), "--resume", resume, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"{resume}\n"), done.stderr
