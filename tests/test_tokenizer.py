"""Tokenizers: text and back, streaming, byte counts, training, files, bad input."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mamba_fast.tokenizer import (
    HF_FILE,
    KIND_FILE,
    ByteTokenizer,
    HFTokenizer,
    as_tokenizer,
    check_vocabulary,
    load_tokenizer,
    train_bpe,
)

tokenizers = pytest.importorskip("tokenizers", reason="the extra `text` is not installed")

TEXTS = [
    "the cat sat on the mat, the cat sat on the hat — naïve café 日本語 🙂\n" * 12,
    "def f(x):\n    return x + 1\n" * 12,
]
SAMPLES = [
    "",
    "the cat",
    "  two  spaces\n\n\ttab",
    "naïve café",
    "日本語🙂🙃",
    "\x00\x7f",
    "e\u0301 \ufffd z",
]

BYTES = ByteTokenizer()
BPE = train_bpe(TEXTS, 320, progress=False)
BOTH = pytest.mark.parametrize("tokenizer", [BYTES, BPE], ids=["bytes", "bpe"])

# The generator tries strings of the program's own source too, the names of special tokens among them.
characters = st.text(st.characters(exclude_categories=["Cs"]), max_size=60).filter(lambda t: "<|" not in t)


def word_level(tmp_path, name=HF_FILE, specials=("</s>",)):
    """A tokenizer.json that is not byte-level: words, spaces dropped between them."""
    vocabulary = {word: i for i, word in enumerate([*specials, "[UNK]", "hello", "wörld"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(list(specials))
    path = tmp_path / name
    tokenizer.save(str(path))
    return path


# ---- text and back ---------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("text", SAMPLES)
def test_decoding_gives_the_text_back(tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert ids.ndim == 1
    assert tokenizer.decode(ids) == text


@BOTH
@given(text=characters)
def test_decoding_gives_any_text_back(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@BOTH
def test_a_batch_is_encoded_as_its_texts_are(tokenizer):
    together = tokenizer.encode_batch(SAMPLES)
    assert [ids.tolist() for ids in together] == [tokenizer.encode(t).tolist() for t in SAMPLES]


def test_bytes_are_their_own_ids():
    assert BYTES.encode("Aé").tolist() == [65, 0xC3, 0xA9]


@BOTH
def test_special_tokens_are_no_text(tokenizer):
    ids = [tokenizer.eos_id, *tokenizer.encode("cat").tolist(), tokenizer.pad_id]
    assert tokenizer.decode(ids) == "cat"


def test_a_special_token_that_a_text_spells_out_is_that_token():
    assert BPE.encode("a<|pad|>b").tolist() == [*BPE.encode("a"), BPE.pad_id, *BPE.encode("b")]
    assert BYTES.decode(BYTES.encode("a<|pad|>b")) == "a<|pad|>b"


@BOTH
def test_special_tokens_are_ids_of_their_own_in_the_vocabulary(tokenizer):
    assert tokenizer.eos_id != tokenizer.pad_id
    assert max(tokenizer.eos_id, tokenizer.pad_id, tokenizer.encode("é").max()) < tokenizer.vocab_size


def test_bytes_that_are_no_utf8_become_replacement_characters():
    assert BYTES.decode([65, 0xFF, 66, 0xC3]) == "A\ufffdB\ufffd"


@BOTH
@pytest.mark.parametrize("change", [np.asarray, list, lambda a: a.astype(">u4"), lambda a: a[::1]])
def test_ids_of_any_integer_type_are_decoded(tokenizer, change):
    assert tokenizer.decode(change(tokenizer.encode("the cat"))) == "the cat"


@BOTH
@pytest.mark.parametrize("bad", [-1, 100000])
def test_an_id_outside_the_vocabulary_is_named(tokenizer, bad):
    with pytest.raises(ValueError, match=f"id {bad} is outside the tokenizer's vocabulary 0"):
        tokenizer.decode([65, bad])


@BOTH
@pytest.mark.parametrize("bad", [[1.5], [[1, 2]], ["a"]])
def test_what_is_no_list_of_ids_is_refused(tokenizer, bad):
    with pytest.raises(ValueError, match="ids must be a list of integers"):
        tokenizer.decode(bad)


@BOTH
def test_a_lone_surrogate_is_named(tokenizer):
    with pytest.raises(ValueError, match=r"'\\udc80' at position 2"):
        tokenizer.encode("ab\udc80")


@BOTH
def test_what_is_no_text_is_refused(tokenizer):
    with pytest.raises(TypeError, match="a text must be a str, got bytes"):
        tokenizer.encode(b"ab")


# ---- streaming -------------------------------------------------------------------------------------


def streamed(tokenizer, ids):
    decoder = tokenizer.stream_decoder()
    return [decoder.push(int(i)) for i in ids] + [decoder.flush()]


@BOTH
@given(text=characters)
def test_streamed_pieces_add_up_to_the_text(tokenizer, text):
    assert "".join(streamed(tokenizer, tokenizer.encode(text))) == text


@BOTH
def test_a_character_comes_out_whole_when_its_last_byte_is_there(tokenizer):
    pieces = streamed(tokenizer, tokenizer.encode("x🙃y"))
    assert [p for p in pieces if p] == ["x", "🙃", "y"]


@BOTH
def test_an_unfinished_character_comes_out_at_the_end(tokenizer):
    ids = tokenizer.encode("x🙃")[:-1]
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)


@BOTH
def test_special_tokens_stream_as_nothing(tokenizer):
    ids = [*tokenizer.encode("a").tolist(), tokenizer.eos_id, *tokenizer.encode("b").tolist()]
    assert "".join(streamed(tokenizer, ids)) == "ab"


def test_broken_bytes_do_not_hold_a_stream_back_for_ever():
    beginning = int(BPE.encode("🙃")[0])  # of a character that never ends
    pieces = streamed(BPE, [beginning] * 40)
    assert "".join(pieces[:-1])


def test_spaces_between_words_survive_streaming(tmp_path):
    tokenizer = HFTokenizer(word_level(tmp_path))
    assert "".join(streamed(tokenizer, tokenizer.encode("hello wörld hello"))) == "hello wörld hello"


# ---- bytes -----------------------------------------------------------------------------------------


@BOTH
@given(text=characters)
def test_bytes_are_counted_as_in_utf8(tokenizer, text):
    ids = tokenizer.encode(text).tolist()
    assert tokenizer.count_bytes([tokenizer.eos_id, *ids, tokenizer.pad_id]) == len(text.encode())


@BOTH
def test_bytes_of_the_parts_of_a_character_add_up(tokenizer):
    ids = tokenizer.encode("日本🙂🙃")
    for cut in range(len(ids) + 1):
        assert tokenizer.count_bytes(ids[:cut]) + tokenizer.count_bytes(ids[cut:]) == 14


def test_bytes_of_other_vocabularies_are_those_of_the_decoded_text(tmp_path):
    tokenizer = HFTokenizer(word_level(tmp_path))
    assert tokenizer.count_bytes(tokenizer.encode("hello wörld")) == len("hello wörld".encode())


# ---- training --------------------------------------------------------------------------------------


def test_the_same_texts_give_the_same_vocabulary(tmp_path):
    again = train_bpe(iter(TEXTS), 320, progress=False)
    BPE.save(tmp_path / "a")
    again.save(tmp_path / "b")
    assert (tmp_path / "a" / HF_FILE).read_bytes() == (tmp_path / "b" / HF_FILE).read_bytes()


def test_learnt_tokens_make_a_text_shorter():
    assert BPE.vocab_size <= 320
    assert len(BPE.encode("the cat sat")) < len("the cat sat") / 2


def test_every_byte_has_a_token_even_unseen_ones():
    assert BPE.decode(BPE.encode("Ж\x01ÿ")) == "Ж\x01ÿ"


def test_training_shows_progress_on_stderr_only(capsys):
    train_bpe(TEXTS, 300)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "learn vocabulary" in captured.err


@pytest.mark.parametrize(
    ("texts", "options", "error", "message"),
    [
        ("one text", {"vocab_size": 300}, TypeError, r"pass \[text\]"),
        (TEXTS, {"vocab_size": 257}, ValueError, r"in \[258, 1048576\], got 257"),
        (TEXTS, {"vocab_size": 300.0}, ValueError, "got 300.0"),
        (TEXTS, {"vocab_size": 300, "min_frequency": 0}, ValueError, "min_frequency .* got 0"),
        ([], {"vocab_size": 300}, ValueError, "no text"),
        (["ok", 5], {"vocab_size": 300}, TypeError, "a text must be a str, got int"),
    ],
)
def test_training_on_something_wrong_is_refused(texts, options, error, message):
    with pytest.raises(error, match=message):
        train_bpe(texts, progress=False, **options)


# ---- files -----------------------------------------------------------------------------------------


@BOTH
def test_a_saved_tokenizer_is_loaded_again(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "model")
    again = load_tokenizer(tmp_path / "model")
    assert type(again) is type(tokenizer)
    assert (again.eos_id, again.pad_id, again.vocab_size) == (
        tokenizer.eos_id,
        tokenizer.pad_id,
        tokenizer.vocab_size,
    )
    assert again.encode(TEXTS[0]).tolist() == tokenizer.encode(TEXTS[0]).tolist()


def test_saving_bytes_over_a_learnt_tokenizer_replaces_it(tmp_path):
    BPE.save(tmp_path)
    BYTES.save(tmp_path)
    assert isinstance(load_tokenizer(str(tmp_path)), ByteTokenizer)


def test_the_byte_tokenizer_goes_by_its_name():
    assert isinstance(load_tokenizer("bytes"), ByteTokenizer)


def test_a_file_and_its_folder_are_the_same_tokenizer(tmp_path):
    path = word_level(tmp_path)
    assert load_tokenizer(path).encode("hello").tolist() == load_tokenizer(tmp_path).encode("hello").tolist()


def test_special_tokens_come_from_the_configuration_beside_the_file(tmp_path):
    path = word_level(tmp_path, specials=("<stop>", "<fill>"))
    config = {"eos_token": {"content": "<stop>"}, "pad_token": "<fill>", "model_max_length": 5}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = HFTokenizer(path)
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<stop>", "<fill>")
    tokenizer.save(tmp_path / "elsewhere")
    assert load_tokenizer(tmp_path / "elsewhere").eos_token == "<stop>"


def test_special_tokens_can_be_named(tmp_path):
    path = word_level(tmp_path, specials=("<stop>",))
    tokenizer = HFTokenizer(path, eos_token="<stop>")
    assert tokenizer.eos_id == tokenizer.pad_id == 0


def test_padding_and_cutting_that_a_file_asks_for_is_not_done(tmp_path):
    inner = tokenizers.Tokenizer.from_file(str(word_level(tmp_path)))
    inner.enable_padding(length=8)
    inner.enable_truncation(max_length=2)
    inner.save(str(tmp_path / HF_FILE))
    assert len(HFTokenizer(tmp_path).encode("hello hello hello")) == 3


def test_a_file_without_a_known_end_of_text_token_asks_for_it(tmp_path):
    path = word_level(tmp_path, specials=("<stop>",))
    with pytest.raises(ValueError, match=r"name one with eos_token=; special tokens: '<stop>'"):
        HFTokenizer(path)


def test_an_end_of_text_token_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match="has no token '<nope>'"):
        HFTokenizer(word_level(tmp_path), eos_token="<nope>")


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"model": {"type": "Nope"}}', "\xff"])
def test_a_damaged_tokenizer_file_is_named(tmp_path, content):
    path = tmp_path / HF_FILE
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=r"tokenizer.json is not a Hugging Face tokenizer.json"):
        load_tokenizer(path)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", "5", "\xff"])
def test_a_damaged_kind_file_is_named(tmp_path, content):
    (tmp_path / KIND_FILE).write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=f"{KIND_FILE} is damaged"):
        load_tokenizer(tmp_path)


def test_an_unknown_kind_is_named(tmp_path):
    (tmp_path / KIND_FILE).write_text('{"kind": "morse"}')
    with pytest.raises(ValueError, match="names the kind 'morse', expected 'bytes' or 'huggingface'"):
        load_tokenizer(tmp_path)


def test_a_damaged_configuration_beside_the_file_is_named(tmp_path):
    word_level(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config.json is damaged"):
        load_tokenizer(tmp_path)


def test_a_place_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"holds no tokenizer: expected {KIND_FILE} or {HF_FILE}"):
        load_tokenizer(tmp_path)
    with pytest.raises(FileNotFoundError, match="no tokenizer 'nowhere'"):
        load_tokenizer("nowhere")
    with pytest.raises(FileNotFoundError, match="no tokenizer file"):
        HFTokenizer(tmp_path / "nowhere.json")


def test_a_vocabulary_larger_than_the_models_is_refused():
    check_vocabulary(BYTES, 258)
    with pytest.raises(ValueError, match="the tokenizer has 258 ids, the model's vocab_size is 257"):
        check_vocabulary(BYTES, 257)


def test_without_the_package_the_extra_is_named(monkeypatch, tmp_path):
    path = word_level(tmp_path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    for use in (lambda: HFTokenizer(path), lambda: train_bpe(TEXTS, 300)):
        with pytest.raises(ModuleNotFoundError, match=r"pip install 'mamba-fast\[text\]'"):
            use()


# ---- hostile values -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes",
    [
        {"vocab_size": 2**31}, {"vocab_size": 10**23}, {"vocab_size": 10**5000},
        {"vocab_size": 300, "min_frequency": 2**64},
    ],
    ids=["2**31", "1e23", "1e5000", "frequency"],
)  # fmt: skip
def test_a_vocabulary_beyond_all_memory_is_refused_before_room_is_made_for_it(sizes):
    name = list(sizes)[-1]
    with pytest.raises(ValueError, match=rf"^{name} must be an integer in \[\d+, \d+\], got .{{1,200}}$"):
        train_bpe(TEXTS, **sizes, progress=False)


def test_the_largest_vocabulary_can_be_asked_for():
    tokenizer = train_bpe(["abab"] * 3, np.int64(2**20), min_frequency=2**40, progress=False)
    assert tokenizer.vocab_size == 258


@pytest.mark.parametrize("key", ["eos_token", "pad_token"])
@pytest.mark.parametrize("value", [[1], {}, 5])
def test_a_special_token_that_is_no_text_is_refused_by_name(tmp_path, key, value):
    train_bpe(TEXTS, 300, progress=False).save(tmp_path)
    described = json.loads((tmp_path / "mamba_fast_tokenizer.json").read_text())
    (tmp_path / "mamba_fast_tokenizer.json").write_text(json.dumps({**described, key: value}))
    with pytest.raises(ValueError, match=rf"^{key} of .*tokenizer\.json must be a token's text, got "):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("content", ["[" * 100_000, '{"kind": 1' + "0" * 5000 + "}"], ids=["deep", "digits"])
def test_a_kind_file_that_python_cannot_take_is_refused_by_name(tmp_path, content):
    (tmp_path / "mamba_fast_tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=r"mamba_fast_tokenizer\.json is damaged"):
        load_tokenizer(tmp_path)


def test_a_deeply_nested_configuration_beside_a_tokenizer_is_refused_by_name(tmp_path):
    train_bpe(TEXTS, 300, progress=False).save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is damaged"):
        HFTokenizer(tmp_path)


def test_an_empty_path_is_not_the_current_folder(tmp_path, monkeypatch):
    ByteTokenizer().save(tmp_path)
    monkeypatch.chdir(tmp_path)
    for load in (load_tokenizer, HFTokenizer):
        with pytest.raises(ValueError, match="the tokenizer's path is an empty path"):
            load("")
    assert isinstance(load_tokenizer("."), ByteTokenizer)


def test_an_argument_may_be_a_tokenizer_its_name_or_its_folder(tmp_path):
    ByteTokenizer().save(tmp_path)
    given = ByteTokenizer()
    assert as_tokenizer(given) is given
    assert as_tokenizer(None) is None
    assert isinstance(as_tokenizer("bytes"), ByteTokenizer)
    assert isinstance(as_tokenizer(tmp_path), ByteTokenizer)


@pytest.mark.parametrize("value", [5, ByteTokenizer, ["bytes"]])
def test_an_argument_that_is_no_tokenizer_is_refused(value):
    with pytest.raises(TypeError, match="^tokenizer must be a Tokenizer, 'bytes' or a path, got "):
        as_tokenizer(value)
