"""Token ids in, token ids out: prompt in chunks, then one position at a time.

The engine owns the models (one, or one for the prompt and one for decoding), the KV cache's contents and the
order of steps. Text, stop strings and events are made above it, in ``kestrel.llm``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kestrel.backend import Backend
from kestrel.config import ModelConfig
from kestrel.errors import ContextOverflowError, KestrelError, NonFiniteError, UsageError
from kestrel.kvcache import KVCache
from kestrel.model import Model
from kestrel.nonfinite import find_non_finite
from kestrel.sampling import SamplingParams, sample
from kestrel.stats import Timings
from kestrel.step import Step
from kestrel.taps import Tap, TapLevel, dump_bytes, tap_key
from kestrel.weights import Weights

DEFAULT_CHUNK = 256  # rows of one forward pass over a prompt
DEFAULT_CONTEXT = 4096  # positions, or the model's own limit where that is lower


class TapSink(Protocol):
    """Receives the hashes of each step, in the order of positions."""

    level: TapLevel

    def rows(self, taps: Sequence[Tap], start: int, hashes: npt.NDArray[np.uint64]) -> None:
        """``hashes`` is u64[taps, M] for positions ``start`` to ``start + M - 1``."""


def memory_parts(config: ModelConfig, weights: Weights, context: int, rows: int) -> dict[str, int]:
    """Bytes that a model of ``context`` positions and ``rows`` rows a step takes on a device, by purpose."""
    c = config
    experts = 0 if c.moe is None else c.moe.top_k * (3 * c.moe.intermediate_size + c.hidden_size)
    widths = 6 * c.hidden_size + 4 * (c.q_size + c.kv_size) + 4 * c.intermediate_size + experts + c.vocab_size
    return {
        "weights": sum(tensor.nbytes for tensor in weights.values()),
        f"KV cache of {context} positions": context * KVCache.bytes_per_slot(c),
        f"activations of {rows} rows": 4 * rows * widths,
        "L2 dump": dump_bytes(config, rows),
    }


class Engine:
    """One sequence at a time on one model. Results do not depend on ``chunk`` or on earlier requests."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        backend: Backend,
        decode_backend: Backend | None = None,
        *,
        context: int | None = None,
        chunk: int = DEFAULT_CHUNK,
    ) -> None:
        """``decode_backend`` runs the generated positions; the prompt's KV rows are copied to it.

        Raises UsageError when ``context`` is more than the model's ``max_position``.
        """
        if context is None:
            context = min(config.max_position, DEFAULT_CONTEXT)
        if not 1 <= context <= config.max_position:
            raise UsageError(
                f"context size must be 1 to {config.max_position}, the model's limit, not {context}"
            )
        if chunk < 1:
            raise UsageError(f"chunk must be at least 1 row, not {chunk}")
        self.config = config
        self.context = context
        self.chunk = min(chunk, context)
        for each, rows in ((backend, self.chunk), (decode_backend, 1)):
            if each is not None:
                each.check_model(config)
                each.check_memory(memory_parts(config, weights, context, rows))
        self.prompt_model = Model(config, weights, backend, slots=context, max_rows=self.chunk)
        self.decode_model = self.prompt_model
        if decode_backend is not None:
            self.decode_model = Model(config, weights, decode_backend, slots=context, max_rows=1)
        self._cached: list[int] = []  # tokens whose KV rows the prompt model holds
        self._running = False
        self._closed = False

    def close(self) -> None:
        """Release the devices' memory; the engine cannot be used afterwards, nor its open generations."""
        self._closed = True
        self.prompt_model.backend.close()
        self.decode_model.backend.close()

    # -- requests --------------------------------------------------------------------------------------------

    def check_prompt(self, ids: Sequence[int], max_tokens: int | None) -> int:
        """Check a request before anything runs and return the number of tokens it may generate.

        Raises UsageError for an empty prompt or an id outside the vocabulary, ContextOverflowError for a
        request that does not fit.
        """
        self._check_ids(ids)
        room = self.context - len(ids)
        wanted = 1 if max_tokens is None else max_tokens
        if wanted > room:
            asked = f"{len(ids)} prompt tokens + {wanted} new tokens = {len(ids) + wanted} positions"
            limit = self.config.max_position
            more = f"raise the context size (up to {limit} here) or shorten the request"
            if len(ids) + wanted > limit:
                more = f"the model has no more than {limit}: shorten the request"
            raise ContextOverflowError(f"context limit {self.context}: {asked}; {more}")
        return room if max_tokens is None else max_tokens

    def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        sink: TapSink | None = None,
        reuse: bool = False,
        timings: Timings | None = None,
        on_prompt: Callable[[int, int], None] | None = None,
    ) -> Iterator[int]:
        """Yield up to ``max_tokens`` token ids (fewer only when the caller closes the iterator).

        End-of-sequence tokens and stop strings are the caller's business. ``reuse`` keeps the KV rows of the
        prefix that this prompt shares with the tokens before; the bits are the same.
        ``on_prompt(done, total)`` is called after each chunk of the prompt. Raises what ``check_prompt``
        raises before anything is written, KestrelError while another generation runs, NonFiniteError
        for a NaN or infinity in the logits.
        """
        limit = self.check_prompt(prompt, params.max_tokens)
        if self._running:
            raise KestrelError("a generation is still running on this model: finish or close it first")
        return self._generate(list(prompt), limit, params, sink, reuse, timings or Timings(), on_prompt)

    def _generate(
        self,
        prompt: list[int],
        limit: int,
        params: SamplingParams,
        sink: TapSink | None,
        reuse: bool,
        timings: Timings,
        on_prompt: Callable[[int, int], None] | None,
    ) -> Iterator[int]:
        if self._running:
            raise KestrelError("a generation is still running on this model: finish or close it first")
        self._running = True
        try:
            began = time.perf_counter()
            timings.prompt_tokens = len(prompt)
            timings.reused_tokens = self._keep_prefix(prompt if reuse and sink is None else [])
            step_rows = self._run_prompt(prompt, sink, on_prompt)
            token = self._choose(self.prompt_model, step_rows, prompt, params)
            self._hand_over(len(prompt))
            first = time.perf_counter()
            timings.prompt_seconds = first - began
            following = self._following(list(prompt), token, limit - 1, params, sink)
            try:
                for count in range(1, limit + 1):
                    timings.generated_tokens, timings.decoded_tokens = count, count - 1
                    timings.generation_seconds = time.perf_counter() - first
                    yield token
                    if count == limit:
                        return
                    if self._closed:
                        raise KestrelError("the model was closed while this generation ran")
                    token = next(following)
            finally:
                following.close()
        finally:
            self._running = False

    def _following(
        self, tokens: list[int], token: int, count: int, params: SamplingParams, sink: TapSink | None
    ) -> Generator[int]:
        """The ``count`` tokens after ``token``, which follows ``tokens``."""
        model, level = self.decode_model, sink.level if sink is not None else "off"
        start = len(tokens)
        loop = None
        if params.greedy and count:
            loop = model.greedy_loop(model.step(1, 1, level), token, start, count)
        if loop is None:
            for _ in range(count):
                tokens.append(token)
                self._forward(model, [token], len(tokens) - 1, 1, sink)
                token = self._choose(model, 1, tokens, params)
                yield token
            return
        del self._cached[start:]
        for chosen, hashes in loop:
            if len(self._cached) == len(tokens):
                self._cached.append(token)
            tokens.append(token)
            if sink is not None:
                sink.rows(model.step(1, 1, level).taps, len(tokens) - 1, hashes[:, None])
            if chosen < 0:
                self._raise_non_finite(tokens, model)
            token = chosen
            yield token

    def logits(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """f32[T, V]: the logits after each of the T tokens, from an empty cache.

        Raises as ``generate`` does; the context must hold T positions.
        """
        self._check_ids(ids)
        if len(ids) > self.context:
            raise ContextOverflowError(f"context limit {self.context}: {len(ids)} tokens do not fit")
        if self._running:
            raise KestrelError("a generation is still running on this model: finish or close it first")
        self._keep_prefix([])
        model = self.prompt_model
        result = np.empty((len(ids), self.config.vocab_size), np.float32)
        for start in range(0, len(ids), self.chunk):
            part = list(ids[start : start + self.chunk])
            self._forward(model, part, start, len(part), None)
            failed = np.flatnonzero(model.argmax(len(part)) < 0)
            if failed.size:
                self._raise_non_finite(ids[: start + int(failed[0]) + 1], model)
            result[start : start + len(part)] = model.logits(len(part))
        return result

    def tensor(
        self, tokens: Sequence[int], prompt_tokens: int, position: int, layer: int | None, field: str
    ) -> tuple[npt.NDArray[Any], int]:
        """The value of one L2 key and its hash, from a run of ``tokens`` cut into steps as ``generate`` does.

        The first ``prompt_tokens`` run in chunks, the others one by one. Raises UsageError when the run has
        no such key.
        """
        if self._running:
            raise KestrelError("a generation is still running on this model: finish or close it first")
        self._check_ids(tokens)
        if not 0 <= position < len(tokens):
            raise UsageError(f"position {position} is not in a run of {len(tokens)} tokens")
        self._keep_prefix([])
        ids = list(tokens)
        starts = [*range(0, prompt_tokens, self.chunk), *range(prompt_tokens, len(ids))]
        for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
            model = self.prompt_model if start < prompt_tokens else self.decode_model
            end = min(end, prompt_tokens) if start < prompt_tokens else end
            if start == prompt_tokens:
                self._hand_over(prompt_tokens)
            if position < end:
                return self._tensor_of_step(model, ids[start:end], start, position, layer, field)
            self._forward(model, ids[start:end], start, 0, None)
        raise AssertionError("unreachable: every position lies in a step")

    def _tensor_of_step(
        self, model: Model, ids: list[int], start: int, position: int, layer: int | None, field: str
    ) -> tuple[npt.NDArray[Any], int]:
        rows = len(ids)
        model.load_rows(np.array(ids, np.int32), np.arange(start, start + rows, dtype=np.int32))
        step = model.step(rows, rows, "extended")
        found = [i for i, tap in enumerate(step.taps) if (tap.layer, tap.field) == (layer, field)]
        if not found:
            raise UsageError(f"this model has no value {tap_key(position, layer, field)}")
        tap = step.taps[found[0]]
        step.program.run(0, tap.op_index + 2)  # up to the value and its hash
        size = tap.dtype.itemsize
        row = position if tap.by_slot else position - start - tap.rows_from
        first, elements = (tap.offset + row * tap.stride) // size, tap.nbytes // size
        value = model.backend.read(tap.buffer, (first + elements,))[first:]
        return value, int(model.hashes(step, rows)[found[0], position - start])

    # -- steps -----------------------------------------------------------------------------------------------

    def _check_ids(self, ids: Sequence[int]) -> None:
        if not len(ids):
            raise UsageError("the prompt is empty: at least one token is needed")
        for index, token in enumerate(ids):
            if not 0 <= token < self.config.vocab_size:
                limit = self.config.vocab_size - 1
                raise UsageError(f"token {index} of the prompt is {token}: ids must lie in 0 .. {limit}")

    def _keep_prefix(self, prompt: list[int]) -> int:
        """Forget all cached rows but the common prefix; the last token always runs, for its logits."""
        if self.decode_model is not self.prompt_model:
            prompt = []  # generated rows lie in the other model's cache
        common = 0
        for old, new in zip(self._cached, prompt[:-1], strict=False):
            if old != new:
                break
            common += 1
        del self._cached[common:]
        return common

    def _run_prompt(
        self, prompt: list[int], sink: TapSink | None, on_prompt: Callable[[int, int], None] | None
    ) -> int:
        """Run what is not cached; returns the logit rows of the last step."""
        logit_rows = 0
        for start in range(len(self._cached), len(prompt), self.chunk):
            part = prompt[start : start + self.chunk]
            last = start + len(part) == len(prompt)
            # A dump has logits at every position; more rows of the same op change no bits.
            logit_rows = len(part) if sink is not None else int(last)
            self._forward(self.prompt_model, part, start, logit_rows, sink)
            if on_prompt is not None:
                on_prompt(start + len(part), len(prompt))
        return logit_rows

    def _forward(
        self, model: Model, ids: list[int], start: int, logit_rows: int, sink: TapSink | None
    ) -> Step:
        rows = len(ids)
        positions = np.arange(start, start + rows, dtype=np.int32)
        model.load_rows(np.array(ids, np.int32), positions)
        step = model.step(rows, logit_rows, sink.level if sink is not None else "off")
        step.program.run()
        self._cached += ids  # only now: a step that was interrupted leaves rows that nobody trusts
        if sink is not None:
            sink.rows(step.taps, start, model.hashes(step, rows))
        return step

    def _choose(self, model: Model, logit_rows: int, tokens: list[int], params: SamplingParams) -> int:
        """The token that follows ``tokens``, from the last logit row of the last step."""
        greedy = int(model.argmax(logit_rows)[-1])
        if greedy < 0:
            self._raise_non_finite(tokens, model)
        if params.greedy:
            return greedy
        return sample(model.logits(logit_rows)[-1], params, len(tokens))

    def _hand_over(self, rows: int) -> None:
        """Copy the prompt's KV rows to the model that decodes."""
        source, target = self.prompt_model, self.decode_model
        if source is target:
            return
        for ours, theirs in zip(source.kv.layers, target.kv.layers, strict=True):
            for name in ("kq", "ks", "vq", "vs"):
                buffer = getattr(ours, name)
                array = source.backend.read(buffer, (rows, *buffer.shape[1:]))
                target.backend.write(getattr(theirs, name), array)

    def _raise_non_finite(self, tokens: Sequence[int], model: Model) -> None:
        """Run the tokens again, op by op, on the model that failed, and name the first non-finite value."""
        self._cached.clear()
        report = find_non_finite(model, list(tokens))
        where = f"the logits after position {len(tokens) - 1} are not finite"
        if report is None:
            raise NonFiniteError(
                f"{where}, but a second run of the same tokens was finite: suspect the machine or its memory"
            )
        raise NonFiniteError(f"{where}: {report.message}", report.position, report.layer, report.op)
