"""A tokenizer made here, for tests of text that need no download."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast


def tiny_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE of a sentence, at most ``vocabulary`` tokens; pads to the left."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=special, show_progress=False)
    text = "the quick brown fox jumps over the lazy dog and packs a box with five dozen jugs "
    tokenizer.train_from_iterator([text * 3], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", padding_side="left"
    )


def piece_tokenizer() -> PreTrainedTokenizerFast:
    """As Llama 2's: spaces are marks on pieces, the first one of a text is dropped; other characters are bytes."""
    marks = ["▁", "▁the", "▁fox", "▁quick", "the", "fo", "x", "q", "ui", "ck", "s", "▁▁", "é", ".", "ox▁"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *marks]
    model = models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def word_tokenizer() -> PreTrainedTokenizerFast:
    """As BERT's: a space in front of every token but the continuing ones."""
    pieces = ["[UNK]", "[PAD]", "[SEP]", "the", "fox", "quick", "##s", "##er", "##the", "é", "日", ".", "a"]
    tokenizer = Tokenizer(models.WordPiece(vocab={piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    tokenizer.add_special_tokens(["[UNK]", "[PAD]", "[SEP]"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="[SEP]", pad_token="[PAD]")


def json_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE that can write anything, with tokens that lie across JSON's signs; some 330 tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<pad>", "<s>", "</s>", "<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(['{"name": "red", "size": 12, "tags": ["a", "b"], "next": null}'] * 3, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", padding_side="left"
    )
