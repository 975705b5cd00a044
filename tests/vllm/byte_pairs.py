"""A tokenizer of pairs of bytes, as most models have them: a space belongs to the word that follows it."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEXT = ["The word is. And # # the other (7) word.\n\nThe end.\n---\nMore words, more # # ends. # # The 7777"] * 50


def byte_pairs() -> PreTrainedTokenizerFast:
    bytes_in_pairs = Tokenizer(models.BPE())
    bytes_in_pairs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_in_pairs.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trained = trainers.BpeTrainer(vocab_size=400, initial_alphabet=letters, special_tokens=["<sep>"])
    bytes_in_pairs.train_from_iterator(TEXT, trained)
    return PreTrainedTokenizerFast(tokenizer_object=bytes_in_pairs)
