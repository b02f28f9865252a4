"""What each weight format and each choice of scales costs, measured on logits.

``python -m bench.quantization FOLDER [--golden FILE.npz]`` quantises a Hugging Face checkpoint in memory and
prints one line for each choice: relative weight error, and against two references the mean KL divergence and
how often the likeliest token is the same. The references are

- golden: ``logits`` f32[T, V] for ``tokens`` i32[T] in the npz file, computed in f32 by another program;
- sampled: the same model in bf16 here, on texts that it samples itself (temperature 1, fixed seeds).

The difference column is the sampled KL minus that of the format's first line, with its standard error: the
texts are the same, so small differences show that a comparison of the means would hide.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kestrel.checkpoints.quantize import Q4_SCALES, Q4Scale, dequantize, quantize
from kestrel.checkpoints.source import open_source
from kestrel.checkpoints.source_model import Checkpoint
from kestrel.cpu import CpuBackend
from kestrel.model import Model
from kestrel.ops import WType
from kestrel.weights import Weights, stored_wtype

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I32 = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Choice:
    name: str
    wtype: WType
    head_wtype: WType
    q4_scale: Q4Scale = "plain"


CHOICES = [
    Choice("bf16", WType.bf16, WType.bf16),
    Choice("q8local", WType.q8local, WType.q8local),
    *(Choice(f"q4local {scale}, q8local head", WType.q4local, WType.q8local, scale) for scale in Q4_SCALES),
    *(Choice(f"q4local {scale}, q4local head", WType.q4local, WType.q4local, scale) for scale in Q4_SCALES),
]


class Bench:
    def __init__(self, checkpoint: Checkpoint, threads: int | None) -> None:
        self.config = checkpoint.config
        self.backend = CpuBackend(threads)
        self.values = {t.spec.name: t.read(0, t.spec.rows).reshape(t.spec.shape) for t in checkpoint.tensors}
        self.specs = [t.spec for t in checkpoint.tensors]

    def weights(self, choice: Choice) -> tuple[Weights, float]:
        """Quantised weights, and their error relative to the values' root mean square."""
        weights: Weights = {}
        error = norm = 0.0
        for spec in self.specs:
            values = self.values[spec.name]
            wtype = stored_wtype(spec, choice.wtype, choice.head_wtype)
            if wtype is None:
                weights[spec.name] = values
                continue
            tensor = quantize(values, wtype, choice.q4_scale)
            weights[spec.name] = tensor
            if spec.role == "matrix":
                error += float(np.square(dequantize(tensor) - values, dtype=np.float64).sum())
                norm += float(np.square(values, dtype=np.float64).sum())
        return weights, (error / norm) ** 0.5

    def model(self, weights: Weights, length: int) -> Model:
        return Model(self.config, weights, self.backend, slots=length, max_rows=length)

    def logits(self, weights: Weights, tokens: I32) -> F32:
        length = len(tokens)
        model = self.model(weights, length)
        model.load_rows(tokens, np.arange(length, dtype=np.int32))
        model.step(length, length).program.run()
        return model.logits(length)

    def sample(self, weights: Weights, seed: int, length: int) -> I32:
        rng = np.random.default_rng(seed)
        model = self.model(weights, length)
        step = model.step(1, 1)
        tokens = [self.config.bos_token_id or 0]
        for position in range(length - 1):
            model.load_rows(np.array(tokens[-1:], np.int32), np.array([position], np.int32))
            step.program.run()
            p = np.exp(log_softmax(model.logits(1)[0]))
            tokens.append(int(rng.choice(p.size, p=p / p.sum())))
        return np.array(tokens, np.int32)


def log_softmax(logits: F32) -> F64:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def kl(reference: F32, logits: F32) -> F64:
    """Of each row: KL divergence of the softmax of ``logits`` from that of ``reference``, in nats."""
    p, q = log_softmax(reference), log_softmax(logits)
    return (np.exp(p) * (p - q)).sum(axis=-1)


def top1(reference: F32, logits: F32) -> npt.NDArray[np.bool_]:
    return reference.argmax(axis=-1) == logits.argmax(axis=-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path, help="Hugging Face folder of a small model")
    parser.add_argument("--golden", type=Path, help="npz file with tokens and logits")
    parser.add_argument("--texts", type=int, default=20, help="sampled texts (%(default)s)")
    parser.add_argument("--length", type=int, default=200, help="tokens in each (%(default)s)")
    parser.add_argument("-t", "--threads", type=int)
    args = parser.parse_args()

    bench = Bench(open_source(args.folder), args.threads)
    golden: Any = np.load(args.golden) if args.golden else None
    reference, _ = bench.weights(CHOICES[0])
    texts = [bench.sample(reference, seed, args.length) for seed in range(args.texts)]
    expected = [bench.logits(reference, text) for text in texts]

    print("| weights | weight error | golden KL | golden top-1 | sampled KL | difference | sampled top-1 |")
    print("|---|---|---|---|---|---|---|")
    first: dict[tuple[WType, WType], F64] = {}
    for choice in CHOICES:
        weights, error = bench.weights(choice)
        cells = [choice.name, f"{error:.4f}"]
        if golden is not None:
            logits = bench.logits(weights, golden["tokens"].astype(np.int32))
            cells += [
                f"{kl(golden['logits'], logits).mean():.5f}",
                f"{top1(golden['logits'], logits).mean():.3f}",
            ]
        else:
            cells += ["", ""]
        ours = [bench.logits(weights, text) for text in texts]
        divergences = np.concatenate([kl(e, o) for e, o in zip(expected, ours, strict=True)])
        equal = np.concatenate([top1(e, o) for e, o in zip(expected, ours, strict=True)])
        base = first.setdefault((choice.wtype, choice.head_wtype), divergences)
        difference = divergences - base
        cells += [
            f"{divergences.mean():.5f}",
            f"{difference.mean():+.5f} ± {difference.std() / len(difference) ** 0.5:.5f}",
            f"{equal.mean():.3f}",
        ]
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
