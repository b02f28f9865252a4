"""Speed of the CPU reference, against llama.cpp on the same weights, threads and machine.

    make bench-env                                    # once: llama.cpp built into .venv-bench
    .venv/bin/python bench/cpu.py --shape qwen3-0.6b  # synthetic weights of that shape
    .venv/bin/python bench/cpu.py --model models/smollm2-135m-instruct

Both engines get the same token ids. Each round runs one after the other, in turn first: the prompt as
batches, then the generated tokens one by one. Reported are medians over the rounds, and the median of the
rounds' ratios (llama.cpp's time / kestrel's time: above 1, kestrel is faster). Weights are exported to a GGUF
file bit for bit; both engines' logits are compared first, so that a file that means something else is a
failure, not a result.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from export_gguf import export_gguf
from rich.console import Console
from rich.table import Table
from synthetic import SHAPES, synthetic_weights

from kestrel import _native
from kestrel.benchmark.shapes import weight_bytes_per_token
from kestrel.config import ModelConfig
from kestrel.cpu import CpuBackend
from kestrel.doctor import cpu_name
from kestrel.engine import Engine
from kestrel.errors import KestrelError, UsageError
from kestrel.ops import WType
from kestrel.sampling import SamplingParams
from kestrel.stats import Timings
from kestrel.weights import Weights, load_model_folder

ROOT = Path(__file__).resolve().parent.parent
MIN_CORRELATION = 0.98  # of the two engines' logits; different activations and KV formats leave about 0.995
SETTLE_SECONDS = 0.3  # between runs: the other engine's threads stop spinning


@dataclass
class Rates:
    """Seconds of each round."""

    prompt: list[float] = field(default_factory=list)
    generation: list[float] = field(default_factory=list)


@dataclass
class Result:
    model: str
    cpu: str
    threads: int
    isa: str
    prompt_tokens: int
    generated_tokens: int
    weight_bytes_per_token: int
    read_gb_per_second: float  # a plain read by as many threads, median of the rounds
    kestrel: Rates
    llama: Rates | None
    llama_version: str | None
    logit_correlation: float | None
    same_top1: bool | None

    def prompt_rate(self, rates: Rates) -> float:
        return self.prompt_tokens / statistics.median(rates.prompt)

    def generation_rate(self, rates: Rates) -> float:
        return self.generated_tokens / statistics.median(rates.generation)

    def gb_per_second(self, rates: Rates) -> float:
        return self.weight_bytes_per_token * self.generation_rate(rates) / 1e9

    def ratio(self, what: Literal["prompt", "generation"]) -> float | None:
        if self.llama is None:
            return None
        theirs: list[float] = getattr(self.llama, what)
        ours: list[float] = getattr(self.kestrel, what)
        return statistics.median(a / b for a, b in zip(theirs, ours, strict=True))

    def as_json(self) -> dict[str, Any]:
        rates = {"kestrel": self.kestrel, "llama": self.llama}
        summary = {
            name: {
                "prompt_tokens_per_second": self.prompt_rate(r),
                "generation_tokens_per_second": self.generation_rate(r),
                "weights_gb_per_second": self.gb_per_second(r),
            }
            for name, r in rates.items()
            if r is not None
        }
        ratios = {"prompt": self.ratio("prompt"), "generation": self.ratio("generation")}
        return {**asdict(self), "summary": summary, "llama_time_over_kestrel_time": ratios}


class LlamaProcess:
    """llama.cpp in the bench environment, fed through pipes (bench/llama_worker.py)."""

    def __init__(self, python: Path, gguf: Path, threads: int, context: int) -> None:
        worker = Path(__file__).with_name("llama_worker.py")
        command = [str(python), str(worker), str(gguf), "--threads", str(threads), "--context", str(context)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.info = self._answer()

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise KestrelError(f"llama.cpp stopped with status {self._process.wait()}: its message is above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


def run_kestrel(engine: Engine, prompt: list[int], count: int) -> tuple[list[int], Timings]:
    timings = Timings()
    params = SamplingParams(temperature=0.0, max_tokens=count + 1)
    tokens = list(engine.generate(prompt, params, timings=timings))
    return tokens, timings


def compare_logits(engine: Engine, llama: LlamaProcess, prompt: list[int]) -> tuple[float, bool]:
    """Correlation of the logits after ``prompt``, and whether their largest is the same.

    Raises KestrelError below ``MIN_CORRELATION``.
    """
    ours: npt.NDArray[np.float32] = engine.logits(prompt)[-1]
    theirs = np.array(llama.ask(do="logits", prompt=prompt)["logits"], np.float32)
    correlation = float(np.corrcoef(ours, theirs)[0, 1])
    if not correlation >= MIN_CORRELATION:
        raise KestrelError(
            f"the engines' logits correlate by {correlation:.4f} only (at least {MIN_CORRELATION} expected): "
            "they do not run the same model, so their times cannot be compared"
        )
    return correlation, int(ours.argmax()) == int(theirs.argmax())


def bench(
    name: str, config: ModelConfig, weights: Weights, args: argparse.Namespace, folder: Path, console: Console
) -> Result:
    context = args.prompt + args.generate + 1
    backend = CpuBackend(args.threads, args.isa)
    engine = Engine(config, weights, backend, context=context, chunk=args.chunk)
    rng = np.random.default_rng(args.seed)
    prompt = [int(i) for i in rng.integers(0, config.vocab_size, args.prompt)]
    llama = None
    correlation, same = None, None
    if not args.no_llama:
        file = folder / f"{Path(name).name}.gguf"
        console.print(f"{name}: exporting {file}")
        export_gguf(config, weights, file)
        llama = LlamaProcess(args.bench_env / "bin" / "python", file, backend.threads, context)
    try:
        if llama is not None:
            correlation, same = compare_logits(engine, llama, prompt[:64])
        ours, theirs, reads = Rates(), Rates(), list[float]()
        generated: list[int] = []

        def kestrel_round() -> None:
            nonlocal generated
            generated, t = run_kestrel(engine, prompt, args.generate)
            ours.prompt.append(t.prompt_seconds)
            ours.generation.append(t.generation_seconds)

        def llama_round() -> None:
            if llama is not None:
                t = llama.ask(do="run", prompt=prompt, generated=generated[: args.generate])
                theirs.prompt.append(t["prompt_seconds"])
                theirs.generation.append(t["generation_seconds"])

        for index in range(-1, args.rounds):  # round -1 warms up: page tables, compiled steps
            order = (
                [kestrel_round, llama_round] if index % 2 or not generated else [llama_round, kestrel_round]
            )
            for run in order:
                time.sleep(SETTLE_SECONDS)
                run()
            reads.append(_native.read_bandwidth(1 << 28, backend.threads))
            if index >= 0:
                console.print(f"{name}: round {index + 1} of {args.rounds}")
        for rates in (ours, theirs):
            del rates.prompt[:1], rates.generation[:1]
    finally:
        if llama is not None:
            llama.close()
    return Result(
        model=name,
        cpu=cpu_name(),
        threads=backend.threads,
        isa=backend.isa,
        prompt_tokens=args.prompt,
        generated_tokens=args.generate,
        weight_bytes_per_token=weight_bytes_per_token(config, weights),
        read_gb_per_second=statistics.median(reads),
        kestrel=ours,
        llama=theirs if llama is not None else None,
        llama_version=llama.info["version"] if llama is not None else None,
        logit_correlation=correlation,
        same_top1=same,
    )


def show(results: list[Result], console: Console) -> None:
    table = Table(
        title="CPU: tokens per second, median of the rounds; ratio: llama.cpp's time / kestrel's time"
    )
    for column in ("model", "", "prompt tok/s", "decode tok/s", "weights GB/s", "of plain read"):
        table.add_column(column, justify="left" if column in ("model", "") else "right")
    for r in results:
        for label, rates in (("kestrel", r.kestrel), ("llama.cpp", r.llama)):
            if rates is None:
                continue
            gb = r.gb_per_second(rates)
            table.add_row(
                r.model if label == "kestrel" else "",
                f"{label} {r.isa}" if label == "kestrel" else label,
                f"{r.prompt_rate(rates):.1f}",
                f"{r.generation_rate(rates):.1f}",
                f"{gb:.1f}",
                f"{gb / r.read_gb_per_second:.0%}",
            )
        if r.llama is not None:
            table.add_row("", "ratio", f"{r.ratio('prompt'):.2f}", f"{r.ratio('generation'):.2f}", "", "")
            table.add_row("", f"logits correlate {r.logit_correlation:.4f}", "", "", "", "")
        table.add_section()
    console.print(table)
    for r in results:
        console.print(
            f"{r.model}: {r.threads} threads, {r.prompt_tokens} prompt tokens, "
            f"{r.generated_tokens} decoded tokens, {len(r.kestrel.prompt)} rounds, "
            f"{r.weight_bytes_per_token / 1e6:.1f} MB of weights a token, "
            f"plain read {r.read_gb_per_second:.1f} GB/s, {r.cpu}"
        )


def models(
    args: argparse.Namespace, folder: Path, console: Console
) -> Iterator[tuple[str, ModelConfig, Weights]]:
    for path in args.model:
        yield (str(path), *load_model_folder(path))
    for shape in args.shape:
        console.print(f"{shape}: making weights")
        config = SHAPES[shape]
        file = folder / f"{shape}.weights"
        yield (
            shape,
            config,
            synthetic_weights(config, file, wtype=args.wtype, head_wtype=args.head_wtype, seed=args.seed),
        )


@contextmanager
def work_folder(path: Path | None) -> Iterator[Path]:
    if path is not None:
        path.mkdir(parents=True, exist_ok=True)
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="kestrel-bench-") as name:
        yield Path(name)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    wtypes = {w.name: w for w in WType}

    def wtype(text: str) -> WType:
        if text not in wtypes:
            raise argparse.ArgumentTypeError(f"choose from {', '.join(wtypes)}")
        return wtypes[text]

    parser.add_argument("-m", "--model", type=Path, action="append", default=[], help="kestrel model folder")
    parser.add_argument(
        "--shape", choices=sorted(SHAPES), action="append", default=[], help="synthetic weights"
    )
    parser.add_argument("--wtype", type=wtype, default=WType.q4local, help="of --shape (default q4local)")
    parser.add_argument(
        "--head-wtype", type=wtype, default=WType.q8local, help="of --shape (default q8local)"
    )
    parser.add_argument("-t", "--threads", type=int, help="default: every CPU this process may use")
    parser.add_argument("--isa", choices=("scalar", "avx2", "avx512"), help="default: the best of this CPU")
    parser.add_argument("--prompt", type=int, default=512, metavar="N", help="prompt tokens (default 512)")
    parser.add_argument("--generate", type=int, default=64, metavar="N", help="decoded tokens (default 64)")
    parser.add_argument(
        "--chunk", type=int, default=256, help="rows of one kestrel forward pass (default 256)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds (default 5)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-llama", action="store_true", help="time kestrel alone")
    parser.add_argument(
        "--bench-env", type=Path, default=ROOT / ".venv-bench", help="environment with llama.cpp"
    )
    parser.add_argument("--work", type=Path, help="folder for generated files, kept (default: temporary)")
    parser.add_argument("--json", type=Path, help="write the results there")
    return parser


def main(argv: list[str] | None = None) -> int:
    parser = build_parser()
    args = parser.parse_args(argv)
    if not args.model and not args.shape:
        parser.error("name a model: --model FOLDER or --shape NAME")
    for name in ("prompt", "generate", "rounds", "chunk"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1")
    log = Console(stderr=True)
    python = args.bench_env / "bin" / "python"
    if not args.no_llama and not python.exists():
        log.print(
            f"bench/cpu.py: no llama.cpp: {python} is missing. Run 'make bench-env', or give "
            "--bench-env DIR, or --no-llama to time kestrel alone.",
            style="red",
        )
        return 1
    try:
        with work_folder(args.work) as folder:
            results = [bench(*model, args, folder, log) for model in models(args, folder, log)]
    except UsageError as error:
        log.print(f"bench/cpu.py: {error}", style="red")
        return 2
    except (KestrelError, ValueError) as error:
        log.print(f"bench/cpu.py: {error}", style="red")
        return 1
    show(results, Console(width=None if sys.stdout.isatty() else 110))
    if args.json is not None:
        args.json.write_text(json.dumps([r.as_json() for r in results], indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
