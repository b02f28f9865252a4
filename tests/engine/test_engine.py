"""The engine on ids: chunks, limits, cancelling, cache reuse, placement, L2 values."""

from __future__ import annotations

import re

import numpy as np
import pytest

from kestrel.contract import FNV_OFFSET, FNV_PRIME
from kestrel.cpu import CpuBackend
from kestrel.engine import Engine
from kestrel.errors import ContextOverflowError, KestrelError, UsageError
from kestrel.l2_fields import BY_NAME, parse_key
from kestrel.ops import WType
from kestrel.sampling import SamplingParams, sample
from tests.support.bits import assert_bits_equal
from tests.support.dumps import Recorder, generate
from tests.support.models import random_weights, tiny_config

FAMILIES = ["llama", "qwen3", "qwen3_moe"]
PROMPT = [5, 300, 17, 42, 42, 9, 120, 33, 8, 250]
GREEDY = SamplingParams(max_tokens=8)


def make(family: str = "qwen3", *, decode: CpuBackend | None = None, **options: int) -> Engine:
    config = tiny_config(family)
    weights = random_weights(config, WType.q4local)
    return Engine(config, weights, CpuBackend(1), decode, **{"context": 64, **options})


def cache_bytes(engine: Engine) -> list[bytes]:
    kv = engine.prompt_model.kv.layers
    return [engine.prompt_model.backend.read(b).tobytes() for k in kv for b in (k.kq, k.ks, k.vq, k.vs)]


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_do_not_change_bits(family: str) -> None:
    whole = generate(make(family), PROMPT, 6, "extended")
    logits = make(family).logits(PROMPT)
    for chunk in (1, 3, 7):
        engine = make(family, chunk=chunk)
        tokens, dump = generate(engine, PROMPT, 6, "extended")
        assert tokens == whole[0]
        assert dump.keys == whole[1].keys
        assert_bits_equal(engine.logits(PROMPT), logits)


def test_a_dump_changes_no_token_and_its_level_changes_no_hash() -> None:
    engine = make()
    plain = list(engine.generate(PROMPT, GREEDY))
    standard, extended = Recorder("standard"), Recorder("extended")
    assert list(engine.generate(PROMPT, GREEDY, sink=standard)) == plain
    assert list(engine.generate(PROMPT, GREEDY, sink=extended)) == plain
    assert standard.keys.items() < extended.keys.items()


def test_logits_agree_with_decoding() -> None:
    engine = make()
    tokens = list(engine.generate(PROMPT, GREEDY))
    logits = engine.logits(PROMPT + tokens)
    assert logits.dtype == np.float32
    assert logits.shape == (len(PROMPT) + len(tokens), engine.config.vocab_size)
    assert logits.argmax(axis=1)[len(PROMPT) - 1 : -1].tolist() == tokens


def test_sampling_takes_the_last_row_and_its_position() -> None:
    params = SamplingParams(max_tokens=6, temperature=2.0, seed=11)
    expected: list[int] = []
    for _ in range(6):
        tokens = [*PROMPT, *expected]
        expected.append(sample(make().logits(tokens)[-1], params, len(tokens)))
    for sink in (None, Recorder()):  # with a dump, a step has logits at every row
        assert list(make(chunk=4).generate(PROMPT, params, sink=sink)) == expected
    assert len(set(expected)) > 2


def test_repeated_requests_are_equal() -> None:
    engine = make("qwen3_moe")
    first = generate(engine, PROMPT, 8)
    for other in range(9):
        list(engine.generate([other + 1] * (other + 1), GREEDY))
        again = generate(engine, PROMPT, 8)
        assert again[0] == first[0]
        assert again[1].keys == first[1].keys


def test_prompt_and_decode_on_two_backends() -> None:
    expected = list(make().generate(PROMPT, GREEDY))
    split = make(decode=CpuBackend(2, "scalar"), chunk=4)
    assert list(split.generate(PROMPT, GREEDY)) == expected
    assert list(split.generate(PROMPT, GREEDY, reuse=True)) == expected
    recorder = Recorder()
    list(split.generate(PROMPT, GREEDY, sink=recorder))
    assert recorder.keys == generate(make(), PROMPT, GREEDY.max_tokens or 0)[1].keys


# -- cache reuse ---------------------------------------------------------------------------------------------


def test_reused_rows_give_the_same_tokens() -> None:
    engine = make()
    first = list(engine.generate(PROMPT, GREEDY))
    longer = [*PROMPT, *first[:5], 77, 78]
    expected = list(make().generate(longer, GREEDY))
    seen: list[tuple[int, int]] = []
    tokens = engine.generate(
        longer, GREEDY, reuse=True, on_prompt=lambda done, total: seen.append((done, total))
    )
    assert list(tokens) == expected
    assert len(engine._cached) > len(longer)
    assert seen == [(len(longer), len(longer))]
    # The same prompt again: everything but its last token is there.
    engine.chunk = 1
    seen.clear()
    again = engine.generate(
        longer, GREEDY, reuse=True, on_prompt=lambda done, total: seen.append((done, total))
    )
    assert list(again) == expected
    assert len(seen) == 1


def test_reuse_stops_at_the_first_other_token() -> None:
    engine = make()
    list(engine.generate(PROMPT, GREEDY))
    other = [*PROMPT[:4], 200, *PROMPT[5:]]
    assert list(engine.generate(other, GREEDY, reuse=True)) == list(make().generate(other, GREEDY))


# -- limits --------------------------------------------------------------------------------------------------


def test_a_request_may_fill_the_context() -> None:
    engine = make(context=16)
    assert len(list(engine.generate(PROMPT, SamplingParams(max_tokens=6)))) == 6
    assert len(list(engine.generate(PROMPT, SamplingParams()))) == 6  # without a number: until it is full
    assert len(list(engine.generate([1] * 15, SamplingParams()))) == 1


@pytest.mark.parametrize(("length", "count"), [(10, 7), (16, 1), (17, 1), (16, None), (1, 16)])
def test_a_request_that_does_not_fit_writes_nothing(length: int, count: int | None) -> None:
    engine = make(context=16)
    list(engine.generate(PROMPT, SamplingParams(max_tokens=3)))
    before = cache_bytes(engine)
    needed = length + (count or 1)
    with pytest.raises(
        ContextOverflowError, match=rf"context limit 16: {length} prompt .* = {needed} positions"
    ):
        engine.generate([1] * length, SamplingParams(max_tokens=count))
    assert cache_bytes(engine) == before
    assert len(list(engine.generate(PROMPT, SamplingParams(max_tokens=3)))) == 3


def test_slots_of_other_positions_are_not_written() -> None:
    engine = make(context=32)
    backend = engine.prompt_model.backend
    for layer in engine.prompt_model.kv.layers:
        for buffer in (layer.kq, layer.ks, layer.vq, layer.vs):
            backend.write(buffer, np.full(buffer.shape, 77, buffer.dtype))
    list(engine.generate(PROMPT, GREEDY))
    last = len(PROMPT) + (GREEDY.max_tokens or 0) - 1  # the last token was chosen, not run
    for layer in engine.prompt_model.kv.layers:
        for buffer in (layer.kq, layer.ks, layer.vq, layer.vs):
            assert (backend.read(buffer)[last:] == 77).all()


def test_logits_beyond_the_context_are_refused() -> None:
    engine = make(context=8)
    assert len(engine.logits([1] * 8)) == 8
    with pytest.raises(ContextOverflowError, match="context limit 8: 9 tokens"):
        engine.logits([1] * 9)


@pytest.mark.parametrize("context", [0, 4097])
def test_a_context_beyond_the_model_is_refused(context: int) -> None:
    with pytest.raises(UsageError, match=f"1 to 4096, the model's limit, not {context}"):
        make(context=context)


@pytest.mark.parametrize("ids", [[], [384], [5, -1], [1, 2, 1 << 40]])
def test_wrong_ids_are_refused(ids: list[int]) -> None:
    engine = make()
    for call in (lambda: engine.generate(ids, GREEDY), lambda: engine.logits(ids)):
        with pytest.raises(UsageError, match=re.compile("empty|ids must lie in 0 .. 383")):
            call()


# -- cancelling ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_closed_request_leaves_the_next_one_untouched(after: int) -> None:
    engine = make()
    expected = list(engine.generate(PROMPT, GREEDY))
    running = engine.generate([7, 8, 9], SamplingParams(max_tokens=20))
    for _ in range(after):
        next(running)
    running.close()  # type: ignore[attr-defined]
    assert list(engine.generate(PROMPT, GREEDY, reuse=True)) == expected


def test_an_interrupted_step_leaves_the_next_request_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(chunk=4)
    expected = list(engine.generate(PROMPT, GREEDY))
    step = engine.prompt_model.step(4, 0)

    class Interrupted:
        def run(self, begin: int = 0, end: int | None = None) -> None:
            step.program.run(0, 20)
            raise KeyboardInterrupt

    broken = type(step)(step.ops, step.taps, Interrupted())
    with monkeypatch.context() as patch:
        patch.setattr(engine.prompt_model, "step", lambda *arguments: broken)
        with pytest.raises(KeyboardInterrupt):
            list(engine.generate([9] * 10, GREEDY))
    assert list(engine.generate([9] * 10, GREEDY, reuse=True)) == list(make().generate([9] * 10, GREEDY))
    assert list(engine.generate(PROMPT, GREEDY, reuse=True)) == expected


def test_two_requests_at_once_are_refused() -> None:
    engine = make()
    expected = list(engine.generate(PROMPT, GREEDY))
    first = engine.generate(PROMPT, GREEDY)
    tokens = [next(first)]
    with pytest.raises(KestrelError, match="still running"):
        engine.generate([1], GREEDY)
    with pytest.raises(KestrelError, match="still running"):
        engine.logits([1])
    assert tokens + list(first) == expected


# -- L2 values -----------------------------------------------------------------------------------------------


def fnv1a(data: bytes) -> int:
    value = FNV_OFFSET
    for byte in data:
        value = (value ^ byte) * FNV_PRIME % (1 << 64)
    return value


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_tensor_gives_the_value_behind_every_key(family: str) -> None:
    engine = make(family, chunk=4, decode=CpuBackend(1, "scalar"))
    tokens, dump = generate(engine, PROMPT, 3, "extended")
    every = [*PROMPT, *tokens]
    for name in dump.keys:
        key = parse_key(name)
        if key.position not in (0, 5, 9, 11):  # first, inside a chunk, last of the prompt, generated
            continue
        value, digest = engine.tensor(every, len(PROMPT), key.position, key.layer, key.field)
        assert digest == dump.keys[name], name
        assert fnv1a(value.tobytes()) == digest, name
    assert {parse_key(name).field for name in dump.keys} <= set(BY_NAME)


def test_tensor_of_an_unknown_value_is_refused() -> None:
    engine = make("llama")
    with pytest.raises(UsageError, match="no value t0_l0_knorm"):
        engine.tensor(PROMPT, len(PROMPT), 0, 0, "knorm")
    with pytest.raises(UsageError, match="position 10 is not in a run of 10 tokens"):
        engine.tensor(PROMPT, len(PROMPT), 10, 0, "nrm")
