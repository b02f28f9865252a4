"""Writes tests/golden/tokenizer_*.json: ids that llama.cpp gives to difficult strings.

Run by hand, in an environment with this package's dev and reference extras, llama-cpp-python, sentencepiece
and protobuf:

    python -m tests.text.make_golden SMOLLM2.gguf

The SentencePiece vocabulary is trained here on the LICENSE and the strings; its ids are written only if
SentencePiece and llama.cpp agree on every string. Each pre-tokenizer is asked on the real Qwen vocabulary.
"""

from __future__ import annotations

import io
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.support.difficult_text import (
    ALL_STRINGS,
    CJK,
    CONTRACTIONS,
    NUMBERS,
    PUNCTUATION,
    STRINGS,
    WHITESPACE,
)
from tests.support.gguf_files import write_tokenizer
from tests.support.qwen_vocab import qwen_gguf

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden"
CHOSEN = STRINGS[::2]
PRE_STRINGS = [
    *CONTRACTIONS,
    " ".join(NUMBERS),
    *WHITESPACE[7:],
    *PUNCTUATION[2:6],
    PUNCTUATION[-2],
    CJK[3],
    "HTTPServer iPhone ÉCOLE",
]
PRE_NAMES = ["default", "gpt-2", "smollm", "qwen2", "llama-bpe", "smaug-bpe", "tekken"]


def llama_ids(path: Path, strings: list[str]) -> list[list[int]]:
    import llama_cpp

    model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    return [model.tokenize(text.encode("utf-8"), add_bos=False, special=True) for text in strings]


def train_sentence_piece() -> tuple[Any, Any]:
    """A BPE model with byte fallback, settings as Llama's: (processor, model protobuf)."""
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2

    lines = (ROOT / "LICENSE").read_text(encoding="utf-8").split("\n")
    lines += 3 * [text for text in ALL_STRINGS if "\0" not in text and "<|" not in text]
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for line in lines if line.strip()]),
        model_writer=out,
        model_type="bpe",
        vocab_size=640,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        character_coverage=0.985,
        control_symbols=["<|im_start|>", "<|im_end|>"],
        user_defined_symbols=["<tool>"],
        minloglevel=2,
    )
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(out.getvalue())
    return sentencepiece.SentencePieceProcessor(model_proto=out.getvalue()), proto


def dump(name: str, value: dict[str, Any]) -> None:
    import llama_cpp

    value = {"source": f"llama.cpp through llama-cpp-python {llama_cpp.__version__}", **value}
    lines = [f"{json.dumps(key)}: {json.dumps(item, ensure_ascii=True)}" for key, item in value.items()]
    (GOLDEN / name).write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def main(smollm2: Path) -> None:
    dump("tokenizer_smollm2.json", {"strings": CHOSEN, "ids": llama_ids(smollm2, CHOSEN)})

    with tempfile.TemporaryDirectory() as folder:
        ids_of = {}
        for pre in PRE_NAMES:
            ids_of[pre] = llama_ids(qwen_gguf(Path(folder) / f"{pre}.gguf", pre), PRE_STRINGS)
    dump("tokenizer_pre.json", {"strings": PRE_STRINGS, **ids_of})

    processor, proto = train_sentence_piece()
    vocabulary = {
        "pieces": [piece.piece for piece in proto.pieces],
        "scores": [piece.score for piece in proto.pieces],
        "types": [piece.type for piece in proto.pieces],
    }
    with tempfile.TemporaryDirectory() as folder:
        path = write_tokenizer(
            Path(folder) / "model.gguf",
            model="llama",
            tokens=vocabulary["pieces"],
            scores=vocabulary["scores"],
            types=vocabulary["types"],
            ids={"bos": 1, "eos": 2, "unknown": 0},
        )
        ids = llama_ids(path, CHOSEN)
    plain = [(text, expected) for text, expected in zip(CHOSEN, ids, strict=True) if "<|" not in text]
    for text, expected in plain:
        if "\0" not in text and processor.encode(text) != expected:
            raise SystemExit(f"SentencePiece and llama.cpp differ on {text!r}")
    dump("tokenizer_sentencepiece.json", {"strings": CHOSEN, "ids": ids, **vocabulary})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
