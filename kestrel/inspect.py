"""``kestrel inspect PATH``: what a model is made of, what it takes, and what would be refused."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from kestrel.checkpoints.manifest import MANIFEST_FILE, WEIGHTS_FILE, Manifest, read_manifest
from kestrel.checkpoints.quantize import RangeError, check_finite
from kestrel.checkpoints.safetensors_file import read_header
from kestrel.checkpoints.source import open_source
from kestrel.checkpoints.source_model import Checkpoint, Findings, StoredTensor
from kestrel.cli import command_parser, progress_bar, run_command, write_out
from kestrel.config import ModelConfig
from kestrel.errors import ModelError
from kestrel.kvcache import KVCache
from kestrel.ops import WType
from kestrel.weights import load_model_folder, stored_wtype, tensor_specs

_BLOCK = 2**22  # weights read at a time by --verify

Update = Callable[[int, int], None]


@dataclasses.dataclass
class Report:
    """What is known of a model, whatever its format; ``faults`` are the reasons to refuse it."""

    path: str
    format: str  # "kestrel", "hugging-face", "gguf", or "" when it is none of them
    config: ModelConfig | None
    tensors: list[StoredTensor]
    faults: list[str]
    notes: list[str]
    fingerprint: str | None = None  # of a kestrel folder
    wtype: str | None = None
    head_wtype: str | None = None
    sources: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    verified: bool = False

    @property
    def parameters(self) -> int | None:
        return None if self.config is None else _parameters(self.config)

    @property
    def bytes_by_type(self) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for tensor in self.tensors:
            sizes[tensor.type] = sizes.get(tensor.type, 0) + tensor.nbytes
        return sizes

    @property
    def kv_bytes_per_token(self) -> int | None:
        return None if self.config is None else KVCache.bytes_per_slot(self.config)

    @property
    def converted_bytes(self) -> dict[str, int]:
        """Bytes of weights after conversion to each format, with the default head."""
        if self.config is None or self.format == "kestrel":
            return {}
        return {
            "q4local": _converted_bytes(self.config, WType.q4local, WType.q8local),
            "q8local": _converted_bytes(self.config, WType.q8local, WType.q8local),
            "bf16": _converted_bytes(self.config, WType.bf16, WType.bf16),
        }

    def to_json(self) -> dict[str, Any]:
        return {
            **dataclasses.asdict(self),
            "parameters": self.parameters,
            "bytes_by_type": self.bytes_by_type,
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "converted_bytes": self.converted_bytes,
        }


def inspect(path: Path | str, *, verify: bool = False, progress: Update | None = None) -> Report:
    """Describe a kestrel folder, Hugging Face folder or GGUF file; does not raise for one that is refused.

    ``verify`` reads all the data: a kestrel folder is compared with the hashes of its manifest, a source is
    searched for weights that are NaN or infinite. ``progress`` is called with work done and work in all.
    """
    folder = Path(path)
    if (folder / MANIFEST_FILE).exists():
        return _inspect_kestrel(folder, verify, progress)
    findings = Findings()
    faults: list[str] = []
    notes: list[str] = []
    try:
        checkpoint = open_source(folder, findings)
    except ModelError as error:
        faults = error.faults
    else:
        notes = checkpoint.notes
        try:
            if verify:
                faults = _verify_source(checkpoint, progress)
        finally:
            checkpoint.close()
    return Report(
        path=str(path),
        format=findings.format,
        config=findings.config,
        tensors=findings.stored,
        faults=faults,
        notes=notes,
        verified=verify and not faults,
    )


def _parameters(config: ModelConfig) -> int:
    return sum(spec.rows * spec.k for spec in tensor_specs(config))


def _converted_bytes(config: ModelConfig, wtype: WType, head_wtype: WType) -> int:
    total = 0
    for spec in tensor_specs(config):
        stored = stored_wtype(spec, wtype, head_wtype)
        total += spec.rows * (4 * spec.k if stored is None else stored.bytes_per_row(spec.k))
    return total


def _inspect_kestrel(folder: Path, verify: bool, progress: Update | None) -> Report:
    report = Report(str(folder), "kestrel", None, [], [], [])
    try:
        manifest = read_manifest(folder)
        report.config, report.fingerprint = manifest.config, manifest.fingerprint
        report.wtype, report.head_wtype = manifest.wtype, manifest.head_wtype
        report.sources = [dataclasses.asdict(source) for source in manifest.sources]
        for spec in tensor_specs(manifest.config):
            record = manifest.tensors.get(spec.name)
            if record is not None:
                row = 4 * spec.k if record.wtype == "f32" else WType[record.wtype].bytes_per_row(spec.k)
                report.tensors.append(StoredTensor(spec.name, record.wtype, spec.shape, spec.rows * row))
        load_model_folder(folder)
        if verify:
            report.faults = _verify_kestrel(folder, manifest, progress)
            report.verified = not report.faults
    except ModelError as error:
        report.faults = error.faults
    except KeyError as error:
        report.faults = [f"{MANIFEST_FILE}: unknown format {error}"]
    return report


def _verify_kestrel(folder: Path, manifest: Manifest, progress: Update | None) -> list[str]:
    """Differences between the folder's bytes and the manifest's hashes."""
    faults = []
    header = read_header(folder / WEIGHTS_FILE)
    done, total = 0, header.size - header.data_begin
    with (folder / WEIGHTS_FILE).open("rb", buffering=0) as file:
        for record in manifest.tensors.values():
            for name, expected in record.sha256.items():
                entry = header.tensors[name]
                digest = hashlib.sha256()
                file.seek(entry.begin)
                left = entry.nbytes
                while left:
                    chunk = file.read(min(left, 2**20))
                    digest.update(chunk)
                    left -= len(chunk)
                done += entry.nbytes
                if progress is not None:
                    progress(done, total)
                if digest.hexdigest() != expected:
                    faults.append(f"{name}: its bytes are not those that were converted (sha256 differs)")
    for side in manifest.files:
        path = folder / side.name
        if not path.is_file():
            faults.append(f"{side.name}: missing")
        elif hashlib.sha256(path.read_bytes()).hexdigest() != side.sha256:
            faults.append(f"{side.name}: changed since the conversion (sha256 differs)")
    return faults


def _verify_source(checkpoint: Checkpoint, progress: Update | None) -> list[str]:
    """Tensors with weights that are not finite."""
    faults = []
    done, total = 0, sum(t.spec.rows * t.spec.k for t in checkpoint.tensors)
    for tensor in checkpoint.tensors:
        step = max(1, _BLOCK // tensor.spec.k)
        try:
            for begin in range(0, tensor.spec.rows, step):
                check_finite(tensor.read(begin, min(begin + step, tensor.spec.rows)))
        except RangeError as error:
            faults.append(f"{tensor.spec.name} ({tensor.origin}): {error}")
        done += tensor.spec.rows * tensor.spec.k
        if progress is not None:
            progress(done, total)
    return faults


# -- text ----------------------------------------------------------------------------------------------------


def report_text(report: Report) -> str:
    """The report as lines for a reader."""
    lines = [f"{report.path}: {report.format or 'not a model'}"]
    if report.config is not None:
        lines += _config_lines(report.config)
    if report.wtype is not None:
        lines.append(f"  converted to     {report.wtype}, embedding and head {report.head_wtype}")
        lines.append(f"  fingerprint      {report.fingerprint}")
        lines += [f"  source           {s['name']}, {s['bytes']} bytes" for s in report.sources]
    if report.tensors:
        total = sum(report.bytes_by_type.values())
        sizes = ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in report.bytes_by_type.items())
        lines.append(f"  weights          {total / 1e6:.1f} MB in {len(report.tensors)} tensors: {sizes}")
    if report.config is not None:
        per_token, limit = KVCache.bytes_per_slot(report.config), report.config.max_position
        lines.append(
            f"  KV cache         {per_token} bytes per token, "
            f"{per_token * limit / 1e6:.1f} MB for {limit} tokens"
        )
    if report.converted_bytes:
        sizes = ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in report.converted_bytes.items())
        lines.append(f"  would convert to {sizes}")
    if report.tensors:
        lines += ["", *_tensor_lines(report.tensors)]
    lines += [f"note: {note}" for note in report.notes]
    if report.verified:
        lines.append(
            "verified: every stored hash agrees" if report.wtype else "verified: every weight is finite"
        )
    if report.faults:
        lines += ["", f"refused, {len(report.faults)} fault{'s' if len(report.faults) > 1 else ''}:"]
        lines += [f"  - {fault}" for fault in report.faults]
    return "\n".join(lines) + "\n"


def _config_lines(c: ModelConfig) -> list[str]:
    size = f"{_parameters(c) / 1e6:.1f} M parameters, {c.num_layers} layers, hidden {c.hidden_size}"
    heads = f"{c.num_heads} query / {c.num_kv_heads} KV heads of {c.head_dim}"
    lines = [
        f"  model            {c.family}, {size}",
        f"  attention        {heads}, {'with' if c.qk_norm else 'without'} QK-norm",
    ]
    if c.moe is not None:
        lines.append(
            f"  experts          {c.moe.num_experts} of width {c.moe.intermediate_size}, "
            f"{c.moe.top_k} a token, norm_topk_prob {str(c.moe.norm_topk_prob).lower()}"
        )
    if c.moe is None or c.moe.dense_layers:
        lines.append(f"  FFN              width {c.intermediate_size}")
    rope = f"{c.rope.type}, theta {c.rope.theta:g}"
    if c.rope.type != "default":
        rope += f", factor {c.rope.factor:g}"
    head = "tied" if c.tie_word_embeddings else "of its own"
    ends = ", ".join(map(str, c.eos_token_ids)) or "none"
    return [
        *lines,
        f"  RoPE             {rope}, context {c.max_position}",
        f"  vocabulary       {c.vocab_size}, head {head}, end tokens {ends}",
    ]


def _tensor_lines(tensors: Iterable[StoredTensor]) -> list[str]:
    """One line for each kind of tensor: the same tensor of many layers (and experts) is counted."""
    groups: dict[tuple[str, str, tuple[int, ...]], list[int]] = {}
    for tensor in tensors:
        name = re.sub(r"(?<=\.)\d+(?=\.)", "*", tensor.name)
        groups.setdefault((name, tensor.type, tensor.shape), []).append(tensor.nbytes)
    rows = [
        (name, kind, str(list(shape)), f"{len(sizes)} x {sizes[0]}" if len(sizes) > 1 else str(sizes[0]))
        for (name, kind, shape), sizes in groups.items()
    ]
    rows.insert(0, ("tensor", "type", "shape", "bytes"))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return [
        "  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code: 1 when the model would be refused."""
    parser = command_parser("inspect", "Show a model's config, tensors and bytes, and what would be refused.")
    parser.add_argument("path", metavar="PATH", help="kestrel folder, Hugging Face folder or GGUF file")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="read all data: check stored hashes, or that weights are finite",
    )
    args = parser.parse_args(argv)
    with progress_bar("verifying", shown=args.verify) as bar:
        report = inspect(args.path, verify=args.verify, progress=bar)
    if args.json:
        write_out(json.dumps(report.to_json(), indent=1, ensure_ascii=False) + "\n")
    else:
        write_out(report_text(report))
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(run_command(main))
