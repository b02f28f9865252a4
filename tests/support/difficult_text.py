"""Strings on which tokenizers and detokenizers have gone wrong."""

from __future__ import annotations

NUMBERS = [
    "0",
    "7",
    "42",
    "365",
    "1234",
    "12345678901234567890",
    "3.14159",
    "1,000,000",
    "-17",
    "0x1F",
    "½ ² ٣ Ⅷ",
]
CONTRACTIONS = [
    "I'm you're he's we'll they've I'd don't",
    "I'M YOU'RE HE'S WE'LL THEY'VE I'D DON'T",
    "it’s ‘quoted’ “text”",
    "'s 't 're 've 'm 'll 'd",
    "rock'n'roll O'Neil 'tis",
    "'sister 'train 'mellow we'redo 'LLAMA it'Very",
]
WHITESPACE = [
    " ",
    "  ",
    "   three before",
    "three after   ",
    "a  b   c    d     e",
    "\t",
    "\ttab\t\ttabs",
    "\n",
    "\n\n",
    "\n\n\n\n\nfive",
    "line\nline",
    "line\r\nline\r\n",
    "trailing \n leading",
    "  \n  \n",
    "def f(x):\n    if x:\n        return x\n\n\treturn None\n",
    "no\u00a0break thin\u2009space ideographic\u3000space zero\u200bwidth\ufeffmark",
]
CJK = [
    "你好，世界！",
    "日本語のテキストとカタカナ、漢字。",
    "한국어 문장입니다.",
    "中文mixed英文123混合",
    "𠀀𠮷𩸽 rare",
    "！？。，、；：「」『』（）",
]
EMOJI = [
    "😀",
    "😀😃😄",
    "👍🏽 skin",
    "👨‍👩‍👧‍👦 family",
    "🇩🇪🇯🇵 flags",
    "❤️ heart 1️⃣ keycap",
    "text😀text 🎉!",
    "🫠🪿",
]
OTHER_SCRIPTS = [
    "Привет, мир! Съешь ещё этих мягких французских булок",
    "Καλημέρα κόσμε",
    "مرحبا بالعالم، كيف حالك؟",
    "שלום עולם \u200fימין לשמאל",
    "हिन्दी में लिखा गया वाक्य",
    "ภาษาไทยไม่มีวรรค",
    "Tiếng Việt có dấu",
    "İstanbul ıI ß ẞ ﬁ ŉ ǆ",
]
PUNCTUATION = [
    "...",
    "!!!???",
    "--- *** ___ ###",
    "a.b.c/d/e\\f",
    "x=y+z*(w-1)%2; // comment",
    '<html><body class="a">&amp;</body></html>',
    "{'k': [1, 2, {\"n\": null}]}",
    "user@example.com https://example.com/a?b=c&d=e#f",
    "$100 €50 £20 ¥10 ~^`|",
    "a.\n/b ;\r\n//c !\n\n/",
    "a_b_c camelCase snake_case SCREAMING",
]
CONTROL = [
    "\x00",
    "\x01\x1f\x7f",
    "bell\x07 esc\x1b[0m",
    "a\x0bb\x0cc",
    "\x85 next line \u2028 line sep \u2029",
]
# Canonically equivalent spellings: a tokenizer with NFC treats both members of a pair alike.
DECOMPOSED = [
    "e\u0301 a\u0308 n\u0303",
    "\u00c5 \u212b A\u030a",
    "\u1112\u1161\u11ab\u1100\u116e\u11a8",
    "q\u0323\u0307",
    "Z\u0338a\u0337l\u0335g\u0336o\u0334",
    "\ufdfa \u2126 \u212a",
]
SPECIAL = [
    "<|im_start|>system\nYou are terse.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "<|endoftext|>",
    "<|endoftext|><|endoftext|>",
    "a<|im_end|>b <|im_end|> c",
    "<|im_start|",
    "<|im_end|>>",
    "< |im_end|>",
]
WORDS = [
    "",
    "a",
    "Hello, world!",
    "The quick brown fox jumps over the lazy dog.",
    "supercalifragilisticexpialidocious antidisestablishmentarianism",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "ABCDEFGHIJKLMNOPQRSTUVWXYZ",
    "HTTPServer XMLHttpRequest iPhone McDonald",
    "naïve café résumé",
    "word" * 40,
]

STRINGS = [
    *WORDS,
    *NUMBERS,
    *CONTRACTIONS,
    *WHITESPACE,
    *CJK,
    *EMOJI,
    *OTHER_SCRIPTS,
    *PUNCTUATION,
    *CONTROL,
    *SPECIAL,
]
ALL_STRINGS = [*STRINGS, *DECOMPOSED]
