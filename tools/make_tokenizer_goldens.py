#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes testdata/tokenizer/: small tokenizers in the styles of known models, texts, and the ids
that the PyPI package `tokenizers` 0.23 gives them. The test that reads them needs no Python.

The vocabularies are trained across the borders that the patterns draw, so that a border in the
wrong place changes ids.
"""
import json
import pathlib
import random
import re
import struct
import zlib

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

ROOT = pathlib.Path(__file__).resolve().parent.parent
OUT = ROOT / "testdata" / "tokenizer"

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = (CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + TAIL)
QWEN = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + TAIL
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
GPT4O = (rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTIONS}?|"
         rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTIONS}?|"
         r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + TAIL)
DEEPSEEK = [r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+",
            r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?"""
            r"[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + TAIL]

WORDS = ("the of and Israel don't I'll WE'RE you've It's 'S 'LL 'ſ 123 4567 3.14 x1y2 "
         "http://x.y/z?a=b foo_bar camelCase HTTPServer naïve cafe\u0301 日本語テスト 你好 привет МИР "
         "नमस्ते שלום สวัสดี 👩‍👩‍👧 🇩🇪 ½ Ⅷ ٣٤ !!! ... --- == (a) [b] {c} <x> \u180e \u0085 \u00a0 \u2028 \u3000 "
         "<|begin|> <|end|> <|think|> \ufeff \x00 \x7f").split(" ")
SPACES = ["", " ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", " \n", "\n "]


def texts():
    rng = random.Random(1)
    result = ["", " ", "a", "\n", "Hello, world!", "  leading", "trailing  ", "a<|end|> b", "<|end|>",
              "<|end|><|end|>", "<|en", "a  <|think|>  b", "e\u0301\u0323 \u212b \uac01", "x" * 300,
              " " * 50 + "x", "\n" * 40, "A" * 30 + "b" * 30, "1" * 20, "!" * 20, "🙂" * 9]
    for _ in range(70):
        result.append("".join(rng.choice(WORDS) + rng.choice(SPACES) for _ in range(rng.randrange(1, 9))))
    for _ in range(60):
        points = [rng.choice([rng.randrange(0x20, 0x7f), rng.randrange(0xa0, 0x530),
                              rng.randrange(0x900, 0x940), rng.randrange(0x4e00, 0x9fa0),
                              rng.randrange(0x1f600, 0x1f640), 0x20, 0x0a, 0x301])
                  for _ in range(rng.randrange(1, 16))]
        result.append("".join(map(chr, points)))
    return result


def split(pattern, behavior="Isolated", invert=False):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": invert}


def byte_level(**options):
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False,
            **options}


def sequence(*steps):
    return {"type": "Sequence", "pretokenizers": list(steps)}


def added(first_id, **think):
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
             "special": True}
    return [{"id": first_id, "content": "<|begin|>", **flags},
            {"id": first_id + 1, "content": "<|end|>", **flags},
            {"id": first_id + 2, "content": "<|think|>", **flags, "special": False, **think}]


def trained(corpus):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(vocab_size=700, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(corpus, trainer)
    return json.loads(tokenizer.to_str())


CODE_POINT_BLOCK = 16384


def code_point_text(point):
    """Returns a text whose ids show how a pattern classifies the character. The C++ test builds the same text."""
    c = chr(point)
    return f"a{c}A{c}{c} {c}1{c}!{c}\n{c}"


def code_point_goldens(base, styles):
    """Returns a vocabulary with tokens across every border of those texts, and for each pattern a CRC-32 of
    the ids of every block of code points."""
    alphabet = sorted(t for t in base["model"]["vocab"] if len(t) == 1)
    letter = byte_letters()
    around = [letter[b] for b in b"aA 1!\n"]
    leads, tails = [letter[b] for b in range(0xc2, 0xf5)], [letter[b] for b in range(0x80, 0xc0)]
    merges = [[t, a] for t in tails for a in around] + [[a, l] for a in around for l in leads]
    vocab = {token: i for i, token in enumerate(alphabet + [a + b for a, b in merges])}
    data = {**base, "decoder": byte_level(), "model": {"type": "BPE", "vocab": vocab,
                                                       "merges": [" ".join(m) for m in merges]}}
    (OUT / "codepoints.json").write_text(dump(data), encoding="utf-8")
    result = {}
    for name in ["gpt2", "llama3", "gpt4o", "deepseek"]:
        tokenizer = Tokenizer.from_str(dump({**data, "pre_tokenizer": styles[name]["pre_tokenizer"]}))
        result[name] = block_checks(tokenizer, code_point_text)
    return result


def marked_text(point):
    """Returns a text whose ids show whether the character is a mark, what it composes with, and its order
    among marks. The C++ test builds the same text."""
    c = chr(point)
    return f"e{c}\u0301 a\u0301{c}\u0334 \u1100{c} \U00011935{c}"


def checksum(tokenizer, strings):
    return zlib.crc32(b"".join(struct.pack(f"<{len(e.ids)}i", *e.ids)
                               for e in tokenizer.encode_batch(strings)))


def block_checks(tokenizer, text_of):
    """Returns a CRC-32 of the ids of every block of code points."""
    blocks = (range(first, first + CODE_POINT_BLOCK) for first in range(0, 0x110000, CODE_POINT_BLOCK))
    return [checksum(tokenizer, [text_of(p) for p in block if not 0xd800 <= p < 0xe000]) for block in blocks]


RANDOM_BLOCK, RANDOM_BLOCKS = 4096, 42  # a million texts for six tokenizers
RANDOM_RANGES = [(0x20, 0x7f), (0x61, 0x7b), (0x30, 0x3a), (0x09, 0x0e), (0xa0, 0x530), (0x900, 0x980),
                 (0x4e00, 0x9fa0), (0x1f600, 0x1f640), (0x20, 0x21), (0, 0xd800), (0xe000, 0x110000)]


def random_texts(block):
    """Returns texts that mix characters of many kinds. The C++ test builds the same texts."""
    state = block

    def draw(below):
        nonlocal state
        state = (state * 6364136223846793005 + 1442695040888963407) % (1 << 64)
        return (state >> 33) % below

    def piece():
        kind = draw(len(RANDOM_RANGES) + 1)
        if kind == len(RANDOM_RANGES):
            return "<|end|>"
        first, end = RANDOM_RANGES[kind]
        return chr(first + draw(end - first))

    return ["".join(piece() for _ in range(1 + draw(24))) for _ in range(RANDOM_BLOCK)]


def byte_letters():
    printable = [*range(0x21, 0x7f), *range(0xa1, 0xad), *range(0xae, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {**{b: chr(b) for b in printable}, **{b: chr(256 + i) for i, b in enumerate(others)}}


def dump(data):
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")) + "\n"


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    strings = texts()
    base = trained(re.sub(r"<\|\w+\|>", "", text) for text in strings[:-60])
    size = len(base["model"]["vocab"])
    begin = {"type": "TemplateProcessing",
             "single": [{"SpecialToken": {"id": "<|begin|>", "type_id": 0}},
                        {"Sequence": {"id": "A", "type_id": 0}}],
             "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
             "special_tokens": {"<|begin|>": {"id": "<|begin|>", "ids": [size], "tokens": ["<|begin|>"]}}}
    around = json.loads(json.dumps(begin))
    around["single"].append({"SpecialToken": {"id": "<|begin|>", "type_id": 0}})
    styles = {
        "gpt2": {"pre_tokenizer": byte_level(use_regex=True, add_prefix_space=True),
                 "added_tokens": added(size, normalized=True, lstrip=True)},
        "llama3": {"pre_tokenizer": sequence(split(LLAMA3), byte_level()), "ignore_merges": True,
                   "post_processor": {"type": "Sequence", "processors": [byte_level(), begin]}},
        "qwen": {"pre_tokenizer": sequence(split(QWEN), byte_level()), "normalizer": {"type": "NFC"}},
        "gpt4o": {"pre_tokenizer": sequence(split(GPT4O, "Removed", True), byte_level()),
                  "added_tokens": added(size, rstrip=True), "post_processor": around},
        "deepseek": {"pre_tokenizer": sequence(*map(split, DEEPSEEK), byte_level())},
        "digits": {"pre_tokenizer": sequence(
            {"type": "Digits", "individual_digits": True},
            {"type": "Split", "pattern": {"String": "a."}, "behavior": "Removed", "invert": False},
            byte_level(use_regex=True))},
    }
    goldens = {"texts": strings, "ids": {}, "decoded": {}}
    for name, style in styles.items():
        model = {**base["model"], "ignore_merges": style.pop("ignore_merges", False)}
        if name == "gpt4o":  # the older spelling of merges
            model["merges"] = [" ".join(pair) for pair in model["merges"]]
        data = {**base, "model": model, "decoder": byte_level(), "added_tokens": added(size), **style}
        text = dump(data)
        (OUT / f"{name}.json").write_text(text, encoding="utf-8")
        tokenizer = Tokenizer.from_str(text)
        goldens["ids"][name] = [e.ids for e in tokenizer.encode_batch(strings)]
        goldens["decoded"][name] = [tokenizer.decode(ids) for ids in goldens["ids"][name]]
    for name in styles:
        # Most texts survive the round trip, so only the others are stored.
        pairs = zip(strings, goldens["decoded"][name])
        goldens["decoded"][name] = {str(i): d for i, (t, d) in enumerate(pairs) if t != d}
    goldens["code_points"] = code_point_goldens(base, styles)
    blocks = [random_texts(block) for block in range(RANDOM_BLOCKS)]
    goldens["random"] = {name: [checksum(Tokenizer.from_file(str(OUT / f"{name}.json")), block)
                                for block in blocks] for name in styles}
    goldens["marks"] = block_checks(Tokenizer.from_file(str(OUT / "qwen.json")), marked_text)
    text = json.dumps(goldens, ensure_ascii=True, separators=(",", ":"))
    (OUT / "goldens.json").write_text(text.replace('],[', '],\n[') + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
