"""ruff, mypy, the import contracts and the package's metadata, as part of the one test command."""

import ast
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(*argv: str) -> None:
    done = subprocess.run([sys.executable, "-m", *argv], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_ruff_check() -> None:
    run("ruff", "check", ".")


def test_ruff_format() -> None:
    run("ruff", "format", "--check", ".")


@pytest.mark.timeout(600)
def test_mypy_strict() -> None:
    run("mypy")


def test_import_contracts() -> None:
    command = "import sys; from importlinter.cli import lint_imports_command as c; c(['--no-cache'])"
    done = subprocess.run([sys.executable, "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_shim_imports_only_the_standard_library() -> None:
    tree = ast.parse((ROOT / "eccon" / "shim.py").read_text())
    names = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    names |= {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert {n.split(".")[0] for n in names} <= set(sys.stdlib_module_names)


@pytest.mark.parametrize("argv", [["status"], ["up", "--help"], ["send", "--help"], ["config", "check"]])
def test_no_command_but_the_console_imports_textual(argv: list[str], tmp_path: Path) -> None:
    program = (
        "import sys; from eccon.cli import main; sys.argv = ['eccon', *sys.argv[1:]]\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print('textual' in sys.modules)"
    )
    env = {**os.environ, "ECCON_STATE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program, *argv], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.stdout.splitlines()[-1] == "False", done.stdout + done.stderr


def test_extras_name_what_an_operator_has() -> None:
    wanted = metadata.requires("eccon") or []
    found = [re.match(r"""([\w-]+).*extra == ['"](\w+)['"]""", r) for r in wanted]
    extras = {name: {m[1] for m in found if m and m[2] == name} for name in ("rbln", "vllm")}
    assert extras == {"rbln": {"vllm-rbln", "optimum-rbln", "nixl"}, "vllm": {"vllm", "nixl"}}
    scripts = {e.name: e.value for e in metadata.distribution("eccon").entry_points}
    assert scripts == {"eccon": "eccon.cli:main", "eccon-proxy": "eccon_proxy.cli:main"}
