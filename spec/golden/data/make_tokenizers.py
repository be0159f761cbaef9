#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Trains small tokenizers of each kind with PyPI's tokenizers 0.23 (with a map of characters by sentencepiece 0.2.3) on this repository's licence and on sample words, and
writes them to tokenizers/KIND.json, and two of sentencepiece to KIND.model.gz, with what they make of some strings in tokenizers/cases.json: ids, offsets as first and
last bytes from 1, and the decoded text.  usage: make_tokenizers.py [OUT_DIR]"""
import base64, gzip, json, os, sys, tempfile
import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

here = os.path.dirname(os.path.abspath(__file__))
out = os.path.join(sys.argv[1] if len(sys.argv) > 1 else here, "tokenizers")

WORDS = ["Hello world", "Привет мир, как дела?", "γειά σου Κόσμε", "שלום עולם", "مرحبا بالعالم", "नमस्ते दुनिया", "こんにちは世界、元気ですか",
         "你好，世界！这是一个测试。", "안녕하세요 세계", "สวัสดีชาวโลก", "வணக்கம் உலகம்", "Xin chào thế giới ệ ố", "café naïve résumé Ångström",
         "I'm you're it's we'll they'd I've DON'T It'S", "1234567890 3.14159 0xFF ½ ² ① ١٢٣", "a_b-c.d/e\\f@g#h$i%j^k&l*m(n)"]
TEXT = [open(os.path.join(here, "../../../LICENSE"), encoding="utf8").read()] + WORDS * 3
CASES = WORDS + [
    "", " ", "     ", "a", " a", "a ", "  two  spaces  ", "tab\tnew\nline\r\ncrlf\n\n\n  x", "to deal in the Software without restriction",
    "cafe\u0301 nai\u0308ve o\u0302\u0323 q\u0307\u0323 \u1112\u1161\u11ab", "\u0301 begins", "İstanbul ſ ﬁ Ǆ ẞß ΣΑΣ", "👨‍👩‍👧‍👦 👍🏽 🇩🇪 ❤️",
    "nbsp\u00a0em\u2003\u3000wide\u180emvs\u200bzwsp\ufeffbom\u0085nel", "\x00\x01\x7f", "𝔘𝔫𝔦 𐐷 𠀀", "!!!???---===>>>", "▁x▁▁y Ġ ##a </w>",
    "<|end|>x<|end|> <|end|>", " <mask> a<mask>b  <mask>", "tool tools <tool> tool.", "[CLS] [MASK][SEP]", "<s>text</s> </s>", "<0x41>",
    "loremipsum" * 12, "ééé" * 40]

LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CLIP = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
ALPHABET = pre_tokenizers.ByteLevel.alphabet()
bytes_of = lambda prefix=False, regex=True: pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=regex)


def trained(model, special, normalizer=None, pre=None, size=400, trainer=trainers.BpeTrainer, **options):
    t = Tokenizer(model)
    if normalizer: t.normalizer = normalizer
    t.pre_tokenizer = pre
    t.train_from_iterator(TEXT, trainer(vocab_size=size, special_tokens=special, show_progress=False, **options))
    return t


def around(single, pair, *ids):
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=list(ids))


def gpt2():
    t = trained(models.BPE(), ["<|end|>"], pre=bytes_of(), initial_alphabet=ALPHABET)
    t.post_processor, t.decoder = processors.ByteLevel(add_prefix_space=False, trim_offsets=True), decoders.ByteLevel()
    return t


def llama3():
    pre = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3), "isolated"), bytes_of(regex=False)])
    t = trained(models.BPE(ignore_merges=True), ["<s>", "<|end|>"], pre=pre, initial_alphabet=ALPHABET)
    t.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), around("<s> $A", "<s> $A <s>:1 $B:1", ("<s>", 0))])
    t.decoder = decoders.ByteLevel()
    return t


def qwen2():
    pre = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3.replace("{1,3}", "")), "isolated"), bytes_of(regex=False)])
    t = trained(models.BPE(), ["<|end|>"], normalizers.NFC(), pre, initial_alphabet=ALPHABET)
    t.add_tokens([AddedToken("<tool>", normalized=True), AddedToken("cafe\u0301", normalized=True)])
    t.post_processor, t.decoder = processors.ByteLevel(trim_offsets=False), decoders.ByteLevel()
    return t


def roberta():
    t = trained(models.BPE(), ["<s>", "<pad>", "</s>"], pre=bytes_of(True), initial_alphabet=ALPHABET)
    t.add_special_tokens([AddedToken("<mask>", lstrip=True, special=True)])
    t.add_tokens([AddedToken("tool", single_word=True, rstrip=True)])
    t.post_processor, t.decoder = processors.RobertaProcessing(("</s>", 2), ("<s>", 0)), decoders.ByteLevel()
    return t


def llama2():
    t = trained(models.BPE(unk_token="<unk>"), ["<unk>", "<s>", "</s>"] + ["<0x%02X>" % b for b in range(256)],
                pre=pre_tokenizers.Metaspace(), size=520, limit_alphabet=60)
    t = json.loads(t.to_str())
    t["added_tokens"], t["pre_tokenizer"] = t["added_tokens"][:3], None
    t["model"].update(fuse_unk=True, byte_fallback=True)
    t = Tokenizer.from_str(json.dumps(t))
    t.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    t.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                   decoders.Strip(content=" ", left=1)])
    t.post_processor = around("<s> $A", "<s> $A <s>:1 $B:1", ("<s>", 1))
    return t


def bert(lowercase=True):
    t = trained(models.WordPiece(unk_token="[UNK]"), ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"], size=330,
                normalizer=normalizers.BertNormalizer(lowercase=lowercase), pre=pre_tokenizers.BertPreTokenizer(),
                trainer=trainers.WordPieceTrainer)
    t.decoder = decoders.WordPiece()
    t.post_processor = around("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", ("[CLS]", 2), ("[SEP]", 3))
    return t


def clip():
    normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()])
    pre = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(CLIP), "removed", True), bytes_of()])
    t = trained(models.BPE(unk_token="<|end|>", end_of_word_suffix="</w>", continuing_subword_prefix=""), ["<|start|>", "<|end|>"],
                normalizer, pre, size=800, initial_alphabet=ALPHABET, end_of_word_suffix="</w>")
    t.post_processor = processors.RobertaProcessing(("<|end|>", 1), ("<|start|>", 0), trim_offsets=False, add_prefix_space=False)
    t.decoder = decoders.ByteLevel()
    return t


# SentencePiece's map of characters, of a few rules: old characters, new ones.
RULES = """FB01\t66 69\n2460\t31\n41 30A\tC5\nBD\t31 2F 32\n3000\t20\n1E9E\t53 53\n301\t27\n1112 1161\tD558\n"""


def piece_model(folder, kind, **options):
    """Trains a model of sentencepiece; returns its bytes."""
    with open(folder + "/rules.tsv", "w") as f: f.write(RULES)
    with open(folder + "/text.txt", "w") as f: f.write("\n".join(WORDS * 9 + TEXT[0].splitlines()))
    sentencepiece.SentencePieceTrainer.train(input=folder + "/text.txt", model_prefix=folder + "/m", model_type=kind, minloglevel=2,
                                             hard_vocab_limit=False, **options)
    return open(folder + "/m.model", "rb").read()


def unigram_pieces(folder):
    return piece_model(folder, "unigram", vocab_size=300, normalization_rule_tsv=folder + "/rules.tsv", user_defined_symbols=["<mask>"])


def bpe_pieces(folder):
    return piece_model(folder, "bpe", vocab_size=450, normalization_rule_name="identity", remove_extra_whitespaces=False,
                       byte_fallback=True, character_coverage=0.98, split_digits=True)


def charsmap(folder):
    model = unigram_pieces(folder)
    # normalizer_spec is { name (field 1), precompiled_charsmap (field 2), ... }; its size is below 2^14.
    name = b"\x0a\x0cuser_defined\x12"
    at = model.index(name) + len(name)
    size, at = model[at], at + 1
    if size > 127: size, at = size - 128 + 128 * model[at], at + 1
    return base64.b64encode(model[at:at + size]).decode()


def t5():
    with tempfile.TemporaryDirectory() as folder: precompiled = charsmap(folder)
    t = trained(models.Unigram(), ["<pad>", "</s>", "<unk>"], pre=pre_tokenizers.Metaspace(), size=360, unk_token="<unk>",
                trainer=trainers.UnigramTrainer)
    t.normalizer = normalizers.Sequence([normalizers.Precompiled(base64.b64decode(precompiled)), normalizers.Strip(left=False),
                                         normalizers.Replace(Regex(" {2,}"), "▁")])
    t.post_processor, t.decoder = around("$A </s>", "$A </s> $B </s>", ("</s>", 1)), decoders.Metaspace()
    return t


def record(t):
    rows = []
    for text in CASES:
        e, at = t.encode(text), [0]
        for c in text: at.append(at[-1] + len(c.encode()))
        offsets = [n for first, last in e.offsets for n in (at[first] + 1, at[last])]
        rows.append({"text": text, "ids": e.ids, "offsets": offsets, "decoded": t.decode(e.ids)})
    pair = t.encode("Hello world", "the Software")
    return {"cases": rows, "pair": {"ids": pair.ids, "types": pair.type_ids}}


def record_pieces(p):
    rows = []
    for s in CASES:
        if "\0" in s: continue
        made = p.encode(s, return_type="proto").pieces
        rows.append({"text": s, "ids": [piece.id for piece in made], "offsets": [n for piece in made for n in (piece.begin + 1, piece.end)],
                     "decoded": p.decode([piece.id for piece in made])})
    return rows


def pair_batches(t):
    """Batches of pairs as the reference cuts and fills them, by max_length."""
    pairs = [("the software", "and to permit persons to whom the software"), ("to deal in the software without restriction", "a"),
             ("the", ""), ("the software the software", "the software the software")]
    t.enable_padding(pad_id=0)
    rows = {}
    for most in 4, 7, 8, 12, 64:
        t.enable_truncation(most, strategy="longest_first")
        batch = t.encode_batch(pairs)
        rows[most] = {"ids": [e.ids for e in batch], "mask": [e.attention_mask for e in batch], "types": [e.type_ids for e in batch]}
    return {"texts": pairs, "rows": rows}


if __name__ == "__main__":
    os.makedirs(out, exist_ok=True)
    cases = {}
    for name, t in dict(gpt2=gpt2(), llama3=llama3(), qwen2=qwen2(), roberta=roberta(), llama2=llama2(), bert=bert(),
                        bert_cased=bert(False), clip=clip(), t5=t5()).items():
        with open(os.path.join(out, name + ".json"), "w", encoding="utf8") as f: f.write(json.dumps(json.loads(t.to_str()), ensure_ascii=False, separators=(",", ":")) + "\n")
        cases[name] = record(t)
        if name == "bert": cases["pair_batches"] = pair_batches(t)
    for name, make in dict(unigram=unigram_pieces, bpe=bpe_pieces).items():
        with tempfile.TemporaryDirectory() as folder: model = make(folder)
        with open(os.path.join(out, name + ".model.gz"), "wb") as f: f.write(gzip.compress(model, 9, mtime=0))
        cases[name] = record_pieces(sentencepiece.SentencePieceProcessor(model_proto=model))
    TEXT[1:] = []
    learned = trained(models.BPE(), ["<|end|>"], pre=bytes_of(), size=300, initial_alphabet=ALPHABET)
    cases["learned"] = learned.encode("the Software<|end|>").ids
    with open(os.path.join(out, "cases.json"), "w", encoding="utf8") as f:
        json.dump(cases, f, separators=(",", ":"))
        f.write("\n")
