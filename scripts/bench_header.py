"""What every benchmark says first: on what it ran, with which versions, of which commit."""

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("torch", "transformers", "triton", "numpy")


def environment() -> dict[str, str]:
    """Hardware, versions and commit, as they go into the JSON line too."""
    versions = {name: _version(name) for name in PACKAGES}
    return {"hardware": _hardware(), "python": platform.python_version(), **versions, "commit": _commit()}


def print_header(title: str) -> dict[str, str]:
    """Print the title and the environment; return the latter."""
    facts = environment()
    print(title)
    print(", ".join(f"{name} {value}" for name, value in facts.items()), end="\n\n", flush=True)
    return facts


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"


def _hardware() -> str:
    import torch

    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    return f"{os.cpu_count()} x {_cpu_name()}, {torch.get_num_threads()} threads"


def _cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _commit() -> str:
    """The commit, with a + where the working tree differs from it."""

    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
