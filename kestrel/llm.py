"""The Python interface: ``LLM``, its results and streams. Stable: names and meanings do not change in 0.x."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kestrel.backend import Backend
from kestrel.backends import Placement, choose_mode, make_backend, parse_device
from kestrel.checkpoints.manifest import read_manifest
from kestrel.engine import DEFAULT_CHUNK, Engine
from kestrel.errors import KestrelError, UsageError, shown
from kestrel.l2_dump import DumpWriter
from kestrel.paths import resolve_model
from kestrel.sampling import SamplingParams
from kestrel.stats import Timings
from kestrel.taps import TapLevel
from kestrel.text.tokenizer import StopMatcher, StreamDecoder, Tokenizer
from kestrel.weights import load_model_folder

FinishReason = Literal["stop", "eos", "length", "cancelled"]


@dataclass(frozen=True)
class StreamChunk:
    """A piece of a stream. The texts joined are the result's text; the ids in order are its ``token_ids``."""

    text: str  # may be empty: half a character, or text that may belong to a stop string, is held back
    token_id: int | None  # None for text that was held back until the end


@dataclass(frozen=True)
class GenerationResult:
    """What a request gave."""

    text: str  # without the stop string and without special tokens
    token_ids: tuple[int, ...]  # every generated id, an end-of-sequence id included
    finish_reason: (
        FinishReason  # stop string, end of sequence, max_tokens or context full, closed by the caller
    )
    prompt_tokens: int  # number of tokens of the prompt
    prompt_token_ids: tuple[int, ...]
    stop: str | None = None  # the stop string that was found
    l2_dump: Path | None = None  # the dump that was written
    timings: Timings = field(default_factory=Timings, compare=False)


class LLM:
    """A model folder made by ``kestrel convert``, ready to generate. Use it as a context manager or ``close``
    it.

    >>> with kestrel.LLM("models/smollm2-135m-instruct") as llm:
    ...     print(llm.generate("The sky is", max_tokens=16).text)

    Results depend on the model and the request alone: in mode ``l2exact`` they have the same bits whatever
    the device, the threads, the instruction set, the chunk and earlier requests. One request runs at a time.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        device: str = "cpu",
        mode: str = "l2exact",
        threads: int | None = None,
        *,
        ctx_size: int | None = None,
        isa: str | None = None,
        prompt_device: str | None = None,
        decode_device: str | None = None,
        graph: bool = True,
        chunk: int = DEFAULT_CHUNK,
        on_load: Callable[[int, int], None] | None = None,
    ) -> None:
        """Load a model.

        ``path``: the folder; None takes ``KESTREL_MODEL`` or the demo model. ``device``: ``cpu``, ``cuda`` or
        ``cuda:N``. ``mode``: ``l2exact``, ``bitexact`` or ``fast``; the CPU runs the exact reference in all
        three. ``threads``: CPU threads; None takes ``KESTREL_THREADS`` or every CPU this process may use.
        ``ctx_size``: positions of the KV cache; None takes 4096 or the model's limit. ``isa``: ``scalar``,
        ``avx2`` or ``avx512``; None takes ``KESTREL_ISA`` or the best. ``prompt_device`` and
        ``decode_device`` run the prompt or the generated positions elsewhere than ``device``. ``graph=False``
        launches GPU kernels one by one. ``chunk``: most rows of one forward pass over a prompt.
        ``on_load(done, total)`` is called with bytes while weights go to a GPU.

        Raises ModelError (a damaged folder: every fault is listed), BackendError (the device is missing),
        UsageError (a value out of range), KestrelError (no such folder).
        """
        if not (path is None or isinstance(path, (str, os.PathLike))):
            raise UsageError(f"path must be a folder's name, not {shown(path)}")
        for name, value in (("threads", threads), ("ctx_size", ctx_size), ("chunk", chunk)):
            whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
            if not whole and (value is not None or name == "chunk"):
                raise UsageError(f"{name} must be a whole number, not {shown(value)}")
        for name, text in (("device", device), ("mode", mode)):
            if not isinstance(text, str):
                raise UsageError(f"{name} must be text, not {shown(text)}")
        if not (isa is None or isinstance(isa, str)):
            raise UsageError(f"isa must be text or None, not {shown(isa)}")
        if not isinstance(graph, bool):
            raise UsageError(f"graph must be True or False, not {shown(graph)}")
        self.path = resolve_model(path)
        parse_device(device)
        self.mode = choose_mode(mode)
        self.placement = Placement(prompt_device or device, decode_device or device)
        config, weights = load_model_folder(self.path)

        total = sum(tensor.nbytes for tensor in weights.values())
        done = 0

        def uploaded(nbytes: int) -> None:
            nonlocal done
            done = min(done + nbytes, total)
            if on_load is not None:
                on_load(done, total)

        backends: list[Backend] = []
        try:
            for where in self.placement.devices:
                backends.append(  # noqa: PERF401  those made before a failure must be closed
                    make_backend(where, self.mode, threads=threads, isa=isa, graph=graph, on_upload=uploaded)
                )
            engine = Engine(config, weights, *backends, context=ctx_size, chunk=chunk)
        except BaseException:
            for made in backends:
                made.close()
            raise
        self.config = config
        self._graph = graph
        self._engine: Engine | None = engine

    # -- life ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Release the memory. Further requests raise KestrelError; closing twice is allowed."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def engine(self) -> Engine:
        """The layer below: ids in, ids out. Not part of the stable interface."""
        if self._engine is None:
            raise KestrelError("this LLM is closed")
        return self._engine

    @property
    def ctx_size(self) -> int:
        """Positions of the KV cache: prompt and generated tokens of one request."""
        return self.engine.context

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises ModelError when the folder has none."""
        return Tokenizer.from_folder(self.path)

    @cached_property
    def eos_token_ids(self) -> frozenset[int]:
        """Every id that ends a text."""
        return frozenset({*self.config.eos_token_ids, *self.tokenizer.eos_ids})

    # -- requests --------------------------------------------------------------------------------------------

    def encode(self, prompt: str) -> list[int]:
        """Token ids of a plain prompt, with what the tokenizer puts around a text (a BOS token, if any)."""
        return self.tokenizer.encode(prompt, add_special_tokens=True)

    def chat_prompt(
        self, messages: Sequence[Mapping[str, Any]], enable_thinking: bool | None = None
    ) -> list[int]:
        """Token ids of a conversation (``[{"role": "user", "content": "..."}]``) by the model's chat
        template.

        ``enable_thinking`` reaches the template unless it is None. Raises ChatTemplateError when the model
        has no template or the template fails, UsageError for ``enable_thinking`` on a template that does not
        know it.
        """
        if enable_thinking is not None and "enable_thinking" not in self.tokenizer.chat_template_variables():
            raise UsageError(
                "the model's chat template does not know enable_thinking (--no-think): leave it out"
            )
        text = self.tokenizer.apply_chat_template(messages, enable_thinking=enable_thinking)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def generate(
        self,
        prompt_or_ids: str | Sequence[int],
        max_tokens: int | None = None,
        *,
        params: SamplingParams | None = None,
        l2_dump: str | os.PathLike[str] | None = None,
        l2_level: TapLevel = "standard",
        **sampling: Any,
    ) -> GenerationResult:
        """Generate up to ``max_tokens`` tokens (None: until the context is full) and return the result.

        ``prompt_or_ids``: text, or token ids taken as they are. ``sampling``: fields of ``SamplingParams``
        (``temperature``, ``top_k``, ``top_p``, ``min_p``, ``seed``, ``stop``, ``ignore_eos``), or give
        ``params``. ``l2_dump``: file for the L2 hashes of every position, at ``l2_level`` ``standard`` or
        ``extended``.

        Raises UsageError (unknown or wrong parameter, empty prompt), ContextOverflowError (prompt and
        ``max_tokens`` do not fit; nothing was written), NonFiniteError (a NaN or infinity in the logits).
        """
        stream = self.stream(
            prompt_or_ids, max_tokens, params=params, l2_dump=l2_dump, l2_level=l2_level, **sampling
        )
        for _ in stream:
            pass
        return stream.result

    def stream(
        self,
        prompt_or_ids: str | Sequence[int],
        max_tokens: int | None = None,
        *,
        params: SamplingParams | None = None,
        l2_dump: str | os.PathLike[str] | None = None,
        l2_level: TapLevel = "standard",
        reuse_cache: bool = False,
        on_prompt: Callable[[int, int], None] | None = None,
        **sampling: Any,
    ) -> Stream:
        """Like ``generate``, but an iterator of ``StreamChunk``; its ``result`` is complete when it ends.

        The prompt runs when the first chunk is asked for. ``close()`` cancels; the next request is not
        affected. ``reuse_cache`` keeps the rows of the prefix shared with the request before: the bits are
        the same, and a conversation's next turn starts sooner. ``on_prompt(done, total)`` is called after
        each chunk of the prompt.
        """
        if params is None:
            params = SamplingParams.from_kwargs(max_tokens=max_tokens, **sampling)
        elif sampling or max_tokens is not None:
            raise UsageError("give either params or single sampling parameters, not both")
        elif not isinstance(params, SamplingParams):
            raise UsageError(f"params must be SamplingParams, not {shown(params)}")
        if l2_level not in ("standard", "extended"):
            raise UsageError(f"unknown L2 level {l2_level!r}: choose standard or extended")
        if not (l2_dump is None or isinstance(l2_dump, (str, os.PathLike))):
            raise UsageError(f"l2_dump must be a file's name, not {shown(l2_dump)}")
        ids = self._ids(prompt_or_ids)
        self.engine.check_prompt(ids, params.max_tokens)
        dump = None
        if l2_dump is not None:
            dump = self._open_dump(l2_dump, l2_level, ids, params)
        timings = Timings()
        try:
            tokens = self.engine.generate(
                ids, params, sink=dump, reuse=reuse_cache, timings=timings, on_prompt=on_prompt
            )
        except BaseException:
            if dump is not None:
                dump.discard()
            raise
        return Stream(self, ids, params, tokens, timings, dump)

    def logits(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """f32[T, V]: row t holds the logits after tokens 0 .. t, computed from an empty cache.

        Raises UsageError (no token, or an id outside the vocabulary), ContextOverflowError (more tokens than
        the context), NonFiniteError.
        """
        return self.engine.logits(self._ids(token_ids))

    # -- inside ----------------------------------------------------------------------------------------------

    def _ids(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            return self.encode(prompt)
        given: object = prompt
        try:
            # A set has no order, and bytes would pass as ids.
            unfit = isinstance(given, (bytes, bytearray, Set, Mapping))
            ids = None if unfit else list(prompt)
        except TypeError:
            ids = None
        if ids is None:
            raise UsageError(f"a prompt is text or a sequence of token ids, not {shown(given)}")
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, (int, np.integer)):
                raise UsageError(f"a prompt is text or a sequence of token ids; found {shown(token)}")
        return [int(token) for token in ids]

    def describe(self) -> dict[str, str]:
        """Where and how it runs: lines of dump headers and reports."""
        engine = self.engine
        facts = engine.prompt_model.backend.describe()
        if engine.decode_model is not engine.prompt_model:
            other = engine.decode_model.backend.describe()
            facts |= {f"decode-{key}": value for key, value in other.items()}
        return {**facts, "mode": self.mode}

    def _open_dump(
        self, path: str | os.PathLike[str], level: TapLevel, ids: list[int], params: SamplingParams
    ) -> DumpWriter:
        engine, facts = self.engine, self.describe()
        header = {
            "model": self.path.absolute().name,
            "weights": read_manifest(self.path).fingerprint,
            **facts,
            "level": level,
        }
        threads = facts.get("threads", facts.get("decode-threads"))
        command = {
            "model": str(self.path.absolute()),
            "prompt_device": self.placement.prompt,
            "decode_device": self.placement.decode,
            "mode": self.mode,
            "isa": facts.get("isa", facts.get("decode-isa")),
            "threads": None if threads is None else int(threads),
            "graph": self._graph,
            "chunk": engine.chunk,
            "ctx_size": engine.context,
            "level": level,
            "sampling": {**vars(params), "stop": list(params.stop)},
            "prompt_ids": ids,
        }
        return DumpWriter(Path(path), level, header, command)


class Stream(Iterator[StreamChunk]):
    """An iterator of ``StreamChunk``, made by ``LLM.stream``; ``close`` or the end of ``with`` cancels."""

    def __init__(
        self,
        llm: LLM,
        prompt_ids: list[int],
        params: SamplingParams,
        tokens: Iterator[int],
        timings: Timings,
        dump: DumpWriter | None,
    ) -> None:
        self.timings = timings
        self._prompt_ids = tuple(prompt_ids)
        self._eos: frozenset[int] = frozenset() if params.ignore_eos else llm.eos_token_ids
        self._decoder = StreamDecoder(llm.tokenizer)
        self._matcher = StopMatcher(params.stop)
        self._tokens = tokens
        self._dump = dump
        self._ids: list[int] = []
        self._text: list[str] = []
        self._result: GenerationResult | None = None
        self._chunks = self._run()

    @property
    def result(self) -> GenerationResult:
        """The result, once the stream has ended or was closed. Raises KestrelError before."""
        if self._result is None:
            raise KestrelError("the stream has not ended: read it to its end or close it")
        return self._result

    def __next__(self) -> StreamChunk:
        return next(self._chunks)

    def close(self) -> None:
        """End the request where it stands. The result has what was made so far; an L2 dump is not written."""
        self._chunks.close()
        if self._result is None:  # never started, so the generator's own clean-up did not run
            self._end("cancelled")

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_result", self) is None:
            self.close()

    def _run(self) -> Generator[StreamChunk, None, None]:
        reason: FinishReason = "cancelled"
        try:
            ended: FinishReason = "length"
            for token in self._tokens:
                self._ids.append(token)
                if token in self._eos:
                    ended = "eos"
                    break
                yield self._chunk(self._matcher.push(self._decoder.push(token)), token)
                if self._matcher.matched is not None:
                    ended = "stop"
                    break
            if ended == "eos":
                yield self._chunk("", self._ids[-1])
            if ended != "stop":
                rest = self._matcher.push(self._decoder.finish()) + self._matcher.finish()
                if self._matcher.matched is not None:
                    ended = "stop"
                if rest:
                    yield self._chunk(rest, None)
            reason = ended
        finally:
            self._end(reason)

    def _chunk(self, text: str, token: int | None) -> StreamChunk:
        self._text.append(text)
        return StreamChunk(text, token)

    def _end(self, reason: FinishReason) -> None:
        close = getattr(self._tokens, "close", None)  # an iterator in general, a generator here
        if close is not None:
            close()
        written = None
        if self._dump is not None:
            if reason == "cancelled":
                self._dump.discard()
            else:
                self._dump.commit(self._ids)
                written = self._dump.path
        self._result = GenerationResult(
            text="".join(self._text),
            token_ids=tuple(self._ids),
            finish_reason=reason,
            prompt_tokens=len(self._prompt_ids),
            prompt_token_ids=self._prompt_ids,
            stop=self._matcher.matched,
            l2_dump=written,
            timings=self.timings,
        )
