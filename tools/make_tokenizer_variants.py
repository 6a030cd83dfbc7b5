#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes testdata/tokenizer/variants_*.json. Each holds variants of a small tokenizer, at least one for every kind of
step in a tokenizer.json, and the ids and texts that the PyPI packages `tokenizers` 0.23.3 and `sentencepiece` 0.2.3
compute with it from difficult texts. Also writes the tokenizers that the variants are based on. The test that reads
them needs no Python.
"""
import base64
import copy
import io
import json
import os
import pathlib
import random
import re

import sentencepiece
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from make_tokenizer_goldens import (LLAMA3, OUT, added, byte_letters, byte_level, checksum, dump, random_texts,
                                    sequence, split, texts)

GPT4 = (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|"
        r"\s+(?!\S)|\s")
DEEPSEEK_LLM = ["[\r\n]", r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕ]+",
                r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", "[一-龥ࠀ-一가-퟿]+"]
DEEPSEEK_CODER = ["[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+"]
SPACE = "\u2581"
TABS = "".join(chr(c) for c in range(1, 32))

HARD = ["", " ", "   ", "a", " a", "a ", "  a  b   c  ", "\n", "\n\na", "a\n", "a\n ", "\t x\t", "\r\n \r x", "Hello, world!",
        "don't STOP'LL 'ſ I'Ve it'ſ", "12345 67 x1y22", "e\u0301 x\u0323\u0307 \u00c5\u212b \u1e9b\u0323", "ﬁ ﬀ ½ Ⅷ ① ㍿ ｆｕｌｌ ² ™",
        "👩‍👩‍👧 🇩🇪 ❤️", "日本語 テスト ｶﾞ 中文。", "नमस्ते שלום สวัสดี", "\u2581 \u2581\u2581x \u2581", "a\u200bb\ufeffc\u00ad\u200d",
        "x\x00y\x7f" + TABS, "x\u00a0y\u3000z\u2028w\u0085", "İSTANBUL ΑΣ ẞ ǅ", "<|end|>", "<|end|> a", "a <|end|>b", " <|end|>  <|end|>",
        "say<|think|>x", " <|think|> ", "a<|think|><|think|>", "<|thin", "a.b-c_d!!?", "https://x.y/z?a=b#c", "<0x41> <0x0A>",
        "aaaaaaaaaaaaaaaaaaa", " " * 20 + "x" + " " * 20, "♫ unknown ☃ ☃☃", "\U0001cc00\U0001e030\u1c89\u0898", "Σ\u0345 \u0301a",
        "word wordword word", "xword word_ _word", "a\u0301\u0323\u0334", "가각 \u1100\u1161\u11a8", "naïve café", "  \n  \n", "x \n"]


SAMPLE = random_texts(0)
CLEAN = [re.sub(r"<\|\w+\|>", "", text) for text in texts()[:90]]


def train_bpe():
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.train_from_iterator(CLEAN, trainers.BpeTrainer(vocab_size=600, show_progress=False))
    data = json.loads(tokenizer.to_str())
    special = ["<unk>", "<s>", "</s>"]
    pieces = special + [f"<0x{b:02X}>" for b in range(256)] + [t for t in data["model"]["vocab"] if t not in special]
    data["model"]["vocab"] = {piece: i for i, piece in enumerate(pieces)}
    return data


def train_sentencepiece(**options):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(CLEAN * 2), model_writer=model,
                                             hard_vocab_limit=False, minloglevel=2, num_threads=1, **options)
    return model.getvalue()


def unigram_json(model):
    """Returns the tokenizer.json of a unigram model of sentencepiece."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    vocab = [[processor.id_to_piece(i), processor.get_score(i)] for i in range(processor.vocab_size())]
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": flags(len(vocab)), "normalizer": None,
            "pre_tokenizer": metaspace("always"), "post_processor": None, "decoder": metaspace("always"),
            "model": {"type": "Unigram", "unk_id": 0, "vocab": vocab, "byte_fallback": False}}


def flags(first, **think):
    """Returns two added tokens: "<|end|>", and "<|think|>" with the given flags."""
    return added(first - 1, **think)[1:]


def metaspace(scheme, **options):
    return {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": scheme, "split": True, **options}


def normalizers(*steps):
    return {"type": "Sequence", "normalizers": list(steps)}


def replace(pattern, content, kind="String"):
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def decoders(*steps):
    return {"type": "Sequence", "decoders": list(steps)}


def template(token, index):
    return {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": token, "type_id": 0}},
                                                     {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {token: {"id": token, "ids": [index], "tokens": [token]}}}


FALLBACK = [{"type": "ByteFallback"}, {"type": "Fuse"}]
LLAMA_DECODER = decoders(replace(SPACE, " "), *FALLBACK, {"type": "Strip", "content": " ", "start": 1, "stop": 0})
GEMMA_DECODER = decoders(replace(SPACE, " "), *FALLBACK)


def spaced_variants(size):
    """Returns variants of the sentencepiece BPE."""
    llama = normalizers({"type": "Prepend", "prepend": SPACE}, replace(" ", SPACE))
    result = {
        "llama2": {"normalizer": llama, "pre_tokenizer": None, "decoder": LLAMA_DECODER, "post_processor": template("<s>", 1)},
        "mistral": {"pre_tokenizer": metaspace("first", split=False), "decoder": LLAMA_DECODER,
                    "post_processor": template("<s>", 1)},
        "gemma": {"normalizer": replace(" ", SPACE), "pre_tokenizer": split(" ", "MergedWithPrevious"),
                  "decoder": GEMMA_DECODER},
        "phi3": {"normalizer": llama, "pre_tokenizer": None, "decoder": LLAMA_DECODER,
                 "added_tokens": flags(size, rstrip=True, special=True)},
        "normalized_added": {"normalizer": llama, "pre_tokenizer": None, "decoder": LLAMA_DECODER,
                             "added_tokens": flags(size, normalized=True)},
        "first_behind_strip": {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": False},
                               "pre_tokenizer": metaspace("first"), "decoder": metaspace("first")},
        "first_behind_accents": {"normalizer": {"type": "StripAccents"}, "pre_tokenizer": metaspace("first"),
                                 "decoder": metaspace("first")},
        "strip_both_ends": {"pre_tokenizer": metaspace("never"),
                            "decoder": decoders(metaspace("never"), {"type": "Fuse"},
                                                {"type": "Strip", "content": "x", "start": 2, "stop": 3},
                                                replace("an", "AN"))},
        "strip_tokens": {"pre_tokenizer": metaspace("always"),
                         "decoder": decoders(replace("[aeiou]", "*", "Regex"), metaspace("always"),
                                             {"type": "Strip", "content": "*", "start": 1, "stop": 0})},
        "no_decoder": {"pre_tokenizer": metaspace("always"), "decoder": None},
        "truncation": {"pre_tokenizer": metaspace("always"), "decoder": metaspace("always"),
                       "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
                       "padding": {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None,
                                   "pad_id": 0, "pad_type_id": 0, "pad_token": "<unk>"}},
    }
    for scheme in ["always", "never", "first"]:
        for cut in [True, False]:
            result[f"metaspace_{scheme}{'' if cut else '_whole'}"] = {
                "pre_tokenizer": metaspace(scheme, split=cut), "decoder": metaspace(scheme)}
    for name, options in {"unk": {"byte_fallback": False, "fuse_unk": False}, "fused_unk": {"byte_fallback": False},
                          "dropped": {"byte_fallback": False, "unk_token": None}}.items():
        result[name] = {"pre_tokenizer": metaspace("always"), "decoder": metaspace("always"), "model": options}
    return result


def added_variants(size):
    """Returns a variant for every combination of an added token's flags."""
    every = ["lstrip", "rstrip", "single_word", "normalized", "special"]
    result = {}
    for bits in range(32):
        options = {flag: bool(bits >> i & 1) for i, flag in enumerate(every)}
        result["added_" + "".join(flag[0] if options[flag] else "_" for flag in every)] = {
            "normalizer": {"type": "Lowercase"}, "pre_tokenizer": sequence(split(LLAMA3), byte_level()),
            "decoder": byte_level(),
            "added_tokens": flags(size, **options) + [{"id": size + 2, "content": "Word", **options}]}
    return result


def byte_variants():
    """Returns variants of a byte-level BPE."""
    result = {
        "gpt4": {"pre_tokenizer": sequence(split(GPT4), byte_level())},
        "deepseek_llm": {"pre_tokenizer": sequence(*map(split, DEEPSEEK_LLM),
                                                   {"type": "Digits", "individual_digits": True}, byte_level())},
        "deepseek_coder": {"pre_tokenizer": sequence(*map(split, DEEPSEEK_CODER),
                                                     {"type": "Digits", "individual_digits": True}, byte_level())},
        "anchors": {"pre_tokenizer": sequence(split(r"^\s+|[a-z]+$"), split(r"\A.|\bw"), byte_level())},
        "words": {"pre_tokenizer": sequence(split(r"[\w']+|\W"), byte_level())},
        "intervals": {"pre_tokenizer": sequence(split("(?:ab|a){2,3}+|[a-z]{1,2}+"), byte_level())},
        "byte_normalizer": {"normalizer": {"type": "ByteLevel"}, "pre_tokenizer": None},
        "whitespace": {"pre_tokenizer": sequence({"type": "Whitespace"}, byte_level())},
        "whitespace_split": {"pre_tokenizer": sequence({"type": "WhitespaceSplit"}, byte_level())},
        "punctuation": {"pre_tokenizer": sequence({"type": "Punctuation", "behavior": "Contiguous"}, byte_level())},
        "delimiter": {"pre_tokenizer": sequence({"type": "CharDelimiterSplit", "delimiter": "."}, byte_level())},
        "fixed_length": {"pre_tokenizer": sequence({"type": "FixedLength", "length": 3}, byte_level())},
        "digits": {"pre_tokenizer": sequence({"type": "Digits", "individual_digits": False}, byte_level(use_regex=True))},
    }
    for behavior in ["Removed", "Isolated", "Contiguous", "MergedWithPrevious", "MergedWithNext"]:
        for invert in [False, True]:
            result[f"split_{behavior}{'_inverted' if invert else ''}"] = {
                "pre_tokenizer": sequence(split(r"\s|[a-c]", behavior, invert), byte_level())}
    for step in ["NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Nmt"]:
        result[step.lower()] = {"normalizer": {"type": step}}
    result["replace"] = {"normalizer": normalizers(replace("[aeiou]+", "", "Regex"), replace("th", "TH"))}
    result["strip"] = {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}}
    for variant in result.values():
        variant.setdefault("pre_tokenizer", sequence(split(LLAMA3), byte_level()))
        variant.setdefault("decoder", byte_level())
    return result


def without_bytes(data):
    """Returns a vocabulary that lacks 21 control characters, as some small vocabularies in use do."""
    letter = byte_letters()
    data = copy.deepcopy(data)
    for byte in [0, 1, 2, 4, 5, 6, 7, 8, 11, 12, 14, 15, 16, 17, 18, 19, 20, 21, 22, 127, 255]:
        data["model"]["vocab"].pop(letter[byte], None)
    merges = data["model"]["merges"]
    vocab = sorted(data["model"]["vocab"], key=data["model"]["vocab"].get)
    data["model"]["merges"] = [m for m in merges if all(part in vocab for part in [*m, "".join(m)])]
    data["model"]["vocab"] = {token: i for i, token in enumerate(vocab)}
    data["added_tokens"] = flags(len(vocab))
    return data


def unigram_variants(charsmap):
    precompiled = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(charsmap).decode()}
    xlmr = normalizers(precompiled, {"type": "Strip", "strip_left": False, "strip_right": True},
                       replace(" {2,}", SPACE, "Regex"))
    return {"t5": {"normalizer": xlmr}, "unigram_plain": {}, "unigram_bytes": {"model": {"byte_fallback": True}},
            "unigram_whole": {"pre_tokenizer": metaspace("first", split=False)},
            "unigram_whitespace": {"pre_tokenizer": sequence({"type": "WhitespaceSplit"}, metaspace("always"))}}


def patched(base, patch):
    """Applies a patch in which null is a value and removes nothing."""
    data = copy.deepcopy(base)
    for field, value in patch.items():
        if field == "model":
            data["model"].update(value)
        else:
            data[field] = value
    return data


def decoded(tokenizer, ids):
    """Returns None where Strip cuts more than the text has: the reference then fails with an index out of bounds."""
    try:
        return tokenizer.decode(ids)
    except BaseException as error:
        if "index out of bounds" not in str(error):
            raise
        return None


def sentencepiece_goldens(models_by_name):
    result = {}
    for name, model in models_by_name.items():
        (OUT / f"{name}.model").write_bytes(model)
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        bos = [processor.bos_id()] if processor.bos_id() >= 0 else []
        strings = [t for t in HARD + random_texts(7)[:200] if "<|" not in t and "\0" not in t and "\ufffd" not in t]
        result[name] = {"texts": strings, "ids": [bos + processor.encode(text) for text in strings]}
    return result


def main():
    os.chdir(OUT)
    byte_base = json.loads((OUT / "llama3.json").read_text(encoding="utf-8"))
    byte_base["post_processor"] = None
    byte_base["model"]["ignore_merges"] = False
    spaced_base = train_bpe()
    spaced_base["model"].update(byte_fallback=True, fuse_unk=True)
    spaced_base["added_tokens"] = flags(len(spaced_base["model"]["vocab"]))
    spaced_base["pre_tokenizer"] = None
    common = {"vocab_size": 400, "character_coverage": 0.98}
    rules = pathlib.Path("rules.tsv")  # rules of a charsmap, from sequence to sequence; the model stores this path
    pairs = {"\u00bd": "1/2", "e\u0301": "\u00e9", "\ufb01": "fi", "\u3000": " ", "\t": " ", "\n": " ", "\u200b": "", "a\u0301": "A",
             "\u0301": "'", "A": "a", "\uff46": "f", "ab": "c", "\u1100\u1161": "\uac00", "\u212b": "\u00c5", "\U0001f469": "w"}
    rules.write_text("".join(f"{' '.join(f'{ord(c):X}' for c in k)}\t{' '.join(f'{ord(c):X}' for c in v)}\n"
                             for k, v in pairs.items()), encoding="utf-8")
    mapped = train_sentencepiece(model_type="unigram", normalization_rule_tsv=str(rules), **common)
    rules.unlink()
    plain = train_sentencepiece(model_type="unigram", normalization_rule_name="identity", remove_extra_whitespaces=False,
                                byte_fallback=True, **common)
    bases = {"bytes": byte_base, "bytes_missing": without_bytes(byte_base), "spaced": spaced_base,
             "unigram": unigram_json(plain)}
    size = len(byte_base["model"]["vocab"])
    tables = {
        "bytes": [("bytes", byte_variants()),
                  ("bytes_missing", {"missing": {}, "missing_unk": {"model": {"unk_token": "a"}}})],
        "added": [("bytes", added_variants(size))],
        "spaced": [("spaced", spaced_variants(len(spaced_base["model"]["vocab"]))),
                   ("unigram", unigram_variants(charsmap_of(mapped)))]}
    for name, base in bases.items():
        (OUT / f"base_{name}.json").write_text(dump(base), encoding="utf-8")
    for table, parts in tables.items():
        strings = [t for t in HARD if "<|" in t or "ord" in t] if table == "added" else HARD
        variants = [variant_golden(name, base, bases[base], patch, strings)
                    for base, variants in parts for name, patch in variants.items()]
        write(f"variants_{table}.json", {"texts": strings, "variants": variants})
    write("sentencepiece.json", sentencepiece_goldens({
        "llama_bpe": train_sentencepiece(model_type="bpe", normalization_rule_name="identity", byte_fallback=True,
                                         remove_extra_whitespaces=False, user_defined_symbols=["<tool>", "\n\n"], **common),
        "mapped_unigram": mapped}))


def variant_golden(name, base_name, base, patch, strings):
    # Fovea ignores truncation and padding, which a language model has no use for.
    asked = {k: v for k, v in patch.items() if k not in ("truncation", "padding")}
    tokenizer = Tokenizer.from_str(dump(patched(base, asked)))
    ids = [tokenizer.encode(text).ids for text in strings]
    back = [decoded(tokenizer, each) for each in ids]
    rng = random.Random(name)
    sample = [[rng.randrange(tokenizer.get_vocab_size()) for _ in range(12)] for _ in range(6)]
    return {"name": name, "base": base_name, "patch": patch, "ids": ids,
            "decoded": {i: d for i, (t, d) in enumerate(zip(strings, back)) if t != d},
            "random": checksum(tokenizer, SAMPLE), "any_ids": sample,
            "any_decoded": [decoded(tokenizer, each) for each in sample]}


def write(name, goldens):
    text = json.dumps(goldens, ensure_ascii=True, separators=(",", ":"))
    (OUT / name).write_text(text.replace('{"name"', '\n{"name"') + "\n", encoding="utf-8")


def charsmap_of(model):
    """Returns the precompiled_charsmap of a ModelProto: field 2 of its field 3."""
    def fields(message):
        at = 0

        def varint():
            nonlocal at
            value, shift = 0, 0
            while True:
                byte = message[at]
                at += 1
                value |= (byte & 127) << shift
                shift += 7
                if byte < 128:
                    return value
        while at < len(message):
            key = varint()
            if key & 7 == 0:
                yield key >> 3, varint()
            else:
                length = varint() if key & 7 == 2 else {1: 8, 5: 4}[key & 7]
                yield key >> 3, message[at:at + length]
                at += length
    normalizer = next(value for number, value in fields(model) if number == 3)
    return next(value for number, value in fields(normalizer) if number == 2)


if __name__ == "__main__":
    main()
