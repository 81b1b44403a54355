"""What every tokenizer of ours does: special tokens around a text, conversations, and mlx-lm's interface."""

from __future__ import annotations

import pytest

from cortexmlx.errors import InvalidRequest
from cortexmlx.models.tokenizers.base import SpecialTokens
from cortexmlx.models.tokenizers.bytelevel import ByteLevelTokenizer
from support.models.byte_tokenizers import SMOLLM, TOKENS, build


def test_prompts_begin_and_end_as_the_settings_say() -> None:
    first = len(TOKENS)
    special = SpecialTokens(bos_id=first, eos_id=first + 1, add_bos=True, add_eos=True)
    tokenizer = build(SMOLLM, special)
    middle = [TOKENS.index("a")]
    assert tokenizer.encode("a") == [first, *middle, first + 1]
    assert tokenizer.encode("a", add_special_tokens=False) == middle
    assert tokenizer.bos_token == "<|begin|>" and tokenizer.eos_token == "<|end|>"
    assert tokenizer.eos_token_ids == {first + 1}


def test_nul_and_broken_text_are_encoded() -> None:
    tokenizer = build()
    assert tokenizer.decode(tokenizer.encode("a\0b")) == "a\0b"
    assert tokenizer.decode(tokenizer.encode("a\udc80b")) == "a\ufffdb"


TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] + ': ' + message['content'] + eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def templated() -> ByteLevelTokenizer:
    first = len(TOKENS)
    special = SpecialTokens(bos_id=first, eos_id=first + 1, add_bos=True)
    return build(SMOLLM, special, chat_template=TEMPLATE)


def test_a_conversation_is_rendered_by_the_template_without_a_second_bos() -> None:
    tokenizer = templated()
    text = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False, add_generation_prompt=True)
    assert text == "<|begin|>user: a<|end|>\nassistant:"
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], add_generation_prompt=True)
    assert ids == tokenizer.encode(text, add_special_tokens=False)
    assert ids.count(len(TOKENS)) == 1


def test_messages_without_a_template_are_an_invalid_request() -> None:
    assert not build().has_chat_template
    with pytest.raises(InvalidRequest, match="no chat template"):
        build().apply_chat_template([{"role": "user", "content": "a"}])


def test_mlx_lm_can_wrap_the_tokenizer() -> None:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    wrapped = TokenizerWrapper(templated())
    assert wrapped.eos_token_ids == {len(TOKENS) + 1}
    assert wrapped.apply_chat_template([{"role": "user", "content": "a"}])[0] == len(TOKENS)


def test_the_vocabulary_is_looked_up_both_ways() -> None:
    tokenizer = build(special=SpecialTokens(unk_id=3))
    count = len(TOKENS) + 3
    assert len(tokenizer) == tokenizer.vocab_size == len(tokenizer.get_vocab()) == count
    for token, index in (("a", TOKENS.index("a")), ("<|end|>", len(TOKENS) + 1), ("user made", count - 1)):
        assert tokenizer.convert_tokens_to_ids(token) == index
        assert tokenizer.convert_ids_to_tokens(index) == token
    assert tokenizer.convert_tokens_to_ids("no such token") == tokenizer.unk_token_id == 3
    assert tokenizer.convert_ids_to_tokens([len(TOKENS), 3]) == ["<|begin|>", TOKENS[3]]
