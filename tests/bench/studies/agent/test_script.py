"""The acts of an agent: what a seed makes, and texts of about the size that was asked for."""

from __future__ import annotations

from collections import Counter

from cortexmlx.bench.studies.agent.script import OUTPUT, SAMPLE, TURNS, Act, Kind, make_script, text, tokens_per_word


def test_a_seed_makes_one_script_with_all_that_an_agent_does() -> None:
    acts = make_script(3)
    assert acts == make_script(3) != make_script(4)
    assert Counter(act.kind for act in acts) == {
        Kind.ASK: TURNS + 2,
        Kind.FORK: 6,
        Kind.CANCEL: 2,
        Kind.EDIT: 2,
        Kind.KILL: 2,
    }
    lengths = [act.tokens for act in acts if act.kind is Kind.ASK]
    assert min(lengths) >= OUTPUT[0] and max(lengths) == OUTPUT[1]
    behind = [acts[place + 1] for place, act in enumerate(acts) if act.kind is Kind.KILL]
    assert [(act.kind, act.tokens) for act in behind] == [(Kind.ASK, OUTPUT[0])] * 2
    assert make_script(3, kills=False) == [act for act in acts if act.kind is not Kind.KILL]


def test_an_edit_is_of_a_question_that_was_asked() -> None:
    for seed in range(20):
        asked = 0
        for act in make_script(seed):
            asked += 2 * (act.kind in (Kind.ASK, Kind.CANCEL))
            if act.kind is Kind.EDIT:
                assert act.place % 2 == 0 and 0 <= act.place < asked


def test_a_text_has_about_the_tokens_that_were_asked_for_and_is_its_own() -> None:
    per_word = tokens_per_word(len(SAMPLE))  # a tokenizer with a token for each character
    texts = [text(Act(Kind.ASK, tokens, seed=seed), per_word) for seed, tokens in enumerate((50, 50, 1500))]
    assert texts[0] != texts[1]
    assert all(0.7 * n < len(t) < 1.3 * n for t, n in zip(texts, (50, 50, 1500), strict=True))
