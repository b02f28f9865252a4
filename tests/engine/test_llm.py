"""The Python interface: results, streams, finish reasons, text."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kestrel
from kestrel.cpu import CpuBackend
from kestrel.errors import BackendError, ContextOverflowError, KestrelError, ModelError, UsageError
from kestrel.llm import LLM
from kestrel.sampling import SamplingParams
from tests.support.bits import assert_bits_equal

PROMPT = "The kestrel hovers"
COUNT = 40  # random weights write half characters often: 40 tokens hold many


def set_eos(llm: LLM, *ids: int) -> None:
    llm.__dict__["eos_token_ids"] = frozenset(ids)


def test_the_package_offers_its_names_lazily() -> None:
    assert kestrel.LLM is LLM
    assert set(kestrel.__all__) <= set(dir(kestrel))
    for name in kestrel.__all__:
        getattr(kestrel, name)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        kestrel.nonsense  # noqa: B018


def test_generate(llm: LLM) -> None:
    result = llm.generate(PROMPT, 12)
    assert len(result.token_ids) == 12
    assert result.finish_reason == "length"
    assert result.prompt_token_ids == tuple(llm.encode(PROMPT))
    assert result.prompt_tokens == len(result.prompt_token_ids)
    assert result.text == llm.tokenizer.decode(result.token_ids)
    assert llm.generate(list(result.prompt_token_ids), 12) == result
    assert llm.generate(np.array(result.prompt_token_ids), 12) == result
    assert result.timings.generated_tokens == 12
    assert result.timings.prompt_seconds > 0


def test_greedy_follows_the_logits(llm: LLM) -> None:
    result = llm.generate(PROMPT, 6)
    logits = llm.logits([*result.prompt_token_ids, *result.token_ids])
    start = result.prompt_tokens - 1
    assert logits[start:-1].argmax(axis=1).tolist() == list(result.token_ids)
    assert_bits_equal(llm.logits(list(result.prompt_token_ids)), logits[: start + 1])


def test_sampling_is_repeatable_and_depends_on_the_seed(llm: LLM) -> None:
    runs = [llm.generate(PROMPT, 12, temperature=1.0, top_p=0.95, seed=seed).token_ids for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
    params = SamplingParams(temperature=1.0, top_p=0.95, seed=2, max_tokens=12)
    assert llm.generate(PROMPT, params=params).token_ids == runs[2]
    with pytest.raises(UsageError, match="not both"):
        llm.generate(PROMPT, 3, params=params)


# -- streams -------------------------------------------------------------------------------------------------


def test_a_stream_is_the_whole_text_in_pieces(llm: LLM) -> None:
    whole = llm.generate(PROMPT, COUNT)
    assert "\ufffd" in whole.text  # the interesting case: bytes that are no character
    for count in range(1, COUNT):  # max_tokens cuts inside characters
        stream = llm.stream(PROMPT, count)
        chunks = list(stream)
        assert "".join(chunk.text for chunk in chunks) == stream.result.text
        assert [c.token_id for c in chunks if c.token_id is not None] == list(whole.token_ids[:count])
        assert stream.result.text == llm.tokenizer.decode(whole.token_ids[:count])


def test_a_stream_has_no_result_before_its_end(llm: LLM) -> None:
    stream = llm.stream(PROMPT, 4)
    next(stream)
    with pytest.raises(KestrelError, match="not ended"):
        stream.result  # noqa: B018
    list(stream)
    assert stream.result.finish_reason == "length"


@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_closed_stream_is_cancelled(llm: LLM, after: int) -> None:
    whole = llm.generate(PROMPT, 8)
    stream = llm.stream(PROMPT, 8)
    for _ in range(after):
        next(stream)
    stream.close()
    assert stream.result.finish_reason == "cancelled"
    assert stream.result.token_ids == whole.token_ids[:after]
    assert list(stream) == []
    assert llm.generate(PROMPT, 8) == whole


def test_a_dropped_stream_is_cancelled(llm: LLM) -> None:
    for _ in llm.stream(PROMPT, 8):
        break
    gc.collect()
    assert len(llm.generate(PROMPT, 3).token_ids) == 3


def test_a_second_request_while_one_runs_is_refused(llm: LLM, tmp_path: Path) -> None:
    whole = llm.generate(PROMPT, 8)
    with llm.stream(PROMPT, 8) as stream:
        next(stream)
        with pytest.raises(KestrelError, match="still running"):
            llm.generate(PROMPT, 1, l2_dump=tmp_path / "dump")
        assert list(tmp_path.iterdir()) == []
        list(stream)
        assert stream.result == whole


# -- finish reasons ------------------------------------------------------------------------------------------


def test_eos_ends_the_text_and_is_counted(llm: LLM) -> None:
    whole = llm.generate(PROMPT, COUNT)
    for place in (0, 3, 7):
        eos = whole.token_ids[place]
        first = whole.token_ids.index(eos)
        set_eos(llm, eos, 383)
        result = llm.generate(PROMPT, COUNT)
        assert result.finish_reason == "eos"
        assert result.token_ids == whole.token_ids[: first + 1]
        assert result.text == llm.tokenizer.decode(whole.token_ids[:first])
        assert llm.generate(PROMPT, COUNT, ignore_eos=True) == whole
        # At the last token both could end it: the token decides.
        assert llm.generate(PROMPT, first + 1).finish_reason == "eos"


def test_a_stop_string_cuts_the_text_wherever_it_falls(llm: LLM) -> None:
    whole = llm.generate(PROMPT, COUNT)
    tried = 0
    for begin in range(len(whole.text) - 3):
        stop = whole.text[begin : begin + 3]
        if "\ufffd" in stop:
            continue
        tried += 1
        stream = llm.stream(PROMPT, COUNT, stop=["never", stop])
        text = "".join(chunk.text for chunk in stream)
        result = stream.result
        assert text == result.text == whole.text[: whole.text.index(stop)]
        assert (result.finish_reason, result.stop) == ("stop", stop)
        assert result.token_ids == whole.token_ids[: len(result.token_ids)]
    assert tried >= 5


def test_half_a_stop_string_at_the_end_is_text(llm: LLM) -> None:
    whole = llm.generate(PROMPT, 10)
    result = llm.generate(PROMPT, 10, stop=whole.text[-3:] + "x")
    assert result == whole


def test_the_context_ends_the_text(llm: LLM) -> None:
    result = llm.generate(PROMPT, ignore_eos=True)
    assert result.finish_reason == "length"
    assert result.prompt_tokens + len(result.token_ids) == llm.ctx_size == 128
    with pytest.raises(ContextOverflowError, match="context limit 128"):
        llm.generate(PROMPT, 128)


# -- loading and refusing ------------------------------------------------------------------------------------


def test_placement_chunk_threads_and_isa_change_nothing(llm: LLM, model_folder: Path) -> None:
    whole = llm.generate(PROMPT, 12)
    options = [{"chunk": 1}, {"threads": 2}, {"isa": "scalar"}, {"mode": "fast"}, {"mode": "bitexact"}]
    for option in options:
        with LLM(model_folder, ctx_size=128, **{"threads": 1, **option}) as other:
            assert other.generate(PROMPT, 12) == whole


def test_chat_prompt(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Who are you?"}]
    text = llm.tokenizer.decode(llm.chat_prompt(messages), skip_special_tokens=False)
    assert text == "<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n"
    quiet = llm.tokenizer.decode(llm.chat_prompt(messages, enable_thinking=False), skip_special_tokens=False)
    assert quiet == text + "<think>\n\n</think>\n\n"


def test_wrong_requests_are_refused(llm: LLM) -> None:
    for prompt in (["a"], [True], [1.0]):
        with pytest.raises(UsageError, match="sequence of token ids"):
            llm.generate(prompt, 1)
    with pytest.raises(UsageError, match="empty"):
        llm.generate("", 1)
    with pytest.raises(UsageError, match="did you mean 'temperature'"):
        llm.generate(PROMPT, 1, temprature=1)
    with pytest.raises(UsageError, match="max_tokens"):
        llm.generate(PROMPT, 0)
    with pytest.raises(UsageError, match="level 'all'"):
        llm.generate(PROMPT, 1, l2_dump="x", l2_level="all")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"device": "gpu"}, UsageError, "unknown device 'gpu'"),
        ({"mode": "exact"}, UsageError, "unknown mode 'exact'"),
        ({"ctx_size": 513}, UsageError, "1 to 512"),
        ({"threads": 0}, UsageError, "threads must be 1 to 1024, not 0"),
        ({"threads": 1025}, UsageError, "threads must be 1 to 1024, not 1025"),
        ({"isa": "sse9"}, KestrelError, "sse9"),
        ({"chunk": 0}, UsageError, "chunk must be at least 1"),
    ],
)
def test_wrong_options_are_refused(
    model_folder: Path, options: dict, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        LLM(model_folder, **options)


def test_a_closed_llm_refuses(model_folder: Path) -> None:
    llm = LLM(model_folder, ctx_size=32)
    llm.close()
    llm.close()
    with pytest.raises(KestrelError, match="closed"):
        llm.generate([1], 1)


def test_a_missing_or_foreign_folder_is_refused(tmp_path: Path, model_folder: Path) -> None:
    with pytest.raises(KestrelError, match="no model at"):
        LLM(tmp_path / "nothing")
    with pytest.raises(ModelError, match=r"kestrel\.convert"):
        LLM(model_folder.parent / "qwen3_moe-source")


class Small(CpuBackend):
    """A device of ``room`` bytes."""

    room = 0
    closed = 0

    def check_memory(self, parts: Mapping[str, int]) -> None:
        if sum(parts.values()) > self.room:
            raise BackendError(", ".join(f"{name}: {size} bytes" for name, size in parts.items()))

    def close(self) -> None:
        type(self).closed += 1


def test_a_device_that_is_too_small_is_refused_and_released(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kestrel.llm.make_backend", lambda *a, **k: Small(1))
    monkeypatch.setattr(Small, "closed", 0)
    with pytest.raises(BackendError, match=r"weights: \d+ bytes, KV cache of 64 positions: \d+ bytes, act"):
        LLM(model_folder, device="cpu", decode_device="cuda", ctx_size=64)
    assert Small.closed == 2
    monkeypatch.setattr(Small, "room", 1 << 30)
    with LLM(model_folder, device="cpu", decode_device="cuda", ctx_size=64) as llm:
        assert llm.generate(PROMPT, 3).finish_reason == "length"
        assert llm.describe()["decode-backend"] == "cpu"
    assert Small.closed == 4


# -- dumps ---------------------------------------------------------------------------------------------------


def test_a_dump_is_whole_or_absent(llm: LLM, tmp_path: Path) -> None:
    from kestrel.l2_dump import read_dump

    target = tmp_path / "dump.txt"
    result = llm.generate(PROMPT, 3, l2_dump=target)
    assert result.l2_dump == target
    first = target.read_text()
    dump = read_dump(target)
    assert dump.tokens == [*result.prompt_token_ids, *result.token_ids]
    with llm.stream(PROMPT, 8, l2_dump=target) as stream:
        next(stream)
    assert target.read_text() == first  # the one before stays
    assert stream.result.l2_dump is None
    with pytest.raises(ContextOverflowError):
        llm.generate(PROMPT, 1000, l2_dump=target)
    assert [path.name for path in tmp_path.iterdir()] == ["dump.txt"]
    with pytest.raises(KestrelError, match="cannot be written"):
        llm.generate(PROMPT, 3, l2_dump=tmp_path / "no" / "dump.txt")
    assert llm.generate(PROMPT, 3) == result.__class__(**{**vars(result), "l2_dump": None})


def test_a_dump_holds_every_position_that_ran(llm: LLM, tmp_path: Path) -> None:
    from kestrel.l2_dump import read_dump
    from kestrel.l2_fields import FIELDS, parse_key

    result = llm.generate(PROMPT, 4, l2_dump=tmp_path / "d", l2_level="extended")
    keys = list(map(parse_key, read_dump(tmp_path / "d").hashes))
    assert keys == sorted(keys, key=lambda key: key.order)
    positions = range(result.prompt_tokens + 3)  # the last token was chosen, not run
    names = [f.name for f in FIELDS if f.per_layer]
    expected = [
        (t, layer, name)
        for t in positions
        for layer, fields in [(0, names), (1, names), (None, ["fnorm", "logits"])]
        for name in fields
    ]
    assert [(key.position, key.layer, key.field) for key in keys] == expected


# -- misuse --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt",
    [None, 5, b"ab", bytearray(b"ab"), {5, 6}, {5: 6}, np.array(5), [[5]], [True], [5.0], ["5"]],
    ids=repr,
)
def test_prompts_of_another_kind_are_refused(llm: LLM, prompt: Any) -> None:
    for request in (llm.generate, llm.logits):
        with pytest.raises(UsageError, match="a prompt is text or a sequence of token ids"):
            request(prompt)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("path", 5),
        ("path", b"/tmp"),
        *((name, value) for name in ("threads", "ctx_size", "chunk") for value in ("2", 1.5, True)),
        ("chunk", None),
        ("device", None),
        ("mode", None),
        ("isa", []),
        ("graph", "no"),
    ],
)
def test_arguments_of_another_kind_are_refused(model_folder: Path, argument: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"{argument} must be"):
        LLM(**{"path": model_folder, argument: value})


@pytest.mark.parametrize(
    ("argument", "value", "words"),
    [
        ("params", {"max_tokens": 1}, "params must be SamplingParams"),
        ("l2_level", "all", "unknown L2 level"),
        ("l2_dump", 5, "l2_dump must be"),
        ("l2_dump", b"x", "l2_dump must be"),
    ],
)
def test_request_arguments_of_another_kind_are_refused(
    llm: LLM, argument: str, value: Any, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        llm.generate("x", **{argument: value})


def test_a_model_closed_under_an_open_stream(model_folder: Path) -> None:
    llm = LLM(model_folder, threads=1, ctx_size=64)
    stream = llm.stream("x", 9)
    next(stream)
    llm.close()
    with pytest.raises(KestrelError, match="was closed while this generation ran"):
        next(stream)
    assert stream.result.finish_reason == "cancelled"
