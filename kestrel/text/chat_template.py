"""Chat templates: Jinja text from a model folder, rendered as transformers renders it, in a sandbox.

The environment follows transformers' ``apply_chat_template``: block trimming, loop controls, the
``generation`` tag, a ``tojson`` that keeps non-ASCII text, ``raise_exception`` and ``strftime_now``. A
template is foreign code, so it sees plain data only and no attribute that leads to Python's internals.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from kestrel.errors import ChatTemplateError, UsageError

if TYPE_CHECKING:
    import jinja2

# Names under which messages carry a model's reasoning; templates read the first.
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")

# Arguments of transformers' function that change its result and that are not offered here.
_NOT_OFFERED = {
    "continue_final_message",
    "max_length",
    "padding",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "sanitize_control_tokens",
    "tokenize",
    "tokenizer_kwargs",
    "truncation",
}


def render_chat_template(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    **variables: Any,
) -> str:
    """The prompt text of a conversation.

    ``tools`` are JSON schemas. ``variables`` reach the template by name (``enable_thinking``, ``bos_token``).
    Raises ``UsageError`` for messages that are not plain data, ``ChatTemplateError`` when the template fails.
    """
    refused = sorted(_NOT_OFFERED & variables.keys())
    if refused:
        raise UsageError(f"chat template: argument {', '.join(refused)} is not supported")
    if not messages:
        raise UsageError("chat template: the conversation is empty, give at least one message")
    compiled = _compile(template)
    data = {
        "messages": _messages(messages),
        "tools": _mappings(tools, "tools"),
        "documents": _mappings(documents, "documents"),
        "add_generation_prompt": add_generation_prompt,
        **{name: _plain(value, name) for name, value in variables.items()},
    }
    try:
        return compiled.render(data)
    except (
        Exception
    ) as error:  # a template is foreign code: whatever it raises is its failure, with its message
        raise ChatTemplateError(f"chat template{_line(error)}: {_reason(error)}") from error


def template_variables(template: str) -> frozenset[str]:
    """The names that a template reads from outside, for instance ``enable_thinking``."""
    import jinja2.meta

    environment = _compile(template).environment
    try:
        return frozenset(jinja2.meta.find_undeclared_variables(environment.parse(template)))
    except RecursionError:  # here the limit may be nearer than it was to the compiler
        raise ChatTemplateError("chat template: it is nested too deep") from None


# -- data -------------------------------------------------------------------------------------------


def _messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Plain copies; keys with ``None`` are left out, since templates test for a missing key."""
    plain = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise UsageError(f"messages[{i}] must be a mapping with a role, not {type(message).__name__}")
        kept = {key: value for key, value in message.items() if value is not None}
        copy: dict[str, Any] = _plain(kept, f"messages[{i}]")
        reasoning = next((copy[key] for key in REASONING_KEYS if copy.get(key) is not None), None)
        if reasoning is not None:
            copy = {"thinking": reasoning, **copy, "reasoning_content": reasoning}
        plain.append(copy)
    return plain


def _mappings(items: Iterable[Any] | None, name: str) -> list[Any] | None:
    if items is None:
        return None
    items = list(items)
    for i, item in enumerate(items):
        if not isinstance(item, Mapping):
            kind = "a JSON schema (a mapping)" if name == "tools" else "a mapping"
            raise UsageError(f"{name}[{i}] must be {kind}, not {type(item).__name__}")
    return [_plain(item, f"{name}[{i}]") for i, item in enumerate(items)]


def _plain(value: Any, where: str) -> Any:
    """``value`` rebuilt from JSON's types, so that a template cannot call methods of richer objects."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Mapping):
        return {_plain(key, where): _plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, tuple):
        return tuple(_plain(item, f"{where}[{i}]") for i, item in enumerate(value))
    raise UsageError(
        f"{where} holds a {type(value).__name__}: chat templates take strings, numbers, lists and mappings"
    )


# -- messages of failures ---------------------------------------------------------------------------


def _line(error: BaseException) -> str:
    """`` line N`` of the template, from the error or from the innermost template frame of its traceback."""
    line = getattr(error, "lineno", None)
    trace = error.__traceback__
    while trace is not None and not isinstance(getattr(error, "lineno", None), int):
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return f" line {line}" if isinstance(line, int) else ""


def _reason(error: BaseException) -> str:
    import jinja2

    text = str(error) or type(error).__name__
    if isinstance(error, jinja2.TemplateError):  # raise_exception: the template's own words
        return text
    return f"{type(error).__name__}: {text}"


# -- environment ------------------------------------------------------------------------------------


@lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    import jinja2

    try:
        return _environment().from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise ChatTemplateError(
            f"chat template line {error.lineno}: syntax error: {error.message}"
        ) from error
    except SyntaxError as error:  # `break` outside a loop: jinja lets it pass, Python does not
        raise ChatTemplateError(f"chat template: syntax error: {error.msg}") from None
    except RecursionError:
        raise ChatTemplateError("chat template: it is nested too deep") from None


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    """Made at first use: importing jinja2 costs more than the rest of a start without a chat."""
    import jinja2
    import jinja2.exceptions
    import jinja2.ext
    import jinja2.nodes
    import jinja2.parser
    import jinja2.runtime
    import jinja2.sandbox
    import jinja2.utils

    class GenerationTag(jinja2.ext.Extension):
        """``{% generation %}...{% endgeneration %}`` marks what the assistant wrote; the text stays as it is.

        A call block, not plain statements: assignments inside stay inside, as they do in transformers.
        """

        tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

        def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

        def _body(self, caller: jinja2.runtime.Macro) -> str:
            return str(caller())

    class Namespace(jinja2.utils.Namespace):
        """``namespace()`` without attributes that begin with an underscore."""

        def __init__(*args: Any, **kwargs: Any) -> None:  # a template may pass self=...
            self, rest = args[0], args[1:]
            attributes = dict(*rest, **kwargs)
            for name in attributes:
                _check_attribute(name)
            jinja2.utils.Namespace.__init__(self, attributes)

        def __setitem__(self, name: str, value: Any) -> None:
            _check_attribute(name)
            super().__setitem__(name, value)

    def _check_attribute(name: object) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(
                f"a namespace may not hold {name!r}: the name begins with an underscore"
            )

    class MakeDict:
        """``dict(...)`` and ``dict.fromkeys``; the class itself stays out of reach."""

        def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
            return dict(*args, **kwargs)

        def fromkeys(self, *args: Any) -> dict[Any, Any]:
            return dict.fromkeys(*args)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = MakeDict()
    environment.globals["namespace"] = Namespace
    return environment


def _to_json(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes for HTML
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(format: str) -> str:
    from datetime import datetime

    return datetime.now().strftime(format)
