"""Chat templates: what they render, what they may not do, and what a user reads when they fail."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from datetime import datetime
from typing import Any

import numpy as np
import pytest

from kestrel.errors import ChatTemplateError, UsageError
from kestrel.text.chat_template import render_chat_template, template_variables
from tests.support.templates import CONVERSATIONS, STRICT, THINKING, TOOLS

HI = [{"role": "user", "content": "Hi"}]


def render(template: str, messages: list[dict[str, Any]] | None = None, **more: Any) -> str:
    return render_chat_template(template, HI if messages is None else messages, **more)


# -- what they render ------------------------------------------------------------------------------


def test_thinking_true_false_absent() -> None:
    start = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert render(THINKING) == start
    assert render(THINKING, enable_thinking=True) == start
    assert render(THINKING, enable_thinking=False) == start + "<think>\n\n</think>\n\n"
    assert render(THINKING, add_generation_prompt=False) == "<|im_start|>user\nHi<|im_end|>\n"


def test_tools_keep_their_order_and_letters() -> None:
    text = render(THINKING, tools=TOOLS)
    assert '"description": "Das Wetter für einen Ort, \\"jetzt\\" <b>&\'"' in text
    assert "Straße, 東京" in text
    assert text.index('"name": "wetter"') < text.index('"name": "zeit"')
    assert text.startswith("<|im_start|>system\n# Functions\n<tools>\n{")


def test_three_turns() -> None:
    text = render(THINKING, CONVERSATIONS["three turns"], add_generation_prompt=False)
    turns = ["user\none", "assistant\ntwo", "user\nthree", "assistant\nfour", "user\nfive"]
    assert text == "".join(f"<|im_start|>{turn}<|im_end|>\n" for turn in turns)


def test_reasoning_of_earlier_turns_is_dropped_and_of_the_last_kept() -> None:
    assert "because" not in render(THINKING, CONVERSATIONS["reasoning"])
    assert "<think>\nbecause\n</think>\n\na" in render(THINKING, CONVERSATIONS["reasoning last"])
    assert "<think>\nbecause" in render(THINKING, CONVERSATIONS["reasoning under an older name"])


def test_blocks_on_their_own_lines_leave_no_space() -> None:
    text = render(STRICT, CONVERSATIONS["system"], bos_token="<s>", eos_token="</s>")
    assert text.startswith("<s>\n[INST] <<SYS>>Antworte knapp. 😀<</SYS>> Hi [/INST]\n{\n")
    assert '"b": "ä"' in text
    assert text.endswith('{"k": "<&>"} False 2')


def test_a_key_that_is_none_counts_as_missing() -> None:
    template = "{{ messages[0].content is defined }} {{ messages[0].name is defined }}"
    assert render(template, [{"role": "user", "content": None, "name": "x"}]) == "False True"


def test_text_of_messages_is_never_a_template() -> None:
    assert "{{ 7 * 7 }} {% for x in y %} {# c #}" in render(
        THINKING, CONVERSATIONS["template syntax in text"]
    )


def test_time() -> None:
    before = datetime.now().strftime("%Y-%m-%d")
    text = render("{{ strftime_now('%Y-%m-%d') }}")
    assert before <= text <= datetime.now().strftime("%Y-%m-%d")


def test_generation_blocks_keep_their_assignments_inside() -> None:
    template = "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}"
    assert render(template) == "21"


def test_variables_of_a_template() -> None:
    assert template_variables(THINKING) >= {"messages", "tools", "enable_thinking", "add_generation_prompt"}
    assert "ns" not in template_variables(THINKING)


def test_the_callers_messages_are_not_changed() -> None:
    messages = [{"role": "user", "content": "q", "reasoning": "r", "x": None}]
    copy = [dict(message) for message in messages]
    render("{{ messages[0].thinking }}", messages)
    assert messages == copy


# -- what they may not do --------------------------------------------------------------------------

ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__['__builtins__'] }}",
    "{{ dict.__class__.__base__ }}",
    "{{ dict.__init__.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.system('true') }}",
    "{{ self.__init__.__globals__ }}",
    "{{ (messages | map(attribute='__class__') | list)[0].__mro__ }}",
    "{{ ('%c' | format(95)) and ''['__cla' ~ 'ss__'].mro() }}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{{ '{0.__class__}'.format_map({'0': messages}) }}",
    "{% set ns = namespace(__class__=1) %}{{ ns }}",
    "{% set ns = namespace() %}{% set ns.__init__ = 1 %}{{ ns.__init__ }}",
    "{{ ().__getattribute__('__class__') }}",
    "{{ messages.append({'role': 'x'}) }}",
    "{{ messages[0].update({'role': 'x'}) }}",
    "{{ messages[0].pop('role') }}",
    "{{ range(10 ** 9) | list }}",
    "{{ dict.update(messages[0], {'role': 'x'}) }}",
    "{{ dict.__subclasses__() }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os }}",
]


@pytest.mark.parametrize("template", ESCAPES)
def test_a_template_cannot_leave_the_sandbox(template: str) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    try:
        text = render(template, messages)
    except ChatTemplateError:
        pass
    else:
        assert text in ("", "{}")  # an attribute that is not there renders as nothing
    assert messages == [{"role": "user", "content": "Hi"}]


def test_the_escapes_would_succeed_without_the_sandbox() -> None:
    """So that the list above means something: plain jinja2 lets most of them through."""
    import jinja2

    leaked = 0
    for template in ESCAPES[:12]:
        environment = jinja2.Environment()
        environment.globals |= {"raise_exception": render, "strftime_now": render}
        with contextlib.suppress(jinja2.TemplateError):
            leaked += environment.from_string(template).render(messages=list(HI)) not in ("", "{}")
    assert leaked >= 8


# -- failures --------------------------------------------------------------------------------------


def test_the_templates_own_message_is_shown() -> None:
    with pytest.raises(ChatTemplateError, match=r"^chat template line \d+: role narrator is not known$"):
        render(THINKING, CONVERSATIONS["unknown role"])
    with pytest.raises(ChatTemplateError, match="user and assistant must take turns"):
        render(STRICT, CONVERSATIONS["assistant first"], bos_token="", eos_token="")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% if %}", r"chat template line 1: syntax error: Expected an expression"),
        ("\n\n{% endfor %}", r"chat template line 3: syntax error: .*endfor"),
        ("{{ 'a' + messages }}", r"chat template line 1: TypeError: can only concatenate str"),
        ("\n{{ missing.field }}", r"chat template line 2: 'missing' is undefined"),
        ("{{ 1 // 0 }}", r"ZeroDivisionError"),
        ("{{ 'x' | nosuchfilter }}", r"No filter named 'nosuchfilter'"),
        ("{{ messages[0] | tojson(indent='x', sort_keys=1) + 1 }}", r"TypeError"),
        ("{% break %}", r"chat template: syntax error: 'break' outside loop"),
        ("{{" * 1000, r"chat template: it is nested too deep"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", r"chat template: it is nested too deep"),
        ("{{ " + "-" * 5000 + "1 }}", r"chat template: it is nested too deep"),
    ],
)
def test_broken_templates(template: str, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        render(template)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "the conversation is empty"),
        (["Hi"], r"messages\[0\] must be a mapping with a role, not str"),
        ([*HI, 3], r"messages\[1\] must be a mapping"),
        ([{"role": "user", "content": b"x"}], r"messages\[0\]\['content'\] holds a bytes"),
        (
            [{"role": "user", "content": [{"image": np.zeros(2)}]}],
            r"\['content'\]\[0\]\['image'\] holds a ndarray",
        ),
    ],
)
def test_messages_that_are_no_messages(messages: list[Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        render(THINKING, messages)


def test_tools_that_are_no_schemas() -> None:
    with pytest.raises(UsageError, match=r"tools\[0\] must be a JSON schema \(a mapping\), not function"):
        render(THINKING, tools=[test_time])


def test_arguments_that_are_not_offered_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match="continue_final_message, tokenize"):
        render(THINKING, tokenize=True, continue_final_message=True)


# -- start-up --------------------------------------------------------------------------------------


def test_jinja2_is_imported_only_by_the_first_chat() -> None:
    code = "import sys, kestrel.text.tokenizer, kestrel.text.chat_template; sys.exit('jinja2' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
